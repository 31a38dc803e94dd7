"""Lists the commands, or runs one: `semrl train ...` is `python -m launch.train ...`."""

import ast
import difflib
import importlib.util
import pathlib
import runpy
import sys

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


def main() -> None:
    """Runs the command that the first argument names; without one, lists all."""
    found = commands()
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in found:
        module = f"launch.{name}"
        sys.argv = [importlib.util.find_spec(module).origin, *sys.argv[2:]]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return
    cli.open_output()
    if name not in ("--help", "-h"):
        near = difflib.get_close_matches(name, found, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        print(f"semrl: {name!r} is no command; {hint}semrl --help lists them.", file=sys.stderr)
        sys.exit(2)
    width = max(map(len, found))
    print("Commands; semrl NAME, or python -m launch.NAME. With --help, each lists its flags:\n")
    print("\n".join(f"  semrl {name:<{width}}  {line}" for name, line in found.items()))


if __name__ == "__main__":
    main()
