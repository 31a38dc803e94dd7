"""One way of writing: removes what does not change an answer, and reads Chinese text as ASCII."""

from __future__ import annotations

import functools
import re
import unicodedata

from semrl_jax.rewards.last_number import is_unit

MAX_CHARS = 4096  # of an answer; no benchmark has a longer one

_GREEK = "alpha beta gamma delta epsilon zeta eta theta iota kappa lambda mu nu xi omicron pi rho"
_SYMBOLS = {
    "\u3000": " ", "、": ",", "。": ".", "【": "[", "】": "]", "“": '"', "”": '"', "‘": "'",
    "’": "'", "′": "'", "−": "-", "–": "-", "—": "-", "‐": "-", "‑": "-", "‒": "-", "﹣": "-",
    "×": r"\times ", "÷": "/", "∕": "/", "⁄": "/", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ",
    "∞": r"\infty ", "≤": r"\leq ", "≥": r"\geq ", "⩽": r"\leq ", "⩾": r"\geq ", "≠": r"\neq ",
    "≈": r"\approx ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "±": r"\pm ", "∓": r"\mp ",
    "∅": r"\emptyset ", "°": r"^{\circ}", "℃": r"^{\circ}", "％": "%", "￥": "¥", "～": "~",
    "ℝ": r"\mathbb{R}", "ℤ": r"\mathbb{Z}", "∠": r"\angle ", "△": r"\triangle ", "⟨": "(", "⟩": ")",
    "…": r"\ldots ",
}  # fmt: skip
_TO_ASCII = str.maketrans(
    {chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}
    | {chr(0x2460 + i): f"({i + 1})" for i in range(9)}  # circled digits
    | {chr(0x3B1 + i): rf"\{name} " for i, name in enumerate(_GREEK.split())}
    | {"σ": r"\sigma ", "τ": r"\tau ", "φ": r"\phi ", "ϕ": r"\phi ", "ω": r"\omega "}
    | {
        c: r"\frac{{{}}}{{{}}}".format(*unicodedata.normalize("NFKC", c).split("⁄"))
        for c in "½⅓⅔¼¾⅕⅖⅗⅘⅙⅚⅛⅜⅝⅞"
    }
    | _SYMBOLS
)
_RAISED = re.compile("[⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ]+")
_LOWERED = re.compile("[₀₁₂₃₄₅₆₇₈₉₊₋]+")
_ROOT = re.compile(r"([√∛∜])\s*(?:\(([^()]*)\)|\{([^{}]*)\}|(\d+(?:\.\d+)?|[a-zA-Z]))")
_INDEX = {"√": "", "∛": "[3]", "∜": "[4]"}
# LaTeX spaces between digits, before three of them, are thousands separators; so is `{,}`.
_THOUSANDS = re.compile(
    r"(?<=\d)(?:,?\\[,;:! ]|,?\\!|\{,\\?!?\}|~|'|[\u00a0\u2009\u202f])\s?(?=\d{3}(?!\d))"
)
_ROW_SPACING = re.compile(r"\\\\\s*\[\s*-?[\d.]+\s*(?:pt|em|ex|mm|cm|in)\s*\]")
_NO_SPACE = re.compile(
    r"(?<!\\)\\!\s*|\\(?:left|right|[bB]igg?[lr]?|displaystyle|limits)(?![a-zA-Z])"
)
_SPACE = re.compile(
    r"(?<!\\)\\[,;: ]|(?<!\\)~|\\q?quad(?![a-zA-Z])|[\x00-\x1f\x7f\u00a0\u2000-\u200b\u202f]"
)
_MATH_MARKS = re.compile(r"(?<!\\)(?:\\[()\[\]]|\$)|\*\*")  # not after the \\ between rows
_FONT = re.compile(
    r"\\(?:math(?:rm|bf|it|sf|up|cal)|boldsymbol|text(?:bf|rm|it|sf|normal)|mbox|operatorname|rm"
    r"|emph)\s*(?=\{)"
)
_LETTER_IN_FONT = re.compile(r"\\text\s*\{\s*([A-Za-z])\s*\}")
_NUMBER = r"(?:\d+(?:\.\d+)?)"
_DEGREES = r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-zA-Z]))|\\degree(?![a-zA-Z])"
_DEGREES_AT_END = re.compile(rf"(?:{_DEGREES})\s*([CF]?)[\s.,]*$")
_TRIGONOMETRIC = re.compile(
    rf"(\\(?:sin|cos|tan|cot|sec|csc)(?:\s*\^\s*\{{?\s*\d\s*\}}?)?)\s*([({{])?\s*({_NUMBER})\s*"
    rf"(?:{_DEGREES})(?(2)\s*[)}}])"
)
_COMMANDS = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\(?:leqslant|leqq|le)(?![a-zA-Z])", r"\\leq"),
        (r"\\(?:geqslant|geqq|ge)(?![a-zA-Z])", r"\\geq"),
        (r"\\ne(?![a-zA-Z])|(?<=[a-zA-Z])\s*!=", r"\\neq "),
        (r"\\lt(?![a-zA-Z])", "<"),
        (r"\\gt(?![a-zA-Z])", ">"),
        (r"\\lbrace(?![a-zA-Z])", r"\\{"),
        (r"\\rbrace(?![a-zA-Z])", r"\\}"),
        (r"\\lg(?![a-zA-Z])", r"\\log_{10}"),
        (r"\\(?:mid|vert|lvert|rvert)(?![a-zA-Z])", "|"),
        (r"\\langle(?![a-zA-Z])", "("),
        (r"\\rangle(?![a-zA-Z])", ")"),
        (r"\\(?:infin|inf)(?![a-zA-Z])", r"\\infty"),
        (r"\\(?:simeq|thickapprox|doteq)(?![a-zA-Z])", r"\\approx"),
        (r"\\(?:dots|cdots|ldots|dotsc)(?![a-zA-Z])", "..."),
        (r"\\(?:varnothing|O)(?![a-zA-Z])", r"\\emptyset"),
        (r"\\(?:mathbb|Bbb|mathbf)\s*\{?\s*R\s*\}?|\\R(?![a-zA-Z])", r"(-\\infty,\\infty)"),
        (r"\{\s*([^{}\\]*)\\choose(?![a-zA-Z])([^{}\\]*)\}", r"\\binom{\1}{\2}"),
        (r"\+\s*(?=\\infty)", ""),
        (r"\s*\(\s*([a-z]\s*\\in\s*\\mathbb\s*\{?[ZNQ]\}?)\s*\)$", r", \1"),
        (r"\\text\s*\{\s*([或和且及]?)\s*\}", r"\1"),
        (r"^\s*(?:negative|minus)\s+(?=[\d\\])", "-"),
        (r",\s*\(?\s*[kn]\s*\\in\s*\\mathbb\s*\{?\s*Z\s*\}?\s*\)?\s*$", ""),
        (r"\{:\}|(?<=\d)\s*(?:\\text\s*\{\s*to\s*\}|\bto\b)\s*(?=\d)", ":"),
        (r"\bC_\s*\{?(\d+)\}?\s*\^\s*\{?(\d+)\}?", r"\\binom{\1}{\2}"),
        (rf"(?:{_DEGREES})\s*[CF]?(?![a-zA-Z])", ""),
        (r"\\frac\s*(\w)\s*(\w)", r"\\frac{\1}{\2}"),
        (r"\\frac\s*(\w)\s*\{", r"\\frac{\1}{"),
        (r"(\\frac\s*\{[^{}]*\})\s*(\w)", r"\1{\2}"),
        (r"\\sqrt\s*(\[[^\[\]]*\])?\s*(\w)", r"\\sqrt\1{\2}"),
        (r"\\sqrt\s*(\[[^\[\]]*\])?\s*\(([^()]*)\)", r"\\sqrt\1{\2}"),
        (r"_\s*\{(\w)\}", r"_\1"),
        (r"(?<![\w.}])\.(?=\d)", "0."),
        (r"(?<![\\a-zA-Z])(?=(?:sqrt|pi|sin|cos|tan|log|ln|infinity)(?![a-zA-Z]))", r"\\"),
        (r"\\infinity(?![a-zA-Z])", r"\\infty"),
        (r"\\sqrt\(([^()]*)\)", r"\\sqrt{\1}"),
    )
)
_PLAIN = re.compile(r"-?[0-9]+(?:\.[0-9]+)?")
# Words that mean a set.
_NO_SOLUTION = re.compile(
    r"(?i)(?:there (?:is|are) )?no (?:real |such )?(?:solutions?|roots?)|(?:the )?empty set"
    r"|\\?\{\s*\\?\}|无解|空集"
)
_ALL_REAL = re.compile(r"(?i)(?:all|any) reals?(?: numbers?)?|全体实数|所有实数")
_START = re.compile(
    r"^(?:[:=]|\\approx\b|(?i:approximately|approx\.|about|roughly)\s(?=\s*[$\d\\])"
    r"|(?:最终)?答案[是为:]*|(?i:the )?(?i:final )?(?i:answer)(?: is\b|:))\s*"
    r"|^\\text\s*\{\s*(?i:the )?(?i:final )?(?i:answer)(?: is\b|:)\s*\}\s*"
)
_CURRENCIES = (
    (re.compile(r"\b(?:US|HK)D?\\?\$|\\\$|(?<!\\)\$|\bUSD\b"), "dollar"),
    (re.compile(r"¥|\bRMB\b|\bCNY\b"), "yuan"),
    (re.compile(r"€|\\euro(?![a-zA-Z])|\bEUR\b"), "euro"),
    (re.compile(r"£|\\pounds(?![a-zA-Z])|\bGBP\b"), "gbp"),
    (re.compile(r"₹|\bRs\.?\s*(?=\}?\s*\d)|\bINR\b"), "rupee"),
)
_CHINESE_UNIT = (
    "平方|立方|千[米克]|厘|分|毫|公|微|米|克|里|升|吨|元|角|钱|个|人|岁|度|只|本|张|件|次|名|支|枝|辆|"
    "棵|页|块|箱|袋|瓶|盒|条|头|朵|颗|组|种|位|天|日|周|月|年|小|时|秒|钟|每|/|公顷|亩|倍|"
    "平方米|千米|道|题|套|双|台|把|根|层|间|户|班|斤|筐|桶|车|节|段|杯|枚|架|艘|匹|篇|首|幅|场"
)
_UNIT = (
    r"mm|cm|dm|km|m|kg|mg|g|mL|ml|L|ft|in|lb|oz|mph|kmph|hrs?|mins?|secs?|"
    r"(?:kilo|centi|milli)?(?:met(?:er|re)|gram|lit(?:er|re))s?|miles?|feet|foot|inch(?:es)?|"
    r"yards?|pounds?|ounces?|tons?|seconds?|minutes?|hours?|days?|weeks?|months?|years?|degrees?|"
    r"radians?|rad|dollars?|bucks?|cents?|euros?|rupees?|yuan|units?|points?|people|students?|"
    r"apples?|balls?|gallons?|acres?|steps?|times|ways|integers?"
)
_VALUE = r"(?:(?<=[\d)}])|(?<=\\pi))"  # before a unit
_UNIT_PHRASE = re.compile(
    rf"{_VALUE}(?:\s+(?:(?:square|cubic|sq\.?|cu\.?)\s+)?|(?=[ckdm]m\b|kg\b))"
    rf"(?:{_UNIT})(?:\s*\^\s*\{{?[23]\}}?)?"
    rf"(?:\s*(?:/|per)\s*(?:{_UNIT}|[smh])(?:\s*\^\s*\{{?[23]\}}?)?)?$"
)
_UNIT_TEXT = re.compile(
    rf"{_VALUE}\s*\\text\s*\{{[^{{}}]*\}}"
    r"(?:\s*\^\s*\{?\d\}?)?(?:\s*/\s*\\text\s*\{[^{}]*\}(?:\s*\^\s*\{?\d\}?)?)?\s*$"
)
_CHINESE_UNIT_TEXT = re.compile(rf"(?<=[\d)}}%万亿])\s*(?:{_CHINESE_UNIT})+$")
_WHOLLY_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_LETTER_IN_BRACKETS = re.compile(r"\(\s*([A-Za-z])\s*\)")


