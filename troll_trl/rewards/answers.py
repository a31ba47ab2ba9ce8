r"""extract_answer: the final answer that a text states, in a `\boxed{}`, in `<answer>` or after "Answer:"."""

import re
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, NamedTuple

# The longest gold answer of MATH-500 has 58. What is much longer is a text, not an answer
MAX_ANSWER_CHARACTERS = 1000
# How far an expression around a box is read
MAX_EXPRESSION_CHARACTERS = 200

_BOX = r"\\(?:boxed|fbox|framebox)"
_BOX_OR_BRACE = re.compile(
    rf"{_BOX}\s*(?:\[[^\[\]{{}}]{{0,20}}\]\s*){{0,2}}(?:(?P<box>\{{)|(?P<bare>-?\d[\d.,/]*(?<![.,])))"
    r"|\\.|(?P<open>\{)|(?P<close>\})",
    re.DOTALL,
)
_INNER_BOX = re.compile(rf"{_BOX}(?=\s*\{{)")
# Thoughts, in the tags of many models: <think>, [THINK], <|begin_of_thought|>, <seed:think>, channels, Apertus's inner
_THOUGHT = re.compile(
    r"(?:<\|?|◁|\[(?=/?think))(?P<close>/|end_)?(?:\w{0,16}[:_])?"
    r"(?:think(?:ing)?|thoughts?|reason(?:ing)?|analysis|reflection|scratchpad|monologue|cot)(?:\s?\|?>|▷|\])"
    r"|(?P<final><\|channel\|>\s*final\b[^<]{0,40}(?:<\|message\|>)?|<channel\|>|<\|content\|>|<\|inner_suffix\|>)"
    r"|<\|inner_prefix\|>|<\|channel\|?>[^<]{0,40}(?:<\|message\|>)?",
    re.IGNORECASE,
)
# What an answer is found by and may be a special token
_TAG = re.compile(rf"{_THOUGHT.pattern}|<\|message\|>|</?answer>", re.IGNORECASE)
# A box that only shows where an answer goes: \boxed{}, \boxed{\text{your answer}}
_PLACEHOLDER = re.compile(
    r"(?:[\s.…?_~${}()\[\]<>\\,;:]|\b(?:text(?:bf|it|rm)?|math(?:bf|rm)|[lc]?dots?|q?quad|phantom|square)\b"
    r"|\b(?:the|my|your|final|correct|answers?|results?|solutions?|value|goes|here)\b)*+",
    re.IGNORECASE,
)
# Boxes with only these between them state one answer together: \boxed{1} \quad\text{and}\quad \boxed{2}
_SAYS_NOTHING = re.compile(r"\\[A-Za-z]+|\\|\d+(?:pt|em|ex|cm|mm)\b|[^\w\\]+|_")
_CONNECTING = frozenset(["and", "or", "also", "either", "maybe", "perhaps", "possibly", "part", "case", "for"])
# An arrow that follows a box. In "A → \boxed{1}, B → \boxed{2}", arrows name the parts of a list
_ARROW = re.compile(
    r"(?:\\(?:q?quad|[^A-Za-z])|[^\w\\,;])*"
    r"(?:\\(?:to|implies|leadsto|mapsto|x?(?:long)?rightarrow)(?![A-Za-z])|[-=]>|[→⇒⟶⟹↦])",
    re.IGNORECASE,
)
_ALTERNATIVE = re.compile(r"\b(?:or|alternatively)\b[^.\n]*\Z")
# Possessive quantifiers (`*+`): a run of blanks is read once, however the match ends
_MARKER = re.compile(
    r"(?:####|\banswer[\s*_]*+:|\bthe\s++(?:final\s++|correct\s++)?answer\s++is\b(?:[\s*_]*+:)?+)[*_]*+"
    r"(?:[\s$}]|\\[(\[$]|[*_]++(?=\s))*+",  # not the mark before a value: *42* is a pair
    re.IGNORECASE,
)
_EMPHASIS = re.compile(r"(?<![\w)])(?:\*{2,3}|__)|(?:\*{2,3}|__)(?![\w(])")
# The end of the sentence, or the beginning of a remark. In ", 7" and ", x = 2" the list of answers continues
_END = re.compile(
    r"(?<!\\)[.!](?=\s|$)|;(?=\s*+(?:[A-Za-z]{2}|$))|\b(?:because|since)\b"
    r"|,\s+(?!(?:and|or)\b)(?=[A-Za-z]{2})|\s\((?=[A-Za-z]{3})",
    re.IGNORECASE,
)
# The expression of which a box is a part begins and ends at these
_EDGE = re.compile(
    r"(?<!\\)\$+|\\[()\[\]]|<\|?/?\w+\|?>|\n|(?<!\\)=|[,;:&]|\\\\|\.(?=\s|\Z)|\*\*"
    r"|\\(?:approx|implies|[Rr]ightarrow|to|iff|q?quad|therefore|text\w*|mathrm|begin|end)(?![A-Za-z])"
)
_OPERATOR_BEFORE = re.compile(
    r"(?:[-+/^<>(|\d]|\\(?:cdot|times|div|pm|neq?|neg|not|le|ge|leq|geq)(?![A-Za-z])"
    r"|\\(?:sqrt|log|ln|sin|cos|tan|[dt]?frac|binom|overline)(?![A-Za-z])[^=]*)\Z"
)
_OPERATOR_AFTER = re.compile(
    r"\s*(?:[-+/^<>_]|\\(?:cdot|times|div|pm|sqrt|[dt]?frac|pi|binom|le|ge)(?![A-Za-z])|!(?!=)|\d)|\s?[})]+\s*[-+/^}]"
)
_DENIED = re.compile(r"(?:\bnot|n't)\s*\Z", re.IGNORECASE)
_MAGNITUDE = re.compile(r"\$?\s?(?:\\text\{\s?)?((?:hundred|thousand|million|billion|trillion)\b)", re.IGNORECASE)


