"""The plan of passes, and the rules for whole batches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from semrl_jax.algorithms import confidence_reweighting, error_penalty
from semrl_jax.algorithms.algorithm import Passes, load_algorithm
from semrl_jax.errors import UserError
from semrl_jax.runs import validate
from semrl_jax.shaping import init_shaping_state
from semrl_jax.training.packing import RowPlan, lay_out
from semrl_jax.training.plan import NONE, PASS, UPDATE, PassNeeds, PassPlan
from semrl_jax.training.rollout_batch import credited_tokens, prompts_alone
from tests.algorithms.test_credit import baselines_after, credit_of, make_metrics
from tests.fixtures import make_scored
from tests.training.test_packing import batch_of, mesh_of

ONE_UPDATE = {"training.prompts_per_minibatch": 4}  # all prompts of a step


def plan_of(config):
    return PassPlan.of(load_algorithm(config.algorithms.to_dict()), config)


def test_a_response_that_was_cut_off_is_not_trained_on(config):
    batch = batch_of([(3, 4), (2, 5), (3, 3)])
    reasons = ("eos", "length", "stop")
    found = credited_tokens(batch, [make_scored(finish_reason=reason) for reason in reasons])
    assert found.truncated.tolist() == [False, True, False]
    config.algorithms.batch_rules.mask_truncated = True
    rewards, mask = np.ones((1, 3), np.float32), batch.response_mask
    arguments = config, rewards, make_metrics(0, 3), mask, init_shaping_state()
    trained = np.asarray(credit_of(*arguments, truncated=found.truncated).response_mask)
    np.testing.assert_array_equal(trained[[0, 2]], mask[[0, 2]])
    assert mask[1].any() and not trained[1].any()


def rules_of(config, **changed):
    config.algorithms.batch_rules.update(changed)
    return config.algorithms.batch_rules


def test_rules_act_between_estimator_and_shaping(config):
    """Three groups: mixed, solved by all, solved by none."""
    random = np.random.default_rng(0)
    rewards = np.array([[1, 0, 0, 1], [1, 1, 1, 1], [0, 0, 0, 0]], np.float32)
    mask = jnp.asarray(np.arange(5) < random.integers(1, 6, 12)[:, None])
    confidence = jnp.array([0.2, 0.6, 0.7])
    old_and_ref = -random.exponential(size=(2, *mask.shape)).astype(np.float32)
    passes = Passes(*old_and_ref, prompt_confidence=confidence)
    algorithm = load_algorithm(config.algorithms.to_dict())
    state = baselines_after(config, rewards, make_metrics(0, 12))

    def found(target, **rules):
        config.shaping.target = target
        rules_of(config, **rules)
        credit = credit_of(config, rewards, make_metrics(1, 12), mask, state, passes)
        return np.asarray(credit.advantages), credit.scalars

    @jax.jit
    def expected(old, ref):
        plain = algorithm.advantages(jnp.asarray(rewards), passes, mask)
        one, factor = error_penalty(plain, old, ref, mask, alpha=0.5)
        two, bonus = confidence_reweighting(
            one, jnp.asarray(rewards), old, confidence, mask, alpha=0.3, low_fraction=0.4
        )
        return two, factor, bonus

    without, report = found("reward")
    assert not {"advantage/ace_factor/mean", "advantage/arm_bonus/mean"} & report.keys()
    # The rule sees the verifier's rewards: a bonus on the rewards solves no problem.
    with_bonus, _ = found("reward", arm_alpha=0.3)
    np.testing.assert_allclose(with_bonus[8:], without[8:], atol=1e-6)
    assert np.abs(with_bonus - without)[4:8].max() > 0.01
    wanted, factor, bonus = expected(*passes[:2])
    plain, report = found("none", ace_alpha=0.5, arm_low_fraction=0.4)
    # 1e-6: two programs, which may round differently.
    np.testing.assert_allclose(plain, wanted, rtol=1e-6, atol=1e-6)
    assert report["advantage/ace_factor/mean"] == pytest.approx(float(factor))
    assert report["advantage/arm_bonus/mean"] == pytest.approx(float(bonus), abs=1e-6)
    # Equal rewards have an advantage by the rule alone; the shaping sees it.
    shaped, _ = found("advantage")
    assert (shaped - plain)[4:8].max() > 0.01 and not shaped[8:].any()


PLAIN = {"old": NONE, "reference": NONE, "corrects": NONE}


@pytest.mark.parametrize(
    ("changed", "planned"),
    [
        ({}, {}),
        ({"batch_rules.ace_alpha": 0.1}, {"old": PASS, "reference": PASS}),
        ({"batch_rules.arm_alpha": 0.1}, {"old": PASS}),
        ({"importance.level": "token"}, {"old": PASS, "corrects": PASS}),
        ({"rollout.max_staleness": 1}, {"old": PASS, "corrects": PASS}),
        ({"rollout.max_staleness": 1, "importance.level_ahead": "none"}, {}),
        ({"loss.surrogate": "clip"}, {"old": PASS}),
        ({"loss.kl_coefficient": 0.1}, {"reference": UPDATE}),
        ({"loss.kl_coefficient": 0.1, "training.offload": ("reference",)}, {"reference": PASS}),
        # A step of one update.
        ({"loss.surrogate": "clip"} | ONE_UPDATE, {"old": UPDATE}),
        ({"importance.level": "token"} | ONE_UPDATE, {"corrects": UPDATE}),
        ({"importance.level": "sequence"} | ONE_UPDATE, {"old": PASS, "corrects": PASS}),
        (
            {"importance.level": "token", "batch_rules.arm_alpha": 0.1} | ONE_UPDATE,
            {"old": PASS, "corrects": PASS},
        ),
    ],
)
def test_who_computes_what(config, changed, planned):
    section = config.algorithms
    section.update_from_flattened_dict({"loss.surrogate": "reinforce", "loss.kl_coefficient": 0.0})
    for field, value in changed.items():
        of = config if field.startswith(("rollout.", "training.")) else section
        of.update_from_flattened_dict({field: value})
    found = plan_of(config)
    assert {name: getattr(found, name) for name in PLAIN} == PLAIN | planned
    assert found.prompts == ("batch_rules.arm_alpha" in changed) and not found.values
    assert found.reference_in_loss == ("loss.kl_coefficient" in changed)
    # The pass of a batch rule is not one of the loss.
    given = found.given(Passes("old", "ref"))
    assert given == Passes(
        "old" if found.old == PASS else None, "ref" if found.reference_in_loss else None
    )


def test_what_a_step_needs_from_its_passes(config):
    """PPO with one update per step: nobody computes log-probabilities while the critic warms up."""
    config.update_from_flattened_dict({"algorithms.name": "ppo", "critic.warmup_steps": 1})
    several = plan_of(config)
    config.update_from_flattened_dict(ONE_UPDATE)
    single = plan_of(config)
    asked = PassNeeds(logprobs=True)
    for step, logprobs in ((0, True), (1, False)):
        assert several.needs(step, PassNeeds()) == PassNeeds(logprobs=True)
        for also in (PassNeeds(), asked):
            assert single.needs(step, also) == PassNeeds(logprobs=logprobs)
    assert single.needs(1, asked | PassNeeds(states=True)) == PassNeeds(states=True)
    config.hidden_states.source = "policy"
    states = plan_of(config)
    assert states.has_pass and states.needs(1, PassNeeds()).states and not single.has_pass


def test_prompts_alone_are_rows_whose_response_is_all_but_their_first_token():
    """Prompts of 4, 1 and 3 tokens with two responses each."""
    batch = batch_of([(4, 2), (4, 1), (1, 3), (1, 1), (3, 2), (3, 4)])
    prompts = prompts_alone(batch, group_size=2)
    assert prompts.response_mask.sum(axis=1).tolist() == [3, 0, 2]
    plan = RowPlan(mesh_of(1), micro_batch_size=3, balance_lengths=False)
    rows = jax.tree.map(lambda leaf: leaf[0], lay_out(prompts, plan).rows)
    first = [batch.token_ids[i][batch.segment_ids[i] == 1] for i in (0, 2, 4)]
    for row, (ids, length) in enumerate(zip(first, (4, 1, 3))):
        ids = ids[:length]
        np.testing.assert_array_equal(rows.token_ids[row], np.pad(ids, (0, 4 - length)))
        np.testing.assert_array_equal(rows.response_ids[row, : length - 1], ids[1:])
        np.testing.assert_array_equal(rows.sources[row, : length - 1], np.arange(length - 1))
        assert not rows.sequence_ids[row, length - 1 :].any()


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("ace_alpha", -0.1, "must be at least 0"),
        ("arm_alpha", -0.1, "must be at least 0"),
        ("arm_low_fraction", 0.0, r"must be in \(0, 1\]"),
        ("arm_low_fraction", 1.5, r"must be in \(0, 1\]"),
    ],
)
def test_wrong_rules_are_refused(config, field, value, rule):
    rules_of(config, **{field: value})
    with pytest.raises(UserError, match=f"algorithms.batch_rules.{field}={value} {rule}"):
        validate(config)
