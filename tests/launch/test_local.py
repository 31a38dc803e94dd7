"""launch.local: output, signals, exit codes and the end of several processes on one machine."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from tests.launch.conftest import ROOT, TINY, environment, run, xla_flags
from tests.launch.test_bad_input import assert_each_is_one_line

# A process in place of launch.train; its first argument says what it does.
CHILD = """
import json, os, signal, subprocess, sys, time
what, place = sys.argv[1], dict(flag.lstrip("-").split("=") for flag in sys.argv[-3:])
index = int(place["config.distributed.process_id"])
def end(code):
    return lambda *_: (print("ends", flush=True), time.sleep(0.1), os._exit(code))
if what == "tell":
    print(json.dumps({"place": place, "xla": os.environ["XLA_FLAGS"], "argv": sys.argv[1:-3],
                      "platforms": os.environ["JAX_PLATFORMS"]}))
    print("last line, without an end", end="", file=sys.stderr)
    sys.exit(0)
if what == "fail" and index == 1:
    time.sleep(0.3)
    sys.exit(7)
if what == "crash" and index == 1:
    os.kill(os.getpid(), signal.SIGSEGV)
signal.signal(signal.SIGTERM, signal.SIG_IGN if what == "deaf" else end(75))
signal.signal(signal.SIGINT, signal.SIG_IGN if what == "deaf" else end(75))
worker = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("pids", os.getpid(), worker.pid, flush=True)
time.sleep(600)
"""
JOB = (
    "import sys; from launch.local import Job; "
    "sys.exit(Job([sys.executable, '-c', *sys.argv[1:]], 2, 3, float(sys.argv[3])).run())"
)


def launch(what, grace_s=30.0):
    return subprocess.Popen(
        [sys.executable, "-c", JOB, CHILD, what, str(grace_s)],
        cwd=ROOT, text=True, stdout=subprocess.PIPE, env=environment(), start_new_session=True,
    )  # fmt: skip


def finish(process):
    try:
        output = process.communicate(timeout=60)[0]
    finally:
        process.kill()
    return process.returncode, sorted(output.splitlines())


def pids(process, count=2):
    """Process ids of the processes and of the workers that they started."""
    found = []
    for line in process.stdout:
        if " pids " in line:
            found += [int(word) for word in line.split()[2:]]
        if len(found) == 2 * count:
            return found
    raise AssertionError("the processes did not start")


def wait_until_gone(numbers, seconds=10.0):
    deadline = time.monotonic() + seconds
    while left := [number for number in numbers if alive(number)]:
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.05)


def alive(number):
    """Whether a process exists and is not a zombie."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(number)], capture_output=True, text=True)
    return state.stdout.strip()[:1] not in ("", "Z")


