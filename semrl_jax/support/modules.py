"""Imports the modules, built in or the user's own, that a config names."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import importlib
import pathlib
import pkgutil
import sys
import traceback
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

from semrl_jax.support.errors import UserError
from semrl_jax.support.fields import check_fields


def module_names(package: str, parts: Sequence[str] = ()) -> tuple[str, ...]:
    """The modules of a package, sorted, not imported; or with `parts` those that define all."""
    path = importlib.import_module(package).__path__
    names = sorted(module.name for module in pkgutil.iter_modules(path))
    if parts:
        modules = {name: importlib.import_module(f"{package}.{name}") for name in names}
        names = [name for name in names if not _missing(modules[name], parts)]
    return tuple(names)


def _missing(module: ModuleType, parts: Sequence[str]) -> list[str]:
    return [part for part in parts if not hasattr(module, part)]


def load_module(field: str, name: str, package: str, parts: Sequence[str]) -> ModuleType:
    """Imports the module that a config names; UserError if it fails or lacks one of the parts.

    A `name` without a dot is of `package`; "" if there are none built in.
    """
    is_users = "." in name or not package
    full = name if is_users else f"{package}.{name}"
    try:
        module = importlib.import_module(full)
    except (Exception, SystemExit) as error:  # a user's module may fail in any way
        if is_users:
            raise UserError(
                f"{field}={name!r:.100} cannot be imported ({_reason(error)}); the module must be "
                "on PYTHONPATH or in the directory the command was started in."
            ) from error
        if not isinstance(error, ModuleNotFoundError) or error.name != full:
            raise  # the module exists, but something that it imports does not
        module = None
    missing = parts if module is None else _missing(module, parts)
    if missing and not is_users:  # a helper module of the package is no choice either
        known = module_names(package, parts)
        near = difflib.get_close_matches(name, known, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        raise UserError(
            f"{field}={name!r:.100} is unknown; {hint}choose one of {', '.join(known)}, "
            "or a module of yours, 'my_package.my_module' (docs/extending.md)."
        )
    if missing:
        raise UserError(
            f"{field}={name!r}: module {full} has no {missing[0]!r}; it has to define "
            f"{', '.join(parts)} (docs/extending.md)."
        )
    return module


def module_with_options(
    field: str, entry: str, package: str, parts: Sequence[str]
) -> tuple[ModuleType, Any]:
    """The module of an entry `NAME:option=value:option=value`, and its `Options` with these values.

    `Options` is a frozen dataclass of settings: numbers, whole numbers, or tuples of texts, whose
    option may be repeated. UserError for a wrong entry; see `load_module`.
    """
    name, *texts = entry.split(":")
    module = load_module(field, name, package, parts)
    if not (isinstance(module.Options, type) and dataclasses.is_dataclass(module.Options)):
        raise UserError(f"{field}={name!r}: Options must be a frozen dataclass.")
    fields = {each.name: each for each in dataclasses.fields(module.Options)}
    options: dict[str, Any] = {}
    for part in texts:
        option, is_set, text = part.partition("=")
        if not is_set or option not in fields:
            raise UserError(
                f"{field}={entry!r}: {part!r:.100} must be OPTION=VALUE with an option of "
                f"{name!r}: {', '.join(fields)}."
            )
        if isinstance(fields[option].default, tuple):
            options[option] = (*options.get(option, ()), text)
            continue
        if option in options:
            raise UserError(f"{field}={entry!r}: {option} is set twice; keep one.")
        kind = int if fields[option].type in (int, "int") else float
        try:
            options[option] = kind(text)
        except ValueError:
            what = "whole number" if kind is int else "number"
            raise UserError(
                f"{field}={entry!r}: {option}={text!r:.100} must be a {what}."
            ) from None
    check_fields(field, options, module.Options)
    try:
        with running(field, module, "Options"):
            return module, module.Options(**options)
    except UserError:
        raise
    except ValueError as error:
        raise UserError(f"{field}={entry!r}: {error}") from None


@contextlib.contextmanager
def running(field: str, module: ModuleType, part: str) -> Iterator[None]:
    """Turns any error of a user's module in the block into a UserError; ours stay as they are."""
    try:
        yield
    except UserError:
        raise
    except Exception as error:
        if module.__name__.startswith("semrl_jax."):
            raise
        raise UserError(
            f"{field}: {part} of {module.__name__} failed ({_reason(error)})."
        ) from error


def _reason(error: BaseException) -> str:
    """Type and message on one line, with the user's line of code that raised it."""
    reason = f"{' '.join(f'{type(error).__name__}: {error}'.split()):.300}"
    if isinstance(error, SyntaxError):  # its message has the place
        return reason
    others = ("<", str(pathlib.Path(__file__).parents[1]), sys.base_prefix, sys.prefix)
    lines = traceback.extract_tb(error.__traceback__)
    users = [line for line in lines if not line.filename.startswith(others)]
    if not users:
        return reason
    return f"{reason}, at {pathlib.Path(users[-1].filename).name} line {users[-1].lineno}"
