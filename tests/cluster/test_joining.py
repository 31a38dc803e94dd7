"""Processes connect before JAX starts: real processes, real ports, deadlines of seconds."""

import re
import socket
import subprocess
import sys
import threading
import time

import pytest

from semrl_jax.cluster import SINGLE, Place, join
from semrl_jax.cluster.peers import name_processes
from semrl_jax.support.errors import UserError
from tests.launch.conftest import ROOT, environment

# Joins with the place given as arguments, counts devices, and sends itself SIGTERM.
MEMBER = """
import os, signal, sys, time
from semrl_jax.cluster import Place, join
from semrl_jax.support.errors import UserError
heard = []
signal.signal(signal.SIGTERM, lambda *_: heard.append(1))
address, count, index, timeout = sys.argv[1], *map(int, sys.argv[2:5])
assert "jax" not in sys.modules
try:
    join(Place(address, count, index, "settings"), connect_timeout_s=timeout, heartbeat_timeout_s=9)
except UserError as error:
    print(error)
    sys.exit(2)
import jax
print("joined", jax.process_index(), jax.process_count(), jax.device_count(), flush=True)
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(0.1)
print("heard", heard)
"""


def free_address() -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def member(address, count, index, timeout=60, **variables):
    return subprocess.Popen(
        [sys.executable, "-c", MEMBER, address, str(count), str(index), str(timeout)],
        cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env=environment() | variables,
    )  # fmt: skip


def finish(process, timeout=90):
    try:
        output = process.communicate(timeout=timeout)[0]
    finally:
        process.kill()
    return process.returncode, output


def test_single_process_does_not_join():
    join(SINGLE, connect_timeout_s=0.0, heartbeat_timeout_s=1.0)
    import jax

    assert not jax.distributed.is_initialized()


@pytest.mark.slow
def test_all_join_and_still_receive_signals():
    # An address without a proxy: gRPC would wait for it until the deadline.
    proxy = {"http_proxy": "http://127.0.0.1:9", "no_proxy": "elsewhere"}
    address = free_address()
    late = member(address, 2, 1, **proxy)  # starts before process 0
    time.sleep(0.5)
    members = [member(address, 2, 0, **proxy), late]
    for index, process in enumerate(members):
        assert finish(process) == (0, f"joined {index} 2 2\nheard [1]\n")


def attempt(place, timeout_s, lines=None):
    """The message of the error that joining raised, and the seconds it took."""
    began = time.monotonic()
    with pytest.raises(UserError) as caught:
        join(
            place,
            connect_timeout_s=timeout_s,
            heartbeat_timeout_s=9.0,
            announce=(lines if lines is not None else []).append,
        )
    assert "\n" not in str(caught.value)
    return str(caught.value), time.monotonic() - began


def test_no_process_at_the_address():
    address = free_address()
    message, seconds = attempt(Place(address, 2, 1, "Slurm"), 0.5)
    assert f"coordinator={address}: process 0 of 2 cannot be reached within" in message
    assert "(Connection refused)" in message and "the place is from Slurm" in message
    assert 0.5 <= seconds < 10
    message, _ = attempt(Place("no-such-host.invalid:80", 2, 1, "settings"), 0.3)
    assert "no-such-host.invalid:80" in message


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (None, "something listens there, but does not answer as process 0 does"),
        (b"HTTP/1.0 400 Bad Request\r\n\r\n", "something listens there, but does not answer as"),
        (b"x" * 9999, "the program that answers there is not process 0"),
        (b"go", "the connection was closed"),
    ],
)
def test_unknown_program_at_the_address(answer, problem):
    """Another program answers: nothing, other text, too much text, or half a line."""
    with socket.create_server(("127.0.0.1", 0)) as stranger:

        def serve():
            for _ in range(50):
                try:
                    caller, _ = stranger.accept()
                except OSError:
                    return
                with caller:
                    caller.recv(1000)  # unread data would cause a reset of the connection
                    if answer is None:
                        time.sleep(1.0)
                    else:
                        caller.sendall(answer)

        threading.Thread(target=serve, daemon=True).start()
        address = f"127.0.0.1:{stranger.getsockname()[1]}"
        message, seconds = attempt(Place(address, 2, 1, "settings"), 0.7)
    assert f"({problem}" in message
    assert "cannot be reached within distributed.connect_timeout_s=0.7 s" in message
    assert seconds < 10


def test_port_in_use_is_reported_at_once():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        message, seconds = attempt(Place(address, 2, 0, "settings"), 30.0)
    assert f"coordinator={address} cannot be listened on: Address already in use;" in message
    assert seconds < 10


def call(address, greeting):
    """Connects as another program would and returns the open socket."""
    host, port = address.split(":")
    for _ in range(600):
        try:
            caller = socket.create_connection((host, int(port)), timeout=10)
        except ConnectionRefusedError:
            time.sleep(0.05)
            continue
        caller.sendall(greeting)
        return caller
    raise AssertionError(f"nobody listens at {address}")


