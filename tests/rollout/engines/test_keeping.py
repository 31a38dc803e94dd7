"""Turns that continue from the caches of the turns before: the right numbers, and the same ones."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from semrl_jax import models
from semrl_jax.rollout.engines import decoding
from semrl_jax.types import HiddenStateParams, SamplingParams
from tests.rollout.engines.responses import as_bytes, full_forward, make_requests
from tests.rollout.engines.test_jax import (
    EOS,
    PENALISED,
    STOP,
    assert_penalised,
    assert_raw_logprobs,
    params,
    policy,
    synced_client,
    synced_replicas,
)  # fmt: skip

_ = params, policy  # fixtures
SAMPLING = SamplingParams(40, eos_token_ids=(EOS,), stop_token_ids=(STOP,))
STATES = HiddenStateParams((0, -1), "float32")


def go_on(rollouts, requests, turn, all_of_them=False):
    """The requests of the next turn: every fifth episode ends, the others get 1 to 40 tokens."""
    by_id = {rollout.sample_id: rollout for rollout in rollouts}
    found = []
    for request in requests:
        rng = np.random.default_rng((turn, request.seed))
        if rng.integers(5) == 0 and not all_of_them:
            continue
        others = rng.integers(3, 31, rng.integers(1, 41)).astype(np.int32)
        ids = [request.prompt_ids, by_id[request.sample_id].response_ids, others]
        found.append(
            dataclasses.replace(request, prompt_ids=np.concatenate(ids), seed=request.seed + turn)
        )
    return found


def play(
    client, version, requests, num_turns=4, sampling=SAMPLING, states=STATES, between=None,
    keep=True,
):  # fmt: skip
    """The rollouts of each turn."""
    turns = []
    for turn in range(1, num_turns + 1):
        turns.append(list(client.generate(requests, sampling, states, version=version, keep=keep)))
        requests = go_on(turns[-1], requests, turn)
        if between is not None:
            between()
    return turns


def renamed(requests):
    return [dataclasses.replace(each, sample_id=f"other/{each.sample_id}") for each in requests]


@pytest.fixture
def prefilled(monkeypatch):
    """The prompts of each prefill."""
    found, real = [], decoding.prefill_and_insert

    def spy(params, slots, token_ids, segment_ids, *arguments, **options):
        found.append(int((np.asarray(segment_ids).sum(1) > 1).sum()))
        return real(params, slots, token_ids, segment_ids, *arguments, **options)

    monkeypatch.setattr(decoding, "prefill_and_insert", spy)
    return found


@pytest.mark.slow
def test_later_turns_have_the_numbers_of_the_full_pass(policy, params, prefilled):
    """Groups of 4, ragged turns, slots that shrink; only the first turn is prefilled."""
    with synced_client(policy, params, chunk=7) as (client, version):
        turns = play(client, version, make_requests())
    assert sum(prefilled) == 5  # prompts
    assert len(turns[-1]) > 5 and len({len(r.response_ids) for r in turns[-1]}) > 3
    for rollouts in turns:
        for rollout, states, logprobs in full_forward(policy, params, rollouts):
            np.testing.assert_allclose(rollout.rollout_logprobs, logprobs, atol=1e-4)
            scale = np.abs(states).max()
            np.testing.assert_allclose(
                rollout.hidden_states[:, 1] / scale, states / scale, atol=1e-5
            )
            # The first layer reads the embedding of the token before each response token.
            before = np.append(rollout.prompt_ids, rollout.response_ids)[-len(states) - 1 : -1]
            embedding = np.asarray(params["embed"]["embedding"])[before]
            np.testing.assert_array_equal(rollout.hidden_states[:, 0], embedding)


@pytest.mark.slow
def test_penalties_count_the_turns_before_as_the_prompt(policy, params, prefilled):
    with synced_client(policy, params, chunk=7) as (client, version):
        turns = play(client, version, make_requests(3, 4), num_turns=3, sampling=PENALISED)
    assert sum(prefilled) == 3
    for rollouts in turns:
        assert_penalised(policy, params, rollouts)


@pytest.mark.slow
@pytest.mark.parametrize(
    "family",
    [
        "llama",
        *(
            pytest.param(name, marks=pytest.mark.soak)
            for name in ("qwen3", "gemma3_text", "qwen3_moe")
        ),
    ],
)
def test_turns_of_families_have_the_numbers_of_the_full_pass(family, prefilled):
    """Layers with a window of 8 and without, where the family has them."""
    config = models.random_config(
        family, vocab_size=31, hidden_size=32, intermediate_size=48, num_layers=3, num_heads=4,
        num_kv_heads=2, head_dim=16, tie_embeddings=family == "gemma3_text",
    )  # fmt: skip
    if config.sliding_window:
        config = dataclasses.replace(config, sliding_window=8)
    policy = models.Policy(config)
    params = jax.tree.map(lambda leaf: leaf * 1.5, policy.init(jax.random.key(3)))
    with synced_client(policy, params, chunk=7) as (client, version):
        turns = play(client, version, make_requests(3, 4), num_turns=3)
    assert sum(prefilled) == 3
    for rollouts in turns:
        assert_raw_logprobs(policy, params, rollouts)


@pytest.mark.soak
def test_a_cache_of_bfloat16_is_kept(policy, params, prefilled):
    policy = dataclasses.replace(policy, compute_dtype="bfloat16")
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32), params)
    exact = dataclasses.replace(policy, compute_dtype="float32")
    errors = {}
    for keep in (True, False):
        with synced_client(policy, params, chunk=7) as (client, version):
            turns = play(client, version, make_requests(), keep=keep)
        if keep:
            assert sum(prefilled) == 5
        found = full_forward(exact, rounded, turns[-1])
        errors[keep] = np.concatenate([np.abs(r.rollout_logprobs - right) for r, _, right in found])
    # bfloat16 has 8 bits, and logits are up to 10. A kept cache adds nothing to the rounding.
    assert errors[True].max() < 0.25 and errors[True].mean() < 1.5 * errors[False].mean() < 0.1


@pytest.mark.slow
def test_turns_repeat_bit_for_bit_whatever_ran_before_and_between(policy, params):
    """A run that was killed repeats its batch in this way. Other calls stand for evaluations."""
    requests = make_requests(8, 4)
    with synced_client(policy, params, chunk=7) as (client, version):
        first = play(client, version, requests)

        def evaluate():
            others = renamed(make_requests(3, 2, seed=9))
            list(client.generate(others, SAMPLING, STATES, version=version))

        again = play(client, version, requests, between=evaluate)
    with synced_client(policy, params, chunk=7) as (client, version):
        fresh = play(client, version, requests)
    assert [*map(as_bytes, first)] == [*map(as_bytes, again)] == [*map(as_bytes, fresh)]


@pytest.mark.slow
def test_only_what_still_holds_is_continued(policy, params, prefilled):
    """Other weights, other tokens, or more responses than slots: these prompts are prefilled."""
    requests = make_requests(2, 2)

    def prompts_prefilled(client, version, requests, **options):
        prefilled.clear()
        rollouts = list(client.generate(requests, SAMPLING, version=version, **options))
        return rollouts, sum(prefilled)

    with synced_client(policy, params, max_batch=8) as (client, version):
        first, _ = prompts_prefilled(client, version, requests, keep=True)
        later = go_on(first, requests, 2, all_of_them=True)
        changed = later[0].prompt_ids.copy()
        changed[len(requests[0].prompt_ids)] = 3 + changed[len(requests[0].prompt_ids)] % 28
        later[0] = dataclasses.replace(later[0], prompt_ids=changed)
        second, count = prompts_prefilled(client, version, later, keep=True)
        assert count == 1
        third = go_on(second, later, 3, all_of_them=True)
        prompts_prefilled(client, version, renamed(make_requests(6, 1)), keep=True)
        _, count = prompts_prefilled(client, version, third)  # 10 responses do not fit 8 slots
        assert count == 4
        _, count = prompts_prefilled(client, version, third)  # nor was anything kept
        assert count == 4
        prompts_prefilled(client, version, requests, keep=True)
        specs = models.tensor_specs(policy.config, "float32")
        halved = jax.tree.map(lambda leaf: leaf / 2, params)
        version = client.sync_weights(
            specs,
            lambda: (a for _, a in models.iterate_hf_tensors(halved, policy.config, "float32")),
            step=1,
        )
        rollouts, count = prompts_prefilled(client, version, later[1:])
        assert count == 3
    assert_raw_logprobs(policy, halved, rollouts)


@pytest.mark.soak
def test_several_replicas_repeat_their_turns(policy, params):
    """Groups may change their replica between turns, always in the same calls."""
    found = []
    for _ in range(2):
        with synced_replicas(policy, params, count=2, chunk=7) as (_, client, version):
            found.append([as_bytes(turn) for turn in play(client, version, make_requests(6, 4))])
    assert found[0] == found[1]
