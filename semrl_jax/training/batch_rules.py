"""Rules of `config.algorithms.batch_rules` that re-weight advantages before the shaping."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_collections
from jaxtyping import Array, Bool, Float

from semrl_jax.algorithms import confidence_reweighting, error_penalty
from semrl_jax.algorithms.algorithm import Algorithm, Needs, Passes
from semrl_jax.settings.algorithms import TOKEN_LEVELS, importance_options


def all_needs(algorithm: Algorithm, config: ml_collections.ConfigDict) -> Needs:
    """What the algorithm needs, and what the importance weights and the rules add."""
    needs, rules = algorithm.needs, config.algorithms.batch_rules
    # The only update of a batch corrects by itself, token by token.
    level = importance_options(config)["level"]
    is_late = level in TOKEN_LEVELS and not has_several_minibatches(config)
    corrects = level != "none" and not is_late
    return needs._replace(
        early_old_logprobs=bool(
            needs.early_old_logprobs or corrects or rules["ace_alpha"] or rules["arm_alpha"]
        ),
        # An offloaded reference has a pass of its own: it is not on the device beside the update.
        early_reference=bool(
            needs.early_reference
            or rules["ace_alpha"]
            or (needs.reference and "reference" in config.training.offload)
        ),
    )


def has_several_minibatches(config: ml_collections.ConfigDict) -> bool:
    """Whether a batch has several updates; the later ones do not have its first parameters."""
    return config.data.prompts_per_step > config.training.prompts_per_minibatch


def reweighted(
    advantages: Float[Array, "B T"],
    rewards: Float[Array, "P G"],
    passes: Passes,
    prompt_confidence: Float[Array, " P"] | None,
    response_mask: Bool[Array, "B T"],
    rules: Mapping[str, Any],
) -> tuple[Float[Array, "B T"], dict[str, Float[Array, ""]]]:
    """The advantages after `error_penalty` and then `confidence_reweighting`, and scalars of both.

    A rule whose alpha is 0 does nothing and logs nothing. Only `arm_alpha` above 0 reads
    `prompt_confidence`.
    """
    scalars = {}
    if alpha := rules["ace_alpha"]:
        advantages, mean = error_penalty(
            advantages, passes.old_logprobs, passes.ref_logprobs, response_mask, alpha=alpha
        )
        scalars["advantage/ace_factor/mean"] = mean
    if alpha := rules["arm_alpha"]:
        advantages, mean = confidence_reweighting(
            advantages,
            rewards,
            passes.old_logprobs,
            prompt_confidence,
            response_mask,
            alpha=alpha,
            low_fraction=rules["arm_low_fraction"],
        )
        scalars["advantage/arm_bonus/mean"] = mean
    return advantages, scalars
