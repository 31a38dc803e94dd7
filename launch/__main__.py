"""Lists the commands."""

import ast
import pathlib

from launch import cli

NO_COMMANDS = {"__init__", "__main__", "cli", "explain", "fields"}


def commands() -> dict[str, str]:
    """The first line of the docstring of each command, by name."""
    files = sorted(pathlib.Path(__file__).parent.glob("*.py"))
    return {
        file.stem: ast.get_docstring(ast.parse(file.read_text())).splitlines()[0]
        for file in files
        if file.stem not in NO_COMMANDS
    }


if __name__ == "__main__":
    cli.open_output()
    found = commands()
    width = max(map(len, found))
    print("Commands; python -m launch.NAME --help has the flags of one:\n")
    print("\n".join(f"  python -m launch.{name:<{width}}  {line}" for name, line in found.items()))
