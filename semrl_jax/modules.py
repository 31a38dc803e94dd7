"""Parts of a run that a config names by their module: built in, or the user's own."""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from collections.abc import Sequence
from types import ModuleType

from semrl_jax.errors import UserError


def module_names(package: str, parts: Sequence[str] = ()) -> tuple[str, ...]:
    """The modules of a package, sorted. It imports the package, but not the modules.

    With `parts` it imports the modules too, and leaves out those that do not define all parts.
    """
    path = importlib.import_module(package).__path__
    names = sorted(module.name for module in pkgutil.iter_modules(path))
    if parts:
        modules = {name: importlib.import_module(f"{package}.{name}") for name in names}
        names = [name for name in names if not _missing(modules[name], parts)]
    return tuple(names)


def _missing(module: ModuleType, parts: Sequence[str]) -> list[str]:
    return [part for part in parts if not hasattr(module, part)]


def load_module(field: str, name: str, package: str, parts: Sequence[str]) -> ModuleType:
    """The module that a config names.

    Args:
      field: of the config, for messages.
      name: of a module of `package`, or "my_package.my_module".
      package: where names without a dot are looked up; "" where there are none built in.
      parts: what the module has to define.

    Raises:
      UserError: if there is no such module, if a user's module cannot be imported, or if a part is
        missing.
    """
    if "." in name or not package:
        full = name
        try:
            module = importlib.import_module(full)
        except Exception as error:  # a user's module may fail in any way
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            raise UserError(
                f"{field}={name!r:.100} cannot be imported ({reason}); the module must be on "
                "PYTHONPATH or in the directory the command was started in."
            ) from error
    else:
        full = f"{package}.{name}"
        try:
            module = importlib.import_module(full)
        except ModuleNotFoundError as error:
            if error.name != full:
                raise  # the module is there; something that it imports is not
            near = difflib.get_close_matches(name, module_names(package, parts), 1)
            hint = f"did you mean {near[0]!r}? Or " if near else ""
            raise UserError(
                f"{field}={name!r:.100} is unknown: there is no module {full:.100}; {hint}name one "
                "of yours as 'my_package.my_module'."
            ) from None
    if missing := _missing(module, parts):
        raise UserError(
            f"{field}={name!r}: module {full} has no {missing[0]!r}; it has to define "
            f"{', '.join(parts)} (docs/extending.md)."
        )
    return module
