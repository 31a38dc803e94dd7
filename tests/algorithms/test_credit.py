"""How the options reach estimator and shaping, and what is kept from step to step."""

import numpy as np

from semrl_jax.algorithms.algorithm import Passes, Spans, load_algorithm
from semrl_jax.algorithms.credit import Credit, Memory, Tokens, assign_credit
from semrl_jax.metrics import Measurement, MetricKey
from semrl_jax.shaping import init_shaping_state
from semrl_jax.training.passes import PassPlan, credit_rules

INDICATORS = ("effective_rank_acceleration", "effective_rank_velocity", "effective_rank")
REWARDS = np.array([[1, 0, 0, 1], [1, 1, 1, 1]], np.float32)
MASK = np.ones((8, 3), bool)
NOTHING = Passes()  # no pass is needed


def credit_of(config, rewards, metrics, mask, baselines, passes=NOTHING, **tokens) -> Credit:
    """The credit of a config, with the first state of its algorithm."""
    algorithm = load_algorithm(config.algorithms.to_dict())
    tokens = Tokens(mask, tokens.pop("truncated", np.zeros(len(mask), bool)), **tokens)
    memory = Memory(baselines, algorithm.first_state())
    rules = credit_rules(algorithm, config, PassPlan.of(algorithm, config))
    return assign_credit(rules, rewards, metrics, passes, tokens, memory)


def test_a_state_of_prompts_is_that_of_the_prompts_of_the_batch(config):
    """Prompts 3 and 1 of four; then prompt 3 twice, of which the last group counts."""
    config.algorithms.name, config.shaping.target = "single_stream", "none"
    algorithm = load_algorithm(config.algorithms.to_dict())
    rules = credit_rules(algorithm, config, PassPlan.of(algorithm, config))
    memory = Memory(init_shaping_state(), algorithm.first_state(num_prompts=4))

    def credit(rewards, prompts):
        nonlocal memory
        tokens = Tokens(MASK, np.zeros(8, bool), prompts=np.array(prompts, np.int32))
        found = assign_credit(rules, np.float32(rewards), {}, NOTHING, tokens, memory)
        memory = found.memory
        return np.asarray(found.advantages)[:, 0].reshape(2, 4)

    first = credit(REWARDS, [3, 1])
    np.testing.assert_allclose(memory.algorithm["rewards"], [0, 10, 0, 5], rtol=1e-6)
    np.testing.assert_allclose(memory.algorithm["weights"], [0, 10, 0, 10], rtol=1e-6)
    # The mean of the batch is the baseline of a first visit: 0.75.
    assert (np.sign(first) == np.sign(REWARDS - 0.75)).all()
    second = credit([[1, 1, 1, 1], [0, 0, 0, 0]], [3, 3])
    assert (second[0] == -second[1]).all()
    np.testing.assert_allclose(memory.algorithm["rewards"], [0, 10, 0, 4.5], rtol=1e-6)
    np.testing.assert_allclose(memory.algorithm["weights"], [0, 10, 0, 13], rtol=1e-6)


def test_rewards_are_remembered_with_the_bonus_with_which_they_were_compared(config):
    baselines = baselines_after(config, REWARDS, make_metrics())
    config.algorithms.name, config.shaping.target = "reinforce", "reward"
    found = credit_of(config, REWARDS, make_metrics(1), MASK, baselines)
    mean = found.scalars["reward/shaped/mean"]
    assert abs(mean - REWARDS.mean()) > 0.01
    np.testing.assert_allclose(found.memory.algorithm["rewards"], mean, rtol=1e-6)


def baselines_after(config, rewards, metrics, mask=None):
    """The baselines after a first step."""
    mask = np.ones((rewards.size, 3), bool) if mask is None else mask
    return credit_of(config, rewards, metrics, mask, init_shaping_state()).memory.shaping


def make_metrics(seed=0, num=8):
    random = np.random.default_rng(seed)
    return {
        key: Measurement(random.uniform(1, 2, num).astype(np.float32), np.ones(num, bool))
        for key in map(MetricKey.parse, INDICATORS)
    }


