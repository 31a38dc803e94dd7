"""Every field of `config.algorithms` changes an update."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs.default import get_config
from semrl_jax.algorithms import importance_weights
from semrl_jax.algorithms.algorithm import Passes, Spans, load_algorithm
from semrl_jax.algorithms.turn_credit import placed_rewards
from semrl_jax.settings.algorithms import importance_options

MASK = np.arange(5) < np.array([5, 1, 3, 2, 4, 5, 2, 1])[:, None]
MASK[[0, 5], 2] = False  # two turns
TURNS = np.where(np.arange(5) == 1, 0.25, 0).astype(np.float32) * MASK
STEPS = np.where(np.arange(5) < 2, np.arange(8)[:, None] / 8, 0).astype(np.float32) * MASK
SPANS = Spans(STEPS, MASK)
REWARDS = np.array([[1, 0, 0.5, 0], [1, 1, 0, 1]], np.float32)
OPD, GSPO, REC, REAL = ({"loss.surrogate": name} for name in ("opmd", "gspo", "rec", "real"))
RING = REC | {"loss.rec_range": "ring"}
PSR, QUANTILE = ({"name": name} for name in ("sample_reinforcement", "quantile_baseline"))
NOISY, TEACHER = {"name": "noisy_rewards"}, {"name": "distillation"}
CAPO, PROF = {"name": "capo"}, {"name": "prof", "advantage.num_removed": 1}
PLUS = {"name": "reinforce_plus_plus", "loss.kl_coefficient": 0.0}
PPO = {"name": "ppo", "loss.kl_coefficient": 0.0, "advantage.kl_reward_coefficient": 0.1}
ADAPTIVE = PPO | {"advantage.kl_target": 0.1}
AHEAD = "rollout.max_staleness"
TOKEN = {"importance.level": "token"}
# Field: the new value, and the settings with which it means something.
CHANGES = {
    "name": ("rloo", {}),
    "aggregation": ("response_mean", {}),
    "constant_length": (7, {"aggregation": "constant_length", "constant_length": 5}),
    "advantage.credit": ("turn", {}),
    "advantage.epsilon": (1.0, {}),
    "advantage.quantile": (0.9, QUANTILE),
    "advantage.normalise": (False, QUANTILE),
    "advantage.positive_weight": (0.5, PSR),
    "advantage.negative_weight": (0.5, PSR),
    "advantage.threshold": (0.7, PSR),
    "advantage.correction": ("forward", NOISY),
    "advantage.false_positive_rate": (0.2, NOISY),
    "advantage.false_negative_rate": (0.2, NOISY),
    "advantage.teacher_weight": (0.5, TEACHER),
    "advantage.teacher_discount": (0.5, TEACHER),
    "advantage.reward_weight": (0.5, TEACHER),
    "advantage.reward_beta": (0.5, {"name": "dpo"}),
    "advantage.baseline_shift": (0.3, {"name": "asymre"}),
    "advantage.weight_temperature": (0.5, {"name": "red_weight"}),
    "advantage.group_baseline": (True, PLUS),
    "advantage.kl_reward_coefficient": (0.5, PLUS),
    "advantage.kl_reward_estimator": ("abs", PPO),
    "advantage.kl_target": (0.1, PPO),
    "advantage.kl_horizon": (20, ADAPTIVE),
    "advantage.outcome_weight": (1.0, CAPO),
    "advantage.process_weight": (2.0, CAPO),
    "advantage.num_removed": (2, PROF),
    "advantage.step_penalty": (0.0, PROF),
    "advantage.min_steps": (4, PROF),
    "advantage.max_steps": (3, PROF),
    "advantage.prompt_memory": (0.5, {"name": "single_stream"}),
    "advantage.baseline_rate": (0.5, {"name": "reinforce"}),
    "advantage.gamma": (0.5, PPO),
    "advantage.gae_lambda": (0.5, PPO),
    "loss.value_clip": (0.1, PPO),
    "loss.surrogate": ("cispo", {}),
    "loss.clip_epsilon": (0.01, {}),
    "loss.clip_epsilon_high": (0.9, {}),
    "loss.dual_clip": (1.01, {}),
    "loss.opmd_tau": (3.0, OPD),
    "loss.rec_range": ("two_side", REC),
    "loss.rec_weighted": (True, REC),
    "loss.rec_far_low": (0.05, RING),
    "loss.rec_far_high": (0.4, RING),
    "loss.real_tau": (1.0, REAL),
    "loss.kl_coefficient": (0.5, {}),
    "loss.entropy_coefficient": (0.5, {}),
    "loss.kl_estimator": ("abs", {}),
    "loss.given_surrogate": ("rl_plus", {}),
    "loss.given_coefficient": (0.5, {}),
    "importance.level": ("token", {}),
    "importance.level_ahead": ("sequence", {AHEAD: 1}),
    "importance.outside": ("mask", TOKEN),
    "importance.floor": (0.95, TOKEN),
    "importance.cap": (1.05, TOKEN),
}


def config_with(settings):
    """`settings` are of `config.algorithms`, but for the staleness."""
    config = get_config()
    for field, value in settings.items():
        section = config if field == AHEAD else config.algorithms
        section.update_from_flattened_dict({field: value})
    return config


@functools.cache
def update_of(settings):
    """Losses and gradients of the third step, from rewards on; `settings` are pairs."""
    config = config_with(dict(settings))
    section, importance = config.algorithms.to_dict(), importance_options(config)
    algorithm, random = load_algorithm(section), np.random.default_rng(0)
    old = -random.exponential(size=MASK.shape)
    logprobs, ref, rollout, entropy = (
        jnp.asarray(old + 0.6 * random.normal(size=MASK.shape), jnp.float32) for _ in range(4)
    )
    old, mask = jnp.asarray(old, jnp.float32), jnp.asarray(MASK)
    values = jnp.asarray(random.normal(size=(2, *MASK.shape)), jnp.float32)

    @jax.jit
    def compute(logprobs, new_values):
        passes, state = Passes(old, ref, values[0], SPANS), algorithm.first_state(num_prompts=2)
        batch = jnp.asarray(REWARDS), passes, mask
        if algorithm.needs.selects:
            passes = passes._replace(selected=algorithm.selected(*batch))
            batch = jnp.asarray(REWARDS), passes, mask
        credited = batch
        if algorithm.needs.turn_rewards:
            credited = placed_rewards(batch[0], TURNS, mask), passes, mask
        for factor in (1.0, 2.0) if algorithm.needs.keeps else ():
            state = algorithm.next_state(state, factor * batch[0], *batch[1:])
        advantages = algorithm.advantages(*credited, state)
        if importance["level"] != "none":
            advantages *= importance_weights(old, rollout, mask, **importance)[0]
        ids = {"sequence_ids": mask.astype(jnp.int32)} if algorithm.needs.sequence_ids else {}
        given = mask & (jnp.arange(len(mask)) % 4 == 2)[:, None]
        weights = algorithm.token_weights(mask)

        def losses(logprobs, new_values):
            loss, _ = algorithm.loss(
                logprobs,
                entropy,
                old_logprobs=old,
                ref_logprobs=ref,
                advantages=advantages,
                weights=weights,
                given=given,
                **ids,
            )
            if not algorithm.needs.values:
                return loss
            returns = algorithm.returns(*credited, state)
            targets = {"old_values": values[0], "returns": returns, "weights": weights}
            return loss + algorithm.value_loss(new_values, **targets)[0]

        return jax.value_and_grad(losses, argnums=(0, 1))(logprobs, new_values)

    loss, gradients = compute(logprobs, values[1])
    assert np.isfinite(loss) and np.isfinite(gradients).all()
    return np.append(np.ravel(gradients), loss)


@pytest.mark.slow
@pytest.mark.parametrize("field", CHANGES)
def test_no_option_is_dead(field):
    value, settings = CHANGES[field]
    changed = settings | {field: value}
    before, after = (update_of(tuple(chosen.items())) for chosen in (settings, changed))
    assert np.abs(before - after).max() > 1e-6


def test_every_option_is_tried():
    section = get_config().algorithms.to_dict()
    fields = {key for key, value in section.items() if not isinstance(value, dict)}
    for name in ("advantage", "loss", "importance", "batch_rules"):
        fields |= {f"{name}.{key}" for key in section[name]}
    # These act on the batch: tests/training/test_plan.py.
    of_batch = {"overlong_tokens", "mask_truncated"}
    of_batch |= {"max_sampling_rounds", "keep_groups_by"}  # tests/sampling/test_selecting.py
    fields.remove("advantage.teacher")  # whose prompts: tests/runs/test_algorithms.py
    assert fields - {f"batch_rules.{name}" for name in of_batch} == set(CHANGES)
