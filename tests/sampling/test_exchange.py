"""Which processes sample, and the exchange of scored responses between processes."""

import dataclasses

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from semrl_jax.metrics import Measurement, MetricKey
from semrl_jax.models import AXES
from semrl_jax.models.hosts import processes_of
from semrl_jax.rewards import Verdict
from semrl_jax.sampling.exchange import pack_scored, sampling_processes, share_of, unpack_scored
from semrl_jax.sampling.scoring import Scored, ScoredRollout
from semrl_jax.types import Rollout, VersionSpan, WeightVersion


@pytest.mark.parametrize(
    ("processes", "shape", "sampling"),
    [
        ([0, 0, 1, 1], (1, 4, 1, 1, 1), (0, 1)),
        ([0, 0, 1, 1], (1, 2, 1, 2, 1), (0, 1)),
        ([0, 0, 1, 1], (1, 1, 1, 4, 1), (0,)),  # one shard over both
        ([0, 1, 2, 3], (2, 1, 1, 2, 1), (0, 2)),
        ([3, 2, 1, 0], (2, 1, 2, 1, 1), (0, 2)),
        ([0, 0, 1, 1], (1, 1, 1, 2, 2), (0,)),  # both have a device of each shard
        ([0, 1, 2, 3], (1, 1, 1, 1, 4), (0, 1, 2, 3)),
    ],
)
def test_the_lowest_process_of_each_data_shard_samples(processes, shape, sampling):
    processes = np.reshape(processes, shape)
    assert sampling_processes(processes) == sampling
    for num_addresses in (1, 2, 3):  # one replica serves one process
        assert sampling_processes(processes, num_addresses) == sampling[:num_addresses]


def test_a_single_process_samples_everything():
    mesh = Mesh(np.array(jax.devices()).reshape(2, 2, 1, 2, 1), AXES)
    assert sampling_processes(processes_of(mesh), num_addresses=2) == (0,)
    assert share_of(range(7), (0,), 0) == range(7)


@pytest.mark.parametrize("count", [0, 1, 2, 7, 12])
def test_shares_are_consecutive_and_even(count):
    sampling = (0, 2, 5)
    shares = [share_of(range(count), sampling, process) for process in range(6)]
    assert [i for share in shares for i in share] == list(range(count))
    assert not shares[1] and not shares[3] and not shares[4]
    sizes = [len(shares[process]) for process in sampling]
    assert max(sizes) - min(sizes) <= 1


def columns(rng, count):
    """Float32 and float64 columns; NaN where not valid."""
    valid = np.arange(count) % 2 == 0
    values = np.where(valid, rng.normal(size=count), np.nan)
    return {
        MetricKey("effective_rank"): Measurement(values, valid),
        MetricKey("curvature", "velocity", 3): Measurement(values.astype(np.float32), ~valid),
    }


def scored(rng, index, measured, raw):
    length = int(rng.integers(0, 5))
    version = WeightVersion("run", "attempt", 3, "ab" * 32)
    mask = rng.random(length) < 0.5 if index % 2 else None
    rollout = Rollout(
        sample_id=f"train/3/{index}/0", group_id=index, sample_index=0,
        prompt_ids=rng.integers(0, 99, 1 + index).astype(np.int32),
        response_ids=rng.integers(0, 99, length).astype(np.int32),
        rollout_logprobs=rng.normal(size=length).astype(np.float32),
        rollout_raw_logprobs=rng.normal(size=length).astype(np.float32) if raw else None,
        finish_reason="eos", versions=(VersionSpan(version, 0, length),), replica_id="r",
        generate_s=0.1, response_mask=mask,
        effective_ranks=rng.normal(size=length // 2).astype(np.float32) if measured else None,
        turn_rewards=rng.normal(size=index).astype(np.float32) if raw else None,
        turn_effective_rank=np.array([np.nan, 2.5], np.float32)[:index] if raw else None,
        routed_experts=rng.integers(0, 9, (length + index, 3, 2), np.uint8) if measured else None,
        step_ends=np.arange(index, dtype=np.int32) if measured else None,
        step_rewards=rng.normal(size=index).astype(np.float32) if measured else None,
        environment_error="timeout: 2 s" * raw, environment_s=0.1 * index,
    )  # fmt: skip
    verdict = Verdict(0.5, True, False, None, "timeout: 2 s", {"a": 1 / 3, "b": -1.0})
    series = {"curvature": rng.normal(size=length).astype(np.float32)} if measured else {}
    return ScoredRollout(rollout, "täxt\n\x00", "42", verdict, series)


@pytest.mark.parametrize(("count", "measured"), [(0, False), (1, True), (5, False), (5, True)])
def test_packing_and_unpacking_keeps_every_bit(count, measured):
    rng = np.random.default_rng(count)
    items = [scored(rng, i, measured=i % 2 == 0, raw=i % 3 == 0) for i in range(count)]
    means = rng.normal(size=(count, 2, 4)).astype(np.float32) if measured else None
    before = Scored(items, columns(rng, count), means)
    after = unpack_scored(pack_scored(before))
    assert len(after) == count
    assert (after.mean_states is None) is not measured
    np.testing.assert_equal(after.mean_states, before.mean_states)
    assert after.metrics.keys() == before.metrics.keys()
    for key, (values, valid) in before.metrics.items():
        assert [x.dtype for x in after.metrics[key]] == [values.dtype, valid.dtype]
        np.testing.assert_equal(after.metrics[key], Measurement(values, valid))
    for a, b in zip(after, before):
        for item_a, item_b in ((a, b), (a.rollout, b.rollout)):
            for field in dataclasses.fields(item_a):
                actual, expected = getattr(item_a, field.name), getattr(item_b, field.name)
                if field.name == "rollout":
                    continue
                if field.name == "series":
                    assert [x.dtype for x in actual.values()] == ["float32"] * len(expected)
                if isinstance(expected, np.ndarray):
                    assert actual.dtype == expected.dtype
                np.testing.assert_equal(actual, expected)
