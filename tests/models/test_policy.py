"""The policy against transformers, and its cached path against its full one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from semrl_jax import models
from tests.models.caches import widened
from tests.models.conftest import make_pair


def torch_outputs(pair, padded):
    with torch.no_grad():
        return pair.torch_model(**padded.torch_arguments(), output_hidden_states=True)


def relative_error(actual, expected):
    """Largest difference over the largest value: both sides are float32 sums of the same terms in
    another order, so the error scales with the values, not with each element."""
    return np.abs(np.asarray(actual) - expected).max() / np.abs(expected).max()


def test_states_and_logits_match_transformers(pair, padded):
    expected = torch_outputs(pair, padded)
    states = jax.jit(pair.policy.final_states)(
        pair.params, padded.token_ids, padded.positions, padded.segment_ids
    )
    valid = padded.valid
    hidden = expected.hidden_states[-1].numpy()
    assert relative_error(np.asarray(states)[valid], hidden[valid]) < 1e-5
    logits = pair.policy.logits(pair.params, states.reshape(-1, 64)).reshape(4, 24, 97)
    assert relative_error(np.asarray(logits)[valid], expected.logits.numpy()[valid]) < 1e-5


def test_logprobs_and_entropy_match_transformers_in_any_block(pair, padded):
    """A block of 500 logits holds 5 tokens; the last block is padded."""
    expected = torch_outputs(pair, padded)
    log_softmax = torch.log_softmax(expected.logits / 0.7, -1)
    states = jnp.asarray(expected.hidden_states[-1].numpy())
    for max_logits in (500, 2**24):
        logprobs, entropy = pair.policy.token_logprobs(
            pair.params, states, padded.token_ids, temperature=0.7, max_logits=max_logits
        )
        chosen = log_softmax.gather(-1, padded.torch_arguments()["input_ids"].long()[..., None])[
            ..., 0
        ]
        # 1e-5 nats on log-probabilities near -10: float32 rounding of logits near 30.
        np.testing.assert_allclose(logprobs, chosen.numpy(), atol=1e-5, rtol=1e-5)
        want = -(log_softmax.exp() * log_softmax).sum(-1).numpy()
        np.testing.assert_allclose(entropy, want, atol=1e-5, rtol=1e-5)


def mean_logprob(policy, params, padded):
    states = policy.final_states(params, padded.token_ids, padded.positions, padded.segment_ids)
    logprobs, _ = policy.token_logprobs(params, states[:, :-1], padded.token_ids[:, 1:])
    counted = padded.valid[:, 1:] & padded.valid[:, :-1]
    return jnp.sum(jnp.where(counted, logprobs, 0.0)) / counted.sum()


def test_gradient_of_mean_logprob_matches_torch(pair, padded):
    gradient = jax.jit(jax.grad(lambda params: mean_logprob(pair.policy, params, padded)))(
        pair.params
    )
    model = pair.torch_model
    model.zero_grad()
    logits = model(**padded.torch_arguments()).logits
    logprobs = torch.log_softmax(logits[:, :-1], -1).gather(
        -1, padded.torch_arguments()["input_ids"][:, 1:].long()[..., None]
    )[..., 0]
    counted = torch.tensor(padded.valid[:, 1:] & padded.valid[:, :-1])
    (logprobs * counted).sum().div(counted.sum()).backward()
    expected = {name: p.grad.numpy() for name, p in model.named_parameters()}
    for spec, actual in models.iterate_hf_tensors(gradient, pair.policy.config, "float32"):
        # 1e-4: gradients are sums over 60 tokens through three layers in another order.
        assert relative_error(actual, expected[spec.name]) < 1e-4, spec.name


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["full", "dots"])
def test_remat_changes_no_gradient(pair, padded, remat):
    policy = dataclasses.replace(pair.policy, remat=remat)
    plain, recomputed = (
        jax.jit(jax.grad(lambda params, p=p: mean_logprob(p, params, padded)))(pair.params)
        for p in (pair.policy, policy)
    )
    # Recomputation may fuse differently: float32 rounding only.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), plain, recomputed
    )


def test_prefill_and_decode_equal_the_full_pass(pair):
    """Left-padded prompts of 3..6 tokens, then 5 tokens one by one."""
    random = np.random.default_rng(1)
    policy, num_new, columns = pair.policy, 5, 6
    lengths = np.array([6, 3, 5])
    prompts = np.zeros((3, columns), np.int32)
    segments = np.zeros((3, columns), np.int32)
    for row, length in enumerate(lengths):
        prompts[row, -length:] = random.integers(2, 97, length)
        segments[row, -length:] = 1
    new = random.integers(2, 97, (3, num_new)).astype(np.int32)
    positions = np.maximum(np.cumsum(segments, axis=1) - 1, 0)
    state, inputs, cache, _ = jax.jit(policy.prefill)(pair.params, prompts, positions, segments)
    cache = widened(cache, num_new)
    states, layer_inputs = [state], [inputs]
    decode = jax.jit(policy.decode)
    for index in range(num_new):
        step = new[:, index], lengths + index, np.int32(columns + index), cache
        state, inputs, cache = decode(pair.params, *step)
        states.append(state)
        layer_inputs.append(inputs)
    for row, length in enumerate(lengths):
        whole = np.concatenate([prompts[row, -length:], new[row]])[None]
        with torch.no_grad():
            expected = pair.torch_model(torch.tensor(whole), output_hidden_states=True)
        want = expected.hidden_states[-1][0, length - 1 :].numpy()
        got = np.stack([np.asarray(s[row]) for s in states])
        assert relative_error(got, want) < 1e-5
        for layer in range(policy.config.num_layers):
            want = expected.hidden_states[layer][0, length - 1 :].numpy()
            got = np.stack([np.asarray(i[row, layer]) for i in layer_inputs])
            assert relative_error(got, want) < 1e-5


def test_segments_do_not_see_each_other(pair):
    """Two sequences packed in one row give the states of the two rows apart."""
    random = np.random.default_rng(2)
    first, second = random.integers(2, 97, 7), random.integers(2, 97, 9)
    packed = np.concatenate([first, second])[None].astype(np.int32)
    positions = np.concatenate([np.arange(7), np.arange(9)])[None].astype(np.int32)
    segments = np.array([[1] * 7 + [2] * 9], np.int32)
    final_states = jax.jit(pair.policy.final_states)
    states = np.asarray(final_states(pair.params, packed, positions, segments))
    for ids, part in ((first, states[:, :7]), (second, states[:, 7:])):
        alone = final_states(
            pair.params,
            ids[None].astype(np.int32),
            np.arange(len(ids), dtype=np.int32)[None],
            np.ones((1, len(ids)), np.int32),
        )
        assert relative_error(part, np.asarray(alone)) < 1e-5


def test_logits_are_computed_in_blocks(tmp_path):
    """The compiled gradient needs a fraction of the [B, T, V] float32 logits."""
    pair = make_pair(tmp_path, vocab_size=20_000, hidden_size=32, num_hidden_layers=1)
    token_ids = jnp.zeros((8, 128), jnp.int32)
    states = jnp.zeros((8, 128, 32))

    def loss(params, states):
        logprobs, entropy = pair.policy.token_logprobs(
            params, states, token_ids, max_logits=64 * 20_000
        )
        return jnp.sum(logprobs) + jnp.sum(entropy)

    compiled = jax.jit(jax.grad(loss)).lower(pair.params, states).compile()
    whole = 8 * 128 * 20_000 * 4
    assert compiled.memory_analysis().temp_size_in_bytes < whole / 2


@pytest.mark.slow
def test_bfloat16_compute_keeps_float32_parameters_and_logprobs(pair, padded):
    policy = dataclasses.replace(pair.policy, compute_dtype="bfloat16")
    states = policy.final_states(
        pair.params, padded.token_ids, padded.positions, padded.segment_ids
    )
    assert states.dtype == jnp.bfloat16
    logprobs, _ = policy.token_logprobs(pair.params, states, padded.token_ids)
    assert logprobs.dtype == jnp.float32
    assert all(
        leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(policy.init(jax.random.key(0)))
    )
    exact = pair.policy.final_states(
        pair.params, padded.token_ids, padded.positions, padded.segment_ids
    )
    # bfloat16 rounds at 2^-8 in each of some ten products on the way.
    assert (
        relative_error(
            np.asarray(states, np.float32)[padded.valid], np.asarray(exact)[padded.valid]
        )
        < 10 * 2**-8
    )
