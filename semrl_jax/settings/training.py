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
        160, "length of the run; a resumed run may raise it", at_least=0, may_change=True
    )
    num_epochs: int = setting(
        0,
        "passes over the prompts, in whole steps; above 0, replaces num_steps",
        "epochs",
        at_least=0,
        may_change=True,
    )
    responses_per_step: int = derived(
        lambda config: (
            config.data.get_ref("prompts_per_step") * config.rollout.get_ref("group_size")
        ),
        "derived from its two factors",
        "responses",
    )
    prompts_per_minibatch: int = derived(
        lambda config: part_of(config.data.get_ref("prompts_per_step"), 24),
        "per optimiser step; divides data.prompts_per_step. Default: 24 if that divides "
        "it, else all",
        "prompts",
        above=0,
    )
    ppo_epochs: int = setting(
        1, "passes over the responses of a step, with other mini-batches in each", "passes", above=0
    )
    micro_batch_size: int = setting(
        8, "per forward and backward pass", "responses", above=0, may_change=True
    )
    micro_batch_tokens: int = setting(
        0,
        "per pass and data shard, padding included; above 0, replaces micro_batch_size",
        at_least=0,
        may_change=True,
    )
    pack_sequences: bool = setting(
        False, "several sequences in a row of micro_batch_tokens", may_change=True
    )
    balance_lengths: bool = setting(True, "give shards equally many tokens", may_change=True)
    learning_rate: float = setting(5e-7, "learning rate of the policy", above=0)
    max_skipped_updates: int = setting(
        3, "non-finite updates in a row that end the run", "updates", above=0
    )
    resume_from: str = setting(
        "", "RUN/checkpoints/20, from which a new WORKDIR continues; docs/resume.md"
    )
    grace_s: float = setting(30.0, "after SIGTERM, to save a checkpoint", above=0, may_change=True)
    offload: tuple[str, ...] = setting(
        (),
        "what the host keeps between updates: optimizer, parameters, reference; repeat the "
        "flag. docs/memory.md",
        each=OFFLOADED,
        may_change=True,
    )
    export: str = setting(
        "",
        "dtype of WORKDIR/model, a Hugging Face directory written at the end: float32 or "
        "bfloat16; empty: none",
        choices=("", *DTYPES),
        may_change=True,
    )


def updates_per_step(config: Any) -> int:
    """The optimiser steps of a training step, of a whole config."""
    training = config.training
    return -(-config.data.prompts_per_step // training.prompts_per_minibatch) * training.ppo_epochs
