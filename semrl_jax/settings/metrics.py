"""Checks of `config.metrics`."""

from __future__ import annotations

from semrl_jax.errors import UserError
from semrl_jax.metrics.names import FINAL_LAYER, METHODS, METRICS, WINDOWS, check_metrics
from semrl_jax.settings.rules import (
    Section,
    above_zero,
    at_least_zero,
    at_most,
    items_are,
    one_of,
)


def check(metrics: Section) -> None:
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
    check_metrics("metrics.names", metrics["names"])
    _check_layers(metrics)
    if metrics["placement"] == "rollout":
        _check_rollout(metrics)


def _check_layers(metrics: Section) -> None:
    items_are(int, "metrics", metrics, "layers")
    layers = tuple(metrics["layers"])
    if FINAL_LAYER not in layers or min(layers) < FINAL_LAYER or len(set(layers)) < len(layers):
        raise UserError(
            f"metrics.layers={layers} must have -1, the final layer, and may have indices of other "
            "layers from 0, each once."
        )
    others = [layer for layer in layers if layer != FINAL_LAYER]
    if others and metrics["placement"] != "trainer":
        raise UserError(
            f"metrics.layers has {others[0]}, but metrics.placement={metrics['placement']!r} has "
            "the final layer only; set it to 'trainer', or metrics.layers=(-1,)."
        )


def _check_rollout(metrics: Section) -> None:
    for name in metrics["names"]:
        if name not in METRICS:
            raise UserError(
                f"metrics.names has {name!r}, but with metrics.placement='rollout' the replica "
                "measures, and it has only the built-in metrics; set the placement to 'trainer'."
            )
    if metrics["device_batch"]:
        raise UserError(
            f"metrics.device_batch={metrics['device_batch']} is for the trainer's accelerator, but "
            "metrics.placement='rollout' measures on the replica's host; set it to 0."
        )
