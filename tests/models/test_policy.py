"""The policy against transformers, and its cached path against its full one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from semrl_jax import models
from tests.models.conftest import make_pair


def torch_outputs(pair, padded):
    with torch.no_grad():
        return pair.torch_model(**padded.torch_arguments(), output_hidden_states=True)


def relative_error(actual, expected):
    """Largest difference over the largest value: both sides are float32 sums of the same terms in
    another order, so the error scales with the values, not with each element."""
    return np.abs(np.asarray(actual) - expected).max() / np.abs(expected).max()


def test_logprobs_and_entropy_match_transformers_in_any_block(pair, padded):
    """A block of 500 logits holds 5 tokens; the last block is padded."""
    expected = torch_outputs(pair, padded)
    log_softmax = torch.log_softmax(expected.logits / 0.7, -1)
    states = jnp.asarray(expected.hidden_states[-1].numpy())
    for max_logits in (500, 2**24):
        logprobs, entropy = pair.policy.token_logprobs(
            pair.params, states, padded.token_ids, temperature=0.7, max_logits=max_logits
        )
        ids = padded.torch_arguments()["input_ids"].long()
        chosen = log_softmax.gather(-1, ids[..., None])[..., 0]
        # 1e-5 nats on log-probabilities near -10: float32 rounding of logits near 30.
        np.testing.assert_allclose(logprobs, chosen.numpy(), atol=1e-5, rtol=1e-5)
        want = -(log_softmax.exp() * log_softmax).sum(-1).numpy()
        np.testing.assert_allclose(entropy, want, atol=1e-5, rtol=1e-5)


def mean_logprob(policy, params, padded):
    states = policy.final_states(params, padded.token_ids, padded.positions, padded.segment_ids)
    logprobs, _ = policy.token_logprobs(params, states[:, :-1], padded.token_ids[:, 1:])
    counted = padded.valid[:, 1:] & padded.valid[:, :-1]
    return jnp.sum(jnp.where(counted, logprobs, 0.0)) / counted.sum()


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
    inputs = padded.token_ids, padded.positions, padded.segment_ids
    states = policy.final_states(pair.params, *inputs)
    assert states.dtype == jnp.bfloat16
    logprobs, _ = policy.token_logprobs(pair.params, states, padded.token_ids)
    assert logprobs.dtype == jnp.float32
    params = policy.init(jax.random.key(0))
    assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params))
    exact = np.asarray(pair.policy.final_states(pair.params, *inputs))[padded.valid]
    # bfloat16 rounds at 2^-8 in each of some ten products on the way.
    found = np.asarray(states, np.float32)[padded.valid]
    assert relative_error(found, exact) < 10 * 2**-8


@pytest.mark.parametrize("param_dtype", ["float32", "bfloat16"])
def test_bfloat16_keeps_the_gradient_of_frequent_tokens(param_dtype):
    """A sum of 512 terms in bfloat16 lost a tenth of it."""
    config = models.DecoderConfig(
        vocab_size=8, hidden_size=32, intermediate_size=32, num_layers=1, num_heads=1,
        num_kv_heads=1, head_dim=32,
    )  # fmt: skip
    random = np.random.default_rng(0)
    token_ids = jnp.asarray(random.integers(0, 8, (32, 128)), jnp.int32)
    weights = jnp.asarray(1 + random.normal(size=32) / 2, jnp.float32)
    segments = jnp.ones_like(token_ids)
    positions = jnp.broadcast_to(jnp.arange(128), token_ids.shape)

    def gradient(compute_dtype, param_dtype):
        policy = models.Policy(config, compute_dtype)
        params = jax.tree.map(lambda x: x.astype(param_dtype), policy.init(jax.random.key(0)))

        def loss(params):
            states = policy.final_states(params, token_ids, positions, segments)
            return jnp.sum(states.astype(jnp.float32) @ weights)

        return jax.jit(jax.grad(loss))(params)["embed"]["embedding"].astype(jnp.float32)

    exact = gradient("float32", "float32")
    found = gradient("bfloat16", param_dtype)
    assert np.linalg.norm(found - exact) < 0.03 * np.linalg.norm(exact)
