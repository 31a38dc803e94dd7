"""The warm start learns what it is shown, and only the response."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from semrl_jax import data, models
from semrl_jax.data.arithmetic import demonstration_texts
from semrl_jax.training.warm_start import fit_demonstrations
from tests.cases import refused


def make_policy():
    return models.Policy(
        models.DecoderConfig(
            vocab_size=len(data.character_tokenizer()), hidden_size=32, intermediate_size=64,
            num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16,
        )
    )  # fmt: skip


def fit(seed=0, num_steps=30, learning_rate=1e-2):
    tokenizer, policy = data.character_tokenizer(), make_policy()
    losses = []
    params = fit_demonstrations(
        policy, policy.init(jax.random.key(seed)),
        data.demonstration_rows(tokenizer, demonstration_texts(0, 64)),
        num_steps=num_steps, batch_size=16, micro_batch_size=8, learning_rate=learning_rate,
        seed=seed,
        report=lambda step, loss: losses.append(loss),
    )  # fmt: skip
    return params, losses


@pytest.mark.slow
def test_loss_falls_from_the_uniform_one_and_repeats_exactly():
    params, losses = fit()
    assert len(losses) == 30
    assert 3.0 < losses[0] < 4.5  # log 34 = 3.5 nats for a model that knows nothing
    assert losses[-1] < losses[0] / 2
    again, _ = fit()
    jax.tree.map(np.testing.assert_array_equal, params, again)
    other, _ = fit(seed=1)
    assert not np.allclose(params["embed"]["embedding"], other["embed"]["embedding"])


@pytest.mark.slow
def test_a_rate_that_is_too_high_ends_it():
    refused(r"learning_rate=1e\+30: the loss or gradient of step", fit, learning_rate=1e30)


@pytest.mark.slow
def test_it_is_a_loop_of_adamw():
    """The mean over the tokens of whole batches, as Optax would train it."""
    tokenizer, policy = data.character_tokenizer(), make_policy()
    shown = data.demonstration_rows(tokenizer, demonstration_texts(0, 8))
    options = {"num_steps": 44, "batch_size": 8, "micro_batch_size": 2, "learning_rate": 1e-2}
    losses = []
    params = fit_demonstrations(
        policy, policy.init(jax.random.key(0)), shown, seed=0,
        report=lambda step, loss: losses.append(loss), **options,
    )  # fmt: skip

    def rate(count):  # 22 steps are the half
        falling = 1 - 0.95 * (count - 22) / 22
        return 1e-2 * (count / 20 if count < 20 else min(falling, 1.0))

    @jax.jit
    @jax.value_and_grad
    def loss_of(params):
        ids, positions, segments = map(
            jnp.asarray, (shown.token_ids, shown.positions, shown.segment_ids)
        )
        states = policy.final_states(params, ids, positions, segments)
        logprobs, _ = policy.token_logprobs(params, states[:, :-1], ids[:, 1:])
        return -jnp.mean(logprobs[shown.loss_mask[:, 1:]])

    wanted, state = policy.init(jax.random.key(0)), None
    for count, loss in enumerate(losses):
        optimizer = optax.chain(
            optax.clip_by_global_norm(1.0), optax.adamw(rate(count), b2=0.98, weight_decay=0.01)
        )
        state = optimizer.init(wanted) if state is None else state
        want, gradient = loss_of(wanted)
        # Sums in another order: Adam divides a few roundings by roundings.
        np.testing.assert_allclose(loss, want, rtol=2e-3)
        changes, state = optimizer.update(gradient, state, wanted)
        wanted = optax.apply_updates(wanted, changes)
    for own, want in zip(*map(jax.tree.leaves, (params, wanted)), strict=True):
        assert np.mean(np.abs(own - want)) < 1e-3
