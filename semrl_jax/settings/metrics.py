"""Checks of `config.metrics`, and of `config.evaluation.metric_options`."""

from __future__ import annotations

from semrl_jax.metrics.names import (
    FINAL_LAYER,
    GROUP_METRICS,
    METHODS,
    METRICS,
    WINDOWS,
    check_metrics,
)
from semrl_jax.settings.rules import (
    Section,
    above_zero,
    at_least_zero,
    at_most,
    items_are,
    one_of,
)
from semrl_jax.support.errors import UserError


def check(metrics: Section, name: str = "metrics") -> None:
    above_zero(name, metrics, "stride", "num_threads")
    at_most(f"{name}.num_threads", metrics["num_threads"], 1024)
    at_least_zero(name, metrics, "dataset_stride", "device_batch")
    one_of(f"{name}.placement", metrics["placement"], ("trainer", "rollout"))
    one_of(f"{name}.window", metrics["window"], WINDOWS)
    one_of(f"{name}.method", metrics["method"], METHODS)
    check_metrics(f"{name}.names", metrics["names"])
    if "of_groups" in metrics:  # evaluations have none of these
        at_least_zero(name, metrics, "drift_every")
        items_are(str, name, metrics, "probes")
        for group_metric in metrics["of_groups"]:
            one_of(f"{name}.of_groups", group_metric, GROUP_METRICS)
    _check_layers(metrics, name)
    if metrics["placement"] == "rollout":
        _check_rollout(metrics, name)


def _check_layers(metrics: Section, name: str) -> None:
    items_are(int, name, metrics, "layers")
    layers = tuple(metrics["layers"])
    if FINAL_LAYER not in layers or min(layers) < FINAL_LAYER or len(set(layers)) < len(layers):
        raise UserError(
            f"{name}.layers={layers} must have -1, the final layer, and may have indices of other "
            "layers from 0, each once."
        )
    others = [layer for layer in layers if layer != FINAL_LAYER]
    if others and metrics["placement"] != "trainer":
        raise UserError(
            f"{name}.layers has {others[0]}, but {name}.placement={metrics['placement']!r} has "
            f"the final layer only; set it to 'trainer', or {name}.layers=(-1,)."
        )


def _check_rollout(metrics: Section, name: str) -> None:
    for metric in metrics["names"]:
        if metric not in METRICS:
            raise UserError(
                f"{name}.names has {metric!r}, but with {name}.placement='rollout' the replica "
                "measures, and it has only the built-in metrics; set the placement to 'trainer'."
            )
    if metrics["device_batch"]:
        raise UserError(
            f"{name}.device_batch={metrics['device_batch']} is for the trainer's accelerator, but "
            f"{name}.placement='rollout' measures on the replica's host; set it to 0."
        )
