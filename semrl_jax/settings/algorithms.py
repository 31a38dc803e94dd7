"""Checks of `config.algorithms`; an algorithm checks its own options."""

from __future__ import annotations

from typing import Any

import ml_collections

from semrl_jax.settings.rules import Section, at_least_zero, at_most, one_of
from semrl_jax.support.choices import IMPORTANCE_LEVELS, KEEP_GROUPS_BY

TOKEN_LEVELS = ("token", "total_variation")  # weights that follow from one token alone
MAX_ROUNDS = 1000  # of dynamic sampling; a step needs an end


def check(algorithms: Section) -> None:
    levels = ("none", *IMPORTANCE_LEVELS)
    for field in ("level", "level_ahead"):
        one_of(f"algorithms.importance.{field}", algorithms["importance"][field], levels)
    name, rules = "algorithms.batch_rules", algorithms["batch_rules"]
    at_least_zero(name, rules, "overlong_tokens", "max_sampling_rounds")
    at_most(f"{name}.max_sampling_rounds", rules["max_sampling_rounds"], MAX_ROUNDS)
    one_of(f"{name}.keep_groups_by", rules["keep_groups_by"], KEEP_GROUPS_BY)


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
