"""Real processes that exchange values, and the message of the others when one is lost."""

import re
import subprocess
import sys
import time

import pytest

from semrl_jax.cluster.agreement import Retry, on_first, run_phase
from semrl_jax.cluster.peers import EXIT_PEER_LOST, Peers
from tests.cases import slow_after

COUNT = 3


def start(index, port, deed):
    return subprocess.Popen(
        [sys.executable, "-m", "tests.cluster.peer_process", *map(str, (index, COUNT, port, deed))],
        text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def run(who, deed, *, others="none", but=()):
    """Runs all processes, one with a deed.

    Returns:
      (exit code, stdout, stderr) of each process that is not in `but`.
    """
    deeds = [deed if index == who else others for index in range(COUNT)]
    first = start(0, 0, deeds[0])
    port = int(first.stdout.readline())
    processes = [first] + [start(index, port, deeds[index]) for index in range(1, COUNT)]
    try:
        found = {}
        for index, process in enumerate(processes):
            if index not in but:
                out, err = process.communicate(timeout=30)
                found[index] = process.returncode, out, err
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return found


def test_gather_returns_all_values_in_order():
    pids = set()
    for code, out, err in run(0, "none").values():
        assert code == 0, err
        lines = out.splitlines()
        assert lines[0] == "[{'process': 0}, {'process': 1}, {'process': 2}]"
        pids.add(lines[-1])
    assert len(pids) == 1  # all processes have the value of process 0


@pytest.mark.parametrize("who", slow_after(1, [0, 1]))
@pytest.mark.parametrize(
    ("deed", "how", "limit_s"),
    slow_after(
        4,
        [
            ("die", "its connection closed", 3),
            ("stop", "it sent nothing for", 12),
            ("hang", "did not finish it ", 14),
            ("die later", "last in phase 'deed') is lost: its connection closed", 3),
            ("busy", "did not finish it ", 14),  # each phase is short, but there is no end
        ],
    ),
)
def test_lost_process_is_named_by_all_others(who, deed, how, limit_s):
    started = time.monotonic()
    found = run(who, deed, but=(who,))
    took = time.monotonic() - started
    for code, _, err in found.values():
        assert code == EXIT_PEER_LOST
        assert len(err.splitlines()) == 1
        assert f"process {who} (" in err and how in err and "'deed'" in err
    assert took < limit_s + 8  # three interpreters start on a busy machine


def test_a_process_that_hangs_between_phases_is_said_to_be_after_one():
    (_, _, err), _ = run(1, "hang later", but=(1,)).values()
    assert re.search(r"process 1 \(.*, in 'after deed' for \d+ s\) did not finish it within", err)


@pytest.mark.slow
def test_all_end_if_all_hang():
    """All processes hang, as in a program of all devices: heartbeats continue, no gather waits."""
    for code, _, err in run(1, "hang", others="hang").values():
        assert code == EXIT_PEER_LOST
        (line,) = err.splitlines()
        assert line.startswith("process 0 (in 'deed'); process 1 (")
        assert re.search(r"in 'deed' for \d+ s\) did not finish it within", line)
        assert "distributed.phase_timeout_s=4 s" in line


def test_processes_that_end_because_of_a_loss_are_not_reported_as_lost():
    for code, _, err in run(1, "die", others="linger", but=(1,)).values():
        assert code == EXIT_PEER_LOST
        (line,) = err.splitlines()
        assert line.startswith("process 1 (")


def test_progress_line_names_a_slow_process():
    found = run(1, "slow")
    assert [code for code, _, _ in found.values()] == [0, 0, 0]
    progress = [line for line in found[0][1].splitlines() if line.startswith("progress")]
    assert progress and "process 1 (" in progress[0] and "'second'" in progress[0]


def test_failure_ends_all_with_its_reason_and_exit_code():
    found = run(2, "fail")
    assert [code for code, _, _ in found.values()] == [2, 2, 2]
    for index in (0, 1):
        assert "process 2 failed: disk on fire" in found[index][2]


@pytest.mark.parametrize(
    ("deed", "raised"),
    [
        ("mistake", "UserError process 1: seed=-1 is wrong."),
        ("preempted", "Preempted SIGTERM"),
        ("error", "PeerFailed process 1 failed in phase 'second': 'boom'"),
        ("retry", "Retry process 1: replica gone"),
    ],
)
def test_error_in_one_process_is_raised_in_all(deed, raised):
    found = run(1, deed)
    for index, (code, out, err) in found.items():
        assert code == 0, err
        line = next(line for line in out.splitlines() if line.startswith("raised"))
        if index != 1:
            assert line == f"raised {raised}"


def test_different_phases_are_an_error():
    found = run(1, "other phase")
    assert any("different phases: ['third'" in err for _, _, err in found.values())


def test_single_process_needs_no_connection():
    peers = Peers()
    assert peers.gather("x", 1) == [1]
    assert on_first(peers, "x", lambda: 3) == 3
    with pytest.raises(Retry):
        run_phase(peers, "x", lambda: (_ for _ in ()).throw(Retry("again")))
    peers.fail("nothing", 1)
    peers.close()