def normalized(text: str) -> str:
    """The answer without math marks, LaTeX spacing, fonts, units, currency and final punctuation.

    Full-width characters, Chinese punctuation and Unicode mathematics become ASCII and LaTeX.
    Percent signs stay, because they have a meaning for `numbers`.
    """
    return split_unit(text)[0]


@functools.lru_cache(maxsize=8192)
def split_unit(text: str) -> tuple[str, str]:
    """The answer as `normalized` writes it, and the unit or currency that was removed from it."""
    if _PLAIN.fullmatch(text):  # most answers; the rest is slow
        return text, ""
    is_price = text.lstrip().startswith("$") and text.count("$") % 2 == 1
    unit = "dollar" if is_price else ""
    text = _THOUSANDS.sub(",", text).translate(_TO_ASCII)
    text = _RAISED.sub(lambda m: f"^{{{unicodedata.normalize('NFKC', m[0])}}}", text)
    text = _LOWERED.sub(lambda m: f"_{{{unicodedata.normalize('NFKC', m[0])}}}", text)
    text = text.replace("\u2212", "-")  # the sign of a raised or lowered number
    text = _ROOT.sub(lambda m: rf"\sqrt{_INDEX[m[1]]}{{{m[2] or m[3] or m[4]}}}", text)
    text = _SPACE.sub(" ", _NO_SPACE.sub("", _ROW_SPACING.sub(r"\\\\", text)))
    text = _MATH_MARKS.sub("", text)
    for pattern, name in _CURRENCIES:
        text, found = pattern.subn("", text)
        unit = name if found else unit
    text = _LETTER_IN_FONT.sub(r"\1", _FONT.sub(r"\\text", text))
    if degrees := _DEGREES_AT_END.search(text):
        unit = {"C": "celsius", "F": "fahrenheit"}.get(degrees[1], "degree")
    text = _TRIGONOMETRIC.sub(r"\1(\\frac{\3\\pi}{180})", text)
    for pattern, replacement in _COMMANDS:
        text = pattern.sub(replacement, text)
    text = _bare(text)
    for pattern in (_UNIT_TEXT, _UNIT_PHRASE, _CHINESE_UNIT_TEXT):
        found = pattern.search(text)
        if found and is_unit(found[0]) and not _is_variable(found[0], text[: found.start()]):
            text, unit = text[: found.start()], found[0]
    if whole := _WHOLLY_TEXT.fullmatch(text):
        text = whole[1]
    if letter := _LETTER_IN_BRACKETS.fullmatch(text.strip()):
        text = letter[1]
    text = _bare(text)
    if _NO_SOLUTION.fullmatch(text):
        text = r"\emptyset"
    elif _ALL_REAL.fullmatch(text):
        text = r"(-\infty,\infty)"
    return text, unit