def test_each_process_gets_its_place(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    code, lines = finish(launch("tell"))
    assert code == 0
    told = [json.loads(line[4:]) for line in lines if "{" in line]
    assert [line[:4] for line in lines if "{" in line] == ["[0] ", "[1] "]
    assert [line for line in lines if "{" not in line] == [
        "[0] last line, without an end",
        "[1] last line, without an end",
    ]
    addresses = {each["place"].pop("config.distributed.coordinator") for each in told}
    assert len(addresses) == 1 and addresses.pop().startswith("127.0.0.1:")
    for index, each in enumerate(told):
        assert each["place"] == {
            "config.distributed.num_processes": "2",
            "config.distributed.process_id": str(index),
        }
        assert each["xla"].split() == xla_flags(3).split()
        assert each["argv"] == ["tell", "30.0"]


def test_other_flags_of_xla_stay(monkeypatch):
    from launch.local import Job

    flags = "--xla_dump_to=/d --xla_force_host_platform_device_count=8"
    monkeypatch.setenv("XLA_FLAGS", flags)
    script = "import os, sys; print(os.environ['XLA_FLAGS'])"
    process = Job([sys.executable, "-c", script], 1, 2, 1.0)._start(0, "127.0.0.1:1")
    assert process.communicate(timeout=30)[0].split() == [
        b"--xla_dump_to=/d",
        b"--xla_force_host_platform_device_count=2",
    ]


@pytest.mark.parametrize(("what", "expected"), [("fail", 7), ("crash", 128 + signal.SIGSEGV)])
def test_failed_process_ends_all(what, expected):
    code, lines = finish(launch(what))
    assert code == expected
    said = f"python -m launch.local: process 1 ended with exit code {expected}; ending all others"
    assert said in lines
    assert "[0] ends" in lines or what == "crash"  # the signal may arrive before the handler is set


def test_signal_is_passed_on_to_all():
    process = launch("wait")
    started = pids(process)
    process.send_signal(signal.SIGINT)  # the next test sends SIGTERM
    code, lines = finish(process)
    assert code == 75
    assert [line for line in lines if line.endswith("ends")] == ["[0] ends", "[1] ends"]
    wait_until_gone(started)


def test_processes_that_do_not_end_are_killed():
    process = launch("deaf", grace_s=0.5)
    started = pids(process)
    process.send_signal(signal.SIGTERM)
    began = time.monotonic()
    code, lines = finish(process)
    assert code == 128 + signal.SIGKILL and time.monotonic() - began > 0.4
    assert "python -m launch.local: SIGKILL to the processes that are left" in lines
    wait_until_gone(started)


def test_a_second_interrupt_does_not_wait():
    process = launch("deaf", grace_s=600.0)
    started = pids(process)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    assert finish(process)[0] == 128 + signal.SIGKILL
    wait_until_gone(started)


@pytest.mark.skipif(sys.platform != "linux", reason="needs PR_SET_PDEATHSIG of Linux")
def test_no_process_outlives_a_launcher_that_is_killed():
    process = launch("deaf")
    started = pids(process)
    process.kill()
    process.communicate(timeout=30)
    wait_until_gone(started[::2])  # workers of the real launch.train end with it
    for worker in started[1::2]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(worker, signal.SIGKILL)


@pytest.mark.slow
def test_mistakes():
    assert_each_is_one_line(
        "launch.local",
        ([], "--processes is needed"),
        (["--processes=0", "--", "x"], "--processes=0 must be"),
        (["--processes=2"], "arguments of launch.train are needed"),
        (["--processes=2", "x", "--", "x"], "'x' is not a flag"),
        (
            ["--processes=1", "--devices_per_process=4097", "--", "x"],
            "must be a whole number of at least 1 and at most 4096",
        ),
        (["--processes=1", "--grace_s=0", "--", "x"], "--grace_s=0.0"),
    )


def test_mistake_of_the_trainer_keeps_its_exit_code(tmp_path: pathlib.Path):
    result = run(
        "launch.local", "--processes=1", "--", f"--config={TINY}", f"--workdir={tmp_path / 'run'}",
        "--config.nothing=1",
    )  # fmt: skip
    assert result.returncode == 2
    lines = result.stdout.splitlines()
    assert lines[0].startswith("[0] python -m launch.train: --config.nothing is no field of")
    assert not (tmp_path / "run").exists()


@pytest.mark.soak
def test_a_process_that_is_killed_ends_the_run(tmp_path):
    """One process dies: the other reports it and ends; the first to end gives the exit code."""
    process = subprocess.Popen(
        [sys.executable, "-m", "launch.local", "--processes=2", "--", f"--config={TINY}",
         f"--workdir={tmp_path / 'run'}", "--config.training.num_steps=1000"],
        cwd=ROOT, text=True, stdout=subprocess.PIPE, env=environment(),
    )  # fmt: skip
    for line in process.stdout:
        if "[0] step " in line:
            break
    children = subprocess.run(
        ["pgrep", "-P", str(process.pid)], capture_output=True, text=True
    ).stdout.split()
    assert len(children) == 2
    os.kill(int(children[1]), signal.SIGKILL)
    output = process.communicate(timeout=120)[0]
    assert process.returncode == 128 + signal.SIGKILL, output
    assert "[0] process 1 (" in output and "is lost" in output
    wait_until_gone([int(child) for child in children])
