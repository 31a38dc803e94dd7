"""The warm start learns what it is shown, and only the response."""

import jax
import numpy as np
import pytest

from semrl_jax import data, models
from semrl_jax.training.warm_start import fit_demonstrations


def fit(seed=0, num_steps=30):
    tokenizer = data.character_tokenizer()
    policy = models.Policy(
        models.DecoderConfig(
            vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_layers=1,
            num_heads=2, num_kv_heads=1, head_dim=16,
        )
    )  # fmt: skip
    losses = []
    params = fit_demonstrations(
        policy, policy.init(jax.random.key(seed)),
        data.arithmetic_demonstrations(tokenizer, 0, 64),
        num_steps=num_steps, batch_size=16, micro_batch_size=8, learning_rate=1e-2, seed=seed,
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
