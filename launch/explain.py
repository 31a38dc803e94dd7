"""Prints every setting of a command: value, unit, origin, meaning."""

from __future__ import annotations

import contextlib
import dataclasses
import textwrap
from collections.abc import Callable, Mapping
from typing import Any

from ml_collections import ConfigDict

from configs.default import get_config
from semrl_jax.settings.algorithms import users_options
from semrl_jax.settings.config import known_settings
from semrl_jax.settings.rules import flatten
from semrl_jax.support.errors import UserError
from semrl_jax.support.fields import Setting

WIDTH = 100
AN_OPTION = Setting("an option of the algorithm; see docs/algorithms.md", "", False, {})


def explained(
    config: ConfigDict,
    check: Callable[[ConfigDict], None],
    file: Mapping[str, Any],
    name_of_file: str,
    overridden: Mapping[str, Any],
    short_flags: Mapping[str, str],
) -> str:
    """All fields by section: name, value, unit, origin; then the meaning, on its own lines.

    Args:
      config: with the flags --config.FIELD; `check` may set further fields. One that it refuses is
        explained too, with the reason.
      file: values of the config file alone, by full name.
      overridden: fields that a flag --config.FIELD sets.
      short_flags: the flag that was given, by the field that it sets.
    """
    with_flags, reason = flatten(config), ""
    try:
        check(config)
    except UserError as error:
        reason = f"\n\nnot yet valid: {' '.join(str(error).split())}"
    values = flatten(config)
    default, known = _known(values)

    def origin(field: str, value: Any) -> str:
        if field in short_flags:
            return f"--{short_flags[field]}"
        if value != with_flags.get(field, default.get(field)):
            return "set by the command"
        if field in overridden:
            return f"--config.{field}"
        if value != file.get(field, default.get(field)):
            return "follows another field"
        return name_of_file if field not in default or value != default[field] else "default"

    lines: list[str] = []
    section = None
    for field in sorted(values, key=lambda field: (field.count(".") > 0, field)):
        if "." in field and section != field.partition(".")[0]:
            section = field.partition(".")[0]
            lines += ["", ": ".join(filter(None, (section, known[section].meaning)))]
        place, of = origin(field, values[field]), known.get(field, AN_OPTION)
        if values[field] != default.get(field, values[field]):
            place += f"; default {_shown(default[field])}"
        amount = " ".join(filter(None, (_shown(values[field]), of.unit)))
        lines.append(f"{field} = {amount}  [{place}]")
        indent = {"initial_indent": " " * 4, "subsequent_indent": " " * 4}
        lines += textwrap.wrap(of.meaning, WIDTH, **indent)
    return "\n".join(lines) + reason


def _known(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Setting]]:
    """Defaults and descriptions of all fields, those of a user's algorithm among them."""
    options: dict[str, dataclasses.Field] = {}
    with contextlib.suppress(UserError):  # the check of the config says it
        found = users_options(values["algorithms.name"]).items()
        options = {f"algorithms.options.{name}": field for name, field in found}
    of_users = {name: field.metadata.get("setting", AN_OPTION) for name, field in options.items()}
    default = flatten(get_config()) | {name: field.default for name, field in options.items()}
    return default, {**known_settings(), **of_users}


def _shown(value: Any) -> str:
    """The value as a flag takes it; an empty text is visible."""
    return repr(value) if value == "" or not isinstance(value, str) else value
