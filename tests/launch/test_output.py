"""Output that cannot be written does not change what a command does; real processes show it."""

import json
import os
import shlex
import subprocess
import sys

import pytest

from tests.cases import slow_after
from tests.launch.conftest import ROOT, TINY, environment

NAME = "数学"
STREAMS = {
    "ascii": "PYTHONIOENCODING=ascii {}",
    "no stdout": "{} >&-",
    "no stderr": "{} 2>&-",
    "no streams": "{} <&- >&- 2>&-",
    "reader gone": "{} | true",
    "reader of both gone": "{} 2>&1 | true",
    "one line read": "{} | head -1",
}


def shell(streams, *arguments, **env):
    """Runs `python -m ...` in a shell; the exit code is that of Python."""
    command = STREAMS[streams].format(shlex.join([sys.executable, "-m", *map(str, arguments)]))
    return subprocess.run(
        ["bash", "-c", f"{command}; exit ${{PIPESTATUS[0]}}"],
        cwd=ROOT, env=environment() | env, capture_output=True, text=True, timeout=120,
    )  # fmt: skip


@pytest.fixture
def prepared(tmp_path):
    """Arguments of a command that takes no time, and the file that it writes."""
    rows, output = tmp_path / f"{NAME}.jsonl", tmp_path / "data" / f"{NAME}.jsonl"
    rows.write_text(json.dumps({"question": "1+1?", "answer": "#### 2"}) + "\n")
    flags = ("--dataset=gsm8k", f"--input={rows}", f"--output={output}")
    return ("launch.prepare_data", *flags), output


@pytest.mark.parametrize("streams", slow_after(2, STREAMS))
def test_a_command_does_its_work_and_names_mistakes(streams, prepared):
    command, output = prepared
    for arguments, code in ((command, 0), ((*command, f"--{NAME}"), 2), ((*command, "--help"), 0)):
        done = shell(streams, *arguments, PYTHONUNBUFFERED="")
        assert done.returncode == code, done.stderr
        assert "Traceback" not in done.stderr and "Exception" not in done.stderr
        if code == 2 and streams not in ("no stderr", "no streams", "reader of both gone"):
            assert "is unknown; see --help." in done.stderr
    assert output.exists()
    if streams == "ascii":
        assert "\\u6570\\u5b66.jsonl" in shell(streams, *command).stdout


def test_a_terminal_that_was_closed_is_a_reader_that_has_ended(prepared):
    command, output = prepared
    master, slave = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", *command], cwd=ROOT, env=environment(), stdout=slave, stderr=slave
    )
    os.close(master), os.close(slave)
    assert process.wait(timeout=60) == 0 and output.exists()


# Each is a minute of a slow machine; the test above has all of them for a short command.
@pytest.mark.soak
@pytest.mark.parametrize("streams", STREAMS)
def test_training_goes_on(streams, tmp_path):
    workdir = tmp_path / NAME
    done = shell(
        streams, "launch.train", f"--config={TINY}", f"--workdir={workdir}",
        "--config.training.num_steps=2", "--config.warm_start.num_steps=1",
        "--config.rollout.jax_processes=1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert (workdir / "checkpoints" / "2").is_dir() and (workdir / "report.html").exists()
