"""A replica as a child process: it starts, is restarted, and ends with its parent."""

import os
import signal
import socket
import subprocess
import sys

import pytest

from semrl_jax.rollout.client import child
from semrl_jax.rollout.client.child import ChildReplica
from semrl_jax.support.errors import UserError
from tests.running import is_running, wait_until

# Listens until its standard input closes, as launch.rollout does; prints its arguments.
SERVER = """
import os, socket, sys
flags = dict(a.lstrip("-").partition("=")[::2] for a in sys.argv[1:])
print("token", len(os.environ["SEMRL_ROLLOUT_TOKEN"]), "pid", os.getpid(), flush=True)
with socket.create_server(("127.0.0.1", int(flags["port"]))):
    assert "until_stdin_closes" in flags
    sys.stdin.read()
print("closed", flush=True)
"""


def command(script):
    return [sys.executable, "-c", script]


def pid_of(log, start=-1):
    """The process id of the n-th start, from the log."""
    lines = [line for line in log.read_text().splitlines() if line.startswith("token")]
    return int(lines[start].split()[-1])


def test_it_listens_with_a_token_and_ends_when_closed(tmp_path):
    log = tmp_path / "log.txt"
    with ChildReplica(command(SERVER), directory=tmp_path, log=log) as replica:
        assert len(replica.token) > 30
        assert is_running(pid_of(log))
    assert log.read_text().splitlines()[-1] == "closed"
    assert not is_running(pid_of(log))


def test_it_is_started_again_at_the_same_address(tmp_path):
    """Nobody else is given its port before it listens: vLLM needs up to a minute for that."""
    log, lines = tmp_path / "log.txt", []
    with ChildReplica(
        command(SERVER), directory=tmp_path, log=log, progress=lines.append
    ) as replica:
        first, address = pid_of(log), replica.address
        os.kill(first, signal.SIGKILL)
        wait_until(lambda: not is_running(first))
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", int(address.split(":")[1])))
        wait_until(lambda: log.read_text().count("token") == log.read_text().count("\n") == 2)
        assert replica.address == address and is_running(pid_of(log)) and pid_of(log) != first
    assert "ended with code -9; started again" in lines[0]
    assert not is_running(pid_of(log))


def test_it_ends_when_its_parent_is_killed(tmp_path):
    log = tmp_path / "log.txt"
    parent = subprocess.Popen(
        command(
            "import sys, time; from semrl_jax.rollout.client.child import ChildReplica;"
            f"ChildReplica({command(SERVER)!r}, directory='.', log={str(log)!r});"
            "print('up', flush=True); time.sleep(100)"
        ),
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert parent.stdout.readline() == "up\n"
    pid = pid_of(log)
    parent.kill()
    parent.communicate()
    wait_until(lambda: not is_running(pid))
    assert log.read_text().splitlines()[-1] == "closed"


@pytest.mark.parametrize(
    ("script", "timeout_s", "message"),
    [
        ("import sys; sys.exit('rollout.top_k=9 is wrong.')", 60.0, "start: rollout.top_k=9"),
        ("pass", 60.0, "did not start: nothing"),
        ("import time; time.sleep(100)", 1.0, "does not listen after 1 s"),
    ],
)
def test_a_child_that_does_not_listen_is_a_one_line_error(
    tmp_path, monkeypatch, script, timeout_s, message
):
    monkeypatch.setattr(child, "END_S", 0.5)
    log = tmp_path / "log.txt"
    with pytest.raises(UserError, match=message) as caught:
        ChildReplica(command(script), directory=tmp_path, log=log, start_timeout_s=timeout_s)
    assert "\n" not in str(caught.value) and str(log) in str(caught.value)


def test_a_missing_program_is_named(tmp_path):
    with pytest.raises(UserError, match="nowhere/python: No such file"):
        ChildReplica(["/nowhere/python"], directory=tmp_path, log=tmp_path / "log.txt")


def test_it_is_tried_again_if_it_cannot_be_started(tmp_path):
    log, lines, program = tmp_path / "log.txt", [], tmp_path / "python"
    program.symlink_to(sys.executable)
    arguments = [str(program), "-c", SERVER]
    with ChildReplica(arguments, directory=tmp_path, log=log, progress=lines.append):
        program.unlink()
        os.kill(pid_of(log), signal.SIGKILL)
        wait_until(lambda: any("cannot be started" in line for line in lines))
        program.symlink_to(sys.executable)
        wait_until(lambda: log.read_text().count("token") == log.read_text().count("\n") == 2)
