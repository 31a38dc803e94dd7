"""Options that the algorithms of the package declare, each in its own file.

The files are read, not imported: an import loads JAX, which takes seconds.
"""

from __future__ import annotations

import ast
import collections
import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

from semrl_jax.support import choices
from semrl_jax.support.fields import setting

FILES = pathlib.Path(__file__).parents[1] / "algorithms"
NAMES = {"setting": setting} | vars(choices)  # that a declaration may use
# The section of `config.algorithms` for the options of a class; "" is that section itself. Options
# of all other classes are in `advantage`.
SECTIONS = {"Aggregation": "", "Bounds": "loss", "Objective": "loss", "ValueLoss": "loss"}


def declared_options() -> dict[str, type]:
    """A dataclass with the options of all algorithms, by section; ValueError if two differ."""
    classes = {
        file.stem if node.name == "Options" else node.name: node
        for file in sorted(FILES.glob("*.py"))
        if "= setting(" in (text := file.read_text("utf-8"))
        for node in ast.parse(text, str(file)).body
        if isinstance(node, ast.ClassDef)
    }
    found: dict[str, dict[str, ast.AnnAssign]] = collections.defaultdict(dict)
    for name, node in classes.items():
        for field in node.body:
            if isinstance(field, ast.AnnAssign) and "= setting(" in ast.unparse(field):
                found[ast.unparse(field.target)][name] = field
    sections: dict[str, list[tuple[str, str, Any]]] = collections.defaultdict(list)
    for option, fields in found.items():
        first, *others = fields
        if any(_place(name, fields) != _place(first, fields) for name in others):
            raise ValueError(
                f"{', '.join(fields)} of semrl_jax/algorithms declare the option {option!r} in "
                "different ways; give it another name in one of them."
            )
        section, text = _place(first, fields)
        kind, _, value = text.partition(": ")[2].partition(" = ")
        field = eval(value, NAMES)
        if fields.keys().isdisjoint(_lineage("Objective", classes)):
            users = [
                name
                for name, node in classes.items()
                if node.name == "Options" and not fields.keys().isdisjoint(_lineage(name, classes))
            ]
            field = _with_users(field, users)
        sections[section].append((option, kind, field))
    return {
        section: dataclasses.make_dataclass(section.title() or "Shared", fields, frozen=True)
        for section, fields in sections.items()
    }


def _place(name: str, fields: Mapping[str, ast.AnnAssign]) -> tuple[str, str]:
    """The section and the text of a declaration."""
    return SECTIONS.get(name, "advantage"), ast.unparse(fields[name])


def _lineage(name: str, classes: Mapping[str, ast.ClassDef]) -> set[str]:
    """A class and all that it extends."""
    bases = classes[name].bases if name in classes else ()
    return {name}.union(
        *(_lineage(ast.unparse(base).rpartition(".")[2], classes) for base in bases)
    )


def _with_users(field: Any, algorithms: list[str]) -> Any:
    """The field with its algorithms in its meaning."""
    known = field.metadata["setting"]
    known = known._replace(meaning=f"{', '.join(algorithms)}: {known.meaning}")
    return dataclasses.field(default=field.default, metadata=field.metadata | {"setting": known})
