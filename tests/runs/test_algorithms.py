"""Two steps of a whole run under algorithms and rules that differ from the default."""

import numpy as np
import pytest

from semrl_jax.runs import train
from tests.fixtures import read_rows

pytestmark = pytest.mark.slow
# Each combines parts that need different passes and arrays. The tiny policy never ends a response
# rightly, so rewards come from the fixture `rewarded`.
RUNS = {
    "no pass at all": {
        "algorithms.name": "dr_grpo", "algorithms.loss.surrogate": "reinforce",
        "algorithms.loss.kl_coefficient": 0.0, "algorithms.aggregation": "constant_length",
        "algorithms.constant_length": 24,
    },
    "whole responses, packed": {
        "algorithms.name": "rloo", "algorithms.loss.surrogate": "gspo",
        "algorithms.loss.kl_estimator": "low_var_kl+", "algorithms.aggregation": "response_mean",
        "training.pack_sequences": True, "training.micro_batch_tokens": 80,
    },
    "KL in the reward, masks": {
        "algorithms.name": "reinforce_plus_plus", "algorithms.loss.surrogate": "cispo",
        "algorithms.loss.kl_coefficient": 0.0, "algorithms.advantage.kl_reward_coefficient": 0.1,
        "algorithms.importance.level": "geometric", "algorithms.importance.outside": "mask",
        "algorithms.importance.floor": 0.5, "algorithms.importance.cap": 2.0,
        "algorithms.batch_rules.overlong_tokens": 4, "algorithms.batch_rules.mask_truncated": True,
    },
    "re-weighted, a reference for the rule alone": {
        "algorithms.loss.kl_coefficient": 0.0, "algorithms.loss.surrogate": "reinforce",
        "algorithms.batch_rules.ace_alpha": 0.5, "algorithms.batch_rules.arm_alpha": 0.5,
    },
    "quantile, dynamic bounds": {
        "algorithms.name": "quantile_baseline", "algorithms.loss.surrogate": "dcpo",
        "algorithms.loss.dual_clip": 10.0, "algorithms.loss.clip_epsilon_high": 0.3,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", RUNS)
def test_a_run_under_another_algorithm(name, config, tmp_path, rewarded):
    config.training.num_steps = 2
    config.update_from_flattened_dict(RUNS[name])
    assert train(config, str(tmp_path / "run")) == 0
    rows = read_rows(tmp_path / "run")
    for row in rows[:2]:
        assert np.isfinite(row["policy/loss"]) and row["policy/update_skipped"] == 0
        without_kl = ("no pass at all", "re-weighted, a reference for the rule alone")
        assert ("policy/kl" in row) == (name not in without_kl)  # logged where one is computed
        with_rules = bool(config.algorithms.batch_rules.arm_alpha)
        for key in ("advantage/arm_bonus/mean", "advantage/ace_factor/mean"):
            assert (key in row) == with_rules
        if with_rules:  # the policy of the first step is the reference: softplus(0) = log 2
            factor = row["advantage/ace_factor/mean"]
            assert row["step"] or factor == pytest.approx(1 + 0.5 * np.log(2), rel=1e-5)
        masked = "policy/importance_weight/masked_fraction"
        assert (masked in row) == (config.algorithms.importance.level != "none")
    assert any(row["policy/grad_norm"] > 0 for row in rows[:2])
