"""Several processes train one policy: same numbers, common end, common resumption."""

import json
import pathlib
import re
import shutil
import signal
import time

import jax
import numpy as np
import pytest

from semrl_jax.cluster.peers import EXIT_PEER_LOST
from tests.fixtures import read_rows, stable
from tests.launch.comparison import assert_same_run, assert_same_state, restore_on_host
from tests.launch.conftest import TINY, read_until, start, start_replica, succeed, xla_flags
from tests.launch.processes import finish, start_processes

NUM_STEPS = 6


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    """Two processes, two devices each."""
    workdir = tmp_path_factory.mktemp("processes") / "run"
    for code, _, err in finish(start_processes(workdir, 2)):
        assert code == 0, err
    return workdir


def assert_close_rows(workdir, expected, first=0):
    """Compares rows except times and counts of replicas, with the rounding of a few steps."""
    rows, wanted = stable(read_rows(workdir)), stable(read_rows(expected))
    assert [row["step"] for row in rows] == [row["step"] for row in wanted]
    for row, want in zip(rows[first:], wanted[first:]):
        assert row.keys() == want.keys()
        for key in want:
            # One replica per process: more bytes of weights. Differences of 1e-7 are not compared.
            if key.startswith("rollout/") or key == "policy/shard_imbalance":
                continue
            # An acceleration is a difference of four effective ranks near 10, rounded to 1e-6 each.
            atol = 1e-4 if "acceleration" in key else 2e-5
            np.testing.assert_allclose(row[key], want[key], rtol=2e-3, atol=atol, err_msg=key)


@pytest.mark.slow
def test_two_processes_give_the_results_of_one_on_the_same_mesh(uninterrupted, tmp_path):
    devices = {"XLA_FLAGS": xla_flags(4)}
    succeed("launch.train", f"--config={TINY}", f"--workdir={tmp_path}/one", env=devices,
                     timeout=300)  # fmt: skip
    assert_close_rows(uninterrupted, tmp_path / "one")


@pytest.mark.soak
def test_two_processes_that_sample_ahead_give_the_results_of_one(uninterrupted, warmed, tmp_path):
    """Each samples its groups, in parts, in another thread; a run that a signal ends continues."""
    flags = (
        "--config.rollout.max_staleness=2", "--config.rollout.in_flight=keep",
        f"--config.training.num_steps={NUM_STEPS}",
    )  # fmt: skip
    record = json.loads((warmed / "config.json").read_text())
    record["config"]["rollout"] |= {"max_staleness": 2, "in_flight": "keep"}
    (warmed / "config.json").write_text(json.dumps(record))
    one = shutil.copytree(warmed, tmp_path / "one")
    devices = {"XLA_FLAGS": xla_flags(4)}
    succeed("launch.train", f"--config={TINY}", f"--workdir={one}", *flags, env=devices,
                     timeout=300)  # fmt: skip
    processes = start_processes(warmed, 2, *flags)
    read_until(processes[0], "step    3/6")
    processes[1].send_signal(signal.SIGTERM)
    found = finish(processes)
    assert [code for code, _, _ in found] == [75, 75], found
    for code, _, err in finish(start_processes(warmed, 2, *flags)):
        assert code == 0, err
    assert_close_rows(warmed, one)
    ages = [row["rollout/staleness"] for row in read_rows(one)[:NUM_STEPS]]
    assert ages == [0, 1, 2, 2, 2, 2]


@pytest.mark.soak
def test_two_processes_train_the_adapters_that_one_does(tmp_path):
    """And go on with them after a signal."""
    one, two = tmp_path / "one", tmp_path / "two"
    flags = ("--config.lora.rank=4", f"--config.training.num_steps={NUM_STEPS}")
    devices = {"XLA_FLAGS": xla_flags(4)}
    succeed("launch.train", f"--config={TINY}", f"--workdir={one}", *flags, env=devices,
                     timeout=300)  # fmt: skip
    processes = start_processes(two, 2, *flags)
    read_until(processes[0], f"step    3/{NUM_STEPS}")
    processes[1].send_signal(signal.SIGTERM)
    found = finish(processes)
    assert [code for code, _, _ in found] == [75, 75], found
    for code, _, err in finish(start_processes(two, 2, *flags)):
        assert code == 0, err
    assert_close_rows(two, one)


