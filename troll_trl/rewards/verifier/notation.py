r"""normalise(): one spelling for the many ways to write the same mathematics, `\frac{1}{2}` for `$\dfrac12$`."""

import re
import unicodedata

_SIGNS = str.maketrans(
    {
        **dict.fromkeys("−–—‐‑‒", "-"), **dict.fromkeys("·⋅∙•", r"\cdot "), **dict.fromkeys('“”"', ""), "’": "'",
        "×": r"\times ", "÷": r"\div ", "∕": "/", "⁄": "/", "∞": r"\infty ", "≤": r"\le ", "≥": r"\ge ",
        "≠": r"\neq ", "≈": r"\approx ", "∪": r"\cup ", "∈": r"\in ", "±": r"\pm ", "°": r"^\circ ", "√": r"\sqrt ",
        "∅": r"\emptyset ", "⟨": "(", "⟩": ")", "，": ", ", "ℝ": r"\mathbb{R}", "⌊": r"\lfloor ", "⌋": r"\rfloor ",
        "⌈": r"\lceil ", "⌉": r"\rceil ",
    }
)  # fmt: skip
_SCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ₀₁₂₃₄₅₆₇₈₉", "0123456789+-n0123456789")
_RAISED, _LOWERED, _ROOT = (
    re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+"),
    re.compile("[₀₁₂₃₄₅₆₇₈₉]+"),
    re.compile(r"√\s*(\d+|[A-Za-z])"),
)

# The end of a command: \le is no part of \left
_END = r"(?![A-Za-z])"
# The beginning of a word in plain text: the "log" of "log2", not that of \log or "catalog"
_WORD = r"(?<![\\A-Za-z])"
# What braces or round brackets hold, two more pairs at most inside of them
_BRACED = r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}"
_ROUND = r"\(((?:[^()]|\((?:[^()]|\([^()]*\))*\))*)\)"
# An argument without braces: the 2 of \sqrt2
_BARE = rf"[0-9A-Za-z]|\\pi{_END}|\\sqrt\s*{_BRACED}"
_FUNCTIONS = "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|ln|log|exp|sqrt|pi"

