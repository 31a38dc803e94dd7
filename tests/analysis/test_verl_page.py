"""docs/verl.md: every defect of metrics and shaping has a test that exists and runs."""

import ast
import pathlib
import re

import pytest

from configs import default

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "verl.md").read_text()
ROWS = {
    defect: re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", line)
    for line in PAGE.splitlines()
    for defect in re.findall(r"^\| (D\d+) \|", line)
}


def test_every_defect_has_a_row():
    assert set(ROWS) == {f"D{n}" for n in range(1, 19)} | {
        "D20", "D21", "D32", "D33", "D34", "D37",
    }  # fmt: skip


def test_every_capability_of_the_release_has_a_row():
    assert re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE) == [str(n) for n in range(1, 30)]


def checks_something(node):
    """An assert statement, or a call of a function that asserts by its name."""
    if isinstance(node, ast.Assert):
        return True
    names = r"(np\.testing\.)?assert_\w+|(\w+\.)?check\w*|pytest\.raises|refused|raised"
    return isinstance(node, ast.Call) and re.fullmatch(names, ast.unparse(node.func)) is not None


@pytest.mark.parametrize("defect", ROWS)
def test_the_tests_of_a_row_exist_and_are_not_skipped(defect):
    assert ROWS[defect]
    fast = []
    for file, name in ROWS[defect]:
        functions = {
            node.name: node
            for node in ast.parse((ROOT / file).read_text()).body
            if isinstance(node, ast.FunctionDef)
        }
        assert name in functions, f"{file}::{name}"
        marks = " ".join(ast.unparse(mark) for mark in functions[name].decorator_list)
        # A mark on a case of several leaves the others.
        assert not re.match(r"pytest\.mark\.(skip|skipif|xfail|soak)\b", marks), name
        fast.append(not re.match(r"pytest\.mark\.slow\b", marks))
        checks = [ast.unparse(node) for node in ast.walk(functions[name]) if checks_something(node)]
        assert checks, name
    assert any(fast)


def test_defaults_on_the_page_are_those_of_the_config():
    config = default.get_config()
    rows = re.findall(r"^\| `(metrics|shaping)\.(\w+)` \| `?([\w.]+)`? \|", PAGE, re.MULTILINE)
    assert {"gain", "eta", "kappa", "alpha", "method"} <= {field for _, field, _ in rows}
    for section, field, stated in rows:
        value = config[section][field]
        assert stated == str(value) or float(stated) == value, field


@pytest.mark.parametrize("page", ["verl.md", "metrics.md", "study.md"])
def test_pictures_and_pages_that_are_linked_exist(page):
    links = re.findall(r"\]\(([\w./]+)\)", (ROOT / "docs" / page).read_text())
    assert links
    for link in links:
        file = ROOT / "docs" / link
        assert file.is_file() and file.stat().st_size < 200_000, link
