"""The annealed temperature over the steps of a run."""

import numpy as np
import pytest

from configs import default
from semrl_jax.runs import train, validate
from semrl_jax.sampling.annealing import annealing_at
from semrl_jax.support.errors import UserError
from semrl_jax.types import Annealing
from tests.fixtures import read_rows


def test_the_decay_slows_down_over_the_steps():
    """The release: t / (20 min(25 + 5 s, 40000)), see `annealing_at`."""
    options = default.get_config().rollout.annealing
    assert annealing_at(3, **options) is None
    options.enabled = True
    for step in (0, 1, 7, 7994, 7995, 7996, 10**6):
        found = annealing_at(step, **options)
        assert found == Annealing(1.2, 0.1, 10, 20.0 * min(25 + 5 * step, 40_000)), step


def test_it_needs_a_correction_an_engine_and_a_temperature(config):
    config.rollout.annealing.enabled = True
    config.algorithms.importance.level = "token"
    validate(config)
    config.rollout.temperature = 0.05
    with pytest.raises(UserError, match=r"minimum=0.1 times rollout.temperature=0.05 must be at"):
        validate(config)
    config.rollout.temperature = 1.0
    config.rollout.engine = "vllm"
    with pytest.raises(UserError, match=r"enabled=True needs rollout.engine='jax'"):
        validate(config)


@pytest.mark.slow
def test_a_run_with_an_annealed_temperature_corrects_for_it(config, tmp_path, rewarded):
    """The engine's unmodified log-probabilities still agree with the policy's."""
    config.rollout.annealing.enabled = True
    config.rollout.annealing.warmup_tokens = 2
    config.rollout.annealing.decay_tokens = 8.0
    config.algorithms.importance.level = "token"
    config.training.num_steps = 1
    assert train(config, str(tmp_path / "run")) == 0
    row = read_rows(tmp_path / "run")[0]
    assert row["rollout/logprob_mismatch/max"] < 1e-4  # float32 engine and policy
    # Where the temperature is low, the engine took likelier tokens than the policy would have.
    assert row["policy/importance_weight/min"] < 0.5
    assert np.isfinite(row["policy/loss"]) and row["policy/update_skipped"] == 0
