"""Checks of `config.algorithms`."""

from __future__ import annotations

from semrl_jax.choices import IMPORTANCE_LEVELS, KL_ESTIMATORS
from semrl_jax.errors import UserError
from semrl_jax.settings.rules import Section, above_zero, at_least_zero, one_of


def check(algorithms: Section) -> None:
    """Raises UserError for the first wrong field."""
    loss, importance = algorithms["loss"], algorithms["importance"]
    above_zero("algorithms.advantage", algorithms["advantage"], "epsilon")
    at_least_zero("algorithms.loss", loss, "kl_coefficient", "entropy_coefficient")
    one_of("algorithms.loss.kl_estimator", loss["kl_estimator"], KL_ESTIMATORS)
    if not 0 < loss["clip_epsilon"] < 1:
        raise UserError(f"algorithms.loss.clip_epsilon={loss['clip_epsilon']} must be in (0, 1).")
    one_of("algorithms.importance.level", importance["level"], ("none", *IMPORTANCE_LEVELS))
    if importance["cap"] < 1:
        raise UserError(
            f"algorithms.importance.cap={importance['cap']} must be at least 1: below, the weights "
            "of all tokens would be lowered, and with them the learning rate."
        )
    one_of("algorithms.aggregation", algorithms["aggregation"], ("token_mean", "response_mean"))
