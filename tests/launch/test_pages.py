"""The pages: their commands exist with these flags and fields, and their links lead somewhere."""

import subprocess
import sys

import pytest

from docs import check_commands
from tests.launch.conftest import ROOT

WRONG = {
    "python -m launch.train --config=configs/nowhere.py --workdir=x": "No such file",
    "python -m launch.train --config=configs/default.py --config.sed=1": "sed is no field",
    "python -m launch.generate --policy=x --outputs=y": "--outputs is unknown",
    "python -m launch.analyze metric": "must be one of",
    "python -m launch.local --processes=2 -- --config=configs/sft.py --workdri=x": "--workdri",
    "python -m launch.nothing": "no command",
    "python -m benchmarks.nothing": "no module",
    "python docs/nothing.py": "is no file",
    "nothing --x": "no program",
}


def check(*pages):
    """Runs the script in a process of its own: commands define their flags for a whole process."""
    return subprocess.run(
        [sys.executable, "docs/check_commands.py", *pages], cwd=ROOT, capture_output=True, text=True
    )


@pytest.mark.slow
def test_commands_and_links_of_all_pages_exist():
    done = check()
    assert done.returncode == 0, done.stderr
    num_pages, _, num_commands, *_ = done.stdout.split()
    assert int(num_pages) > 20 and int(num_commands) > 50  # it looked at the pages


def test_a_wrong_command_is_found(tmp_path):
    page = tmp_path / "page.md"
    right = "python -m launch.train --config=configs/quickstart.py --workdir=x"
    page.write_text("\n".join(["```bash", right, *WRONG, "```"]))
    done = check(page)
    assert done.returncode == 1
    found = dict(line.split(": ", 1) for line in done.stderr.splitlines() if "page.md:" in line)
    assert found.keys() == {f"page.md:{3 + number}" for number in range(len(WRONG))}
    assert all(reason in done.stderr for reason in WRONG.values()), done.stderr


def test_commands_are_read_as_the_shell_does(tmp_path):
    page = tmp_path / "page.md"
    lines = ["text", "```bash", "A=$(f (x)) one --a='b c' && two & # three", "four \\", "  --d=$E"]
    page.write_text("\n".join([*lines, "five", "```", "```", "six", "```"]))
    assert list(check_commands.commands_of(page)) == [
        ("page.md:3", ("one", "--a=b c")), ("page.md:3", ("two",)),
        ("page.md:4", ("four", "--d=1")), ("page.md:6", ("five",)),
    ]  # fmt: skip


def test_a_broken_link_is_found(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# One `two`, three\n## x\n## x\n[a](#one-two-three) [b](#x-1) [c](page.md#x)"
        " [d](page.md#y) [e](no.md) [f](https://nowhere.example/no)\n"
    )
    found = list(check_commands.broken_links(page))
    assert [line.split()[1] for line in found] == ["page.md#y:", "no.md:"]
