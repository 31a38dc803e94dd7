"""Parts of a run that a config names by their module: built in, or the user's own."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import pkgutil
from collections.abc import Sequence
from types import ModuleType

from semrl_jax.errors import UserError


def load_module(field: str, name: str, package: str, parts: Sequence[str]) -> ModuleType:
    """The module that a config names.

    Args:
      field: of the config, for messages.
      name: of a module of `package`, or "my_package.my_module".
      package: where names without a dot are looked up; "" where there are none built in.
      parts: what the module has to define.

    Raises:
      UserError: if there is no such module, or a part of it is missing.
    """
    full = name if "." in name or not package else f"{package}.{name}"
    try:
        module = importlib.import_module(full)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{full}.".startswith(f"{error.name}."):
            raise  # the module is there; something that it imports is not
        raise UserError(
            f"{field}={name!r}: there is no module {full}; {_hint(name, package)}"
        ) from None
    if missing := [part for part in parts if not hasattr(module, part)]:
        raise UserError(
            f"{field}={name!r}: module {full} has no {missing[0]!r}; it has to define "
            f"{', '.join(parts)} (docs/extending.md)."
        )
    return module


def _hint(name: str, package: str) -> str:
    own = "name one of yours as 'my_package.my_module', importable from where the command starts."
    if not package:
        return own
    directory = importlib.util.find_spec(package).submodule_search_locations
    known = sorted(module.name for module in pkgutil.iter_modules(directory))
    near = difflib.get_close_matches(name, known, 1)
    return f"did you mean {near[0]!r}? Or {own}" if near else f"{own}"
