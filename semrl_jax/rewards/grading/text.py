"""One way of writing: removes what does not change an answer, and reads Chinese text as ASCII."""

from __future__ import annotations

import re

MAX_CHARS = 4096  # of an answer; no benchmark has a longer one

_SYMBOLS = {
    "\u00a0": " ", "\u3000": " ", "、": ",", "。": ".", "【": "[", "】": "]", "“": '"', "”": '"',
    "‘": "'", "’": "'", "−": "-", "–": "-", "—": "-", "×": r"\times ", "÷": "/", "·": r"\cdot ",
    "⋅": r"\cdot ", "∙": r"\cdot ", "π": r"\pi ", "∞": r"\infty ", "≤": r"\leq ", "≥": r"\geq ",
    "≠": r"\neq ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "±": r"\pm ", "∓": r"\mp ",
    "²": "^{2}", "³": "^{3}", "½": r"\frac{1}{2}", "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}",
    "∅": r"\emptyset ", "°": r"^{\circ}", "％": "%", "￥": "¥", "～": "~", "θ": r"\theta ",
    "α": r"\alpha ", "β": r"\beta ",
}  # fmt: skip
_TO_ASCII = str.maketrans(
    {chr(code): chr(code - 0xFEE0) for code in range(0xFF01, 0xFF5F)}
    | {chr(0x2460 + i): f"({i + 1})" for i in range(9)}  # circled digits
    | _SYMBOLS
)
_ROOT = re.compile(r"√\s*(?:\(([^()]*)\)|\{([^{}]*)\}|(\d+(?:\.\d+)?|[a-zA-Z]))")
_NO_SPACE = re.compile(
    r"(?<!\\)\\!\s*|\\(?:left|right|[bB]igg?[lr]?|displaystyle|limits)(?![a-zA-Z])"
)
_SPACE = re.compile(r"(?<!\\)\\[,;: ]|(?<!\\)~|\\q?quad(?![a-zA-Z])|[\x00-\x1f\x7f]")
_MATH_MARKS = re.compile(r"(?<!\\)(?:\\[()\[\]]|\$)")  # not after the \\ between rows
_FONT = re.compile(r"\\(?:math(?:rm|bf|it|sf)|textbf|textrm|textit|mbox|operatorname|rm)\s*(?=\{)")
_LETTER_IN_FONT = re.compile(r"\\text\s*\{\s*([A-Za-z])\s*\}")
_COMMANDS = (
    (re.compile(r"\\[dtc]frac(?![a-zA-Z])"), r"\\frac"),
    (re.compile(r"\\(?:leqslant|le)(?![a-zA-Z])"), r"\\leq"),
    (re.compile(r"\\(?:geqslant|ge)(?![a-zA-Z])"), r"\\geq"),
    (re.compile(r"\\ne(?![a-zA-Z])"), r"\\neq"),
    (re.compile(r"\\lt(?![a-zA-Z])"), "<"),
    (re.compile(r"\\gt(?![a-zA-Z])"), ">"),
    (re.compile(r"\\lbrace(?![a-zA-Z])"), r"\\{"),
    (re.compile(r"\\rbrace(?![a-zA-Z])"), r"\\}"),
    (re.compile(r"\\lg(?![a-zA-Z])"), r"\\log_{10}"),
    (re.compile(r"\\(?:mid|vert|lvert|rvert)(?![a-zA-Z])"), "|"),
    (re.compile(r"\\infin(?![a-zA-Z])"), r"\\infty"),
    (re.compile(r"\{,\}"), ","),
    (re.compile(r"\+\s*(?=\\infty)"), ""),
    (re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-zA-Z]))|\\degree(?![a-zA-Z])"), ""),
    (re.compile(r"\\frac\s*(\d)\s*(\d)"), r"\\frac{\1}{\2}"),
    (re.compile(r"\\frac\s*(\d)\s*\{"), r"\\frac{\1}{"),
    (re.compile(r"(\\frac\s*\{[^{}]*\})\s*(\d)"), r"\1{\2}"),
    (re.compile(r"\\sqrt\s*(\d|[a-zA-Z])"), r"\\sqrt{\1}"),
    (re.compile(r"_\s*\{(\w)\}"), r"_\1"),
    (re.compile(r"(?<![\w.])\.(?=\d)"), "0."),
)
_START = re.compile(
    r"^(?:[:=]|(?:最终)?答案[是为:]*|(?i:the )?(?i:final )?(?i:answer)(?: is\b|:))\s*"
)
_CURRENCY = re.compile(r"\\\$|(?<!\\)\$|[¥€£₹]|\b(?:US|HK)D?\$|\bRs\.?\s*(?=\d)|\bUSD\b|\bRMB\b")
_CHINESE_UNIT = (
    "平方|立方|千|厘|分|毫|公|微|米|克|里|升|吨|元|角|钱|个|人|岁|度|只|本|张|件|次|名|支|枝|辆|"
    "棵|页|块|箱|袋|瓶|盒|条|头|朵|颗|组|种|位|天|日|周|月|年|小|时|秒|钟|每|/|公顷|亩|倍|"
    "平方米|千米|道|题|套|双|台|把|根|层|间|户|班|斤|筐|桶|车|节|段|杯|枚|架|艘|匹|篇|首|幅|场"
)
_UNIT = (
    r"mm|cm|dm|km|m|kg|mg|g|mL|ml|L|ft|in|lb|oz|mph|kmph|hrs?|mins?|secs?|"
    r"(?:kilo|centi|milli)?(?:met(?:er|re)|gram|lit(?:er|re))s?|miles?|feet|foot|inch(?:es)?|"
    r"yards?|pounds?|ounces?|tons?|seconds?|minutes?|hours?|days?|weeks?|months?|years?|degrees?|"
    r"radians?|rad|dollars?|cents?|euros?|rupees?|units?|points?|people|students?|"
    r"apples?|balls?|gallons?|acres?|steps?|times|ways|integers?"
)
_UNIT_PHRASE = re.compile(
    rf"(?<=[\d)}}])(?:\s+(?:(?:square|cubic|sq\.?|cu\.?)\s+)?|(?=[ckdm]m\b|kg\b))"
    rf"(?:{_UNIT})(?:\s*\^\s*\{{?[23]\}}?)?"
    rf"(?:\s*(?:/|per)\s*(?:{_UNIT}|[smh])(?:\s*\^\s*\{{?[23]\}}?)?)?$"
)
_UNIT_TEXT = re.compile(
    r"(?<=[\d)}])\s*\\text\s*\{(?!\s*(?:or|and|million|billion|thousand|hundred|percent)\b)[^{}]*\}"
    r"(?:\s*\^\s*\{?\d\}?)?(?:\s*/\s*\\text\s*\{[^{}]*\}(?:\s*\^\s*\{?\d\}?)?)?\s*$"
)
_CHINESE_UNIT_TEXT = re.compile(rf"(?<=[\d)}}%])\s*(?:{_CHINESE_UNIT})+$")
_WHOLLY_TEXT = re.compile(r"\\text\s*\{([^{}]*)\}")
_LETTER_IN_BRACKETS = re.compile(r"\(\s*([A-Za-z])\s*\)")


