"""One spelling for the many ways to write the same mathematics: Unicode, LaTeX variants, plain text."""

import re
import unicodedata

from math_answers.rewards.verifier.sets import set_of_words

_SCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ₀₁₂₃₄₅₆₇₈₉₊₋", "0123456789+-n0123456789+-")
_SUPERSCRIPT, _SUBSCRIPT = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+"), re.compile("[₀₁₂₃₄₅₆₇₈₉₊₋]+")
_GREEK = {
    "α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "ε": "epsilon", "θ": "theta", "λ": "lambda", "μ": "mu",
    "π": "pi", "ρ": "rho", "σ": "sigma", "τ": "tau", "φ": "phi", "ϕ": "phi", "ψ": "psi", "ω": "omega",
    "Δ": "Delta", "Σ": "Sigma", "Ω": "Omega",
}  # fmt: skip
_SIGNS = {
    **{letter: f"\\{name} " for letter, name in _GREEK.items()},
    **dict.fromkeys("−–—‐‑‒﹣－", "-"),
    **dict.fromkeys("·⋅∙•", r"\cdot "),
    **dict.fromkeys("“”„‟\"", ""),
    **dict.fromkeys("′’", "'"),
    **{sign: f"\\mathbb{{{letter}}}" for sign, letter in zip("ℝℤℕℚℂ", "RZNQC", strict=True)},
    "×": r"\times ", "÷": r"\div ", "∕": "/", "⁄": "/", "∞": r"\infty ", "≤": r"\le ", "⩽": r"\le ", "≥": r"\ge ",
    "⩾": r"\ge ", "≠": r"\neq ", "≈": r"\approx ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "±": r"\pm ",
    "∓": r"\mp ", "°": r"^\circ ", "º": r"^\circ ", "∅": r"\emptyset ", "⟨": r"\langle ", "⟩": r"\rangle ", "、": ", ",
    "，": ", ", "。": ".", "∀": r"\forall ", "∖": r"\setminus ", "∠": r"\angle ", "√": r"\sqrt ",
    "∛": r"\sqrt[3]", "∜": r"\sqrt[4]", "ƒ": "f",
}  # fmt: skip
_SIGN_TABLE = str.maketrans(_SIGNS)
_ROOT = re.compile(r"(?<=[√∛∜])\s*(\d+(?:\.\d+)?|[A-Za-z])")
_ROOT_OR_BRACKET = re.compile(r"(?P<root>\\sqrt\s*(?:\[[^\[\]]{1,9}\]\s*)?)?(?P<bracket>[()])")

# An argument without braces: `\\frac\\pi4`, `\\sqrt\\pi`, `\\frac1\\sqrt2`; and one with
_GROUP = r"\{(?:[^{}]|\{(?:[^{}]|\{[^{}]*\})*\})*\}"
_BARE = (
    rf"[0-9A-Za-z]|\\sqrt\s*{_GROUP}"
    r"|\\(?:pi|alpha|beta|gamma|delta|theta|phi|varphi|lambda|omega|sigma|mu|rho)(?![A-Za-z])"
)


def _braced_roots(match: re.Match) -> str:
    r"""`\sqrt(2)` as `\sqrt{2}`, with brackets inside of any depth."""
    text, opened = list(match[0]), []
    for token in _ROOT_OR_BRACKET.finditer(match[0]):
        place = token.start("bracket")
        if token["bracket"] == "(":
            opened.append((place, token["root"] is not None))
        elif opened:
            start, of_root = opened.pop()
            if of_root and not token["root"]:
                text[start], text[place] = "{", "}"
    return "".join(text)


_EXP_OR_BRACKET = re.compile(r"(?P<exp>\\exp\s*)?(?P<open>[({])|(?P<close>[)}])|\\.")


def _powers_of_e(match: re.Match) -> str:
    r"""`\exp(2)` and `\exp{2}` as `e^{2}`. `\exp(2)^3` stays, since `e^{2}^3` is read as another number."""
    whole, text, opened = match.string, list(match.string), []
    for token in _EXP_OR_BRACKET.finditer(whole):
        if token["open"]:
            opened.append(token)
        elif token["close"] and opened:
            start, end = opened.pop(), token.end()
            before, after = whole[max(start.start() - 1, 0) : start.start()], whole[end : end + 2].strip()[:1]
            paired = start["open"] + token["close"] in ("()", "{}")
            if start["exp"] and paired and before not in ("^", "_") and after not in ("^", "_", "!", "'"):
                text[start.start()] = " e^{" if before.isalpha() else "e^{"
                text[start.start() + 1 : start.end()] = [""] * (len(start[0]) - 1)
                text[end - 1] = "}"
    return "".join(text)


