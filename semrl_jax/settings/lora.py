"""Settings of `config.lora`."""

from __future__ import annotations

import dataclasses

from semrl_jax.settings.rules import Section
from semrl_jax.support.choices import DTYPES
from semrl_jax.support.errors import UserError
from semrl_jax.support.fields import setting


@dataclasses.dataclass(frozen=True)
class Lora:
    rank: int = setting(
        0, "rank of the adapters; 0: no adapters, all parameters are trained", at_least=0
    )
    alpha: float = setting(
        32.0, "the product of an adapter's matrices is scaled by alpha / rank", above=0
    )
    rank_stabilized: bool = setting(False, "True: scaled by alpha / sqrt(rank)")
    targets: tuple[str, ...] = setting(
        ("all-linear",),
        "Modules of every layer: q_proj, ..., patterns such as *_proj, or all-linear; "
        "repeat the flag. docs/lora.md",
        items=str,
    )
    base_dtype: str = setting(
        "float32",
        "Dtype of the frozen base, which is also the reference: float32, or bfloat16 for "
        "half the memory",
        choices=DTYPES,
    )
    dropout: float = setting(
        0.0,
        "Share of an adapter's inputs that are 0 in the update, by config.seed; the others are "
        "divided by 1 - dropout",
        within="[0, 1)",
    )
    path: str = setting(
        "", "Directory in PEFT's format with the adapter to start from; empty: a new adapter"
    )


def check(lora: Section) -> None:
    if lora["rank"] and not lora["targets"]:
        raise UserError("lora.targets=() names no module; set ('all-linear',), or lora.rank=0.")
    if lora["dropout"] and not lora["rank"]:
        raise UserError(f"lora.dropout={lora['dropout']} needs adapters; set lora.rank, or 0 here.")
    if lora["path"] and not lora["rank"]:
        raise UserError(
            f"lora.path={lora['path']!r} is not read with lora.rank=0; set lora.rank to the "
            "adapter's, or give the adapter as model.path to train the merged model."
        )
