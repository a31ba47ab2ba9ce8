r"""extract_answer: the final answer that a text states, in a `\boxed{}`, in `<answer>` or behind "Answer:"."""

import re
from collections.abc import Callable

# A completion that boxes more different answers than this, in whatever words, lists candidates
MAX_BOXES = 5

_BOX_OR_BRACE = re.compile(
    r"\\(?:boxed|fbox|framebox)\s*(?:\[[^\[\]{}]{0,20}\]\s*){0,2}(?:(?P<box>\{)|(?<=\s)(?P<bare>[^\s{}$\\][^\s{}$\\]*+))"
    r"|\\.|(?P<open>\{)|(?P<close>\})",
    re.DOTALL,
)
_INNER_BOX = re.compile(r"\\(?:boxed|fbox|framebox)(?=\s*[\[{\d])")
# Possessive quantifiers (`*+`): a run of blanks is read once, however the match ends.
_ANSWER_MARKER = re.compile(
    r"(?:####|\banswer[\s*_]*+:|\bthe\s++(?:final\s++|correct\s++)?answer\s++is\b[\s*_]*+:?+)(?:[\s*_$]|\\[(\[$])*+",
    re.IGNORECASE,
)
# The end of a sentence, or what only explains the answer
_ANSWER_END = re.compile(
    r"(?<!\\)(?:[.!](?=\s|$)|;(?=\s*+(?:[A-Za-z]{2}|$)))|\b(?:because|since)\b"
    r"|,\s*+(?:which|so|as|where|that is|i\.e|hence|thus|therefore)\b",
    re.IGNORECASE,
)
# What may stand between boxes that state one answer together: \boxed{1} and \boxed{2}
_CONNECTOR = re.compile(
    r"(?:\\text|[\s$,;:.&*\\(){}\[\]|/=-]|\b(?:or|alternatively)\b[^.\n\d\\]*+"
    r"|\b(?:and|also|either|maybe|perhaps|possibly|to|the|final|answers?|is|it|could|may|might|be|are|solutions?|[a-z]"
    r"|\d{1,3})\b)*+",
    re.IGNORECASE,
)
MAX_CONNECTOR_CHARACTERS = 60


def extract_answer(text: str, accept: Callable[[str], bool] | None = None) -> str | None:
    r"""
    The final answer that a text states, after the last `</think>`: what its last `\boxed{...}` holds; without one, its
    last `<answer>...</answer>`; without either, what follows the last `Answer:`, `####` or "the (final) answer is" on
    its line.

    Boxes that only "and", "or" or punctuation separate state one answer together, a list, and so do more than
    `MAX_BOXES` boxes that differ: who lists candidates has not answered.

    Args:
        text (`str`):
            A completion or a worked solution. It is read in time linear in its length.
        accept (`Callable[[str], bool]`, *optional*):
            Whether an answer can be one. A box that cannot gives way to a later "the answer is" that can: the option of
            a multiple choice behind its boxed text.

    Returns:
        `str` or `None`:
            The answer, without the box or the words around it; `None` if the text states none, for example because its
            last box is empty or its thinking never ends.
    """
    # What follows a <think> that never ends is a thought, not an answer.
    text = text.rpartition("</think>")[2].partition("<think>")[0]
    boxes = _boxes(text)
    if boxes:
        boxed = _answer_of_boxes(text, boxes)
        if boxed is not None and accept is not None and not accept(boxed):
            later = _stated(text[boxes[-1][2] :])
            return later if later is not None and accept(later) else boxed
        return boxed
    tagged, close, _ = text.rpartition("</answer>")
    inside = tagged.rpartition("<answer>")
    if close and inside[1]:
        return _stated(inside[2]) or inside[2].strip() or None
    return _stated(text)


def _stated(text: str) -> str | None:
    """What follows the last "the answer is" or the like."""
    end = start = -1
    for marker in _ANSWER_MARKER.finditer(text):
        start, end = marker.span()
    if start < 0:
        return None
    line = text[end:].partition("\n")[0]
    return _ANSWER_END.split(line, maxsplit=1)[0].strip(" \t\r,") or None


def last_boxed(text: str) -> str | None:
    r"""
    The content of the last `\boxed{...}`, `\fbox{...}` or `\framebox{...}` whose braces balance, or of a bare
    `\boxed 5`.

    Args:
        text (`str`):
            Any text. It is read once, so that many unclosed boxes cost no more than a text without them.

    Returns:
        `str` or `None`:
            The content, of the outer one where boxes are nested; `None` without a balanced box.
    """
    boxes = _boxes(text)
    return boxes[-1][0] if boxes else None


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


def _answer_of_boxes(text: str, boxes: list[tuple[str, int, int]]) -> str | None:
    answers = [content.strip() for content, _, _ in boxes]
    if not answers[-1]:
        return None
    first = len(boxes) - 1
    if len(set(answers)) > MAX_BOXES:
        first = 0
    while first > 0:
        between = text[boxes[first - 1][2] : boxes[first][1]]
        if len(between) > MAX_CONNECTOR_CHARACTERS or not _CONNECTOR.fullmatch(between):
            break
        first -= 1
    together = list(dict.fromkeys(answer for answer in answers[first:] if answer))
    return together[0] if len(together) == 1 else ", ".join(f"{{{answer}}}" for answer in together)
