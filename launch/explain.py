"""Prints every setting of a command: value, unit, origin, meaning."""

from __future__ import annotations

import contextlib
import dataclasses
import textwrap
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ml_collections import ConfigDict

from configs.default import get_config
from semrl_jax.settings.algorithms import users_options
from semrl_jax.settings.config import known_settings
from semrl_jax.settings.rules import flatten
from semrl_jax.support.errors import UserError
from semrl_jax.support.fields import Setting

WIDTH = 100
DEFAULT = "default"
AN_OPTION = Setting("an option of the algorithm; see docs/algorithms.md", "", False, {})


class Stages(NamedTuple):
    """The values of all fields, by full name, after each stage that may change them."""

    file: Mapping[str, Any]  # of the config file alone
    flags: Mapping[str, Any]  # with the flags --config.FIELD
    command: Mapping[str, Any]  # with what the command itself sets


def origins(
    stages: Stages,
    name_of_file: str,
    overridden: Mapping[str, Any],
    short_flags: Mapping[str, str],
) -> dict[str, str]:
    """Where the value of each field comes from; `overridden` are set by --config.FIELD."""
    default, _ = _known(stages.command)
    found = {}
    for field, value in stages.command.items():
        if field in short_flags:
            found[field] = f"--{short_flags[field]}"
        elif value != stages.flags.get(field, default.get(field)):
            found[field] = "set by the command"
        elif field in overridden:
            found[field] = f"--config.{field}"
        elif value != stages.file.get(field, default.get(field)):
            found[field] = "follows another field"
        elif field not in default or value != default[field]:
            found[field] = name_of_file
        else:
            found[field] = DEFAULT
    return found


def explain(values: Mapping[str, Any], origins: Mapping[str, str]) -> str:
    """All fields by section: name, value, unit, origin; then the meaning, on its own lines."""
    default, known = _known(values)
    lines: list[str] = []
    section = None
    for field in sorted(values, key=lambda field: (field.count(".") > 0, field)):
        if "." in field and section != field.partition(".")[0]:
            section = field.partition(".")[0]
            lines += ["", ": ".join(filter(None, (section, known[section].meaning)))]
        origin = origins[field]
        if values[field] != default.get(field, values[field]):
            origin += f"; default {_shown(default[field])}"
        of = known.get(field, AN_OPTION)
        amount = " ".join(filter(None, (_shown(values[field]), of.unit)))
        lines.append(f"{field} = {amount}  [{origin}]")
        indent = {"initial_indent": " " * 4, "subsequent_indent": " " * 4}
        lines += textwrap.wrap(of.meaning, WIDTH, **indent)
    return "\n".join(lines)


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


def explained(
    config: ConfigDict,
    check: Callable[[ConfigDict], None],
    file: Mapping[str, Any],
    name_of_file: str,
    overridden: Mapping[str, Any],
    short_flags: Mapping[str, str],
) -> str:
    """What --explain prints; a config that `check` refuses is explained too, with the reason."""
    flags = flatten(config)
    reason = ""
    try:
        check(config)
    except UserError as error:
        reason = f"\n\nnot yet valid: {' '.join(str(error).split())}"
    stages = Stages(file, flags, flatten(config))
    return explain(stages.command, origins(stages, name_of_file, overridden, short_flags)) + reason
