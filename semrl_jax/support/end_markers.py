"""Marks that end a response where they are written out in its text."""

from __future__ import annotations

END_MARKERS = ("</s>", "<|im_end|>", "<|endoftext|>")


def response_text(text: str) -> str:
    """The text before the first end marker."""
    end = min((at for at in map(text.find, END_MARKERS) if at >= 0), default=len(text))
    return text[:end]
