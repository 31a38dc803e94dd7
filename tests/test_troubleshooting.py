"""docs/troubleshooting.md quotes no message that the code does not have."""

import ast
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
# The section whose first column quotes messages of UserError; the others describe what a run does.
OF_MISTAKES = "Messages with several causes"


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
    """The quoted words of the first column, in the section on mistakes."""
    body = re.search(rf"^## {OF_MISTAKES}\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.M)
    rows = [line for line in body[1].splitlines() if line.startswith("| `")]
    return [phrase for row in rows for phrase in re.findall(r"`([^`]+)`", row.split(" | ")[0])]


def test_every_entry_is_of_a_message():
    templates = messages()
    assert len(templates) > 300
    text = (
        "\n".join(templates.values()) + (ROOT / "semrl_jax" / "data" / "prompt_rows.py").read_text()
    )
    quoted = phrases()
    assert len(quoted) > 10
    stale = [phrase for phrase in quoted if phrase not in text]
    assert not stale, f"no message has {stale}; remove them from docs/troubleshooting.md"