def _bare(text: str) -> str:
    """Without what may stand before and after an answer; the dots of `1, 2, ...` stay."""
    text = _START.sub("", " ".join(text.split()))
    bare = text.rstrip(".,;:?\\ ")
    end = text[len(bare) :].rstrip(",;:?\\ ")
    if end.endswith("..") and re.search("[.,]", bare + end[0]):
        return bare.strip() + end.rstrip(".") + "..."
    return bare.strip()


def _is_variable(unit: str, before: str) -> bool:
    """Whether a letter is a variable rather than a unit: the last one of `3k + 2 m`."""
    sides = _COMMAND.sub("", before).rpartition("=")
    return len(unit.strip()) == 1 and re.search("[a-zA-Z]", sides[2]) is not None


def same_text(a: str, b: str) -> bool:
    """Whether two normalised answers are the same but for spaces and fonts; not if empty.

    Case, articles and punctuation count only without words: AB is not ab, and Yes is yes.
    """
    a, b = map(_compared, (a, b))
    if a == "" or a == b or not _WORD.search(a):
        return a != "" and a == b
    return _plain_words(a) == _plain_words(b)


_WORD = re.compile(r"(?<![\\a-zA-Z])(?:[A-Za-z]{3}|[Nn][Oo]\b|[aApP]\.?[mM]\b)")


