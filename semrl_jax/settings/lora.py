"""Settings of `config.lora`."""

from __future__ import annotations

import dataclasses

from semrl_jax.settings.rules import Section
from semrl_jax.support.choices import DTYPES
from semrl_jax.support.errors import UserError
from semrl_jax.support.fields import setting


@dataclasses.dataclass(frozen=True)
class Lora:
    rank: int = setting(0, "rank of the adapters; 0: all parameters are trained", at_least=0)
    alpha: float = setting(32.0, "an adapter's product is scaled by alpha / rank", above=0)
    rank_stabilized: bool = setting(False, "True: scaled by alpha / sqrt(rank)")
    targets: tuple[str, ...] = setting(
        ("all-linear",),
        "q_proj, ..., patterns such as *_proj, or all-linear; repeat the flag",
        items=str,
    )
    base_dtype: str = setting(
        "float32",
        "dtype of the base, which is also the reference: float32 or bfloat16",
        choices=DTYPES,
    )
    dropout: float = setting(
        0.0, "share of an adapter's inputs that are 0 in the update", within="[0, 1)"
    )
    path: str = setting("", "directory in PEFT's format to start from; empty: new adapters")


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
