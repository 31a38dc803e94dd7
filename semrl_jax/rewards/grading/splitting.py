"""Parts of an answer: items between commas, brackets, unions, matrices. Linear in the length."""

from __future__ import annotations

import re
from typing import NamedTuple

MAX_ITEMS = 64  # an answer with more is compared as text

_MATRIX = re.compile(
    r"(?P<factor>-?\s*(?:\d+|\d*\\frac\s*\{[^{}]*\}\s*\{[^{}]*\})?)\s*(?:\\cdot\s*)?"
    r"[\[(]?\s*\\begin\s*\{(?P<kind>[pb]?matrix|array)\}(?:\s*\{[lcr|\s]*\})?(?P<rows>.*)"
    r"\\end\s*\{(?P=kind)\}\s*[\])]?"
)
_OPENING, _CLOSING = "([{", ")]}"
_SEPARATOR = re.compile(
    r",|;|，|\\text\s*\{\s*(?:and|or)\s*\}|(?<![a-zA-Z\\])(?:and|or)(?![a-zA-Z])|[或和且]"
)
_UNION = re.compile(r"\\cup(?![a-zA-Z])")
_LABELS = re.compile(r"(?:\(\d\)\s*){2,}")
_BUILDER = re.compile(r"\\?\{\s*[a-zA-Z]\s*(?:\||:)(.*?)\\?\}")


class Parts(NamedTuple):
    """An answer of several parts."""

    # Around them: `()` and `[)` of tuples and intervals, "matrix" of matrices with their shape; ""
    # of sets and lists, whose order has no meaning; "union" likewise.
    brackets: str
    items: tuple[str, ...]  # the parts, texts

    @property
    def is_ordered(self) -> bool:
        return self.brackets not in ("", "union")


def split(text: str) -> Parts | None:
    """Takes a normalised answer apart; None if it is one expression.

    `{1, 2}`, `1, 2`, `1 or 2` and `(1)(2)` are the same; `1 \\pm 2` is two items.
    """
    if matrix := _MATRIX.fullmatch(text):
        rows = [row.split("&") for row in re.split(r"\\\\", matrix["rows"]) if row.strip()]
        factor = matrix["factor"] + ("1" if matrix["factor"].strip() == "-" else "")
        items = tuple(item.strip() for row in rows for item in row)
        items = tuple(f"({factor})({item})" for item in items) if factor else items
        shape = " ".join(str(len(row)) for row in rows)
        return Parts(f"matrix {shape}", items) if len(items) <= MAX_ITEMS else None
    if _LABELS.fullmatch(text):
        return Parts("", tuple(re.findall(r"\d", text)))
    united = at_top_level(text, _UNION)
    if len(united) > 1:
        return Parts("union", united) if len(united) <= MAX_ITEMS else None
    items = at_top_level(text, _SEPARATOR)
    if len(items) > 1:
        return _unordered(items)
    inside = bracketed(text)
    if inside is None:
        return _unordered((text,)) if r"\pm" in text or r"\mp" in text else None
    brackets, content = inside
    if brackets == "{}":
        return _unordered(at_top_level(content, _SEPARATOR))
    items = at_top_level(content, re.compile("[,;]"))
    if 1 < len(items) <= MAX_ITEMS:
        return Parts(brackets, items)
    return None


def condition(text: str) -> str:
    """The condition of a set such as `{x | x > 2}`; any other text as it is."""
    builder = _BUILDER.fullmatch(text)
    return builder[1].strip() if builder else text


def _unordered(items: tuple[str, ...]) -> Parts | None:
    found = []
    for item in items:
        if r"\pm" in item or r"\mp" in item:
            for plus, minus in (("+", "-"), ("-", "+")):
                signed = re.sub(r"\\pm(?![a-zA-Z])", plus, item)
                found.append(re.sub(r"\\mp(?![a-zA-Z])", minus, signed).removeprefix("+"))
        elif item:
            found.append(item)
    if found == [r"\emptyset"]:
        return Parts("{}", (r"\emptyset",))  # the set of the empty set, which has one element
    return Parts("", tuple(found)) if len(found) <= MAX_ITEMS else None


def bracketed(text: str) -> tuple[str, str] | None:
    """The outer brackets, such as `[)`, and what is between them, if they hold the whole text."""
    start = text[1:] if text.startswith(r"\{") else text
    end = start[:-2] + "}" if start.endswith(r"\}") else start
    if len(end) < 2 or end[0] not in _OPENING or end[-1] not in _CLOSING:
        return None
    if (end[0] == "{") != (end[-1] == "}"):
        return None
    depth = 0
    for at, character in enumerate(end):
        if character in _OPENING:
            depth += 1
        elif character in _CLOSING:
            depth -= 1
            if depth == 0 and at < len(end) - 1:
                return None
    return (end[0] + end[-1], end[1:-1].strip()) if depth == 0 else None


def at_top_level(text: str, separator: re.Pattern[str]) -> tuple[str, ...]:
    """Splits at the separators that are in no bracket."""
    depths, depth = [], 0
    for character in text:
        depth += (character in _OPENING) - (character in _CLOSING)
        depths.append(depth)
    parts, start = [], 0
    for match in separator.finditer(text):
        if depths[match.start()] == 0 and depths[match.end() - 1] == 0:
            parts.append(text[start : match.start()].strip())
            start = match.end()
    return (*parts, text[start:].strip())
