"""Pages in one file: data that no browser executes, a content policy, a template with names."""

from __future__ import annotations

import base64
import functools
import hashlib
import itertools
import json
import math
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

MIN_CHARACTERS = 100  # of a turn of an episode

_HERE = pathlib.Path(__file__).parent
STYLE, KIT = ((_HERE / f"kit.{kind}").read_text("utf-8") for kind in ("css", "js"))


def data_element(name: str, value: Any) -> str:
    """A script element with JSON, which no browser executes; without "<" no text can end it."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return f'<script type="application/json" id="{name}">{text}</script>\n'


def content_policy(*scripts: str) -> str:
    """A Content-Security-Policy: only these scripts and the kit run, and nothing is loaded."""
    allowed = " ".join(map(_source_of, (KIT, *scripts)))
    return f"default-src 'none'; style-src 'unsafe-inline'; script-src {allowed}"


@functools.cache
def _source_of(script: str) -> str:
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def filled(template: str, parts: Mapping[str, str]) -> bytes:
    """The template with every {{name}} replaced, {{style}} and {{kit}} shared by all pages."""
    parts = {"style": STYLE, "kit": KIT} | parts
    # One pass: braces in a part are not filled again.
    return re.sub(r"\{\{(\w+)\}\}", lambda m: parts[m[1]], template).encode(errors="replace")


def rounded(value: float | int, digits: int = 4) -> float | None:
    """The number with this many digits; None if it is not finite."""
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None


def shortened(text: str, limit: int) -> str:
    """At most `limit` characters of the text, from its beginning."""
    return text if len(text) <= limit else text[: limit - 3] + "..."


def cut(text: str, limit: int) -> str:
    """At most `limit` characters of the text: its beginning and its end, where the answer is."""
    if len(text) <= limit:
        return text
    tail = limit // 2
    return (
        f"{text[: limit - tail]}\n[... {len(text) - limit} characters left out ...]\n{text[-tail:]}"
    )


def cut_turns(response: str, lengths: Sequence[int], limit: int) -> list[str]:
    """A response in parts of these lengths, or as one; a longer one is cut in each part."""
    ends = list(itertools.accumulate(lengths))
    turns = [response[end - length : end] for end, length in zip(ends, lengths)] or [response]
    if len(response) <= limit:
        return turns
    return [cut(turn, max(limit // len(turns), MIN_CHARACTERS)) for turn in turns]


def script_lengths(texts: Sequence[str]) -> list[int]:
    """The lengths of texts in JavaScript, where a character beyond U+FFFF counts twice."""
    return [len(text.encode("utf-16-le", "surrogatepass")) // 2 for text in texts]
