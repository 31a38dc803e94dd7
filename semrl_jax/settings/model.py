"""Checks of `config.model`."""

from __future__ import annotations

from semrl_jax.settings.rules import Section, above_zero, divides, one_of
from semrl_jax.support.choices import ATTENTION_KERNELS, DTYPES, REMAT_POLICIES


def check(model: Section) -> None:
    one_of("model.compute_dtype", model["compute_dtype"], DTYPES)
    one_of("model.param_dtype", model["param_dtype"], DTYPES)
    one_of("model.reference_dtype", model["reference_dtype"], DTYPES)
    one_of("model.attention", model["attention"], ATTENTION_KERNELS)
    one_of("model.remat", model["remat"], REMAT_POLICIES)
    if model["path"]:
        return
    # `DecoderConfig` checks the sizes.
    above_zero("model", model, "num_heads", "hidden_size")
    divides("model.num_heads", model["num_heads"], "model.hidden_size", model["hidden_size"])