@pytest.mark.slow
def test_every_process_reports_the_missing_ones(monkeypatch):
    monkeypatch.setattr("semrl_jax.cluster.joining.REPORT_EVERY_S", 0.5)
    address, lines, messages = free_address(), [], {}

    def process(index, timeout_s):
        messages[index], _ = attempt(Place(address, 9, index, "JobSet"), timeout_s, lines)

    # Process 3 gives up before process 0 does. Process 2 learns the reason from process 0.
    threads = [
        threading.Thread(target=process, args=arguments)
        for arguments in ((0, 5.0), (2, 20.0), (3, 3.0))
    ]
    for thread in threads:
        thread.start()
    # Process 2 has connected before another process claims to be process 2.
    while not any(re.match(r"waits for processes 1, [34]-8 ", line) for line in lines):
        assert threads[0].is_alive(), lines
        time.sleep(0.01)
    others = [
        call(address, b"semrl_jax/1 7 of 8\n"),  # a process of another job
        call(address, b"semrl_jax/1 2 of 9\n"),  # has arrived already, on one side or the other
        call(address, b"GET / HTTP/1.1\r\n\r\n"),
        call(address, b"\xff\xfe\n"),
    ]
    for thread in threads:
        thread.join(timeout=30)
    for other in others:
        other.close()
    missing = {0: "1, 3-8", 2: "1, 3-8", 3: "1, 4-8"}
    assert messages.keys() == missing.keys()
    for index, names in missing.items():
        start = f"processes {names} of 9 did not arrive at distributed.coordinator={address} within"
        assert messages[index].startswith(start), (index, messages[index])
    assert "was refused: it expects 8 processes, process 0 expects 9" in messages[0] or (
        "was refused: process 2 has already arrived" in messages[0]
    )
    assert any(re.match(r"waits for processes .* at 127", line) for line in lines), lines


@pytest.mark.slow
def test_process_that_arrives_twice_is_refused():
    address, messages = free_address(), {}

    def coordinator():
        messages[0], _ = attempt(Place(address, 3, 0, "settings"), 4.0)

    thread = threading.Thread(target=coordinator)
    thread.start()
    first = call(address, b"semrl_jax/1 1 of 3\n")
    assert first.recv(100) == b"missing 2\n"
    message, _ = attempt(Place(address, 3, 1, "settings"), 20.0)
    assert f"coordinator={address} refused process 1: process 1 has already arrived" in message
    message, _ = attempt(Place(address, 4, 2, "settings"), 20.0)
    assert "it expects 4 processes, process 0 expects 3" in message
    first.close()  # like a killed process; a restarted one is accepted
    again = call(address, b"semrl_jax/1 1 of 3\n")
    assert b"missing 2" in again.recv(100)
    thread.join(timeout=30)
    again.close()
    assert messages[0].startswith("process 2 of 3 did not arrive")


@pytest.mark.slow
def test_process_lost_while_joining_ends_the_others():
    """A process lost between the exchange and JAX's start gives exit code 76, not an abort."""
    address = free_address()
    survivor = member(address, 2, 0, timeout=5)
    with call(address, b"semrl_jax/1 1 of 2\n") as dying:
        assert dying.recv(100) == b"go\n"
    code, output = finish(survivor)
    assert code == 76, output
    assert "process 0 of 2: another process was lost while all were joining" in output
    assert "Check failure" not in output


def test_name_processes():
    assert name_processes([3]) == "process 3"
    assert name_processes({7, 1, 2, 3, 5}) == "processes 1-3, 5, 7"


LEAVER = """
import sys, time
from semrl_jax.cluster import Place, exit_without_peers, join
address, index = sys.argv[1], int(sys.argv[2])
join(Place(address, 2, index, "settings"), connect_timeout_s=60, heartbeat_timeout_s=60)
if index == 0:
    print("waits", flush=True)
    time.sleep(600)
exit_without_peers(7)
print("leaves")
"""


@pytest.mark.slow
def test_exit_without_peers_does_not_wait():
    address = free_address()
    first, second = (
        subprocess.Popen(
            [sys.executable, "-c", LEAVER, address, str(index)],
            cwd=ROOT, text=True, stdout=subprocess.PIPE, env=environment(),
        )
        for index in range(2)
    )  # fmt: skip
    try:
        assert finish(second, timeout=60) == (7, "leaves\n")
    finally:
        first.kill()
        first.communicate()


@pytest.mark.slow
def test_a_process_that_used_jax_before_is_refused_in_one_line():
    member = MEMBER.replace("import os,", "import jax.numpy; jax.numpy.zeros(1)\nimport os,")
    member = member.replace('assert "jax" not in sys.modules\n', "")
    address = free_address()
    started = [
        subprocess.Popen(
            [sys.executable, "-c", member, address, "2", f"{index}", "60"],
            cwd=ROOT,
            env=environment(),
            stdout=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    for process in started:
        said, _ = process.communicate(timeout=120)
        assert process.returncode == 2
        assert said.count("\n") == 1 and "makes a JAX array when it is imported" in said
