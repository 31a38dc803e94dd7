"""Makes docs/performance.md from the template next to this file and from recorded results.

    python -m benchmarks.performance
    python -m benchmarks.performance --run step packing
    python -m benchmarks.performance --run all

The first command only writes the page. `--run` measures again before, which takes minutes each and
needs a quiet machine, and replaces benchmarks/results/NAME.json. A line `<!-- result: NAME -->` of
the template becomes the recorded text, with command, date, machine and versions. With numbers,
`<!-- result: NAME 0 3 -->`, it has only these paragraphs and tables of the text.
"""

import argparse
import json
import pathlib
import re
import subprocess
import sys

from benchmarks import results

HERE = pathlib.Path(__file__).parent
TEMPLATE, RESULTS = HERE / "performance.md", HERE / "results"
PAGE = HERE.parent / "docs" / "performance.md"
MARK = re.compile(r"^<!-- result: (\w+)((?: \d+)*) -->$", re.MULTILINE)
# Packages whose versions the page leaves out; the result files have them.
LEFT_OUT = re.compile(r"(jaxlib|flax|optax|orbax-checkpoint|transformers|numpy|grpcio) \S+, ")


def names() -> list[str]:
    """The results that the page has, each made by the benchmark of that name."""
    return [name for name, _ in MARK.findall(TEMPLATE.read_text())]


def page() -> str:
    """The text of docs/performance.md."""
    shown = lambda found: section(found[1], *map(int, found[2].split()))  # noqa: E731
    return MARK.sub(shown, TEMPLATE.read_text())


def section(name: str, *chosen: int) -> str:
    """A recorded result, or how to get it; `chosen` parts of it, default all."""
    file = RESULTS / f"{name}.json"
    if not file.exists():
        return f"Not measured yet: `python -m benchmarks.performance --run {name}`."
    found = json.loads(file.read_text())
    if missing := [field for field in results.FIELDS if field not in found]:
        raise SystemExit(f"{file} has no {missing[0]}; make it again with --run {name}.")
    day, versions = found["date"].split()[0], LEFT_OUT.sub("", found["versions"])
    origin = f"`{found['command']}`, {day}; {found['machine']}; {versions}."
    parts = found["text"].split("\n\n")
    text = "\n\n".join(parts[number] for number in chosen or range(len(parts)))
    return f"### {found['title']}\n\n{text}\n\n{origin}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", nargs="+", default=[], choices=["all", *names()], metavar="NAME")
    arguments = parser.parse_args()
    for name in names() if "all" in arguments.run else arguments.run:
        command = [sys.executable, "-m", f"benchmarks.{name}", f"--json={RESULTS / name}.json"]
        subprocess.run(command, cwd=HERE.parent, check=True)
    PAGE.write_text(page())
    print(f"done: {PAGE}")


if __name__ == "__main__":
    main()
