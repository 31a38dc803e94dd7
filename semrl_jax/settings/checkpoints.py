"""Settings of `config.checkpoints`."""

from __future__ import annotations

import dataclasses

from semrl_jax.settings.rules import Section
from semrl_jax.support.choices import DTYPES
from semrl_jax.support.errors import UserError
from semrl_jax.support.fields import setting


@dataclasses.dataclass(frozen=True)
class Checkpoints:
    every_steps: int = setting(40, "steps between two checkpoints", above=0)
    keep: int = setting(2, "the newest ones stay", "checkpoints", above=0)
    keep_every: int = setting(
        0, "Checkpoints of multiples of this step are never removed; 0: none", "steps", at_least=0
    )
    extra_steps: tuple[int, ...] = setting(
        (), "Steps with a checkpoint of their own, which is never removed", items=int
    )
    export: str = setting(
        "",
        "Dtype of checkpoints/<step>/model, the policy as a Hugging Face directory in each "
        "checkpoint: float32 or bfloat16. Empty: none",
        choices=("", *DTYPES),
    )
    copy_to: str = setting(
        "",
        "Bucket or directory (gs://, s3://, a path) that gets a copy of the run with each "
        "checkpoint, and from which an empty WORKDIR continues. Empty: none",
    )


def check(checkpoints: Section) -> None:
    for step in checkpoints["extra_steps"]:
        if step < 1:
            raise UserError(f"checkpoints.extra_steps has {step}; steps count from 1.")
