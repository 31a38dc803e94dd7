"""A setting in one statement: default, meaning, unit, rules, and whether a resume may change it.

A section is a frozen dataclass whose fields are settings or further sections:

    @dataclasses.dataclass(frozen=True)
    class Profile:
        stride: int = setting(40, "Tokens between two measured prefixes", "tokens", above=0)

`build` makes an `ml_collections.ConfigDict` of it, `described` tells what is known of each field,
and `check_fields` raises UserError for the first value that breaks a rule of its field.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import ml_collections

from semrl_jax.support.errors import UserError
from semrl_jax.support.intervals import in_words, is_within

# Units that the end of a field's name says.
UNITS = {"_tokens": "tokens", "_steps": "steps", "_s": "seconds", "_gib": "GiB"}


class Setting(NamedTuple):
    """What is known of a field."""

    meaning: str  # one or two sentences
    unit: str  # "" for a text, a choice or a plain number
    # Whether a run may be resumed with another value: results then change by rounding at most,
    # or only from there on
    may_change: bool
    rules: Mapping[str, Any]  # names in `RULES`, and what they compare with
    # The default, from the whole config, where it follows other fields
    of: Callable[[ml_collections.ConfigDict], Any] | None = None


def setting(
    default: Any, meaning: str, unit: str = "", *, may_change: bool = False, **rules: Any
) -> Any:
    """A field of a section; see `Setting`."""
    return _field(default, Setting(meaning, unit, may_change, rules))


def derived(
    of: Callable[[ml_collections.ConfigDict], Any],
    meaning: str,
    unit: str = "",
    *,
    may_change: bool = False,
    **rules: Any,
) -> Any:
    """A field that follows others until it is set; `of` makes it from references to them."""
    return _field(None, Setting(meaning, unit, may_change, rules, of))


def follows(field: str, meaning: str, **options: Any) -> Any:
    """A field with the value of another one, named in full, until it is set."""
    section, _, name = field.partition(".")
    # Without identity(), setting the field would change the other one too.
    return derived(lambda config: config[section].get_ref(name).identity(), meaning, **options)


def section(kind: type, meaning: str = "", *, may_change: bool = False) -> Any:
    """A section within another one; `may_change` is of all its fields. `dict`: the user's own."""
    return _field(None, Setting(meaning, "", may_change, {}), kind)


def part_of(total: Any, size: int) -> Any:
    """`size`, above 0, if it divides `total`, otherwise `total`, a number or a reference to one."""
    is_rest = (total % size + size - 1) // size  # 1 if it does not divide, else 0
    return size + (total - size) * is_rest


def _field(default: Any, known: Setting, kind: type | None = None) -> Any:
    return dataclasses.field(default=default, metadata={"setting": known, "section": kind})


def fields_of(kind: type) -> Iterator[tuple[dataclasses.Field, Setting, type | None]]:
    """Each setting of a section, what is known of it, and its dataclass if it is a section."""
    if kind is not dict:
        for field in dataclasses.fields(kind):
            if "setting" in field.metadata:
                yield field, field.metadata["setting"], field.metadata["section"]


def build(kind: type) -> ml_collections.ConfigDict:
    """The config with all defaults. Derived fields follow overrides of what they come from."""
    config = ml_collections.ConfigDict()
    later: list[tuple[ml_collections.ConfigDict, str, Callable]] = []

    def fill(part: ml_collections.ConfigDict, kind: type) -> None:
        for field, known, inner in fields_of(kind):
            if inner:
                part[field.name] = ml_collections.ConfigDict()
                fill(part[field.name], inner)
            elif known.of:
                later.append((part, field.name, known.of))
            else:
                part[field.name] = field.default

    fill(config, kind)
    for part, name, of in later:
        part[name] = of(config)
    return config


def described(kind: type, place: str = "", may_change: bool = False) -> dict[str, Setting]:
    """Every field and section by its full name. Fields of a section inherit `may_change`."""
    found = {}
    for field, known, inner in fields_of(kind):
        changes = may_change or known.may_change
        is_number = field.type.startswith(("int", "float", "tuple[int"))
        implied = next(
            (u for end, u in UNITS.items() if is_number and field.name.endswith(end)), ""
        )
        found[place + field.name] = known._replace(may_change=changes, unit=known.unit or implied)
        if inner:
            found |= described(inner, f"{place}{field.name}.", changes)
    return found


def check_fields(name: str, section: Any, kind: type) -> None:
    """Each field of the section `name`, a mapping, keeps its rules; one that is missing is fine."""
    for field, known, inner in fields_of(kind):
        if field.name not in section:
            continue
        full, value = f"{name}.{field.name}".lstrip("."), section[field.name]
        if inner:
            check_fields(full, value, inner)
        for rule, argument in known.rules.items():
            RULES[rule](full, value, argument)


def above(field: str, value: Any, limit: float | int) -> None:
    if not value > limit:
        raise UserError(f"{field}={value} must be above {limit}.")


def at_least(field: str, value: Any, limit: float | int) -> None:
    if not value >= limit:
        raise UserError(f"{field}={value} must be at least {limit}.")


def at_most(field: str, value: Any, limit: float | int) -> None:
    if value > limit:
        raise UserError(f"{field}={value} must be at most {limit}.")


def within(field: str, value: Any, interval: str) -> None:
    """The value is in an interval such as "[0, 1)"."""
    if not is_within(value, interval):
        raise UserError(f"{field}={value} must be {in_words(interval)}.")


def one_of(field: str, value: Any, allowed: Sequence[Any]) -> None:
    if value not in allowed:
        raise UserError(f"{field}={value!r} must be one of {', '.join(map(repr, allowed))}.")


def each_of(field: str, values: Sequence[Any], allowed: Sequence[Any]) -> None:
    for value in values:
        one_of(field, value, allowed)


def items_are(field: str, values: Sequence[Any], kind: type) -> None:
    """Each item of a tuple has the type int or str, and no text is empty."""
    for item in values:
        if item == "":  # of --field=
            raise UserError(f"{field} has an empty text; leave it out, or set '()' for none.")
        if type(item) is not kind:
            kinds = {int: "whole numbers", str: "texts"}[kind]
            raise UserError(f"{field} has {item!r}; it may have {kinds}, one for each flag.")


RULES: Mapping[str, Callable[[str, Any, Any], None]] = {
    "above": above,
    "at_least": at_least,
    "at_most": at_most,
    "within": within,
    "choices": one_of,
    "each": each_of,
    "items": items_are,
}