@pytest.mark.soak
def test_four_processes_on_a_tensor_mesh_give_the_same_results(uninterrupted, warmed):
    flags = ("--config.mesh.tensor=2", "--config.mesh.fsdp=2")
    for code, _, err in finish(start_processes(warmed, 4, *flags, devices=1)):
        assert code == 0, err
    assert_close_rows(warmed, uninterrupted)


@pytest.mark.soak
@pytest.mark.parametrize("sequence", [1, 2])
def test_states_of_the_policy_are_measured_in_their_own_process(tmp_path, sequence):
    """If rows are split over both processes (mesh axis `sequence`), process 0 measures all."""
    flags = (
        "--config.hidden_states.source=policy", "--config.hidden_states.compare_every=1",
        "--config.hidden_states.dtype=float32",
        f"--config.mesh.sequence={sequence}", "--config.training.num_steps=2",
    )  # fmt: skip
    one, two = tmp_path / "one", tmp_path / "two"
    succeed("launch.train", f"--config={TINY}", f"--workdir={one}", *flags, timeout=300,
                     env={"XLA_FLAGS": xla_flags(2)})  # fmt: skip
    for code, _, err in finish(start_processes(two, 2, *flags, devices=1)):
        assert code == 0, err
    assert_close_rows(two, one)
    for row in read_rows(two)[:2]:
        assert row["rollout/hidden_state_mismatch/max"] < 1e-4  # both are float32


def lose_one(processes, who, number):
    """Kills one of two processes with a signal; the other reports it and ends."""
    processes[who].send_signal(number)
    asked = time.monotonic()
    other = processes[1 - who]
    _, err = other.communicate(timeout=60)
    took = time.monotonic() - asked
    processes[who].kill()
    finish(processes)
    assert other.returncode == EXIT_PEER_LOST, err
    line = err.strip().splitlines()[-1]
    assert f"process {who} (" in line and "is lost" in line and "last checkpoint" in line
    # A closed connection is noticed at once, silence after heartbeat_timeout_s=10.
    assert took < (10 if number == signal.SIGKILL else 25)


def resume(workdir, steps):
    """Runs the same command in both processes to the end."""
    found = finish(start_processes(workdir, 2))
    for code, _, err in found:
        assert code == 0, err
    assert re.search(rf"resumed .* at step {steps}\b", found[0][1])  # only process 0 prints


@pytest.mark.soak
def test_a_signal_ends_all_at_the_same_step_and_a_kill_ends_all(uninterrupted, warmed):
    """SIGTERM to one of two processes, later SIGKILL to one; the same command continues the run."""
    processes = start_processes(warmed, 2)
    read_until(processes[0], "step    2/6")
    processes[1].send_signal(signal.SIGTERM)
    found = finish(processes)
    assert [code for code, _, _ in found] == [75, 75], found
    assert "the same command resumes" in found[0][1]
    processes = start_processes(warmed, 2)
    read_until(processes[0], "step    4/6")
    lose_one(processes, 1, signal.SIGKILL)
    resume(warmed, "[2-5]")
    assert_same_run(warmed, uninterrupted, NUM_STEPS)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("who", "number"), [(0, signal.SIGKILL), (0, signal.SIGSTOP), (1, signal.SIGSTOP)]
)
def test_same_command_continues_after_a_lost_process(uninterrupted, warmed, who, number):
    processes = start_processes(warmed, 2)
    read_until(processes[0], "step    3/6")
    lose_one(processes, who, number)
    resume(warmed, "[1-5]")
    assert_same_run(warmed, uninterrupted, NUM_STEPS)


