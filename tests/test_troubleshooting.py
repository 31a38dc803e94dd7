"""docs/troubleshooting.md has an entry for every message of a user's mistake, and no stale one."""

import ast
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
# Sections whose first column quotes messages of UserError; the others describe what a run does.
OF_MISTAKES = (
    "Before the start: flags and settings", "Data and benchmarks", "Models and tokenizers",
    "The run directory and checkpoints", "Replicas and network", "Several processes",
    "Metrics and analysis",
)  # fmt: skip


def template(node):
    """The text of a message with {} for values; None if it is no literal."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        parts = (part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
        return "".join(parts)
    return None


def messages():
    """Templates of `raise UserError(...)`, by file and line."""
    found = {}
    for room in ("semrl_jax", "launch"):
        for file in sorted((ROOT / room).rglob("*.py")):
            source = file.read_text()
            if "raise UserError(" not in source:
                continue
            for node in ast.walk(ast.parse(source)):
                if (
                    isinstance(node, ast.Raise)
                    and isinstance(node.exc, ast.Call)
                    and getattr(node.exc.func, "id", "") == "UserError"
                    and node.exc.args
                    and (text := template(node.exc.args[0])) is not None
                ):
                    found[f"{file.relative_to(ROOT)}:{node.lineno}"] = text
    return found


def phrases():
    """The quoted words of the first columns, in the sections on mistakes."""
    found = []
    for section in OF_MISTAKES:
        body = re.search(rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.M)
        for line in body[1].splitlines():
            if line.startswith("| `"):
                found += re.findall(r"`([^`]+)`", line.split(" | ")[0])
    return found


@pytest.fixture(scope="module")
def templates():
    found = messages()
    assert len(found) > 300
    return found


def test_every_message_has_an_entry(templates):
    known = phrases()
    # A template such as "{}: {}" has no words to look up; only its values have.
    missing = [
        f"{place}: {text[:120]}"
        for place, text in templates.items()
        if len(re.findall(r"[a-z]{3,}", text)) > 2 and not any(phrase in text for phrase in known)
    ]
    assert not missing, "add these to docs/troubleshooting.md:\n" + "\n".join(missing)


def test_every_entry_is_of_a_message(templates):
    text = "\n".join([*templates.values(), (ROOT / "launch" / "cli.py").read_text()])
    text += (ROOT / "semrl_jax" / "data" / "rows.py").read_text()
    stale = [phrase for phrase in phrases() if phrase not in text]
    assert not stale, f"no message has {stale}; remove them from docs/troubleshooting.md"
