"""Checks of `config.optimizer`. Each optimiser checks its options when it is loaded."""

from __future__ import annotations

from semrl_jax.settings.rules import Section, one_of
from semrl_jax.support.choices import DTYPES


def check(optimizer: Section) -> None:
    one_of("optimizer.first_moment_dtype", optimizer["first_moment_dtype"], DTYPES)
