"""Settings of `config.algorithms`; an algorithm checks its own options."""

from __future__ import annotations

import dataclasses
from typing import Any

import ml_collections

from semrl_jax.settings.declared import declared_options
from semrl_jax.support.choices import IMPORTANCE_LEVELS, KEEP_GROUPS_BY
from semrl_jax.support.fields import described, section, setting
from semrl_jax.support.modules import load_module

TOKEN_LEVELS = ("token", "total_variation")  # weights that follow from one token alone
MAX_ROUNDS = 1000  # of dynamic sampling; a step needs an end
_LEVELS = ("none", *IMPORTANCE_LEVELS)
_OPTIONS = declared_options()


@dataclasses.dataclass(frozen=True)
class Importance:
    level: str = setting(
        "none", "none, token, sequence, geometric or total_variation", choices=_LEVELS
    )
    level_ahead: str = setting(
        "token",
        "in place of none with rollout.max_staleness above 0 or rollout.vllm_quantization; "
        "none: no correction",
        choices=_LEVELS,
    )
    outside: str = setting(
        "truncate", "truncate weights to the bounds; or mask: drop what lies outside"
    )
    floor: float = setting(0.0, "the smallest ratio")
    cap: float = setting(2.0, "the largest ratio, or difference of probabilities")


@dataclasses.dataclass(frozen=True)
class BatchRules:
    overlong_tokens: int = setting(
        0,
        "the reward falls by up to 1 within this distance of the length limit; 0: off",
        at_least=0,
    )
    mask_truncated: bool = setting(
        False, "True: truncated responses count in their group, but are not trained on"
    )
    # A run that ended with too few groups may continue with more rounds, or without the rule.
    max_sampling_rounds: int = setting(
        0,
        "Dynamic sampling: most rounds of prompts that a step samples to get prompts_per_step "
        "groups with unequal rewards; fewer groups end the run. 0: off",
        "rounds",
        at_least=0,
        at_most=MAX_ROUNDS,
        may_change=True,
    )
    keep_groups_by: str = setting(
        "reward", "what must differ in a group: reward or correctness", choices=KEEP_GROUPS_BY
    )


@dataclasses.dataclass(frozen=True)
class Algorithms(_OPTIONS[""]):
    name: str = setting(
        "grpo", 'A name of docs/algorithms.md, or "my_package.my_module" (docs/extending.md)'
    )
    options: dict = section(dict, "options of your own algorithm; docs/extending.md")
    advantage: Any = section(_OPTIONS["advantage"])
    loss: Any = section(_OPTIONS["loss"])
    importance: Importance = section(
        Importance, "Correction for the difference between engine and policy; docs/verl.md"
    )
    batch_rules: BatchRules = section(BatchRules)


def users_options(name: str) -> dict[str, dataclasses.Field]:
    """Fields that a user's algorithm declares; UserError if its module cannot be imported."""
    if "." not in name:
        return {}
    module = load_module("algorithms.name", name, "semrl_jax.algorithms", ("Options",))
    if not dataclasses.is_dataclass(module.Options):
        return {}
    shared = {field.rpartition(".")[2] for field in described(Algorithms)}
    return {
        field.name: field
        for field in dataclasses.fields(module.Options)
        if field.name not in shared and field.default is not dataclasses.MISSING
    }


def add_users_options(config: ml_collections.ConfigDict, name: str) -> None:
    """Adds the fields of `users_options` that the config does not set, with their defaults."""
    section = config.algorithms
    options = {option: field.default for option, field in users_options(name).items()}
    with config.unlocked():
        section.options = options | {**section.options}


def importance_options(config: ml_collections.ConfigDict) -> dict[str, Any]:
    """Options of `importance_weights`; their level may be 'none'.

    With batches that are sampled ahead or by a quantised engine, 'none' becomes `level_ahead`.
    """
    options = config.algorithms.importance.to_dict()
    ahead = options.pop("level_ahead")
    from_another = config.rollout.max_staleness or config.rollout.vllm_quantization
    if from_another and options["level"] == "none":
        options["level"] = ahead
    return options
