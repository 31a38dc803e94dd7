"""What benchmarks share: intervals, tables, and result files for docs/performance.md.

A benchmark that belongs on the page has the option `--json=FILE` (`add_option`), and hands its
Markdown to `show`, which prints it, and writes the file if the option is given. A file is one JSON
object with these texts:

    title      of the section
    command    that was run
    date       UTC, as in 2026-11-23 06:30
    machine    processor and cores
    versions   packages and revision
    text       Markdown without headings: tables and what a reader must know about them

`python -m benchmarks.performance` makes the page of all such files.
"""

import argparse
import datetime
import json
import math
import pathlib
import shlex
import sys
from collections.abc import Mapping, Sequence

from benchmarks import machine

FILES = (
    "--json",
    "--directory",
    "--workdir",
    "--keep",
    "--tunix",
    "--trl",
    "--before",
)  # name files only
PATHS = ("--model", "--problems")  # the last name of these is told
FIELDS = ("title", "command", "date", "machine", "versions", "text")


def median_interval(values: Sequence[float], level: float = 0.95) -> tuple[float, float, float]:
    """An interval for the median by order statistics, valid for every distribution.

    The median lies between the k-th smallest and the k-th largest of n values with probability
    1 - 2 P(Binomial(n, 1/2) < k).

    Returns:
      Low, high and that probability, for the largest k that gives at least `level`. Below 6 values,
      the extremes, although their probability is below 95 %.
    """
    ordered, n = sorted(values), len(values)
    below, k = 0.5**n, 1  # below = P(Binomial(n, 1/2) < k)
    while k < n // 2 and 1 - 2 * (below + math.comb(n, k) * 0.5**n) >= level:
        below += math.comb(n, k) * 0.5**n
        k += 1
    return ordered[k - 1], ordered[n - k], 1 - 2 * below


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; its first column is text, the others are numbers."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def add_option(parser: argparse.ArgumentParser) -> None:
    """Adds `--json=FILE`."""
    parser.add_argument(
        "--json", type=pathlib.Path, help="file for python -m benchmarks.performance"
    )


def show(
    title: str, text: str, file: pathlib.Path | None, versions: Mapping[str, str] | None = None
) -> None:
    """Prints the result of this command, and writes it to the file if there is one.

    Args:
      title: of the section.
      text: Markdown without headings.
      file: the value of `--json`.
      versions: of packages that `machine.versions` does not name, such as those of peers.
    """
    found = {
        "title": title,
        "command": command(sys.argv),
        "date": f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M}",
        "machine": machine.hardware(),
        "versions": machine.versions(versions or {}),
        "text": text.strip(),
    }
    print(f"{found['text']}\n\n{found['machine']}; {found['versions']}; {found['date']} UTC")
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found, indent=1) + "\n")


def command(argv: Sequence[str]) -> str:
    """The command of this process as one types it, without options that only name files."""
    module = getattr(sys.modules["__main__"].__spec__, "name", None) or argv[0]
    options, rest = [], list(argv[1:])
    while rest:
        option = rest.pop(0)
        name, equals, value = option.partition("=")
        if name in PATHS:
            value = value if equals else rest.pop(0)
            options.append(f"{name}={pathlib.Path(value).name}")
        elif name not in FILES:
            options.append(option)
        elif not equals:
            rest.pop(0)  # its value
    return shlex.join(["python", "-m", module, *options])