_ESCAPED = r"(?<!\\)\\"  # a command, not the end of a matrix row
_RULES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"~~", "?"),  # struck out
        # Delimiters. \$ is a currency, $ is not
        (r"(?<!\\)\$", ""),
        (_ESCAPED + r"\$", "$"),
        (r"\\textdollar(?![A-Za-z])(?:\{\})?\s?|\\(?:text|textbf|mathrm|mbox)\{\s?\$\s?\}"
         r"|\A\s?(?:\\text\{\s?USD\s?\}|USD)(?:\s|~|\\[ ,;])?(?=\d)", "$"),
        (r"\\\\\s*\[[^\[\]]{0,9}(?:pt|em|ex|mm|cm)\]", r"\\\\"),
        (_ESCAPED + r"[()\[\]]", ""),
        # Sizes, styles and space
        (r"\\(?:left|right|middle|[bB]igg?[lrm]?)(?![A-Za-z])\s*\.?", ""),
        (r"\\(?:displaystyle|textstyle|scriptstyle|limits|nolimits|boldsymbol|rm|bf|it)(?![A-Za-z])", ""),
        (r"\\[hv]?(?:space|phantom)\*?\{[^{}]*\}", " "),
        (r"\{,\}(?=\d{3}(?!\d))", ","),
        (r"(?<=\d)\{,\}(?=\d)", "."),
        (r"\{:\}", ":"),
        (r"(?<=\d), (?=0\d\d(?!\d))", ","),  # 35, 000
        (r",\s?" + _ESCAPED + r"!\s?", ","),
        (_ESCAPED + r"!", ""),
        (_ESCAPED + r"[,;:> ]|~|\\q?quad|\\(?:enspace|thinspace|space)(?![A-Za-z])", " "),
        # Names
        (r"\\[dtc](frac|binom)(?![A-Za-z])", r"\\\1"),
        (r"\\big(cup|cap)(?![A-Za-z])", r"\\\1"),
        (r"\\(?:leqslant|leqq|leq)(?![A-Za-z])|<=", r"\\le "),
        (r"\\(?:geqslant|geqq|geq)(?![A-Za-z])|>=", r"\\ge "),
        (r"\\lt(?![A-Za-z])|&lt;", "<"),
        (r"\\gt(?![A-Za-z])|&gt;", ">"),
        (r"\\ne(?![A-Za-z])|(?<![\d)])\s?!=|\s!=", r"\\neq "),  # 5!=120
        (r"\\(?:varnothing|emptyset)(?![A-Za-z])|\\\{\s*\\\}", r"\\emptyset "),
        (r"\\[lr]?vert(?![A-Za-z])", "|"),
        (r"\\(?:lor|vee)(?![A-Za-z])", " or "),
        (r"\\(?:land|wedge)(?![A-Za-z])", " and "),
        (r"\\infin(?![A-Za-z])", r"\\infty"),
        (r"\\%", "%"),
        (r"\\(?:mathbb|Bbb)\s*(?:\{\s?([NZQRC])\s?\}|([NZQRC])(?![A-Za-z]))", r"\\mathbb{\1\2}"),
        (r"\\in\s*(?:\\(?:mathbf|mathrm|text)\s*\{\s?([NZQRC])\s?\}|\\?([NZQRC])(?![A-Za-z_({]))",
         r"\\in\\mathbb{\1\2}"),
        (r"\\R(?:eals)?(?![A-Za-z])", r"\\mathbb{R}"),
        (r"\\(?:smallsetminus|backslash)(?![A-Za-z])", r"\\setminus "),
        (r"(?<=[)\]}])\s?(?:-|\\)\s?(?=\\\{)", r"\\setminus "),  # (0,5)-\{4\}
        (r"\\(?:mathrm|operatorname|rm)\s*\{\s*([eid])\s*\}|\\(?:mathrm|rm)\s+([eid])(?![A-Za-z])", r"\1\2"),
        (r"(?<![\d.])\{10\}\^", "10^"),
        (r"\A\\operatorname\{([A-Za-z]{3,})\}\Z", r"\\text{\1}"),
        (r"\\operatorname\*?\{([A-Za-z]+)\}|\\(?:text|mathrm)\{(gcd|lcm)\}", r"\\\1\2 "),
        # Periods: 0.\dot{3}, 0.\bar{3}, 0.(3), 0.333...
        (r"(?<=\d)(\.\d*)\\dot\s?\{?(\d)\}?(?:(\d*)\\dot\s?\{?(\d)\}?)?", r"\1\\overline{\2\3\4}"),
        (r"(?<=\d)(\.\d*)(?:\\bar\s?\{?(\d+)\}?|\((\d+)\))", r"\1\\overline{\2\3}"),
        (r"(?<=\d)(\.\d{0,9}?)((?P<one>\d)(?=(?P=one){2,}[.\\])|(?P<more>\d{2,9}?)(?=(?P=more)+[.\\]))\d+"
         r"(?:\.\.\.|\\[lc]?dots(?![A-Za-z]))", r"\1\\overline{\2}"),
        (r"\\textsuperscript(?=\{)", "^"),
        (r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))|\\degrees?(?![A-Za-z])|(?<=\d)\^\{?o\}?(?!\w)", r"^\\circ "),
        (r"\\(?:textbf|textit|textrm|textsf|texttt|textnormal|emph|mbox|hbox|mathrm|mathbf|mathsf|mathit|bm|text)\s*\{",
         r"\\text{"),
        (r"(?<![\d.,^_])\\text\{\s*([+-]?[\d.,/]+)\s*\}(?![\d.])", r"\1"),
        (r"\A\s*(?:\\text\{)?\s*(?i:all real(?: number)?s)\s*\}?\s*\Z", r"\\mathbb{R}"),
        # An ordinal is its number: 12^{\text{th}}, 12-th, 21st, but 2^{nd} may be a power
        (r"(?<![\d.,/}])(?<!\d )(\d{1,3}(?:,\d{3})+|\d+)(?:\s?-)?\s?(?:\^?\s?\{?\s?\\text\{\s?-?(?:st|nd|rd|th)\s?\}\}?"
         r"|(?:st|nd|rd|th)(?![A-Za-z])|\^(?:\{th\}|th(?![A-Za-z])))", r"\1"),
        (r"\\forall(?![A-Za-z])", " for all "),
        # k = 0, \pm 1, \pm 2, \dots
        (r"(?<![A-Za-z])([A-Za-z])\s?=\s?0,\s?\\pm\s?1,\s?(?:\\pm\s?2,\s?(?:\\pm\s?3,\s?(?:\\pm\s?4,\s?)?)?)?(?:\\[lc]?dots(?![A-Za-z])|\.\.\.)",
         r"\1\\in\\mathbb{Z}"),
        # A quantifier that says nothing. What excepts something stays
        (r"(?<=\S),?\s*(?:\\text\{)?\s*\bfor (?:all|any|every|each)\b(?:[\s{}$,]|\\text\{|\\in(?![A-Za-z])"
         r"|\\mathbb\{[RZQNC]\}|\b(?:reals?|integers?|complex|rational|natural|values?|numbers?|of|[A-Za-z])\b)*\Z",
         ""),
        # Plain text
        (r"\*\*", "^"),
        (r"(?<!\^)(?<!\^\{)\*", r"\\cdot "),
        (r"(?<![\\A-Za-z])(?:infinity|inf|oo)(?![A-Za-z])", r"\\infty "),
        (r"(?<![\\A-Za-z])pi(?![A-Za-z])", r"\\pi "),
        (r"(?<![\\A-Za-z])(arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|ln|log)(?=[\s({]|\d)", r"\\\1"),
        (r"(?<![\\A-Za-z])sqrt(?![A-Za-z])", r"\\sqrt"),
        (r"\\surd\s*(\d+(?:\.\d+)?)", r"\\sqrt{\1}"),
        (r"\\surd(?![A-Za-z])", r"\\sqrt"),
        (r"(?<![\\A-Za-z])cbrt(?![A-Za-z])", r"\\sqrt[3]"),
        (r"\\sqrt.*", _braced_roots),
        (r"(?<![\\A-Za-z])exp(?=\()", r"\\exp"),
        (r"(?s)\A.*?\\exp\s*[({].*", _powers_of_e),
        # Arguments without braces
        (rf"\\sqrt\s*(\[[^\[\]]{{1,9}}\])?\s*({_BARE})", r"\\sqrt\1{\2}"),
        (rf"\\(frac|binom)\s*({_BARE})", r"\\\1{\2}"),
        (rf"\\(frac|binom)\s*({_GROUP})\s*({_BARE})", r"\\\1\2{\3}"),
        (r"\\frac\s+\{", r"\\frac{"),
        # Thousands in front of something
        (r"(?<![\d,.])(\d{1,3}),(\d{3})(?:,(\d{3}))?(?=\\(?:pi|sqrt|frac|cdot|times)|[a-z](?![A-Za-z]))", r"\1\2\3"),
        # Otherwise read as the logarithm of 2/5
        (r"(\\(?:ln|log|lg|sin|cos|tan|exp))\s*([0-9A-Za-z])(?=\s*/)", r"\1(\2)"),
        (r"\s+", " "),
        # Space says something only between two letters or digits, after a comma, and before a unit: 10^{7} m
        (r"(?<![0-9A-Za-z,])(?<!\}) |(?<=\}) (?![A-Za-z])| (?![0-9A-Za-z])(?!\\text)", ""),
    )
)  # fmt: skip
_BASE_WORDS = "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen"
_BASES = {word: str(base) for base, word in enumerate(_BASE_WORDS.split())}
_BASE = re.compile(
    r"(?<=[0-9A-Z)])(?:_\s?\{?\\text\{\s?\(?(\w+)\)?\s?\}\}?"
    r"|\s?(?:\\text\{)?\s?\(?(?:in )?base(?:[ -]|\s?\}\s?|\{)\s?(\w+)[)}\s]*)\Z"
)
_BRACKETED_NUMERAL = re.compile(r"(?<![\w)}\]])\((\d[0-9A-Z]*)\)(?=_(?:\{\d+\}|\d+)\Z)", re.ASCII)  # (2516)_8
_NUMERAL = re.compile(r"-?\d+(?:\.\d+)?", re.ASCII)
_MARKDOWN = re.compile(r"\A[\s*_`:]+|[\s*_`]+\Z")


