"""Rules of several fields or of entries; each raises UserError with the full name of the field."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import ml_collections

from semrl_jax.support.errors import UserError

Section = Any  # a ConfigDict, or a mapping with the same fields


def divides(field: str, size: int, of: str, total: int) -> None:
    """The value `size` of `field` divides the value `total` of the field `of`."""
    if not total % size:
        return
    fitting = [n for i in range(1, math.isqrt(total) + 1) if not total % i for n in (i, total // i)]
    below = max(n for n in fitting if n < size)
    above = min(n for n in fitting if n > size or n == total)
    choice = f"{below} or {above}" if below < above else f"{total}"
    raise UserError(f"{field}={size} must divide {of}={total}; set it to {choice}, or change {of}.")


def split_entry(
    field: str, entry: str, kind: str, allowed: Sequence[str], repeatable: Sequence[str] = ()
) -> tuple[str, dict[str, list[str]]]:
    """Splits `NAME:setting=value:setting=value` into the name and the values of each setting.

    A value ends before the next `:setting=`. `kind` is what an entry is, for messages.
    """
    first, *parts = re.split(r":(?=\w+=)", entry)
    settings: dict[str, list[str]] = {}
    for name, _, value in (part.partition("=") for part in parts):
        if name not in allowed:
            raise UserError(
                f"{field}={entry!r}: {name!r} is not a setting of a {kind}; choose from "
                f"{', '.join(allowed)}."
            )
        if name in settings and name not in repeatable:
            raise UserError(f"{field}={entry!r}: {name} is set twice; keep one.")
        settings.setdefault(name, []).append(value)
    return first, settings


def flatten(config: ml_collections.ConfigDict | dict[str, Any]) -> dict[str, Any]:
    """Every field by its full name."""
    flat = {}
    for name, value in config.items():
        if isinstance(value, ml_collections.ConfigDict | dict):
            flat |= {f"{name}.{field}": item for field, item in flatten(value).items()}
        else:
            flat[name] = value
    return flat
