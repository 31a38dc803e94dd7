"""Imports between the rooms of the package run in one direction."""

import ast
import functools
import pathlib

PACKAGE = pathlib.Path(__file__).parents[1] / "semrl_jax"
# From the top down: a room imports rooms of lower lines, and none of its own line.
FLOORS = (
    ("library",),
    ("planning", "jobs", "tinker"),
    ("runs",),
    ("analysis",),
    ("training",),
    ("evaluation",),
    ("sampling",),
    ("rollout",),
    ("environments",),
    ("models", "rewards", "cluster", "pages"),
    ("settings",),
    ("data",),
    ("algorithms",),
    ("shaping",),
    ("metrics",),
    ("support",),
)
PURE = {"metrics", "shaping", "algorithms"}
EXCEPTIONS = {
    ("analysis", "runs"),  # checkpoint files
    ("data", "settings"),  # the rule of a choice
}


@functools.cache
def imports():
    """(room, imported room, file) of every import of a room by another."""
    return list(_imports())


def _imports():
    rooms = {room for floor in FLOORS for room in floor}
    for file in sorted(PACKAGE.rglob("*.py")):
        room = file.relative_to(PACKAGE).parts[0]
        for node in ast.walk(ast.parse(file.read_text())):
            names = []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            for name in names:
                package, _, rest = name.partition(".")
                other = rest.split(".")[0]
                if package == "semrl_jax" and other in rooms and room in rooms and other != room:
                    yield room, other, file.name


def test_no_room_imports_one_above_it():
    floor = {room: index for index, rooms in enumerate(FLOORS) for room in rooms}
    found = imports()
    assert len(found) > 50
    upward = {
        (room, other, file)
        for room, other, file in found
        if floor[other] <= floor[room] and (room, other) not in EXCEPTIONS
    }
    assert not upward


def test_pure_rooms_import_no_other():
    assert not {(a, b) for a, b, _ in imports() if a in PURE and b not in {*PURE, "support"}}


def test_the_root_holds_records_only():
    assert {file.name for file in PACKAGE.glob("*.py")} == {"__init__.py", "types.py"}