def test_options_reach_estimator_and_shaping(config):
    """The first batch sets the baselines, and the second is shaped against them; worked by hand."""
    first = credit_of(config, REWARDS, make_metrics(), MASK, init_shaping_state())
    std = np.std([1, 0, 0, 1], ddof=1)
    plain = np.repeat([0.5, -0.5, -0.5, 0.5, 0, 0, 0, 0], 3).reshape(8, 3) / (std + 1e-6)
    np.testing.assert_allclose(first.advantages, plain, rtol=1e-6)
    assert first.scalars["shaping/active"] == 0 and first.returns is None
    baselines = first.memory.shaping
    np.testing.assert_allclose(
        baselines.baseline, [found.value.mean() for found in make_metrics().values()], rtol=1e-6
    )
    shaped = credit_of(config, REWARDS, make_metrics(1), MASK, baselines)
    bonus = np.asarray(shaped.advantages) - np.asarray(first.advantages)
    assert shaped.scalars["shaping/active"] == 1
    assert (bonus >= 0).all() and (bonus[:4] > 0).any()
    np.testing.assert_array_equal(bonus[4:], 0)  # equal rewards leave nothing to shape
    config.shaping.eta = 0.0
    found = credit_of(config, REWARDS, make_metrics(1), MASK, baselines)
    np.testing.assert_allclose(found.advantages, plain, rtol=1e-6)


def test_the_signal_may_go_into_the_reward(config):
    baselines = baselines_after(config, REWARDS, make_metrics())
    config.shaping.target = "reward"
    found = credit_of(config, REWARDS, make_metrics(1), MASK, baselines)
    assert (np.asarray(found.advantages)[4:] != 0).any()  # Phi breaks the tie of equal rewards


def test_turns_are_credited_by_their_own_and_later_rewards(config):
    """A group of two: worked by hand. The last turn of the second has a penalty of 1 in addition.

    Returns of the first turns: 1 + 0 and 3 + 1 - 1; of the second ones: 0 and 0.
    """
    mask = np.array([[1, 1, 0, 1], [1, 0, 1, 1]], bool)
    turns = np.array([[0, 1, 0, 0], [3, 0, 0, 1]], np.float32)
    rewards = np.array([[1, 3]], np.float32)
    config.algorithms.name, config.shaping.target = "dr_grpo", "none"
    config.algorithms.advantage.credit = "turn"
    given = config, rewards, {}, mask, init_shaping_state()
    found = credit_of(*given, spans=Spans(turns, turns > 0)).advantages
    np.testing.assert_array_equal(found, [[-1, -1, 0, 0], [1, 0, 0, 0]])
    config.algorithms.advantage.credit = "episode"
    found = credit_of(*given).advantages
    np.testing.assert_array_equal(found, [[-1, -1, 0, -1], [1, 0, 1, 1]])


def test_baselines_stay_where_nothing_is_measured(config):
    config.shaping.target = "none"
    before = init_shaping_state()
    after = credit_of(config, REWARDS, {}, MASK, before).memory.shaping
    for one, other in zip(after, before, strict=True):
        np.testing.assert_array_equal(one, other)


def test_advantages_have_importance_weights(config):
    """Log-probabilities that differ by log 2 from the engine's: truncated at a cap of 1.5."""
    config.algorithms.importance.update(level="token", cap=1.5)
    zeros = np.zeros(MASK.shape, np.float32)
    shift = np.where(np.arange(3) == 1, np.log(2), 0).astype(np.float32)
    passes = Passes(old_logprobs=zeros)
    arguments = config, REWARDS, make_metrics(), MASK, init_shaping_state(), passes
    plain = credit_of(*arguments, rollout_logprobs=zeros).advantages
    found = credit_of(*arguments, rollout_logprobs=zeros - shift).advantages
    np.testing.assert_allclose(found, np.array([[1, 1.5, 1]], np.float32) * plain, rtol=1e-6)


def test_a_truncated_response_counts_in_its_group_and_is_not_trained_on(config):
    truncated = np.arange(8) == 3
    arguments = config, REWARDS, make_metrics(), MASK, init_shaping_state()
    plain = credit_of(*arguments, truncated=truncated)
    np.testing.assert_array_equal(plain.response_mask, MASK)
    config.algorithms.batch_rules.mask_truncated = True
    found = credit_of(*arguments, truncated=truncated)
    np.testing.assert_array_equal(found.response_mask, MASK & ~truncated[:, None])
    np.testing.assert_array_equal(found.advantages, plain.advantages)
