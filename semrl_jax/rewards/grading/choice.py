"""Multiple choice: the letters that a response chooses."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from semrl_jax.rewards.grading.text import normalized, same_text

_MARKS = re.compile(
    r"(?:answer|choice|option|choose|答案|选项|故选|应选|选择|选)\s*(?:is|are|为|是|的)?\s*[:：]?\s*",
    re.IGNORECASE,
)
_LABEL = re.compile(r"^\s*\(?\s*([A-Za-z])\s*[).:：、．,]\s*")
_ARTICLE = re.compile(r"A\s{1,9}[a-z]")
_FONTS = re.compile(r"\\[a-zA-Z]+\s*|[{}$*\\]")


def option_text(option: str) -> str:
    """An option without the letter before it: `A)A) 5` is `5`."""
    while label := _LABEL.match(option):
        option = option[label.end() :]
    return option.strip()


def reference_letters(
    reference: str, letters: str, choices: Sequence[str], equal: Callable[[str, str], bool]
) -> str:
    """The letters of a reference answer: `C`, `(C)`, `ACD`, `C. 1-i`, or the text of an option."""
    found = _written(reference, letters)
    return found or _by_text(reference, letters, choices, equal)


def chosen_letters(
    response: str,
    box: str | None,
    letters: str,
    choices: Sequence[str] = (),
    equal: Callable[[str, str], bool] = str.__eq__,
) -> str:
    """The letters that a response chooses, sorted; "" if it chooses none.

    The first rule that applies:

    1. The box has letters: `C`, `(C)`, `C.`, `C. 12`, `\\text{C}`, `ACD`, `A, C`.
    2. The box equals the text of exactly one option.
    3. The last stand-alone letter in the box.
    4. Without a box: the letters after the last mark, such as `answer is`, `答案是` or `故选`.
    5. Without a box: the last stand-alone letter. An `A` before a word in small letters is an
       article, and counts only if there is no other.

    Args:
      response: the text.
      box: content of its last box; None if it has none.
      letters: those that may be chosen, such as "ABCDE".
      choices: texts of the options in the order of the letters, if known.
      equal: tells whether the box is the text of an option.
    """
    if box is not None:
        return (
            _written(box, letters)
            or _by_text(box, letters, choices, equal)
            or _last_alone(box, letters)
        )
    marks = list(_MARKS.finditer(response))
    for mark in reversed(marks):
        rest = response[mark.end() : mark.end() + 40].partition("\n")[0]
        if found := _leading(rest, letters):
            return found
    return _last_alone(response, letters)


def _written(text: str, letters: str) -> str:
    """Letters and nothing else, or one letter as the label of what follows."""
    plain = normalized(text)
    bare = re.sub(r"[\s,;()]|\\text|[{}]|and|和", "", plain)
    bare = bare.upper() if len(bare) == 1 else bare
    if re.fullmatch(f"[{letters}]+", bare) and len(set(bare)) == len(bare):
        return "".join(sorted(bare))
    label = re.match(r"\s*(?:\\text\s*\{)?\(?\s*([A-Z])\s*[).:、]", plain)
    return label[1] if label and label[1] in letters else ""


def _by_text(
    text: str, letters: str, choices: Sequence[str], equal: Callable[[str, str], bool]
) -> str:
    options = [(letter, option_text(option)) for letter, option in zip(letters, choices)]
    for compare in (_same, equal):  # 62, 34 is not the option 34, 62
        found = [letter for letter, option in options if compare(text, option)]
        if len(found) == 1:
            return found[0]
    return ""


def _same(a: str, b: str) -> bool:
    return same_text(normalized(a), normalized(b))


def _leading(text: str, letters: str) -> str:
    """Letters at the start of a text, such as `(C)`, `ACD.`, `A、C`, `**B**`."""
    text = _FONTS.sub("", text).lstrip(" (（[:：")
    match = re.match(rf"([{letters}](?:[,、\s]*(?:and|和)?\s*[{letters}])*)(?![A-Za-z])", text)
    if match is None or _ARTICLE.match(text):
        return ""
    found = [character for character in match[1] if character in letters]
    return "".join(sorted(set(found)))


def _last_alone(text: str, letters: str) -> str:
    found = article = ""
    for match in re.finditer(rf"(?<![A-Za-z\\])[{letters}](?![A-Za-z'])", text):
        if _ARTICLE.match(text, match.start()):
            article = match[0]
        else:
            found = match[0]
    return found or article