def normalized(text: str) -> str:
    """The answer without math marks, LaTeX spacing, fonts, units, currency and final punctuation.

    Full-width characters, Chinese punctuation and Unicode mathematics become ASCII and LaTeX.
    Percent signs stay, because they have a meaning for `numbers`.
    """
    text = _ROOT.sub(lambda m: rf"\sqrt{{{m[1] or m[2] or m[3]}}}", text.translate(_TO_ASCII))
    text = _SPACE.sub(" ", _NO_SPACE.sub("", text))
    text = _CURRENCY.sub("", _MATH_MARKS.sub("", text))
    text = _LETTER_IN_FONT.sub(r"\1", _FONT.sub(r"\\text", text))
    for pattern, replacement in _COMMANDS:
        text = pattern.sub(replacement, text)
    text = _bare(text)
    for unit in (_UNIT_TEXT, _UNIT_PHRASE, _CHINESE_UNIT_TEXT):
        text = unit.sub("", text)
    if whole := _WHOLLY_TEXT.fullmatch(text):
        text = whole[1]
    if letter := _LETTER_IN_BRACKETS.fullmatch(text.strip()):
        text = letter[1]
    return _bare(text)


def _bare(text: str) -> str:
    """Without what may stand before and after an answer."""
    return _START.sub("", " ".join(text.split())).rstrip(".,;:? ").strip()


def same_text(a: str, b: str) -> bool:
    """Whether two normalised answers are the same but for case, spaces and fonts; not if empty."""
    a, b = map(_compared, (a, b))
    return a != "" and a == b


def _compared(text: str) -> str:
    text = re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)  # 1 2 is not 12
    return re.sub(r"\\text(?![a-zA-Z])|[{}]|\\(?=[{}%])|['\"]", "", text).casefold()


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
