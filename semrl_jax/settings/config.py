"""The whole config: its sections, their settings, and the checks of each section alone.

Nothing here loads JAX, so that a wrong setting is refused at once.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import importlib
import math
import re
from collections.abc import Mapping
from types import MappingProxyType

import ml_collections

from semrl_jax.settings import (
    algorithms,
    checkpoints,
    critic,
    data,
    distributed,
    environment,
    evaluation,
    hidden_states,
    logging,
    lora,
    mesh,
    metrics,
    model,
    moved,
    optimizer,
    profile,
    rewards,
    rollout,
    sft,
    training,
    warm_start,
)
from semrl_jax.settings.rules import flatten
from semrl_jax.shaping.options import ShapingOptions
from semrl_jax.support.errors import UserError
from semrl_jax.support.fields import Setting, build, check_fields, described, section, setting


@dataclasses.dataclass(frozen=True)
class Config:
    """Every setting; the sections mirror the rooms of the package."""

    seed: int = setting(0, "Seed of all random numbers", at_least=0, at_most=2**32 - 1)
    distributed: distributed.Distributed = section(
        distributed.Distributed, "docs/clusters.md", may_change=True
    )
    model: model.Model = section(model.Model)
    mesh: mesh.Mesh = section(
        mesh.Mesh, "sizes multiply to the device count; one may be -1", may_change=True
    )
    data: data.Data = section(data.Data)
    rollout: rollout.Rollout = section(rollout.Rollout)
    environment: environment.Environment = section(
        environment.Environment, "what the policy talks to, turn by turn. docs/environments.md"
    )
    hidden_states: hidden_states.HiddenStates = section(hidden_states.HiddenStates)
    metrics: metrics.Metrics = section(metrics.Metrics)
    shaping: ShapingOptions = section(ShapingOptions)
    algorithms: algorithms.Algorithms = section(algorithms.Algorithms)
    rewards: rewards.Rewards = section(rewards.Rewards)
    critic: critic.Critic = section(
        critic.Critic, "Only with an algorithm that has one, such as ppo"
    )
    lora: lora.Lora = section(lora.Lora, "Adapters upon a frozen base; docs/lora.md")
    warm_start: warm_start.WarmStart = section(
        warm_start.WarmStart, "Supervised training before the first update"
    )
    sft: sft.Sft = section(sft.Sft, "Fine-tuning on conversations, launch.sft; docs/data.md")
    optimizer: optimizer.Optimizer = section(
        optimizer.Optimizer, "Optimiser of the policy, the critic and launch.sft; docs/memory.md"
    )
    training: training.Training = section(training.Training)
    evaluation: evaluation.Evaluation = section(evaluation.Evaluation, may_change=True)
    checkpoints: checkpoints.Checkpoints = section(checkpoints.Checkpoints, may_change=True)
    logging: logging.Logging = section(logging.Logging, may_change=True)
    profile: profile.Profile = section(profile.Profile, may_change=True)


def default_config() -> ml_collections.ConfigDict:
    """A config with the default of every setting."""
    return build(Config)


@functools.cache
def known_settings() -> Mapping[str, Setting]:
    """What is known of every setting and section, by full name."""
    return MappingProxyType(described(Config))


def unknown_field(config: ml_collections.ConfigDict, field: str) -> str:
    """Why a field that the config does not have cannot be set, with its likely name."""
    names = list(flatten(config))
    if inside := [name for name in names if name.startswith(f"{field}.")]:
        fields = ", ".join(inside)
        return f"{field}: a section takes no value; set one of its fields: {fields}."
    if places := moved.new_places(field):
        return f"{field} is of an earlier version: {places}."
    section, _, short = field.rpartition(".")
    inside = [name.rpartition(".") for name in names]
    inside = [name for place, _, name in inside if place == section]
    letters = re.compile(".*".join(map(re.escape, short)))  # lr: learning_rate
    of_section = difflib.get_close_matches(short, inside, n=1, cutoff=0.7) or sorted(
        filter(letters.match, inside), key=len
    )
    near = (
        [name for name in names if name.endswith(f".{field}")]
        or difflib.get_close_matches(field, names, n=1, cutoff=0.8)
        or [f"{section}.{name}" for name in of_section[:1]]
    )
    hint = f"did you mean {' or '.join(near)}?" if near else "see docs/configuration.md."
    return f"{field} is no field of the config; {hint}"


def check_sections(config: ml_collections.ConfigDict) -> None:
    """Raises UserError for the first wrong field; most sections are checked alone."""
    for field, value in flatten(config).items():
        if place := moved.new_places(field):
            raise UserError(f"the config sets a field of an earlier version: {place}.")
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{field}={value} must be a finite number.")
        limit = 2**63 if field == "seed" else 2**31  # above, clocks and arrays overflow
        if isinstance(value, int | float) and abs(value) >= limit:
            raise UserError(f"{field}={value} must be below 2^{limit.bit_length() - 1}.")
    check_fields("", config, Config)
    for field in dataclasses.fields(Config):
        if field.metadata["section"]:
            module = importlib.import_module(f"semrl_jax.settings.{field.name}")
            if hasattr(module, "check"):
                module.check(config[field.name])
    most = config.rollout.max_response_tokens
    for name in ("rollout", "evaluation"):
        if config[name].min_tokens > most:
            raise UserError(
                f"{name}.min_tokens={config[name].min_tokens} must be at most "
                f"rollout.max_response_tokens={most}; lower it."
            )
