"""Rules that many fields share. Each raises UserError with the full name of the field."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from semrl_jax.errors import UserError

Section = Any  # a ConfigDict, or a mapping with the same fields


def above_zero(name: str, section: Section, *fields: str) -> None:
    """Each field of the section `name` is above 0."""
    for field in fields:
        if not section[field] > 0:
            raise UserError(f"{name}.{field}={section[field]} must be above 0.")


def at_least_zero(name: str, section: Section, *fields: str) -> None:
    """Each field of the section `name` is at least 0."""
    for field in fields:
        if not section[field] >= 0:
            raise UserError(f"{name}.{field}={section[field]} must be at least 0.")


def at_most(field: str, value: float | int, limit: int) -> None:
    """The value is at most the limit."""
    if value > limit:
        raise UserError(f"{field}={value} must be at most {limit}.")


def one_of(field: str, value: Any, allowed: Sequence[Any]) -> None:
    """The value is one of those allowed."""
    if value not in allowed:
        raise UserError(f"{field}={value!r} must be one of {tuple(allowed)}.")


def items_are(kind: type, name: str, section: Section, *fields: str) -> None:
    """Each item of each field, a tuple, has the type int or str."""
    kinds = {int: "whole numbers", str: "texts"}[kind]
    for field in fields:
        for item in section[field]:
            if type(item) is not kind:
                raise UserError(
                    f"{name}.{field} has {item!r}; it may have {kinds}, one for each flag."
                )


def optimizer(name: str, section: Section) -> None:
    """The fields of an AdamW optimiser in the section `name`."""
    above_zero(name, section, "learning_rate", "max_grad_norm")
    at_least_zero(name, section, "weight_decay", "learning_rate_warmup_steps")
    for field in ("adam_b1", "adam_b2"):
        if not 0 <= section[field] < 1:
            raise UserError(f"{name}.{field}={section[field]} must be in [0, 1).")