@pytest.mark.soak
def test_process_that_hangs_before_a_collective_ends_all(warmed):
    """The others wait inside a program, not in a gather; the deadline covers this too."""
    processes = start_processes(
        warmed, 2, "--config.distributed.phase_timeout_s=45", "--config.rollout.call_timeout_s=40",
        own_launcher={1: ("tests.launch.hung",)},
    )  # fmt: skip
    for code, _, err in finish(processes):
        assert code == EXIT_PEER_LOST, err
        line = err.strip().splitlines()[-1]
        assert "process 1 (" in line and "in 'update' for 4" in line
        assert "within distributed.phase_timeout_s=45 s" in line and "last checkpoint" in line


@pytest.mark.soak
def test_a_replica_killed_and_started_again_is_sent_the_weights_by_all(uninterrupted, warmed):
    """The owner cannot send the weights alone: every process takes part in gathering them."""
    replicas, addresses = map(list, zip(start_replica(), start_replica()))
    try:
        processes = start_processes(warmed, 2, f"--config.rollout.addresses={tuple(addresses)}")
        read_until(processes[0], "step    2/6")
        replicas[1].kill()
        replicas[1].communicate()
        replicas[1], _ = start_replica(port=addresses[1].split(":")[1])
        (code, out, err), (other_code, _, other_err) = finish(processes)
    finally:
        for process in replicas:
            process.kill()
            process.communicate()
    assert (code, other_code) == (0, 0), (err, other_err)
    assert "are sent again" in out
    last = pathlib.Path("checkpoints", str(NUM_STEPS))
    assert_same_state(warmed / last, uninterrupted / last)
    assert_close_rows(warmed, uninterrupted)


@pytest.mark.soak
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_it_resumes_with_another_number_of_processes_and_another_mesh(
    uninterrupted, warmed, before, after
):
    flag = "--config.training.num_steps=3"
    for code, _, err in finish(start_processes(warmed, before, flag, devices=before)):
        assert code == 0, err
    first = restore_on_host(warmed / "checkpoints" / "3" / "state")["params"]
    found = finish(start_processes(warmed, after, devices=after))
    assert [code for code, _, _ in found] == [0] * after, found
    out = found[0][1]
    assert re.search(r"resumed .* at step 3\b", out)
    changed = "setting changed since the run began: distributed.num_processes" in out
    assert changed == (after == 1)  # the run began with two
    rows, wanted = read_rows(warmed), read_rows(uninterrupted)
    for row, want in zip(rows[:-1], wanted[:-1], strict=True):  # the last row is an evaluation
        for key in ("reward/mean", "response/length/mean"):  # the same prompts and responses
            assert row[key] == pytest.approx(want[key]), (row["step"], key)
    last, expected = (
        restore_on_host(path / "checkpoints" / "6" / "state")["params"]
        for path in (warmed, uninterrupted)
    )
    # The change over three more steps, compared with the run on four devices.
    moved, apart = (
        np.sqrt(sum(np.sum((a - b) ** 2) for a, b in zip(*map(jax.tree.leaves, pair))))
        for pair in ((last, first), (last, expected))
    )
    assert moved > 0 and apart < 1e-2 * moved


@pytest.mark.soak
def test_slurm_environment_is_sufficient(uninterrupted, warmed):
    """Starts the tasks of one step on this machine, as srun does."""
    job = int(time.time()) % 100_000  # its port; SLURM_PORTS
    variables = {
        "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2",
        "XLA_FLAGS": xla_flags(2),
    }  # fmt: skip
    tasks = [
        start("launch.train", f"--config={TINY}", f"--workdir={warmed}",
              env=variables | {"SLURM_PROCID": str(task)})
        for task in range(2)
    ]  # fmt: skip
    for code, _, err in finish(tasks):
        assert code == 0, err
    assert_same_run(warmed, uninterrupted, NUM_STEPS)
