"""Settings of `config.training`."""

from __future__ import annotations

import dataclasses
from typing import Any

from semrl_jax.settings.optimizer import Steps
from semrl_jax.support.choices import DTYPES, OFFLOADED
from semrl_jax.support.fields import derived, part_of, setting


@dataclasses.dataclass(frozen=True)
class Training(Steps):
    num_steps: int = setting(
        160, "length of the run; may be raised when it is resumed", at_least=0, may_change=True
    )
    num_epochs: int = setting(
        0,
        "passes over the prompts; above 0, replaces num_steps; a rest below a step is left out",
        "epochs",
        at_least=0,
        may_change=True,
    )
    responses_per_step: int = derived(
        lambda config: (
            config.data.get_ref("prompts_per_step") * config.rollout.get_ref("group_size")
        ),
        "derived: follows overrides of both factors",
        "responses",
    )
    prompts_per_minibatch: int = derived(
        lambda config: part_of(config.data.get_ref("prompts_per_step"), 24),
        "Prompts of one optimiser step; divides data.prompts_per_step. Default: 24 if "
        "that divides it, else all",
        "prompts",
        above=0,
    )
    ppo_epochs: int = setting(
        1,
        "Passes over the responses of a step. From the second on, mini-batches have other "
        "prompts, drawn by config.seed",
        "passes",
        above=0,
    )
    micro_batch_size: int = setting(
        8, "responses of one forward and backward pass", "responses", above=0, may_change=True
    )
    micro_batch_tokens: int = setting(
        0,
        "Tokens of one forward and backward pass on each data shard, padding included; "
        "above 0, replaces micro_batch_size",
        at_least=0,
        may_change=True,
    )
    pack_sequences: bool = setting(
        False, "put several sequences into a row of micro_batch_tokens", may_change=True
    )
    balance_lengths: bool = setting(
        True, "Give shards equally many tokens; same numbers up to rounding", may_change=True
    )
    learning_rate: float = setting(5e-7, "learning rate of the policy", above=0)
    max_skipped_updates: int = setting(
        3, "non-finite updates in a row that end the run", "updates", above=0
    )
    resume_from: str = setting(
        "",
        "Checkpoint of a run, RUN/checkpoints/20, from which a new WORKDIR continues with all "
        "its state; docs/resume.md. Empty: none",
    )
    grace_s: float = setting(
        30.0, "time after SIGTERM to save the last checkpoint", above=0, may_change=True
    )
    offload: tuple[str, ...] = setting(
        (),
        "What the host's memory keeps while no update needs it: optimizer, parameters, "
        "reference; repeat the flag. docs/memory.md",
        each=OFFLOADED,
        may_change=True,
    )
    export: str = setting(
        "",
        "Dtype of WORKDIR/model, a Hugging Face directory that launch.train writes at "
        "the end: float32 or bfloat16. Empty: none",
        choices=("", *DTYPES),
        may_change=True,
    )


def updates_per_step(config: Any) -> int:
    """The optimiser steps of a training step, of a whole config."""
    training = config.training
    return -(-config.data.prompts_per_step // training.prompts_per_minibatch) * training.ppo_epochs
