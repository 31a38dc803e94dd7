"""Multiple choice: the letters that a response chooses."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from semrl_jax.rewards.extraction import MAX_BOXES
from semrl_jax.rewards.grading.text import normalized, same_text

_TAIL = r"[*_】]*\s*(?:is|are|为|是|的)?\s*[:：]?\s*"
_MARKS = (  # the first that a response has counts; "option B is wrong" announces nothing
    re.compile(
        rf"(?:answer|choose|chose|correct (?:option|choice)|答案|故选|应选|(?<!不)选择?)s?{_TAIL}",
        re.IGNORECASE,
    ),
    re.compile(rf"(?:option|choice|选项){_TAIL}", re.IGNORECASE),
)
_LABEL = re.compile(r"^\s*\(?\s*([A-Za-z])\s*[).:：、．,]\s*")
_FULL_WIDTH = {code: code - 0xFEE0 for code in range(0xFF21, 0xFF5B)}
_OR = re.compile(r"(?i)\bor\s*$")
_ARTICLE = re.compile(r"A\s{1,9}[a-z]")
MAX_END = 200  # characters in which a response may end with its letter
# A response that ends with its letter: `it must be C.`, `**D**`, `(A)`, `**C. 8**`.
_LAST_WORD = re.compile(
    r"(?:^|\n|\b(?:is|be)\s|[:：])[\s*_(]*([A-Z])[\s*_).。]*$"
    r"|(?:^|\n)\*\*\(?([A-Z])[.)][^\n*]*\*\*\.?\s*$"
)
_HEDGE = re.compile(r"[\s,]*(?:or\b|/|或|和/或|还是|[|&]|\+\s*[A-Z]\b)", re.IGNORECASE)
_NO_LETTER = re.compile(  # a name in an expression, or an option that is refused
    r"\s*(?:[_^=?!'+]|\\(?:cup|cap|times|cdot|setminus|subset|[lgn]eq?)(?![a-z])|-\s*[A-Z]\b)"
    r"|\s+(?:is|are)\s+(?:wrong|not|incorrect|false)\b"
)
# A letter before its text: `(C) 12`, `C. 12`, `\\text{Option C}`, `C, because ...`.
_BOXED_LABEL = re.compile(
    r"\s*(?:\\text\s*\{\s*)?(?:[Oo]ption|[Cc]hoice)?\s*\(?\s*([A-Z])"
    r"(?:\s*[).:、}]|,?\s+(?=\\text|since\b|because\b|as\b)|$)"
)
_OTHER = re.compile(r"\bor\b|或|\b[A-J][.):]\s")
_FONTS = re.compile(
    r"\\(?:text|math|boldsymbol|[fm]?box|q?quad|left|right)[a-z]*\s*|\\(?=\W)|[{}$*]"
)


def option_text(option: str) -> str:
    """An option without the letter before it: `A)A) 5` is `5`."""
    while label := _LABEL.match(option):
        option = option[label.end() :]
    return option.strip()


def reference_letters(
    reference: str, letters: str, choices: Sequence[str], equal: Callable[[str, str], bool]
) -> str:
    """The letters of a reference answer: `C`, `(C)`, `ACD`, `C. 1-i`, or the text of an option."""
    return _written(reference, letters) or _by_text(reference, letters, choices, equal)


def chosen_letters(
    response: str,
    box: str | None,
    letters: str,
    choices: Sequence[str] = (),
    equal: Callable[[str, str], bool] = str.__eq__,
) -> str:
    """The letters that a response chooses, sorted; "" if it chooses none.

    The first rule that applies:

    1. The box has letters: `C`, `(C)`, `C.`, `C. 12`, `\\text{C}`, `ACD`, `A, C`, `Option C`, also
       before a reason: `C, since A fails`.
    2. The box equals the text of exactly one option.
    3. The only letter that stands alone in the box.
    4. Without a box: the letters after the last mark, such as `answer is`, `答案是` or `故选`.
    5. Without a box: the last stand-alone letter. An `A` before a word in small letters is an
       article, and counts only if there is no other.

    `B or C` chooses nothing.

    Args:
      response: the text.
      box: content of its last box; None if it has none.
      letters: those that may be chosen, such as "ABCDE".
      choices: texts of the options in the order of the letters, if known.
      equal: tells whether the box is the text of an option.
    """
    if box is not None:
        found = reference_letters(box, letters, choices, equal)
        alone = set(re.findall(rf"(?<![A-Za-z\\])[{letters}](?![A-Za-z'])", box))
        return found or (alone.pop() if len(alone) == 1 else "")
    found = announced_letters(response, letters)
    return _last_alone(response, letters) if found is None else found


def announced_letters(response: str, letters: str) -> str | None:
    """The letters after the last mark that letters follow; "" for `B or C`, None without any."""
    for marks in _MARKS:
        for mark in reversed(list(marks.finditer(response))[-MAX_BOXES:]):
            rest = response[mark.end() : mark.end() + 40].partition("\n")[0]
            if (found := _leading(rest, letters)) is not None:
                return "" if _OR.search(response, 0, mark.start()) else found
    response = response.rstrip()
    if last := _LAST_WORD.search(response, max(len(response) - MAX_END, 0)):
        letter = last[1] or last[2]
        return letter if letter in letters else None
    return None


def letters_of_answer(response: str, box: str | None) -> str:
    """The letters that a response chooses by a box or a mark, where the options are not known."""
    letters = "ABCDEFGHJ"
    if box is not None:
        return _written(box, letters)
    return announced_letters(response, letters) or ""


def _written(text: str, letters: str) -> str:
    """Letters and nothing else, or one letter as the label of what follows."""
    plain = normalized(text)
    bare = re.sub(r"[\s,;()]|\\text|[{}]|and|和", "", plain)
    bare = bare.upper() if len(bare) == 1 else bare
    if re.fullmatch(f"[{letters}]+", bare) and len(set(bare)) == len(bare):
        return "".join(sorted(bare))
    label = _BOXED_LABEL.match(plain)
    if label is None or label[1] not in letters or _OTHER.search(plain, label.end()):
        return ""
    return label[1]


def _by_text(
    text: str, letters: str, choices: Sequence[str], equal: Callable[[str, str], bool]
) -> str:

    def same(a: str, b: str) -> bool:
        return same_text(normalized(a), normalized(b))

    options = [(letter, option_text(option)) for letter, option in zip(letters, choices)]
    for compare in (same, equal):  # 62, 34 is not the option 34, 62
        found = [letter for letter, option in options if compare(text, option)]
        if len(found) == 1:
            return found[0]
    return ""


def _leading(text: str, letters: str) -> str | None:
    """Letters at the start of a text, such as `(C)`, `ACD.`, `A、C`, `**B**`; "" for `B or C`."""
    text = _FONTS.sub("", text.translate(_FULL_WIDTH))
    text = re.sub(r"^\s*\(([a-z])\)", lambda m: m[1].upper(), text).lstrip(" (（[:：")
    match = re.match(
        rf"([{letters}](?:\)?[,、\s]*(?:and|和)?\s*\(?[{letters}])*)(?![A-Za-z])", text
    )
    if match is None or _ARTICLE.match(text):
        return None
    if _HEDGE.match(text, match.end()):
        return ""
    if _NO_LETTER.match(text, match.end()):
        return None
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