_ARTICLE = re.compile(r"^(?i:an?|the)\s+(?=[a-z]{4})")


def _plain_words(text: str) -> str:
    # Between digits they count: 1.2 cups are not 12 cups.
    return re.sub(r"(?<!\d)[.,\s]|[.,\s](?!\d)|,(?=\d{3}(?!\d))", "", text).casefold()


def _compared(text: str) -> str:
    text = re.sub(r"\\text\s*\{([^{}]*)\}", r" \1 ", text)
    text = _ARTICLE.sub("", text.strip())
    text = re.sub(r"(?<![\d.,])\s+|\s+(?!\d)", "", text)  # 1 2 is not 12, 1, 234 not 1,234
    return re.sub(r"\\(?=[{}%])|\"(?=[a-zA-Z])|(?<=[a-zA-Z])\"|([_^])\{(\w)\}", r"\1\2", text)


_COMMAND = re.compile(r"\\[a-zA-Z]+")
_FUNCTIONS = re.compile(r"a?(?:rc)?(?:sin|cos|tan|cot|sec|csc)h?|log|ln|exp|sqrt|max|min")


def is_words(text: str) -> bool:
    """Whether a normalised answer is prose: only its text counts, it is no product of letters."""
    if r"\text" in text or any(ord(character) > 0x2E7F for character in text):
        return True
    letters = re.findall(r"[A-Za-z]+", _COMMAND.sub(" ", text))
    if any(len(word) > 3 and not _FUNCTIONS.fullmatch(word) for word in letters):
        return True
    return re.fullmatch(r"[A-Za-z]{3,}", text) is not None


def answer_class(extracted: str | None) -> str:
    """The text by which two answers are equal: normalised, without case and spaces; "": no vote."""
    return "".join(normalized(extracted or "").casefold().split())
