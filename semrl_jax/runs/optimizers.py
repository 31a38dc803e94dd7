"""The optimisers of a run, as its config describes them."""

from __future__ import annotations

from typing import Any

import ml_collections

from semrl_jax.training.optimizer import Optimizer, load_direction
from semrl_jax.training.state import make_optimizer


def optimizer_of(config: ml_collections.ConfigDict, name: str) -> Optimizer:
    """The optimiser of the section `name`, "training" or "critic"."""
    rate = {field: config[name][field] for field in ("learning_rate", "learning_rate_warmup_steps")}
    return make_optimizer(**rate, **optimizer_settings(config, name))


def optimizer_settings(config: ml_collections.ConfigDict, name: str) -> dict[str, Any]:
    """What `clipped` gets beside the rate, for the section "training", "critic" or "sft"."""
    section = config[name]
    return {
        "weight_decay": section.weight_decay,
        "max_grad_norm": section.max_grad_norm,
        "direction": load_direction(config, name),
        "param_dtype": config.model.param_dtype,
        "is_offloaded": "optimizer" in config.training.offload,
    }
