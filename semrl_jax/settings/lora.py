"""Checks of `config.lora`."""

from __future__ import annotations

from semrl_jax.settings.rules import Section, above_zero, at_least_zero, items_are, one_of
from semrl_jax.support.choices import DTYPES
from semrl_jax.support.errors import UserError


def check(lora: Section) -> None:
    at_least_zero("lora", lora, "rank")
    above_zero("lora", lora, "alpha")
    items_are(str, "lora", lora, "targets")
    one_of("lora.base_dtype", lora["base_dtype"], DTYPES)
    if lora["rank"] and not lora["targets"]:
        raise UserError(
            "lora.targets=() names no module; set it to ('all-linear',), or lora.rank=0 to train "
            "all parameters."
        )
    if lora["path"] and not lora["rank"]:
        raise UserError(
            f"lora.path={lora['path']!r} is not read with lora.rank=0; set lora.rank to that of "
            "the adapter, or give the adapter as model.path to train all parameters from the "
            "merged model."
        )
