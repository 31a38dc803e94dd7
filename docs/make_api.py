"""Writes the API reference, made from the docstrings, to build/api.

    pip install -e '.[docs]'
    python docs/make_api.py [DIRECTORY]

A warning of pdoc, such as a name that does not exist, ends the command with exit code 1.
"""

from __future__ import annotations

import dataclasses
import importlib
import pathlib
import pkgutil
import sys
import threading
import typing
import warnings
from collections.abc import Iterator
from types import ModuleType

import jax
import pdoc

import semrl_jax

TARGET = pathlib.Path(__file__).resolve().parents[1] / "build" / "api"
# Generated code, and a module that needs another package.
LEFT_OUT = ("semrl_jax.rollout.wire.proto", "semrl_jax.environments.kinds.verifiers")


def modules(package: ModuleType) -> Iterator[ModuleType]:
    """The package and all modules in it, imported."""
    yield package
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        if not found.name.startswith(LEFT_OUT):
            yield importlib.import_module(found.name)


def resolve(module: ModuleType) -> None:
    """Makes a module readable for pdoc, which looks up names without calling the module.

    Names that are imported at their first use are imported. Annotations of the fields of data
    classes and named tuples are evaluated in the module of the class that declares them.
    """
    for name in getattr(module, "__all__", ()):
        vars(module)[name] = getattr(module, name)
    for value in list(vars(module).values()):
        if not isinstance(value, type) or value.__module__ != module.__name__:
            continue
        if dataclasses.is_dataclass(value) or hasattr(value, "_fields"):
            hints = typing.get_type_hints(value, None, {"Array": jax.Array}, include_extras=True)
            made = value.__init__ if dataclasses.is_dataclass(value) else value.__new__
            known = made.__annotations__
            made.__annotations__ = {name: hints.get(name, known[name]) for name in known}


def main() -> int:
    target = pathlib.Path(sys.argv[1]) if len(sys.argv) > 1 else TARGET
    found = list(modules(semrl_jax))
    for module in found:
        resolve(module)
    # Before Python 3.13 it is a function, which cannot be part of a union in an annotation.
    threading.Lock = type(threading.Lock())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        left_out = (f"!{name}" for name in LEFT_OUT)
        pdoc.pdoc("semrl_jax", *left_out, output_directory=target)
    ours = [str(warning.message) for warning in caught if "pdoc" in warning.filename]
    for message in ours:
        print(message, file=sys.stderr)
    print(f"{target / 'index.html'}: {len(found)} modules, {len(ours)} warnings")
    return 1 if ours else 0


if __name__ == "__main__":
    sys.exit(main())
