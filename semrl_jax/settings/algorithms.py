"""Settings of `config.algorithms`; an algorithm checks its own options."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_collections

from semrl_jax.support.choices import IMPORTANCE_LEVELS, KEEP_GROUPS_BY
from semrl_jax.support.fields import section, setting

TOKEN_LEVELS = ("token", "total_variation")  # weights that follow from one token alone
MAX_ROUNDS = 1000  # of dynamic sampling; a step needs an end
_LEVELS = ("none", *IMPORTANCE_LEVELS)


@dataclasses.dataclass(frozen=True)
class Advantage:
    """`config.algorithms.advantage`."""

    epsilon: float = setting(1e-6, "grpo, quantile_baseline: keeps a quotient finite")
    quantile: float = setting(
        0.5, "quantile_baseline: which quantile of a group's rewards is the baseline"
    )
    normalise: bool = setting(True, "quantile_baseline: divide by the standard deviation")
    positive_weight: float = setting(0.1, "sample_reinforcement: weight of correct responses")
    negative_weight: float = setting(1.0, "sample_reinforcement: weight of wrong responses")
    correction: str = setting("backward", "noisy_rewards: backward or forward")
    false_positive_rate: float = setting(
        0.0, "noisy_rewards: probability that a wrong response is accepted"
    )
    false_negative_rate: float = setting(
        0.0, "noisy_rewards: probability that a correct response is rejected"
    )
    threshold: float = setting(
        0.0, "sample_reinforcement, noisy_rewards: rewards above are positive"
    )
    baseline_shift: float = setting(-0.1, "asymre: added to the baseline")
    baseline_rate: float = setting(0.1, "reinforce: update rate of the baseline")
    group_baseline: bool = setting(
        False, "reinforce_plus_plus: subtract the mean of the group first"
    )
    gamma: float = setting(1.0, "ppo: discount per token")
    gae_lambda: float = setting(1.0, "ppo: lambda of generalised advantage estimation")
    kl_reward_coefficient: float = setting(
        0.0, "ppo, reinforce_plus_plus: KL in the reward; above 0, loss.kl_coefficient must be 0"
    )
    kl_reward_estimator: str = setting("kl", "ppo, reinforce_plus_plus: as loss.kl_estimator.")
    kl_target: float = setting(
        0.0,
        "ppo, reinforce_plus_plus: wanted KL of an adaptive coefficient; 0: it is fixed",
        "nats per token",
    )
    kl_horizon: int = setting(
        10_000, "Number over which an adaptive coefficient changes by a fifth", "responses"
    )


@dataclasses.dataclass(frozen=True)
class Loss:
    """`config.algorithms.loss`."""

    surrogate: str = setting("clip", "Loss of a token: clip, gspo, dcpo, cispo, reinforce or opmd")
    clip_epsilon: float = setting(0.2, "how far a ratio may fall below 1")
    clip_epsilon_high: float = setting(0.0, "How far a ratio may rise above 1; 0: as far as below")
    dual_clip: float = setting(0.0, "largest ratio at a negative advantage; 0: no limit")
    opmd_tau: float = setting(1.0, "strength of OPMD's regulariser")
    kl_coefficient: float = setting(
        0.001, "Weight of the KL penalty; 0: no reference is loaded or computed"
    )
    entropy_coefficient: float = setting(0.001, "weight of the entropy bonus")
    kl_estimator: str = setting(
        "low_var_kl", "Estimator of the KL: kl, abs, mse, low_var_kl or low_var_kl+"
    )
    value_clip: float = setting(0.5, "ppo: largest change of a value in a step")


@dataclasses.dataclass(frozen=True)
class Importance:
    """`config.algorithms.importance`."""

    level: str = setting(
        "none",
        "Level of the importance weights: none, token, sequence, geometric or total_variation",
        choices=_LEVELS,
    )
    level_ahead: str = setting(
        "token",
        "The level where level is none, but responses come from another policy: with "
        "rollout.max_staleness above 0 or rollout.vllm_quantization. none: no correction "
        "either.",
        choices=_LEVELS,
    )
    outside: str = setting(
        "truncate", "Truncate weights to the bounds, or mask: drop what lies outside"
    )
    floor: float = setting(0.0, "the smallest ratio")
    cap: float = setting(2.0, "the largest ratio, or difference of probabilities")


@dataclasses.dataclass(frozen=True)
class BatchRules:
    """`config.algorithms.batch_rules`."""

    overlong_tokens: int = setting(
        0,
        "Over this many tokens before the limit of a response, its reward falls by up to 1; 0: off",
        at_least=0,
    )
    mask_truncated: bool = setting(
        False, "True: a response cut off at its limit is not trained on, but counts in its group"
    )
    # A run that ended with too few groups may continue with more rounds, or without the rule.
    max_sampling_rounds: int = setting(
        0,
        "Dynamic sampling: a step samples rounds of prompts_per_step prompts until "
        "prompts_per_step groups have unequal rewards, and trains on these. The run ends "
        "if so many rounds do not suffice. 0: off.",
        "rounds",
        at_least=0,
        at_most=MAX_ROUNDS,
        may_change=True,
    )
    keep_groups_by: str = setting(
        "reward", "What must differ in a group: reward or correctness", choices=KEEP_GROUPS_BY
    )


@dataclasses.dataclass(frozen=True)
class Algorithms:
    """`config.algorithms`."""

    name: str = setting(
        "grpo",
        'docs/algorithms.md, or "my_package.my_module" with one of your own, docs/extending.md',
    )
    options: dict = section(dict, "options without a field below")
    advantage: Advantage = section(Advantage)
    loss: Loss = section(Loss)
    importance: Importance = section(
        Importance, "Correction for the difference between rollout engine and policy; docs/verl.md"
    )
    batch_rules: BatchRules = section(BatchRules)
    aggregation: str = setting(
        "token_mean",
        "How the losses of the tokens become one: token_mean, response_mean or constant_length",
    )
    constant_length: int = setting(0, "aggregation constant_length: limit of a response", "tokens")


def importance_options(config: ml_collections.ConfigDict) -> dict[str, Any]:
    """Options of `importance_weights`; their level may be 'none'.

    Batches that are sampled ahead come from an earlier policy, and those of a quantised engine
    from a rounded one. For them, 'none' gives way to `level_ahead`.
    """
    options = config.algorithms.importance.to_dict()
    ahead = options.pop("level_ahead")
    from_another = config.rollout.max_staleness or config.rollout.vllm_quantization
    if from_another and options["level"] == "none":
        options["level"] = ahead
    return options