class Box(NamedTuple):
    """What a box holds, and its span in the text."""

    content: str
    start: int
    end: int


def extract_answer(text: str, accept: Callable[[str], bool] | None = None) -> str | None:
    r"""
    Find the final answer in a text, after the last thought (`<think>` or similar).

    It is what the last `\boxed{...}` holds; without one, the last `<answer>...</answer>`; without either, what follows
    the last `Answer:`, `####` or "the (final) answer is" in its sentence. A box that only shows where an answer goes
    (`\boxed{}`, `\boxed{your answer}`) does not count.

    Boxes that a connector joins state one answer together, a list. If `accept` refuses this answer, the only one that
    it accepts of the boxes and a later "the answer is" counts: the letter of a multiple choice. The time is linear in
    the length of the text.
    """
    text = _without_thoughts(text)
    boxes = [box for box in _boxes(text) if not _PLACEHOLDER.fullmatch(box.content)]
    if not boxes:
        return _tagged(text) or _stated(text)
    first = len(boxes) - 1
    while first > 0 and _connects(text[boxes[first - 1].end : boxes[first].start]):
        first -= 1
    # All of them, or a policy could guess twice
    together = list(dict.fromkeys(box.content.strip() for box in boxes[first:]))
    boxed = ", ".join(f"{{{content}}}" for content in together)
    if len(together) == 1:
        boxed = _with_operators(text, boxes[-1])
    if accept is None or accept(boxed):
        return boxed
    accepted = [answer for answer in (*together, _stated(text[boxes[-1].end :])) if answer and accept(answer)]
    return accepted[0] if len(accepted) == 1 else boxed


def thought_decoder(tokenizer: Any) -> Callable[[Sequence[int]], str]:
    """Return a function that decodes a completion without special tokens, except for the tags that [`extract_answer`]
    reads. In some tokenizers they are special tokens: without them, a thought would pass for an answer."""
    tags = {token: text for text, token in tokenizer.get_vocab().items() if _TAG.fullmatch(text)}
    tags = {token: text for token, text in tags.items() if not tokenizer.decode([token], skip_special_tokens=True)}
    return lambda token_ids: "".join(
        tag or tokenizer.decode(list(ids), skip_special_tokens=True) for tag, ids in groupby(token_ids, tags.get)
    )


