"""Trainer and replicas with the same devices in turns: the same run, with less on the devices."""

import gc
import os
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

from semrl_jax.models.of_config import build_policy
from semrl_jax.models.pinned import PINNED
from semrl_jax.rollout.building import jax_engine
from semrl_jax.runs import lifecycle, train
from semrl_jax.sampling.sampler import Sampler
from semrl_jax.sampling.source import Now
from semrl_jax.training import loop
from semrl_jax.training.offload import local_bytes
from tests.fixtures import read_rows, scores_by_length, stable
from tests.launch.comparison import restore_on_host
from tests.rollout.embedded import EmbeddedReplica
from tests.tiny import tiny_config

TOKEN = "a-token-for-tests"
OF_TURNS = {"policy/offloaded_bytes", "rollout/weight_bytes"}  # the latter depend on the place


def in_turns(address=""):
    config = tiny_config()
    config.training.num_steps = 2
    config.rollout.in_turns = True
    config.training.export = "float32"
    if address:
        config.rollout.addresses = (address,)
    return config


def on_devices(params, earlier):
    """Bytes of all arrays on devices that are shaped like parameters, such as their moments.

    Those of `earlier` tests do not count.
    """
    gc.collect()
    shapes, known = {leaf.shape for leaf in jax.tree.leaves(params)}, set(map(id, earlier))
    arrays = [array for array in jax.live_arrays() if array.shape in shapes]
    here = (array for array in arrays if array.sharding.memory_kind != PINNED)
    return sum(local_bytes(array) for array in here if id(array) not in known)


def numbers(workdir):
    rows = stable(read_rows(workdir))
    kept = [{k: v for k, v in row.items() if k not in OF_TURNS} for row in rows]
    return kept, restore_on_host(workdir / "checkpoints" / "2" / "state")


@pytest.mark.slow
@pytest.mark.usefixtures("rewarded", "reports_where_looked_at")
def test_a_run_in_turns_is_the_same_run(tmp_path, monkeypatch):
    """In this process; and with a replica, whose trainer is killed while the replica sleeps."""
    held, offer, earlier = [], Now.offer, jax.live_arrays()

    def offered(source, weights, step):
        held.append(on_devices(weights[-1], earlier))
        offer(source, weights, step)

    monkeypatch.setattr(Now, "offer", offered)
    straight = in_turns()
    straight.rollout.in_turns = False
    assert train(straight, str(tmp_path / "straight")) == 0
    assert train(in_turns(), str(tmp_path / "turns")) == 0
    rows = read_rows(tmp_path / "turns")[:2]
    for row in rows:
        # Parameters, moments and the reference, of which the straight run has as many bytes there.
        assert 0 < row["policy/offloaded_bytes"] <= min(held[:3])
        assert row["time/to_host_s"] > 0 and row["time/to_device_s"] > 0
    assert held[3:] == [0, 0, 0]

    policy, tokenizer = build_policy(straight)
    engine = jax_engine(straight, policy, tokenizer)
    monkeypatch.setenv("SEMRL_ROLLOUT_TOKEN", TOKEN)
    with EmbeddedReplica(engine, token=TOKEN) as replica:
        command = [sys.executable, "-m", "tests.runs.test_turns", replica.address]
        killed = subprocess.run([*command, str(tmp_path / "killed")], capture_output=True)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        assert len(read_rows(tmp_path / "killed")) == 1 and engine._params is None
        save, weights = lifecycle.save_trained, []

        def save_trained(*given):
            weights.append(engine._params)
            save(*given)

        monkeypatch.setattr(lifecycle, "save_trained", save_trained)
        assert train(in_turns(replica.address), str(tmp_path / "killed")) == 0
        assert weights == [None]  # the export brings all parameters to the devices
    expected = numbers(tmp_path / "straight")
    for name in ("turns", "killed"):
        rows, state = numbers(tmp_path / name)
        assert rows == expected[0]
        jax.tree.map(np.testing.assert_array_equal, state, expected[1])


def train_and_be_killed(address, workdir):
    """Trains as the test does, and is killed between the second sampling and its update."""
    release, num_released = Sampler.release_weights, 0

    def release_weights(sampler, clock):
        nonlocal num_released
        release(sampler, clock)
        num_released += 1
        if num_released == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    Sampler.release_weights = release_weights
    loop.group_rewards = scores_by_length
    train(in_turns(address), workdir)


if __name__ == "__main__":
    train_and_be_killed(*sys.argv[1:])
