"""A run does not depend on the number of its replicas, nor on which of them join, leave or fail."""

import contextlib

import jax
import numpy as np
import pytest

from semrl_jax.models.of_config import build_policy
from semrl_jax.rollout.building import jax_engine
from semrl_jax.rollout.client import RolloutClient
from semrl_jax.runs import train
from tests.cases import refused
from tests.fixtures import read_rows, stable
from tests.launch.comparison import restore_on_host
from tests.rollout.embedded import EmbeddedReplica
from tests.tiny import tiny_config

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("rewarded")]
STEPS = 4
# They count what was sent, and what failures cost.
COUNTS = {
    f"rollout/{name}"
    for name in ("retries", "taken_over", "duplicates", "replica_failures", "weight_bytes",
                 "token_bytes", "state_bytes")
}  # fmt: skip


@pytest.fixture
def config():
    config = tiny_config()
    config.training.num_steps = STEPS
    config.evaluation.every_steps = 3
    config.rollout.groups_per_call = 1
    config.rollout.sync_wait_s = 20.0
    return config


@pytest.fixture
def start(config, monkeypatch):
    """Starts a JAX replica."""
    with contextlib.ExitStack() as stack:
        policy, tokenizer = build_policy(config)

        def start():
            engine = jax_engine(config, policy, tokenizer)
            replica = EmbeddedReplica(engine, token="a-token-for-tests")
            stack.callback(replica.close, 0.0)
            return replica

        monkeypatch.setenv("SEMRL_ROLLOUT_TOKEN", "a-token-for-tests")
        yield start


@pytest.mark.parametrize("parts", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_replicas_that_join_leave_and_fail(config, start, tmp_path, monkeypatch, report, parts):
    if parts > 1:  # of two batches at the same time
        config.rollout.max_staleness, config.rollout.in_flight = parts, "keep"
    config.rollout.addresses = (start().address,)
    assert train(config, str(tmp_path / "one")) == 0

    first, second, third = start(), start(), start()
    file = tmp_path / "replicas"
    file.write_text(f"# at the start\n{first.address}\n{second.address}\n")
    sync, generate = RolloutClient.sync_weights, RolloutClient.generate
    sampled_by = {}

    def sync_weights(client, *args, step, **options):
        if step == 1:
            file.write_text(f"{first.address}\n{second.address}\n{third.address}  # new\n")
        if step == 3:
            file.write_text(f"{second.address}\n{third.address}\n")
        return sync(client, *args, step=step, **options)

    def generate_and_kill(client, *args, version, **options):
        for rollout in generate(client, *args, version=version, **options):
            sampled_by.setdefault(version.step, set()).add(rollout.replica_id)
            yield rollout
            if version.step == 2:
                second.close(0.0)

    monkeypatch.setattr(RolloutClient, "sync_weights", sync_weights)
    monkeypatch.setattr(RolloutClient, "generate", generate_and_kill)
    config.rollout.addresses, config.rollout.addresses_file = (), str(file)
    assert train(config, str(tmp_path / "several")) == 0
    assert [len(sampled_by[step]) for step in (0, 1)] == [2, 3]

    one, several = (read_rows(tmp_path / name) for name in ("one", "several"))
    assert any("rollout/replica/1/tokens_per_s" in row for row in several)
    assert "time/replica/2/busy_fraction" in several[2]
    assert not any("replica/0" in key for row in one for key in row)

    def numbers(rows):
        return [{k: v for k, v in row.items() if k not in COUNTS} for row in stable(rows)]

    assert numbers(one) == numbers(several)
    states = [
        restore_on_host(tmp_path / name / "checkpoints" / str(STEPS) / "state")
        for name in ("one", "several")
    ]
    jax.tree.map(np.testing.assert_array_equal, *states)
    assert (tmp_path / "several" / "curves.png").stat().st_size > 0


def test_a_file_that_cannot_be_used_at_the_start_is_refused(config, tmp_path):
    config.rollout.addresses_file = str(tmp_path / "nowhere")
    refused(r"rollout\.addresses_file=.*cannot be read", train, config, str(tmp_path / "run"))
    assert list(tmp_path.iterdir()) == []