def opened_thought(prompt: str) -> str:
    """Return the tag of a thought that a prompt opens for its completion, such as `<think>`; else an empty text."""
    tag = next(reversed(list(_THOUGHT.finditer(prompt))), None)
    return "" if tag is None or tag["close"] or tag["final"] or prompt[tag.end() :].strip() else f"{tag[0]}\n"


def _without_thoughts(text: str) -> str:
    """Return the text after the last thought. After a thought that never ends there is no answer."""
    start, end = 0, len(text)
    for tag in _THOUGHT.finditer(text):
        if tag["close"] or tag["final"]:
            start, end = tag.end(), len(text)
        else:
            end = min(end, tag.start())
    return text[start:end]


def _boxes(text: str) -> list[Box]:
    """Return every outermost balanced box, in the order of the text."""
    opened: list[tuple[int, int] | None] = []  # start of the box and of its content; None for another brace
    found: list[tuple[int, int, int, int]] = []  # start and end, of the box and of its content
    for token in _BOX_OR_BRACE.finditer(text):
        if token["box"]:
            opened.append(token.span())
        elif token["bare"]:
            found.append((*token.span(), *token.span("bare")))
        elif token["open"]:
            opened.append(None)
        elif token["close"] and opened and (box := opened.pop()) is not None:
            while found and found[-1][0] > box[0]:
                found.pop()
            found.append((box[0], token.end(), box[1], token.start()))
    return [Box(_INNER_BOX.sub("", text[first:last]), start, end) for start, end, first, last in found]


def _connects(between: str) -> bool:
    if len(between) > MAX_EXPRESSION_CHARACTERS or _ARROW.match(between):  # from a step to the answer
        return False
    words = _SAYS_NOTHING.sub(" ", between).casefold().split()
    return all(word in _CONNECTING or len(word) == 1 for word in words) or bool(_ALTERNATIVE.search(between))


def _with_operators(text: str, box: Box) -> str:
    r"""Return what a box holds, with the expression of which it is a part: `-\boxed{10}`, `\frac{1}{\boxed{10}}`."""
    content = box.content.strip()
    before = text[max(0, box.start - MAX_EXPRESSION_CHARACTERS) : box.start]
    after = text[box.end : box.end + MAX_EXPRESSION_CHARACTERS]
    if magnitude := _MAGNITUDE.match(after):
        return f"{content} {magnitude[1]}"
    edges, edge = list(_EDGE.finditer(before)), _EDGE.search(after)
    before = before[edges[-1].end() :] if edges else before
    after = after[: edge.start()] if edge else after
    if _DENIED.search(before):
        return rf"\neq {{{content}}}"
    in_formula = bool(edges) and edges[-1][0] not in ("\n", ":", "**") and edge is not None and edge[0] != "\n"
    if not in_formula:  # in prose, an operator touches the box: "- \boxed{5}" is an item of a list
        before, after = before.rpartition(" ")[2], after.partition(" ")[0].rstrip("!")
    before = before.rstrip()
    while before.endswith("(") and after.startswith(")"):
        before, after = before[:-1].rstrip(), after[1:]
        content = f"({content})"
    if not re.search(r"[\w!}]", after):  # a mark of the sentence; the unit in \boxed{4}/\mathrm{cm}
        after = ""
    if not (_OPERATOR_BEFORE.search(before) or _OPERATOR_AFTER.match(after)):
        return content
    around = f"{before}{{{content}}}{after}".strip()
    return around if around.count("{") == around.count("}") else content


def _tagged(text: str) -> str | None:
    """Return the content of the last `<answer>`."""
    before, close, _ = text.rpartition("</answer>")
    _, tag, inside = before.rpartition("<answer>")
    return (_stated(inside) or inside.strip() or None) if close and tag else None


def _stated(text: str) -> str | None:
    """Return what follows the last "the answer is" or the like."""
    end = max((marker.end() for marker in _MARKER.finditer(text)), default=None)
    if end is None:
        return None
    line = _EMPHASIS.sub("", text[end:].partition("\n")[0])
    return _END.split(line, maxsplit=1)[0].strip(" \t\r,;$") or None
