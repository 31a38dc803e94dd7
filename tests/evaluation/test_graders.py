"""Held-out problems are graded by the verifiers that the config names."""

import pytest

from semrl_jax.evaluation.graders import takes_rows
from semrl_jax.rewards import VerifierPool
from tests.tiny import tiny_config


def test_the_verifiers_of_a_run_with_several_grade_its_evaluation():
    config = tiny_config()
    config.rewards.functions = ("gsm8k_strict:weight=0.5:name=marked", "math_text", "model")
    with VerifierPool.of(config.rewards) as pool:
        verdict = pool.submit("#### 7", "7").result()
    assert verdict.parts == {"marked": 1.0, "math_text": 0.0}  # the reward model is no verifier
    assert verdict.score == 0.5


@pytest.mark.parametrize(
    ("fields", "settings"),
    [
        ({"rewards.function": "mine:grade"}, {}),
        ({"rewards.functions": ("math", "mine:grade:weight=2")}, {}),
        ({"evaluation.verifier": "mine:grade"}, {}),
        ({}, {"sums": {"verifier": "mine:grade"}}),
    ],
)
def test_a_verifier_of_the_user_may_take_the_rows(fields, settings):
    config = tiny_config()
    assert not takes_rows(config, {"sums": {"verifier": "benchmark"}})
    config.update_from_flattened_dict(fields)
    assert takes_rows(config, settings)
