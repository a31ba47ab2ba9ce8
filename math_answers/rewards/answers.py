r"""extract_answer: the final answer that a text states, in a `\boxed{}`, in `<answer>` or after "Answer:"."""

import re
from collections.abc import Callable
from decimal import Decimal

# A completion that boxes more different answers than this lists candidates
MAX_BOXES = 5
# Most digits that `written_out` writes; a float64 stays below
MAX_WRITTEN_EXPONENT = 400

_BOX_OR_BRACE = re.compile(
    r"\\(?:boxed|fbox|framebox)\s*(?:\[[^\[\]{}]{0,20}\]\s*){0,2}"
    r"(?:(?P<box>\{)|(?:(?<=\s)|(?=\d))(?P<bare>[^\s{}$\\][^\s{}$\\]*+))"
    r"|\\.|(?P<open>\{)|(?P<close>\})",
    re.DOTALL,
)
_INNER_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?=\s*[\[{\d])")
# Possessive quantifiers (`*+`): a run of blanks is read once, however the match ends.
_ANSWER_MARKER = re.compile(
    r"(?:####|\banswer[\s*_]*+:|\bthe\s++(?:final\s++|correct\s++)?answer\s++is\b[\s*_]*+:?+)(?:[\s*_$}]|\\[(\[$])*+",
    re.IGNORECASE,
)
_EMPHASIS = re.compile(r"(?<![\w)])(?:\*\*|__)|(?:\*\*|__)(?![\w(])")
# The end of a sentence, or what only explains the answer
_ANSWER_END = re.compile(
    r"(?<!\\)(?:[.!](?=\s|$)|;(?=\s*+(?:[A-Za-z]{2}|$)))|\b(?:because|since)\b"
    r"|,\s*+(?:which|so|as|where|that is|i\.e|hence|thus|therefore)\b",
    re.IGNORECASE,
)
# What may separate boxes that state one answer together: \boxed{1} \quad\text{and}\quad \boxed{2}
_CONNECTOR = re.compile(
    r"(?:\\[A-Za-z]+\*?|\\.|[\s$,;:.&*+(){}\[\]|/=-]|\d+(?:pt|em|ex|cm|mm)\b|\b(?:or|alternatively)\b[^.\n\d\\]*+"
    r"|\b(?:and|also|either|maybe|perhaps|possibly|to|the|final|answers?|is|it|could|may|might|be|are|solutions?|for|part|case"
    r"|[a-z](?:_\{?\w\}?)?|\d{1,3})\b)*+",
    re.IGNORECASE,
)
# Thoughts, in the tags of many models: <think>, [THINK], <|begin_of_thought|>, <seed:think>, channels
_THOUGHT = re.compile(
    r"(?:<\|?|◁|\[(?=/?think))(?P<close>/|end_)?(?:\w{0,16}[:_])?"
    r"(?:think(?:ing)?|thoughts?|reason(?:ing)?|analysis|reflection|scratchpad|monologue|cot)(?:\s?\|?>|▷|\])"
    r"|<\|channel\|>(?P<final>\s*final\b)?[^<]{0,40}(?:<\|message\|>)?|\Aanalysis(?=[A-Z])|(?P<merged>assistantfinal)",
    re.IGNORECASE,
)
# An operator next to a box: 2\cdot\boxed{5} says 10
_OPERATOR_BEFORE = re.compile(
    r"(?:[-+/^<>(|]|\\(?:cdot|times|div|pm|neq?|not|sqrt|log|ln|sin|cos|tan|gcd|neg|[dt]?frac|binom)(?![A-Za-z])[^=]*|\d)\Z"
)
_DENIED = re.compile(r"(?:\bnot|n't)\s*\Z", re.IGNORECASE)
_MAGNITUDE = re.compile(r"\$?\s?(?:\\text\{\s?)?((?:hundred|thousand|million|billion|trillion)s?\b)", re.IGNORECASE)
_OPERATOR_AFTER = re.compile(
    r"\s*(?:[-+/^<>_]|\\(?:cdot|times|div|pm|sqrt|[dt]?frac|pi|binom)(?![A-Za-z])|!(?!=)|\d)|\s?\}+\s*(?:\^|\Z|[-+/}])"
)
# What says nothing in a box that only shows where an answer goes: blanks, dots, commands for text, "your answer"
_BLANK = re.compile(
    r"[\s.…?_~${}()\[\]]+|\\[ ,;:!_]|\\[hv]?(?:phantom|space)\*?\s?\{[^{}]*\}|\\rule(?:\s?\{[^{}]*\}){2}"
    r"|\\(?:q?quad|[lc]?dots?|cdot|bullet|[bB]lacksquare|checkmark|qed|square|Box|underline|text[a-z]*|math[a-z]{2}"
    r"|mbox)(?![A-Za-z])"
)
_NOUNS = "answer answers ans result results solution value number expression content qed"
_OTHER_WORDS = "a an the my our your final correct exact numerical insert put write goes here"
_PLACEHOLDER_NOUNS, _PLACEHOLDER_WORDS = frozenset(_NOUNS.split()), frozenset(_OTHER_WORDS.split())
MAX_PLACEHOLDER_CHARACTERS = 60
# What follows a \boxed without braces that a sentence only names: a word, "a" or "I" before a word, a lone sign
_PROSE = re.compile(r"[\W_]*+(?:[^\W\d_]{2}|[aI]\s++[a-z]|\s|\Z)")
# What precedes a box on its line: marks of a quotation, or cells of a table
_MARGIN = re.compile(r"\s*(?:(>[>\s]*)|\|(?:.*\|)?)")
_ASIDE = re.compile(r"(?:[^\\]*[a-z]{2} )?\(\s*")
# At these marks the expression around a box begins or ends
_EDGE = re.compile(
    r"(?<!\\)\$+|\\[()\[\]]|</?[a-z]+>|\n|(?<!\\)=|[,;:&]|\\\\|\.(?=\s|\Z)|\*\*"
    r"|\\(?:approx|le|ge|leq|geq|implies|[Rr]ightarrow|to|iff|q?quad|therefore|equiv|pmod|cong|sim|simeq|text\w*|mathrm|begin|end)(?![A-Za-z])"
)
MAX_EXPRESSION_CHARACTERS = 200


def extract_answer(text: str, accept: Callable[[str], bool] | None = None) -> str | None:
    r"""
    The final answer that a text states, after the last `</think>`: what its last `\boxed{...}` holds; without one, its
    last `<answer>...</answer>`; without either, what follows the last `Answer:`, `####` or "the (final) answer is" on
    its line. A box without an answer (`\boxed{}`, `\boxed{...}`, `\boxed{your answer}`, "in \boxed as requested") only
    counts if the text states nothing else.

    Boxes that a connector joins state one answer together, a list, and so do more than `MAX_BOXES` boxes that differ.
    If `accept` refuses a box, it may accept another one, or a later "the answer is": the option of a multiple choice.
    The time is linear in the length of the text.
    """
    text = _without_thoughts(text)
    boxes = _boxes(text)
    filled = [box for box in boxes if not _says_nothing(text, *box)]
    if filled:
        boxed = _answer_of_boxes(text, filled, accept)
        if accept is not None and not accept(boxed):
            later = _stated(text[filled[-1][2] :])
            return later if later is not None and accept(later) else boxed
        return boxed
    ends = [0, *(end for _, _, end in boxes)]
    starts = [*(start for _, start, _ in boxes), len(text)]
    text = "".join(text[end:start] for end, start in zip(ends, starts, strict=True))
    return _tagged(text) or _stated(text) or (boxes[-1][0].strip() if boxes else None) or None


def written_out(number: float | Decimal) -> str:
    """A number without an exponent: the "e" of "1e+16" may be read as Euler's number. Raises a `ValueError` for one of
    hundreds of digits, or of gigabytes, such as 1e-99999999999."""
    exact = Decimal(str(number))
    if abs(exact.adjusted()) > MAX_WRITTEN_EXPONENT:
        raise ValueError(
            f"The number {exact} cannot be written without an exponent: that of a gold answer is at most "
            f"{MAX_WRITTEN_EXPONENT}. Write it as a text, such as '10^{{-500}}'."
        )
    return format(exact, "f")


def _without_thoughts(text: str) -> str:
    """The text after the last thought. After a thought that never ends there is no answer."""
    start, end = 0, len(text)
    if not any(map(text.__contains__, ("<", "◁", "[T", "[t"))) and not text.startswith("analysis"):
        return text
    for tag in _THOUGHT.finditer(text):
        if tag["close"] or tag["final"] or tag["merged"]:
            start, end = tag.end(), len(text)
        else:
            end = min(end, tag.start())
    return text[start:end]


def _tagged(text: str) -> str | None:
    """The content of the last `<answer>`."""
    before, close, _ = text.rpartition("</answer>")
    _, tag, inside = before.rpartition("<answer>")
    return (_stated(inside) or inside.strip() or None) if close and tag else None


def _stated(text: str) -> str | None:
    """What follows the last "the answer is" or the like."""
    end = start = -1
    for marker in _ANSWER_MARKER.finditer(text):
        start, end = marker.span()
    if start < 0:
        return None
    line = _EMPHASIS.sub("", text[end:].partition("\n")[0])
    return _ANSWER_END.split(line, maxsplit=1)[0].strip(" \t\r,").rstrip("( ") or None


def _boxes(text: str) -> list[tuple[str, int, int]]:
    """Content, start and end of every outermost balanced box, in the order of the text."""
    open_braces: list[tuple[int, int] | None] = []  # start of the box and of its content; None for another brace
    boxes: list[tuple[int, int, int, int]] = []  # start and end, of the box and of its content
    for token in _BOX_OR_BRACE.finditer(text):
        if token["box"]:
            open_braces.append((token.start(), token.end()))
        elif token["bare"]:
            bare = token["bare"].rstrip(".,;:")
            boxes.append((token.start(), token.end(), token.start("bare"), token.start("bare") + len(bare)))
        elif token["open"]:
            open_braces.append(None)
        elif token["close"] and open_braces:
            box = open_braces.pop()
            if box is not None:
                span, inner = (box[1], token.start()), []
                while boxes and boxes[-1][0] > box[0]:
                    inner.append(boxes.pop())
                if len(inner) == 1:  # perhaps \boxed{\boxed{5}}
                    start, end, content, stop = inner[0]
                    around = text[span[0] : start] + text[end : span[1]]
                    span = span if around.strip(" $") else (content, stop)
                boxes.append((box[0], token.end(), *span))
    return [(_INNER_BOX.sub("", text[content:stop]), start, end) for start, end, content, stop in boxes]


def _says_nothing(text: str, content: str, start: int, end: int) -> bool:
    """Whether a box is a placeholder, or a text only names it: "I used \\boxed as requested"."""
    if text[end - 1] != "}":
        named = text[start:end].split(maxsplit=1)[1:]  # no word follows the command in \boxed5
        return bool(named) and _PROSE.match(text, end - len(named[0])) is not None
    if len(content) > MAX_PLACEHOLDER_CHARACTERS:
        return False
    words = {word.strip("<>:").casefold() for word in _BLANK.sub(" ", content).split()}
    return not words or (bool(words & _PLACEHOLDER_NOUNS) and words <= _PLACEHOLDER_NOUNS | _PLACEHOLDER_WORDS)


def _answer_of_boxes(text: str, boxes: list[tuple[str, int, int]], accept: Callable[[str], bool] | None) -> str:
    answers = [content.strip() for content, _, _ in boxes]
    first = len(boxes) - 1
    if len(set(answers)) > MAX_BOXES:
        first = 0
    while first > 0 and _CONNECTOR.fullmatch(text, boxes[first - 1][2], boxes[first][1]):
        first -= 1
    together = list(dict.fromkeys(answers[first:]))
    accepted = [answer for answer in together if accept is not None and accept(answer)]
    if len(accepted) == 1:  # \boxed{800}. The answer is \boxed{C}
        return accepted[0]
    if len(together) == 1:
        return _with_operators(text, *boxes[-1])
    return ", ".join(f"{{{answer}}}" for answer in together)


def _with_operators(text: str, content: str, start: int, end: int) -> str:
    r"""The expression around a box that is only a part of it: `-\boxed{10}`, `\frac{1}{\boxed{10}}`."""
    line = text[text.rfind("\n", 0, start) + 1 : start]
    after = text[end : end + MAX_EXPRESSION_CHARACTERS]
    margin = _MARGIN.match(line)
    if margin and line.count("$") % 2 == 0 and (margin[1] or "|" in after.partition("\n")[0]):
        line = line[margin.end() :]
    before = line[-MAX_EXPRESSION_CHARACTERS:]
    edges = list(_EDGE.finditer(before))
    in_formula = bool(edges)
    before = before[edges[-1].end() if edges else 0 :]
    if (
        _ASIDE.fullmatch(before) and re.match(r"\)(?!\s*\()", after) and not _OPERATOR_AFTER.match(after, 1)
    ):  # (\boxed{10})
        return content.strip()
    edge = _EDGE.search(after)
    after = after[: edge.start()] if edge else after
    after = after if re.search(r"[\w!}]", after) else ""  # of \boxed{4}/\mathrm{cm} the operator belongs to the unit
    in_formula = in_formula and edge is not None and edge[0] != "\n"
    if in_formula or before.lstrip().startswith("\\"):
        before = before.rstrip()
    if _DENIED.search(before):
        return rf"\neq {{{content}}}"
    magnitude = _MAGNITUDE.match(text, end)
    if magnitude:
        return f"{content.strip()} {magnitude[1]}"
    operated = _OPERATOR_BEFORE.search(before), _OPERATOR_AFTER.match(after)
    if not any(operated) or not (in_formula or before.strip()[:1] in "\\-+" or after[:1] in "^\\"):
        return content.strip()
    if not in_formula:
        before, after = before.split(" ")[-1], after.split(" ")[0]
    around = f"{before}{{{content}}}{after}".strip()
    return around if around.count("{") == around.count("}") else content.strip()
