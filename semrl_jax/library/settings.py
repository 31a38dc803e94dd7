"""A config from keywords."""

from __future__ import annotations

import dataclasses
import importlib
import os
import pathlib
import runpy
from collections.abc import Mapping
from typing import Any

import ml_collections

import configs
from semrl_jax.settings.algorithms import add_users_options
from semrl_jax.settings.config import unknown_field
from semrl_jax.settings.rules import flatten
from semrl_jax.support.errors import UserError
from semrl_jax.support.modules import module_names


def chosen_config(
    config: str | os.PathLike[str] | ml_collections.ConfigDict,
) -> ml_collections.ConfigDict:
    """A config of one's own, of a file with `get_config`, or of a name in `configs`."""
    if isinstance(config, ml_collections.ConfigDict):
        return config
    if str(config).endswith(".py"):
        if not pathlib.Path(config).is_file():
            raise UserError(f"config={str(config)!r} does not exist; name a file with get_config.")
        return runpy.run_path(str(config))["get_config"]()
    names = module_names(configs.__name__, ("get_config",))
    if config not in names:
        raise UserError(
            f"config={config!r} is unknown; choose one of {', '.join(names)}, or a file."
        )
    return importlib.import_module(f"{configs.__name__}.{config}").get_config()


def configure(config: ml_collections.ConfigDict, sections: Mapping[str, Any]) -> None:
    """Sets fields of a config; UserError for an unknown field, or a value of another type.

    `sections` has by name a mapping from fields to values, or a dataclass of `semrl_jax.settings`,
    whose values that are no defaults are set. A field without a section, as `seed`, has its value.
    """
    fields = flatten({name: _plain(section) for name, section in sections.items()})
    name = fields.get("algorithms.name", config.algorithms.name)
    if any(field.startswith("algorithms.options.") for field in fields):
        add_users_options(config, name)
    known = flatten(config)
    for field, value in fields.items():
        if field not in known:
            raise UserError(unknown_field(config, field))
        if isinstance(value, list):
            value = tuple(value)
        if isinstance(value, os.PathLike):
            value = str(value)
        try:
            config.update_from_flattened_dict({field: value})
        except (TypeError, ValueError):
            kind = type(known[field]).__name__
            raise UserError(
                f"{field}={value!r} must be of type {kind}, not {type(value).__name__}."
            ) from None


def _plain(section: Any) -> Any:
    """A dataclass as a mapping, without its defaults."""
    if not dataclasses.is_dataclass(section):
        return section
    values = {field.name: getattr(section, field.name) for field in dataclasses.fields(section)}
    defaults = {field.name: field.default for field in dataclasses.fields(section)}
    return {
        name: _plain(value)
        for name, value in values.items()
        if value is not None and value != defaults[name]
    }
