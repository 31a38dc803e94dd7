"""The last number of a response, where nothing announces the answer.

A number counts only if the words and signs around it leave it as it is: `5 apples` is 5, but
`x > 5`, `5 squared`, `2^5`, `not 5` and `3-5` are no answers.
"""

from __future__ import annotations

import re

WINDOW = 2000  # characters at the end of a text in which the last number is looked for
# A number as it is written: with its sign, as a fraction, root, percentage, power or time of day.
_DIGITS = r"(?:\d{1,3}(?:[ \u00a0\u2009\u202f]\d{3})+(?!\d)|\d(?:,?\d)*(?:\.\d+)?|\.\d+)"
_GROUP = r"(?:\s*\{[^{}]*\}|\s*\d)"
NUMBER = (
    r"(?:(?<![\w)\]}.%])[-+−–]|(?:(?<=[=≈]\s)|\A)[-−–]\s|\b(?:negative|(?<!\d\s)minus)\s)?(?:[$€£¥][-−]?)?"
    rf"(?:(?:\d+\s*)?\\[dt]?frac{_GROUP}{_GROUP}|\d*\\sqrt{_GROUP}|{_DIGITS})"
    rf"(?:\s?/\s?{_DIGITS}|(?::\d+)+(?:\s?[aApP]\.?[mM]\b)?|[eE][-+]?\d+|\s*(?:\\times|×|\\cdot)\s*10\s*\^\s*"
    r"(?:\{\s*[-+]?\d+\s*\}|-?\d+))?"
    r"(?:\s?\\?%|\\?!|π|\\pi|\s?(?:hundred|thousand|[mbtr]+illion|万|亿)(?![a-z]))?"
)
# Words after a number that make another number of it.
_CHANGE = (
    r"(?:plus|minus|times\s+[a-z]|divided|over\s+[a-z]|squared|cubed|factorial|mod|modulo|halves|half"
    r"|(?:degrees\s+)?below\s+zero|thirds?|(?:four|fif|six|seven|eigh|nin|ten|hundred|thousand|million)ths?"
    r"|and\s+a\s+(?:half|quarter)|gross|lakh|crore|bn|pi|arc\w+|alpha|beta|theta|[bcxyz]|[abcxyz]{2,3})\b"
    r"|[十百千万亿](?![米克])|[折成多余的]|分之"
)
# Words after a number that are no unit: they change it, compare it, or leave it open.
_NO_UNIT = re.compile(
    rf"^\W*(?:{_CHANGE}|(?:to|(?:more|less|fewer)\s+than|is|if|minimum|maximum|below|above|under"
    r"|[ap]\.?\s?m|per\s?cent\w*|pct|dozen|hundred|thousand|[mbtr]+illion)\b)"
    r"|\b(?:or|not|wrong|at least|at most|below zero|and\s+(?:an?|half|one|two|three|four|five|six"
    r"|seven|eight|nine|ten|eleven|twelve|\w+teen|\w+ty))\b|n't\b|[或和]|以[上下内]|左右",
    re.IGNORECASE,
)
# A number in these surroundings is part of something else: `x > 5`, `2^5`, `5x`, `not 5`.
_BEFORE_PART = re.compile(
    r"(?:[)\]}]$|[\^√±]|\\(?:pm|sqrt|cdot|times|div)|[A-Za-z]_\{?|[A-Za-z]\(|\d\s*[*x]|[A-Za-z)]\s+[*x]"
    r"|[\w)\]}]\s*[+×·÷/≤≥≠]|(?:[\d)\]}]|(?<![<\w/])[A-Za-z])\s*(?:[<>]=?|!=)"
    r"|(?:\b(?:log\w*|ln|lg|sin|cos|tan|sqrt|root of|not|than|times|plus|over|mod)|n't|cannot be)"
    r"|mod\{?|至少|至多|不是|大于|小于)\s*$"
)
_AFTER_PART = re.compile(
    rf"\s?(?:\\(?:text|mathrm)\s*\{{\s*)?(?:{_CHANGE})|(?:\s\w+){{0,2}}\s(?:or\s+(?:more|less|fewer)|at\s+least)\b|\s?\^(?!\s*\{{?\s*\\circ)|\s?或"
    r"|√|_\w|\+|\s\+\s?[\w(\\]|\((?![a-z]{3})|\s?[*×·÷/]\s?(?:[\d(]|[xyzn]\b)|\s?-\s?[xyzn(]\b"
    r"|[abijknxyzKMB](?![A-Za-z])|\\(?:pi|sqrt|cdot|times)"
)
# Words anywhere in a text that leave open whether its only number is the answer.
_UNCERTAIN = re.compile(
    r"(?i)\b(?:or|not|wrong|such as|between|at least|at most|half|halves|thirds?|double"
    r"|twice|squared?|root|power|if|except|either|maybe|dozens?|minus|negative|below zero|minimum"
    r"|maximum|\w+ty)\b"
    r"|[或非不<>≤≥≠=≈]|\\(?:[lgn]eq?|approx|neg|in|infty|lfloor|lceil)(?![a-z])|至少|以[上下内]|左右"
)
_IN_BRACKETS = re.compile(r"[^()\[\]{}]*,(?!\d{3}(?!\d))[^()\[\]{}]*")
MAX_AROUND = 60  # characters
_NUMBER = re.compile(NUMBER)
_JOINED = re.compile(  # a list by `and` or `or`, one by a comma, or one quantity of several
    r"\s*(?:(,?\s*(?:and|or)\b|和|或)|(,)|-|–|—|~|to\b"
    r"|(?:hours?|hrs?|minutes?|feet|foot|ft|dollars?|pounds?|years?|weeks?)(?:\s+and)?\b)\s*"
)
_BETWEEN_NUMBERS = re.compile(r"(?i)\bbetween\s*$")
_MATH = re.compile(r"\$\$?([^$]+)\$\$?|\\\(((?:[^\\]|\\[^)])*)\\\)|\\\[((?:[^\\]|\\[^\]])*)\\\]")
_BETWEEN_MATH = re.compile(r",?\s*(?:and|or)\s*|\s*[和或]\s*")
_PROSE = re.compile(r"(?<![\\{a-zA-Z])[a-zA-Z]{2,}\s+[a-zA-Z]{2,}")


