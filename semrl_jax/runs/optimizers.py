"""The optimisers of a run, as its config describes them."""

from __future__ import annotations

import math

import ml_collections

from semrl_jax.algorithms.algorithm import load_algorithm
from semrl_jax.settings.training import updates_per_step
from semrl_jax.training.optimizer import Optimizer, load_direction, make_optimizer


def optimizer_of(config: ml_collections.ConfigDict, name: str, num_steps: int = 0) -> Optimizer:
    """The optimiser of the section `name`: "training", "critic", or "sft" with its `num_steps`."""
    section = config[name]
    if name == "sft":
        rate = {
            "learning_rate_warmup_steps": math.ceil(section.warmup_fraction * num_steps),
            "kind": section.schedule,
            "num_steps": num_steps,
            "final_fraction": section.final_fraction,
        }
    else:
        rate = {
            "learning_rate_warmup_steps": section.learning_rate_warmup_steps,
            "kind": section.learning_rate_schedule,
        }
        if section.learning_rate_schedule != "constant":
            steps = config.training.num_steps
            if name == "training" and load_algorithm(config.algorithms.to_dict()).needs.values:
                steps -= config.critic.warmup_steps  # they do not train the policy
            rate["num_steps"] = steps * updates_per_step(config)
            rate["final_fraction"] = section.learning_rate_final_fraction
    return make_optimizer(
        learning_rate=section.learning_rate,
        **rate,
        weight_decay=section.weight_decay,
        max_grad_norm=section.max_grad_norm,
        direction=load_direction(config, name),
        param_dtype=config.model.param_dtype,
        is_offloaded="optimizer" in config.training.offload,
    )
