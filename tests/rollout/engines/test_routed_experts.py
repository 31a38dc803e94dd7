"""The experts that the JAX engine says tokens went to are those of a full pass of the model."""

import asyncio
import dataclasses

import jax
import numpy as np
import pytest

from semrl_jax import models
from semrl_jax.rollout.building import engine_mesh
from semrl_jax.rollout.engines.jax import JaxEngine
from semrl_jax.rollout.wire.codec import GenerateCall, NotOffered, check_call
from semrl_jax.types import HiddenStateParams, SamplingParams, WeightVersion
from tests.rollout.engines.responses import as_bytes, make_requests
from tests.rollout.engines.test_jax import synced_client
from tests.rollout.engines.test_keeping import SAMPLING, go_on

CONFIG = models.DecoderConfig(
    vocab_size=31, hidden_size=32, intermediate_size=48, num_layers=3, num_heads=2,
    num_kv_heads=2, head_dim=16, model_type="qwen3_moe",
    experts=models.Experts(6, 2, 24, normalize_weights=True, dense_layers=(1,)),
)  # fmt: skip
VERSION = WeightVersion("run", "attempt", 0, "digest")


def made(config=CONFIG):
    policy = models.Policy(config)
    params = policy.init(jax.random.key(3))
    return policy, jax.tree.map(lambda leaf: leaf * 2.0, params)  # so that lengths vary


def assert_of_full_pass(policy, params, rollouts):
    """All tokens but the last have the experts of one uncached pass over prompt and response."""
    sequences = [np.concatenate([r.prompt_ids, r.response_ids]) for r in rollouts]
    ids, segments = np.zeros((2, len(sequences), max(map(len, sequences))), np.int32)
    for row, sequence in enumerate(sequences):  # on the left: the last column is a token
        ids[row, -len(sequence) :], segments[row, -len(sequence) :] = sequence, 1
    positions = np.maximum(np.cumsum(segments, axis=1) - 1, 0)
    expected = np.asarray(jax.jit(policy.prefill)(params, ids, positions, segments).experts)
    for row, rollout in enumerate(rollouts):
        assert rollout.routed_experts.dtype == np.uint8
        wanted = expected[row, -len(sequences[row]) : -1]
        np.testing.assert_array_equal(rollout.routed_experts, wanted)
    assert len(np.unique(expected)) == policy.config.experts.num_experts


@pytest.mark.slow
def test_experts_are_those_of_the_full_pass_over_the_wire():
    """Ragged prompts and responses, 8 slots for 20 responses; one layer of three is dense."""
    policy, params = made()
    with synced_client(policy, params, max_batch=8) as (client, version):
        options = {"version": version, "routed_experts": True}
        rollouts = list(client.generate(make_requests(), SAMPLING, **options))
        assert len({len(r.response_ids) for r in rollouts}) > 3
        assert_of_full_pass(policy, params, rollouts)
        expected = sum(r.routed_experts.nbytes for r in rollouts)
        lengths = [len(r.prompt_ids) + len(r.response_ids) - 1 for r in rollouts]
        assert client.counters["state_bytes"] == expected == sum(lengths) * 2 * 2
        plain = list(client.generate(make_requests(), SAMPLING, version=version))
        assert as_bytes(plain) == as_bytes(rollouts)  # asking changes no token
        assert all(rollout.routed_experts is None for rollout in plain)


@pytest.mark.slow
def test_a_turn_that_continues_a_cache_has_the_experts_of_all_tokens():
    policy, params = made()
    requests = make_requests(2, 2)
    with synced_client(policy, params) as (client, version):
        options = {"version": version, "keep": True}
        for turn in range(1, 4):
            found = list(client.generate(requests, SAMPLING, routed_experts=True, **options))
            assert_of_full_pass(policy, params, found)
            requests = go_on(found, requests, turn, all_of_them=True)
        found = list(client.generate(requests, SAMPLING, **options))  # nobody asks for them,
        requests = go_on(found, requests, 4, all_of_them=True)
        found = list(client.generate(requests, SAMPLING, routed_experts=True, **options))
        assert_of_full_pass(policy, params, found)  # so that all tokens are computed again


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param((2, 2), marks=pytest.mark.slow),
        *(pytest.param(shape, marks=pytest.mark.soak) for shape in ((1, 2), (2, 1))),
    ],
)
def test_experts_are_the_same_on_several_devices(shape):
    config = dataclasses.replace(CONFIG, vocab_size=32)
    policy, params = made(config)
    engine = JaxEngine(policy, mesh=engine_mesh(config, data=shape[0], tensor=shape[1]))
    engine.begin_weight_update(models.tensor_specs(config, "float32"))
    tensors = models.iterate_hf_tensors(params, config, "float32")
    engine.load_arrays((spec.name, array) for spec, array in tensors)
    call = GenerateCall(
        tuple(make_requests(4, 2)), SAMPLING, HiddenStateParams(), VERSION, routed_experts=True
    )

    async def generated():
        await engine.commit_weight_update(VERSION)
        return [rollout async for rollout in engine.generate(call)]

    assert_of_full_pass(policy, params, asyncio.run(generated()))
    engine.close()


def test_a_dense_model_has_no_experts_to_send():
    dense = dataclasses.replace(CONFIG, model_type="qwen3", experts=None)
    engine = JaxEngine(models.Policy(dense))
    call = GenerateCall(
        tuple(make_requests(1, 1)), SamplingParams(1), HiddenStateParams(), VERSION,
        routed_experts=True,
    )  # fmt: skip
    with pytest.raises(NotOffered, match=r"routed_experts are not sent by this replica; set"):
        check_call(call, engine.describe())