_DELIMITERS = (
    (r"(?<!\\)\$", ""),  # $5$
    (r"\\(?:text|textbf|mathrm)\{\s*\\?\$\s*\}|\\\$|\\textdollar" + _END, "$"),  # from here on, a $ is a currency
    (r"(?<!\\)\\[()\[\]]", ""),  # \(5\), but not the row's end in \\[4pt]
    (rf"\\(?:left|right|middle){_END}(?:\s*\.(?!\d))?", ""),
    (rf"\\(?:[bB]igg?[lrm]?|displaystyle|textstyle|limits|rm|bf){_END}", ""),
)
# A mark at the beginning of a value is no operator: **x = 5**, x = *5*. In 2**3 and "2 *3* 4" it may be one
_MARKDOWN = (
    (
        r"(\A\s*|[=,;:(\[{]\s*)(\*{1,3}|__?|`)(?=[^\s*_`])((?:(?!\2).)*?[^\s*_`])\2"
        r"(?![\w*`])(?:(?<=[).:]\*\*)|(?!\s*\d))",  # "**2** 345" is not 2345
        r"\1\3",
    ),
)
_SPACES = (
    (r"(?<=\d)(?:\{,\}|,?\\!|\\,)\s?(?=\d{3}(?!\d))", ""),  # thousands that leave no doubt: 1{,}234
    (r"(?<!\\)\\!", ""),
    (rf"(?<!\\)\\[,;:> ]|~|\\q?quad{_END}|\\hspace\*?\{{[^{{}}]*\}}", " "),
)
_SYNONYMS = {
    "dfrac": r"\frac", "tfrac": r"\frac", "cfrac": r"\frac", "dbinom": r"\binom", "tbinom": r"\binom", "div": "/",
    "leq": r"\le ", "leqslant": r"\le ", "geq": r"\ge ", "geqslant": r"\ge ", "lt": "<", "gt": ">", "ne": r"\neq ",
    "vert": "|", "lvert": "|", "rvert": "|", "langle": "(", "rangle": ")", "bigcup": r"\cup ", "R": r"\mathbb{R}",
    "varnothing": r"\emptyset ", "degree": r"^\circ ", "degrees": r"^\circ ",
}  # fmt: skip
_COMMANDS = (
    (r"\\([A-Za-z]+)", lambda command: _SYNONYMS.get(command[1], command[0])),
    ("<=", r"\\le "),
    (">=", r"\\ge "),
    (r"\\not\s*=|(?<![\d)])!=", r"\\neq "),
    (r"\\\{\s*\\\}", r"\\emptyset "),
    (r"\\%|(?:\\text\{)?\s*\bpercent\b\s*\}?", "%"),
    (r"\^\s*(?:\{\s*\\circ\s*\}|\\circ" + _END + ")", r"^\\circ "),
    (r"\\(?:mathcal|mathscr|mathbf|boldsymbol|bm)\s*\{([A-Za-z])\}|\\(?:mathrm|operatorname)\{([eid])\}", r"\1\2"),
    (r"\\operatorname\*?\{([A-Za-z]+)\}", r"\\\1 "),
    (r"\\(?:text(?:bf|it|rm|normal)|emph|[mh]box|math(?:rm|bf|sf|it|tt)|boldsymbol|bm|text)\s*\{", r"\\text{"),
    (r"\\text\{\s*([+-]?[\d.,/]+)\s*\}", r"\1"),
    (r"\b([ap])\.\s?m\.?", r"\1m"),
    (r"\\text\{\s*,?\s*(and|or)\s*\}", r" \1 "),
    (r"\\exp\s*" + _ROUND, r"e^{\1}"),
    (r"\A\(([0-9A-Z]+)\)(?=_)", r"\1"),  # the base in (17)_8
    (r"\(\s*-\\infty\s*,\s*\+?\\infty\s*\)", r"\\mathbb{R}"),
)
# As in code
_PLAIN_TEXT = (
    (r"\*\*", "^"),
    (r"\*", r"\\cdot "),
    (rf"{_WORD}(?:infinity|inf|oo){_END}", r"\\infty "),
    (rf"{_WORD}abs\s?{_ROUND}", r"|\1|"),
    (rf"{_WORD}log_?(2|10)(?=\s?[({{])", r"\\log_{\1}"),
    (rf"{_WORD}a(sin|cos|tan)(?=\s?\()", r"\\arc\1 "),
    (rf"{_WORD}({_FUNCTIONS})(?=[\s({{\d^_]|\Z|[-+/,)])", r"\\\1 "),
    (r"\\sqrt\s*(\[[^\[\]]{1,9}\])?\s*" + _ROUND, r"\\sqrt\1{\2}"),
)
_ARGUMENTS = (
    (rf"\\sqrt\s*(\[[^\[\]]{{1,9}}\])?\s*({_BARE})", r"\\sqrt\1{\2}"),
    (rf"\\(frac|binom)\s*({_BARE})", r"\\\1{\2}"),
    (rf"\\(frac|binom)\s*({_BRACED})\s*({_BARE})", r"\\\1\2{\3}"),
    (rf"\\(frac|binom)\s*({_BRACED})\s+\{{", r"\\\1\2{"),
)
_ENDS = (
    (r"\s+", " "),
    (r"\A[\s*_`]+|(?:[\s*_`,;:]|(?<!\.)\.)+\Z", ""),  # the period of a sentence; "0.5..." is not 0.5
)
_RULES = [
    (re.compile(pattern), replacement)
    for group in (_DELIMITERS, _MARKDOWN, _SPACES, _COMMANDS, _PLAIN_TEXT, _ARGUMENTS, _ENDS)
    for pattern, replacement in group
]


def normalise(text: str) -> str:
    """Write a bare answer in one spelling."""
    if not text.isascii():
        text = _ROOT.sub(r"\\sqrt{\1}", text)
        text = _RAISED.sub(lambda run: f"^{{{run[0].translate(_SCRIPTS)}}}", text)
        text = _LOWERED.sub(lambda run: f"_{{{run[0].translate(_SCRIPTS)}}}", text)
        text = unicodedata.normalize("NFKC", text.translate(_SIGNS)).translate(_SIGNS)
        text = "".join(map(_named_letter, text))
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return text


def _named_letter(character: str) -> str:
    r"""Return `\chi` for χ, by its name in Unicode; nothing for a mark that is not shown."""
    if character.isascii():
        return character
    greek = re.fullmatch(r"GREEK (SMALL|CAPITAL) LETTER (?:FINAL )?(\w+)", unicodedata.name(character, ""))
    if greek is None:
        return "" if unicodedata.category(character) == "Cf" else character
    letter = greek[2].replace("LAMDA", "LAMBDA")
    return f"\\{letter.lower() if greek[1] == 'SMALL' else letter.capitalize()} "
