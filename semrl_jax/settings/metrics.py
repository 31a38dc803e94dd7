"""Checks of `config.metrics`."""

from __future__ import annotations

from semrl_jax.choices import METHODS, METRICS, WINDOWS
from semrl_jax.errors import UserError
from semrl_jax.settings.rules import Section, above_zero, at_least_zero, at_most, one_of


def check(metrics: Section) -> None:
    """Raises UserError for the first wrong field."""
    above_zero("metrics", metrics, "stride", "num_threads")
    at_most("metrics.num_threads", metrics["num_threads"], 1024)
    at_least_zero("metrics", metrics, "dataset_stride", "device_batch")
    one_of("metrics.placement", metrics["placement"], ("trainer", "rollout"))
    one_of("metrics.window", metrics["window"], WINDOWS)
    one_of("metrics.method", metrics["method"], METHODS)
    if metrics["window_growth"] < 1:
        raise UserError(
            f"metrics.window_growth={metrics['window_growth']} must be at least 1; "
            "1 measures every prefix."
        )
    for name in metrics["names"]:
        if name not in METRICS:
            raise UserError(
                f"metrics.names has {name!r}; it may have {METRICS}, one for each flag."
            )
    if metrics["placement"] == "rollout" and metrics["device_batch"]:
        raise UserError(
            f"metrics.device_batch={metrics['device_batch']} is of the trainer's accelerator, but "
            "metrics.placement='rollout' measures on the replica's host; set it to 0."
        )
