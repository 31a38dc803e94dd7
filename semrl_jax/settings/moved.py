"""Fields that had another name in an earlier release."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Old name -> present name, both in full.
MOVED: dict[str, str] = {}


def with_present_names(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a record, perhaps of an earlier release, by their present names."""
    return {MOVED.get(name, name): value for name, value in fields.items()}


def new_places(name: str) -> str:
    """The new name of a field, or of each field of a former section; "" if none has moved."""
    return "; ".join(
        f"{old} is now {new}"
        for old, new in MOVED.items()
        if old == name or old.startswith(f"{name}.")
    )