def normalise(text: str) -> str:
    r"""
    Rewrite a bare answer in one spelling, `\frac{1}{2}` for `$\dfrac12$`: ASCII, LaTeX commands without variants (all
    text commands are `\text`, `\$` is `$`), no delimiters or sizes, and spaces only where they say something.
    """
    if _NUMERAL.fullmatch(text):  # most answers
        return text
    if not text.isascii():
        text = _to_ascii(text)
    text = _MARKDOWN.sub("", text)
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    text = _BRACKETED_NUMERAL.sub(r"\1", _BASE.sub(_index_of_base, text.strip()))
    text = set_of_words(text)
    return text if text.endswith("...") else text.rstrip(".,;: ").strip()


def _index_of_base(match: re.Match) -> str:
    """`_8`, for "base eight" after a numeral."""
    base = (match[1] or match[2]).lower()
    base = _BASES.get(base, base)
    return f"_{{{base}}}" if base.isdigit() else match[0]


def _to_ascii(text: str) -> str:
    text = unicodedata.normalize("NFC", text)  # "=" with a stroke through it is one character
    text = _OVERLINED.sub(lambda digits: f"\\overline{{{digits[0][::2]}}}", text)
    text = _ROOT.sub(r"{\1}", text)
    text = _SUPERSCRIPT.sub(lambda run: f"^{{{run[0].translate(_SCRIPTS)}}}", text)
    text = _SUBSCRIPT.sub(lambda run: f"_{{{run[0].translate(_SCRIPTS)}}}", text)
    text = text.translate(_SIGN_TABLE)
    return "".join(character if character.isascii() else _plain(character) for character in text)


# Overlined digits. Any other mark above, below or through a character changes it
_OVERLINED = re.compile("(?:[0-9][\u0304\u0305])+")


def _plain(character: str) -> str:
    digit = unicodedata.decimal(character, None)
    if digit is not None:
        return str(digit)
    if unicodedata.category(character) == "Cf":  # invisible
        return ""
    if unicodedata.combining(character):
        return "?"
    if character.isspace():
        return " "
    plain = unicodedata.normalize("NFKC", character)
    if "⁄" in plain:  # ½ is 1⁄2
        top, _, bottom = plain.partition("⁄")
        return f"\\frac{{{top}}}{{{bottom}}}"
    return plain