def last_number(text: str) -> str | None:
    """The last number as it is written, with all mathematics around it if it stands between `$`.

    A list such as `3, 4 and 5` is one answer. None for a range such as `3-5`, and for a number that
    is part of something else, such as `2^5` or `not 5`.
    """
    text = text[-WINDOW:]
    numbers = list(_NUMBER.finditer(text))
    if not numbers:
        return None
    last = numbers[-1]
    answer, end = "", 0
    for found in _MATH.finditer(text):
        content = found[1] or found[2] or found[3]
        names = [text.rpartition("=")[0].strip() for text in (answer.rpartition(",")[2], content)]
        is_same = names[0] == names[1] and (names[0] or _NUMBER.fullmatch(content))
        if is_same and _BETWEEN_MATH.fullmatch(text, end, found.start()):
            content = f"{answer}, {content}"
        is_around = found.start() <= last.start() and last.end() < found.end()
        if is_around and not _PROSE.search(content):
            return content
        answer, end = content, found.end()
    before, after = _around(text, last)
    inside = re.search(r"[(\[{][^()\[\]{}]*$", before), re.match(r"[^()\[\]{}]*[)\]}]", after)
    if all(inside):
        brackets = inside[0][0] + last[0] + inside[1][0]
        if _IN_BRACKETS.fullmatch(brackets[1:-1]):
            return brackets
    return None if _is_part(text, last) else _with_list(text, numbers)


def only_number(text: str) -> str | None:
    """The only number of a text, unless other words change it: `not 5`, `5x`, `half of 5`."""
    numbers = list(_NUMBER.finditer(text))
    if len(numbers) != 1 or _UNCERTAIN.search(text) or _is_part(text, numbers[0]):
        return None
    return numbers[0][0]


def is_unit(words: str) -> bool:
    """Whether words after a number leave it as it is; `squared` and `or more` do not."""
    return _NO_UNIT.search(re.sub(r"\\text|[{}]", " ", words)) is None


def _around(text: str, number: re.Match[str]) -> tuple[str, str]:
    start, end = number.span()
    return text[max(start - MAX_AROUND, 0) : start], text[end : end + MAX_AROUND]


def _is_part(text: str, number: re.Match[str]) -> bool:
    before, after = _around(text, number)
    return bool(_BEFORE_PART.search(before) or _AFTER_PART.match(after))


def _with_list(text: str, numbers: list[re.Match[str]]) -> str | None:
    """The last number, with those that `and` or `or` joins to it; None for a range such as 3-5."""
    first = len(numbers) - 1
    joins: list[re.Match[str]] = []
    while first > 0 and (
        join := _JOINED.fullmatch(text, numbers[first - 1].end(), numbers[first].start())
    ):
        if join[1] is None and join[2] is None:
            return None
        joins.append(join)
        first -= 1
    # "In 2020, 15 of them" and "it costs 5, and 7 in all" are no lists.
    if not joins or joins[0][1] is None or (len(joins) == 1 and joins[0][1].startswith(",")):
        return numbers[-1][0]
    if _BETWEEN_NUMBERS.search(text, 0, numbers[first].start()):
        return None
    return text[numbers[first].start() : numbers[-1].end()]
