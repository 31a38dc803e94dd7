"""Finds the answer in a response, by ordered rules, in time linear in the length of the text.

Only the response is read, never the prompt: an instruction to use \\boxed{} would set the format
flag, and a number in the question could become the answer.
"""

from __future__ import annotations

import re

from semrl_jax.end_markers import response_text

# Possessive repeats do not backtrack, so hostile braces cost one pass. A box may contain two nested
# levels of braces.
_COMPLETE_BOX = re.compile(r"\\boxed\{(?:[^{}]++|\{(?:[^{}]++|\{[^{}]*+\})*+\})*+\}")
_NUMBER = re.compile(r"-?\d*\.?\d+")
_SCIENTIFIC = re.compile(r"([-+]?\d+(?:\.\d+)?)[eE]([-+]?\d{1,3})")

_SPACING = re.compile(r"\\[!,;: ]|~|\\q?quad(?![a-zA-Z])|[\x00-\x1f\x7f]")
_SIZING = re.compile(r"\\(?:left|right|[bB]igg?[lr]?)(?![a-zA-Z])")
_FRACTION = re.compile(r"\\[dtc]frac(?![a-zA-Z])")
_DEGREES = re.compile(r"\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![a-zA-Z]))|\\degree(?![a-zA-Z])|°")
_CURRENCY_AND_PERCENT = re.compile(r"\\?[$%]")
_TEXT = r"\\(?:text|textbf|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}"
_WHOLLY_TEXT = re.compile(rf"\s*{_TEXT}\s*")
_UNIT_TEXT = re.compile(rf"(?<=[\d}})])\s*{_TEXT}\s*(?:\^\s*(?:\d|\{{\d\}}))?\s*$")
_UNIT_WORD = re.compile(
    r"(?<=[\d}\)])\s+(?:mm|cm|km|kg|mg|mL|meters?|metres?|centimeters?|kilometers?|miles?|feet|foot|"
    r"inch(?:es)?|yards?|grams?|kilograms?|pounds?|liters?|litres?|seconds?|minutes?|hours?|days?|"
    r"weeks?|months?|years?|degrees?|radians?|percent|dollars?|cents?|euros?|units?|mph|"
    r"(?:square|cubic) (?:units?|meters?|centimeters?|feet|inches|miles))$"
)


def has_complete_box(text: str) -> bool:
    """Whether a complete \\boxed{...} with at most two nested brace levels comes before the end."""
    return _COMPLETE_BOX.search(response_text(text)) is not None


def extract_answer(text: str) -> str | None:
    """Finds the answer in a response as `find_answer`, normalised by `normalize_answer`.

    It may be empty (`\\boxed{}`). None if no rule finds an answer.
    """
    answer = find_answer(text)
    return None if answer is None else normalize_answer(answer)


def find_answer(text: str) -> str | None:
    """Finds the answer in a response as it is written there; None if no rule finds one.

    In the text before the first end marker, the first rule that applies gives the answer:

    1. between `final answer is $` and `$. I hope`;
    2. the content of the last `boxed`: balanced braces, else up to `$`;
    3. after the last `he answer is`;
    4. after the last `final answer is`;
    5. after the first `答案是`, up to a blank line;
    6. the last number, commas removed.

    Line breaks, a leading `:`, and a final `.` or `/` are removed.

    Source: the math scorer of the reference implementation (hf618/VERL, 3de68f1), which reads the
    prompt as well.
    """
    answer = _raw_answer(response_text(text))
    if answer is None:
        return None
    answer = re.sub(r"\n\s*", "", answer).strip()
    return answer.removeprefix(":").removesuffix(".").removesuffix("/")


def _raw_answer(text: str) -> str | None:
    start_mark, end_mark = "final answer is $", "$. I hope"
    start = text.find(start_mark)
    if start >= 0:
        start += len(start_mark)
        end = text.find(end_mark, start)
        if end >= 0:
            return text[start:end]
    if "boxed" in text:
        return box_content(text.rpartition("boxed")[2])
    for mark in ("he answer is", "final answer is"):
        if mark in text:
            return text.rpartition(mark)[2]
    if "答案是" in text:
        return text.partition("答案是")[2].strip().partition("\n\n")[0]
    numbers = _NUMBER.findall(text.replace(",", ""))
    return numbers[-1] if numbers else None


def box_content(text: str) -> str:
    """The content of a box; `text` is what follows the word boxed."""
    if text.startswith("{"):
        depth = 0
        for brace in re.finditer(r"[{}]", text):
            depth += 1 if brace[0] == "{" else -1
            if depth == 0:
                return text[1 : brace.start()]
    return text.removeprefix("{").partition("$")[0]


def normalize_answer(answer: str) -> str:
    """Removes what does not change an answer: spacing, sizing commands, currency, percent, units.

    `10\\%` becomes `10`, as in the reference implementation. A reference answer is compared in this
    form and as written, so both `10` and `0.1` are right if it is `10\\%`.
    """
    answer = _SPACING.sub(" ", answer)
    answer = _SIZING.sub("", answer)
    answer = _FRACTION.sub(r"\\frac", answer)
    answer = _DEGREES.sub("", answer)
    answer = _CURRENCY_AND_PERCENT.sub("", answer)
    if whole := _WHOLLY_TEXT.fullmatch(answer):
        answer = whole[1]
    return _UNIT_WORD.sub("", _UNIT_TEXT.sub("", " ".join(answer.split())))


def expand_scientific(answer: str) -> str:
    """Rewrites `1e3`, which LaTeX reads as a product with Euler's number, as 1 \\times 10^{3}."""
    match = _SCIENTIFIC.fullmatch(answer.strip())
    return f"{match[1]} \\times 10^{{{int(match[2])}}}" if match else answer
