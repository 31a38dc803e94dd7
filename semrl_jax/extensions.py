"""Modules that a setting names: by a name in this package, or by the path of any other module."""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

from semrl_jax.errors import UserError


def module_names(package: str) -> tuple[str, ...]:
    """The modules of a package, sorted; none of them is imported."""
    path = importlib.import_module(package).__path__
    return tuple(sorted(found.name for found in pkgutil.iter_modules(path)))


def load_module(field: str, name: str, package: str) -> ModuleType:
    """Imports the module that a setting names.

    Args:
      field: the setting, for messages.
      name: a module of `package`, such as "qwen2"; or with a dot the path of any other module, such
        as "my_package.my_module".
      package: with the modules that need no path, such as "semrl_jax.models.families".

    Raises:
      UserError: if there is no such module, or its import fails.
    """
    if "." not in name:
        names = module_names(package)
        if name not in names:
            raise UserError(
                f"{field}={name!r:.100} is unknown; choose one of {names}, or name a module of "
                "your own as 'my_package.my_module'."
            )
        return importlib.import_module(f"{package}.{name}")
    try:
        return importlib.import_module(name)
    except Exception as error:  # a user's module may fail in any way
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(
            f"{field}={name!r:.100} cannot be imported ({reason}); the module must be on "
            "PYTHONPATH or in the directory the command was started in."
        ) from error
