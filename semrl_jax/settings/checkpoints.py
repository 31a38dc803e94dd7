"""Settings of `config.checkpoints`."""

from __future__ import annotations

import dataclasses

from semrl_jax.settings.rules import Section
from semrl_jax.support.choices import DTYPES
from semrl_jax.support.errors import UserError
from semrl_jax.support.fields import setting


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    every_steps: int = setting(40, "between checkpoints", above=0)
    keep: int = setting(2, "the newest ones stay", "checkpoints", above=0)
    keep_every: int = setting(
        0, "checkpoints of its multiples are never removed; 0: none", "steps", at_least=0
    )
    extra_steps: tuple[int, ...] = setting(
        (), "further steps with a checkpoint, which is never removed", items=int
    )
    export: str = setting(
        "",
        "dtype of checkpoints/STEP/model, a Hugging Face directory: float32 or bfloat16; "
        "empty: none",
        choices=("", *DTYPES),
    )
    copy_to: str = setting(
        "",
        "gs://, s3:// or a directory that gets a copy of the run with each checkpoint; "
        "docs/resume.md",
    )


def check(checkpoints: Section) -> None:
    for step in checkpoints["extra_steps"]:
        if step < 1:
            raise UserError(f"checkpoints.extra_steps has {step}; steps count from 1.")
