"""Every setting that a message or a page names exists."""

import ast
import importlib
import pathlib
import re

import pytest

from semrl_jax.settings.config import known_settings
from semrl_jax.settings.moved import MOVED, REMOVED

ROOT = pathlib.Path(__file__).parents[2]
FIELDS = list(known_settings())
SECTIONS = sorted({field.partition(".")[0] for field in FIELDS if "." in field})
NAME = re.compile(rf"(?<![\w./-])(?:config\.)?((?:{'|'.join(SECTIONS)})(?:\.[a-z]\w*)+)(?![\w(])")
OTHERS = re.compile(
    r"""[a-z]+\.(csv|json|jsonl|ipynb|md|pkl|safetensors)\b  # a file
    | model\.(embed_tokens|layers|norm)\b  # a tensor
    | hidden_states\.(kinds|layers)$  # of a request on the wire
    """,
    re.VERBOSE,
)


def texts(file):
    """The text of a page, or the strings of a module except docstrings."""
    if file.suffix == ".md":
        return [file.read_text()]
    tree = ast.parse(file.read_text())
    docstrings = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and id(node) not in docstrings
    ]


def exists(name):
    """A field, a section, the start of a field, a former field, a function of a room, or a file."""
    if any(field.startswith(name) for field in FIELDS if name.endswith("_")):
        return True
    if any(field == name or field.startswith(f"{name}.") for field in FIELDS):
        return True
    room, _, function = name.partition(".")
    in_room = room in ("algorithms", "data", "metrics") and hasattr(
        importlib.import_module(f"semrl_jax.{room}"), function
    )
    return in_room or name in MOVED or name in REMOVED or bool(OTHERS.match(name))


@pytest.mark.parametrize("folder", ["semrl_jax", "launch", "configs", "docs", "third_party", "."])
def test_every_setting_that_is_named_exists(folder):
    files = [*ROOT.glob("*.md")] if folder == "." else sorted((ROOT / folder).rglob("*.*"))
    missing = {
        (str(file.relative_to(ROOT)), name)
        for file in files
        if file.suffix in (".md", ".py")
        for text in texts(file)
        for name in NAME.findall(text)
        if not exists(name)
    }
    assert files and not missing
