"""Finds the answer in a response, by ordered rules, in time linear in the length of the text.

Only the response is read, never the prompt: an instruction to use \\boxed{} would set the format
flag, and a number in the question could become the answer.
"""

from __future__ import annotations

import re

from semrl_jax.rewards.last_number import last_number
from semrl_jax.support.end_markers import response_text

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
# So does what makes another number of it: `not \boxed{1}`, `2\boxed{1}`, `\frac{1}{\boxed{2}}`.
_SIGN = re.compile(
    r"((?<=[=$(\[])\s*-|\\pm|\bnot|(?<=\})\s*/|(?<![\w.])\d+(?!\s)"
    r"|\\(?:[dtc]?frac\s*\{[^{}]*\}|sqrt)\s*\{"
    r"|(?:(?<=[ \d})\]])|(?<=[^<\w/][a-zA-Z]))(?:\\[lgn]eq?(?![a-z])|[≤≥≠<>]=?))\s*$"
)
_POWER = re.compile(r"\s*\^\s*(?:\d|\{\s*-?\d+\s*\})")  # after a box
MAX_BETWEEN = 40  # characters
MAX_BOXES = 64  # the last ones are looked at; also of marks

# What announces an answer. GSM8K writes `####`.
_MARK = re.compile(
    r"####|<answer>|【答案】|答案(?:应该|应)?[是为:：]+"
    r"|(?i:\banswer\b)[*_]*\s*(?:\bis\b|\bare\b|[:：=])"
)
_END_OF_ANSWER = re.compile(r"</answer>|\n")
_CLOSING_MARKS = re.compile(r"[*_`]+\.?$")
_DISPLAYED = re.compile(r"(?:\$\$|\\\[)(.*?)(?:\$\$|\\\])", re.DOTALL)
_SENTENCE = re.compile(r"(?<=[^\s\d])[.](?=\s|$)|[.](?=\s*[A-Z])|。|\s(?:so|because|since)\b")


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
        answer = _marked(text) or last_number(text)
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
        is_near = end is not None and start - end <= MAX_BETWEEN
        if found and not (is_near and _BETWEEN.fullmatch(text, end, start)):
            break
        if content.strip():
            start = box.start()
            sign = _SIGN.search(text, max(start - MAX_BETWEEN, 0), start)
            power = _POWER.match(text, end) if end is not None else None
            before = sign[1] if sign else ""
            if power:
                content = f"({content}){power[0]}"
            if before.isdigit():
                before += r"\cdot "
            found.insert(0, before + content)
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
