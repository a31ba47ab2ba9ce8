r"""parts(): how an answer is divided: lists, sets, tuples, intervals, unions, matrices, systems, \pm."""

import re
from typing import NamedTuple

MAX_DEPTH = 6
_ROWS = re.compile(r"(?s)\\begin\{([pbB]?matrix|array|cases|aligned)\}(?:\{[lcr|]*\})?(.*?)(?:\\\\)?\s*\\end\{\1\}")
_ROW_END = re.compile(r"\\\\(?:\[\w+\])?")
_UNION = r"\\cup(?![A-Za-z])"
# In 1,234 the comma is part of the number, if no blank follows it
_COMMA = r",(?!\d{3}(?!\d))|,(?=\s)|;|(?<![A-Za-z])(?:and|or)(?![A-Za-z])"
_OPENING = re.compile(r"(?:\\text)?\{|\\\{|[(\[]")
_WRAPPED = re.compile(r"((?:\\text|\\)?\{|\()(.*?)\\?[)}]", re.DOTALL)
# What makes round brackets and \{\} more than a wrapping: (1,2), (A), (x>2)
_MEANINGFUL = re.compile(r"[,;<>=|:]|\\pm|\b(?:and|or)\b|\A[A-J]\Z")
_MEMBER_OF = re.compile(r"\A(?:[A-Za-z]\s?|\([a-z, ]+\)\s?)\\in(?![A-Za-z])\s?|\A\\(?:therefore|approx)(?![A-Za-z])")


class Parts(NamedTuple):
    """The members of an answer. `kind` is "list", "alternatives", "set", "union", two brackets, or a matrix's shape."""

    kind: str
    members: list[str]


def parts(text: str) -> Parts | None:
    """Divide a normalised answer at its outermost separators; `None` if it has none."""
    if match := _ROWS.fullmatch(text):
        rows = [row.split("&") for row in _ROW_END.split(match[2])]
        if match[1] in ("cases", "aligned"):
            return Parts("list", ["".join(row).strip(" ,.") for row in rows])
        return Parts(f"matrix {[len(row) for row in rows]}", [cell for row in rows for cell in row])
    if len(united := split(text, _UNION)) > 1:
        return Parts("union", united)
    listed = split(text, _COMMA)
    has_sign = r"\pm" in text and not is_wrapped(text)
    if len(listed) > 1 or has_sign:
        members = [part.replace(r"\pm", sign) for part in listed for sign in ("+-" if r"\pm" in part else "+")]
        kind = "alternatives" if not has_sign and re.search(r"\bor\b", text) else "list"
        return Parts(kind, [member for member in members if member.strip()])
    if not is_wrapped(text):
        return None
    start = 2 if text.startswith(r"\{") else 1
    inner = parts(text[start:-start])
    if inner is None or inner.kind != "list" or text[0] == "{":
        return None
    return Parts("set" if start == 2 else text[0] + text[-1], inner.members)


def split(text: str, separator: str) -> list[str]:
    """Return the members between separators outside of brackets; `(0,1]` closes as well as `(0,1)`."""
    members, start, depth = [], 0, 0
    for token in re.finditer(rf"(?P<open>[({{\[])|(?P<close>[)}}\]])|(?P<separator>{separator})", text):
        depth += (token["open"] is not None) - (token["close"] is not None)
        if token["separator"] is not None and depth == 0 and token.start() > 0:
            members.append(text[start : token.start()])
            start = token.end()
    return [*members, text[start:]]


def is_wrapped(text: str) -> bool:
    """Tell whether a text begins with a bracket that closes at its end."""
    depth = 0
    for token in re.finditer(r"[({\[]|[)}\]]", text if _OPENING.match(text) else ""):
        depth += 1 if token[0] in "({[" else -1
        if depth == 0:
            return token.end() == len(text)
    return False


def unwrap(text: str) -> str:
    r"""Remove what may be around the whole of a value: braces, `\text{}`, round brackets, `\{5\}`, `x \in`."""
    for _ in range(MAX_DEPTH):
        text = _MEMBER_OF.sub("", text.strip().lstrip(",;:= ").rstrip(",;:= ")).strip()
        wrapped = _WRAPPED.fullmatch(text)
        if wrapped is None or not is_wrapped(text):
            return text
        opening, content = wrapped.groups()
        is_words = opening == r"\text{" and not re.search(r"[\d\\,]", content)
        if is_words or (opening in ("(", r"\{") and _MEANINGFUL.search(content)):
            return text
        text = content
    return text
