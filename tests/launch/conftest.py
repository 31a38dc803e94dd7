"""Runs commands as a user does: processes with one device, without forced devices."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable

import pytest

ROOT = pathlib.Path(__file__).parents[2]
TINY = ROOT / "tests" / "launch" / "tiny_config.py"
TOKEN = "a-token-for-tests"


def xla_flags(num_devices: int | None = None) -> str:
    """The flags of this process, with this number of CPU devices; None: without forced devices."""
    forced = "--xla_force_host_platform_device_count"
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if not flag.startswith(forced)]
    return " ".join(flags + [f"{forced}={num_devices}"] * (num_devices is not None))


def environment() -> dict[str, str]:
    """The environment of this process without the forced devices."""
    return {**os.environ, "XLA_FLAGS": xla_flags(), "SEMRL_ROLLOUT_TOKEN": TOKEN}


def start(*arguments, **options) -> subprocess.Popen:
    """Starts `python -m ...`; both outputs are text pipes."""
    return subprocess.Popen(
        [sys.executable, "-m", *map(str, arguments)],
        cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=environment() | options.pop("env", {}), **options,
    )  # fmt: skip


def run(*arguments, timeout=300, text=None, **options) -> subprocess.CompletedProcess:
    """Runs `python -m ...` to its end.

    `text` is its standard input. Without it, the process reads the standard input of the tests.
    """
    if text is not None:
        options["stdin"] = subprocess.PIPE
    process = start(*arguments, **options)
    try:
        out, err = process.communicate(text, timeout=timeout)
    except BaseException:
        process.kill()
        raise
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


EACH = """
import importlib, json, os, runpy, sys
module, imports, directory, calls = json.load(sys.stdin)
for name in imports:
    importlib.import_module(name)
for number, arguments in enumerate(calls):
    if not os.fork():
        for stream, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{directory}/{number}.{name}", os.O_CREAT | os.O_WRONLY), stream)
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


def run_each(
    module: str, *calls: Iterable, imports: Iterable[str] = ()
) -> list[subprocess.CompletedProcess]:
    """Runs `python -m MODULE` with each of several lists of arguments.

    Each is a fork of a process that has imported what all commands share, and `imports`.
    """
    with tempfile.TemporaryDirectory() as name:
        directory = pathlib.Path(name)
        shared = ["launch.cli", "launch.fields", *imports]
        words = [list(map(str, arguments)) for arguments in calls]
        done = subprocess.run(
            [sys.executable, "-c", EACH], input=json.dumps([module, shared, name, words]),
            cwd=ROOT, env=environment(), text=True, capture_output=True, timeout=300,
        )  # fmt: skip
        codes = list(map(int, done.stdout.split()))
        assert len(codes) == len(calls), done.stderr
        texts = [
            [(directory / f"{number}.{kind}").read_text() for kind in ("out", "err")]
            for number in range(len(calls))
        ]
    return [
        subprocess.CompletedProcess(arguments, code, *text)
        for arguments, code, text in zip(calls, codes, texts)
    ]


def succeed(*arguments, **options) -> subprocess.CompletedProcess:
    """Runs a command, see `run`, which ends with exit code 0."""
    done = run(*arguments, **options)
    assert done.returncode == 0, (done.stdout, done.stderr)
    return done


def read_until(process: subprocess.Popen, text: str) -> str:
    """Reads lines of the output up to one with `text`; fails if the process ends first."""
    seen = []
    for line in process.stdout:
        seen.append(line)
        if text in line:
            return line
    raise AssertionError(f"no {text!r} in {seen}; stderr: {process.stderr.read()}")


def start_replica(config=TINY, port=0) -> tuple[subprocess.Popen, str]:
    """Starts `launch.rollout`; returns the process and its address. Port 0 takes a free port."""
    process = start("launch.rollout", f"--config={config}", f"--port={port}")
    return process, read_until(process, "listens on").split()[-1]


@pytest.fixture
def warmed(uninterrupted, tmp_path) -> pathlib.Path:
    """A run directory with the warm start done and no step taken.

    `uninterrupted` is a fixture of the module: a finished run.
    """
    workdir = tmp_path / "run"
    shutil.copytree(uninterrupted / "warm_start", workdir / "warm_start")
    shutil.copy(uninterrupted / "config.json", workdir)
    return workdir


@pytest.fixture
def replica(request):
    """The address of a `launch.rollout` process on a free port.

    The parameter of the fixture is its config; TINY if there is none.
    """
    process, address = start_replica(getattr(request, "param", TINY))
    yield address
    process.terminate()
    assert process.wait(timeout=30) == 0
    process.stdout.close(), process.stderr.close()
