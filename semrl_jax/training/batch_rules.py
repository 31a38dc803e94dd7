"""What an algorithm and the rules of `config.algorithms.batch_rules` need and do."""

from __future__ import annotations

import dataclasses

import ml_collections

from semrl_jax.algorithms.algorithm import Algorithm, Needs
from semrl_jax.algorithms.credit import BatchRules, CreditRules
from semrl_jax.settings.algorithms import TOKEN_LEVELS, importance_options
from semrl_jax.shaping import ShapingOptions


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


def credit_rules(algorithm: Algorithm, config: ml_collections.ConfigDict) -> CreditRules:
    """How a run assigns credit."""
    rules, importance = config.algorithms.batch_rules, importance_options(config)
    fields = [field.name for field in dataclasses.fields(BatchRules)]
    return CreditRules(
        algorithm,
        ShapingOptions(**config.shaping),
        BatchRules(**{field: rules[field] for field in fields}),
        () if importance["level"] == "none" else tuple(importance.items()),
    )
