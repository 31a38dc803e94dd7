"""Finds the answer in a response, by ordered rules, in time linear in the length of the text.

Only the response is read, never the prompt: an instruction to use \\boxed{} would set the format
flag, and a number in the question could become the answer.
"""

from __future__ import annotations

import re

from semrl_jax.end_markers import response_text

# Possessive repeats do not backtrack, so hostile braces cost one pass. A box may contain two nested
# levels of braces.
_COMPLETE_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{(?:[^{}]++|\{(?:[^{}]++|\{[^{}]*+\})*+\})*+\}")
# With braces, or around one number or letter. The word "boxed" alone is no box.
_BOX = re.compile(r"(?:\\?boxed|\\fbox)\s*(?=\{)|\\boxed\s*(?=[\d.+-]|[A-Za-z](?![A-Za-z]))")
_UNBRACED = re.compile(r"[-+]?[\d.,/]*\d|[A-Za-z]")
# Between two boxes of one answer: `\boxed{1} and \boxed{2}`, `\boxed{1}$, $x = \boxed{2}`.
_BETWEEN = re.compile(
    r"(?:[\s$.]|\\[()\[\], ]|\\q?quad)*(?:,|;|、|和|或|及|&|\\text\{|\band\b|\bor\b)"
    r"(?:[\s$,}]|\\[()\[\], ]|\\q?quad|\band\b|\bor\b|[a-zA-Z](?:_\{?\w\}?)?\s*=)*"
)
# What is written before a box and belongs to it: `$-\boxed{1}$`, `\pm \boxed{1}`, `x > \boxed{1}`.
_SIGN = re.compile(
    r"((?<=[=$(\[])\s*-|\\pm"
    r"|(?:(?<=[ \d})\]])|(?<=[^<\w/][a-zA-Z]))(?:\\[lgn]eq?(?![a-z])|[≤≥≠<>]=?))\s*$"
)
MAX_BETWEEN = 40  # characters
MAX_BOXES = 64  # the last ones are looked at; also of marks

# What announces an answer. GSM8K writes `####`.
_MARK = re.compile(
    r"####|<answer>|答案(?:应该|应)?[是为:：]+"
    r"|(?i:\banswer\b)[*_]*\s*(?:\bis\b|\bare\b|[:：=])"
)
_END_OF_ANSWER = re.compile(r"</answer>|\n")
_CLOSING_MARKS = re.compile(r"[*_`]+\.?$")
_DISPLAYED = re.compile(r"(?:\$\$|\\\[)(.*?)(?:\$\$|\\\])", re.DOTALL)
_SENTENCE = re.compile(r"(?<=[^\s\d])[.](?=\s|$)|[.](?=\s*[A-Z])|。|\s(?:so|because|since)\b")

# The last number of a text, as it is written: with its sign, as a fraction, percentage or power.
WINDOW = 2000  # characters at the end of a text in which the last number is looked for
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
_UNCERTAIN = re.compile(
    r"(?i)\b(?:or|not|wrong|such as|between|at least|at most|half|halves|thirds?|double"
    r"|twice|squared?|root|power|if|except|either|maybe|dozens?|minus|negative|below zero|minimum"
    r"|maximum|\w+ty)\b"
    r"|[或非不<>≤≥≠]|\\(?:[lgn]eq?|neg|in|infty|lfloor|lceil)(?![a-z])|至少|以[上下内]|左右"
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


def has_complete_box(text: str) -> bool:
    """Whether a complete \\boxed{...} with at most two nested brace levels comes before the end."""
    return _COMPLETE_BOX.search(response_text(text)) is not None


def find_answer(text: str) -> str | None:
    """Finds the answer in a response as it is written there; None if no rule finds one.

    In the text before the first end marker, the first rule that applies gives the answer:

    1. between `final answer is $` and `$. I hope`;
    2. the content of the last box that has one: balanced braces, else up to `$`. Boxes that only
       `and`, `or` or a comma separates from it belong to it;
    3. what follows the last mark, such as `answer is`, `Answer:`, `答案是`, `####` or `<answer>`,
       on its line;
    4. the last number, with all mathematics around it if it stands between `$` or `\\(` and `\\)`.
       A number that is part of an expression, such as `2^5` or `x > 5`, is no answer.

    Source: the math scorer of the reference implementation (hf618/VERL, 3de68f1), which reads the
    prompt as well, takes the word `boxed` for a box, and the last of several boxes only.
    """
    text = response_text(text)
    answer = _minerva(text) or boxed_answer(text)
    if answer is None:
        answer = _marked(text) or _last_number(text)
    if answer is None:
        return None
    answer = re.sub(r"\n\s*", "", answer).strip()
    return answer.removeprefix(":").removesuffix(".").removesuffix("/").strip()


def is_boxed(text: str) -> bool:
    """Whether the answer of a response is in a box, perhaps without its end."""
    return boxed_answer(response_text(text)) is not None


def first_sentence(answer: str) -> str:
    """An answer without what follows it: a further sentence, or a reason."""
    return _SENTENCE.split(answer.strip(), maxsplit=1)[0].strip()


def _minerva(text: str) -> str | None:
    start_mark, end_mark = "final answer is $", "$. I hope"
    start = text.find(start_mark)
    end = text.find(end_mark, start + len(start_mark)) if start >= 0 else -1
    return text[start + len(start_mark) : end] if end >= 0 else None


def boxed_answer(text: str) -> str | None:
    """The content of the last box that has one, and of boxes joined to it; None without a box."""
    boxes = list(_BOX.finditer(text))[-MAX_BOXES:]
    found: list[str] = []
    start = len(text)
    for box in reversed(boxes):
        content, end = _content(text, box.end())
        if found and not (
            end is not None and start - end <= MAX_BETWEEN and _BETWEEN.fullmatch(text, end, start)
        ):
            break
        if content.strip():
            start = box.start()
            sign = _SIGN.search(text, max(start - MAX_BETWEEN, 0), start)
            found.insert(0, (sign[1] if sign else "") + content)
    return ", ".join(dict.fromkeys(found)) if found else None


def _content(text: str, start: int) -> tuple[str, int | None]:
    """The content of the box whose braces begin at `start`, and the place after it if it ends."""
    if text[start] != "{":
        found = _UNBRACED.match(text, start)
        return (found[0], found.end()) if found else ("", None)
    depth = 0
    for brace in re.compile(r"(?<!\\)[{}]").finditer(text, start):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[start + 1 : brace.start()], brace.end()
    return text[start + 1 :].partition("$")[0], None


def _marked(text: str) -> str | None:
    for mark in reversed(list(_MARK.finditer(text))[-MAX_BOXES:]):
        rest = text[mark.end() :].lstrip(" \n\t*_`:：")
        if shown := _DISPLAYED.match(rest):
            rest = shown[1].replace("\n", " ")
        answer = _END_OF_ANSWER.split(rest, maxsplit=1)[0].strip(" *_`")
        answer = _CLOSING_MARKS.sub("", answer)
        if answer:
            return answer
    return None


def _last_number(text: str) -> str | None:
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
        if (
            found.start() <= last.start()
            and last.end() < found.end()
            and not _PROSE.search(content)
        ):
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
