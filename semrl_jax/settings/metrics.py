"""Settings of `config.metrics`, whose checks `config.evaluation.metric_options` has too."""

from __future__ import annotations

import dataclasses

import ml_collections

from semrl_jax.metrics.names import (
    FINAL_LAYER,
    GROUP_METRICS,
    METHODS,
    METRICS,
    WINDOWS,
    check_metrics,
)
from semrl_jax.settings.rules import Section
from semrl_jax.support.errors import UserError
from semrl_jax.support.fields import derived, setting


def _window(config: ml_collections.ConfigDict) -> ml_collections.FieldReference:
    is_release = config.shaping.get_ref("reproduce_release")
    # A reference knows sums and products only; one that begins with a text holds texts.
    text = ml_collections.FieldReference("")
    return text + is_release * "release" + (1 - is_release) * "exact"


@dataclasses.dataclass(frozen=True)
class Metrics:
    stride: int = setting(
        40, "between two measured prefixes of a response; ERA needs 3 strides", "tokens", above=0
    )
    dataset_stride: int = setting(
        20, "between two measured prefixes of a batch; 0: not measured", "responses", at_least=0
    )
    window: str = derived(
        _window,
        "Prefixes that velocity and acceleration compare: exact, release or later. Follows "
        "shaping.reproduce_release unless set",
        choices=WINDOWS,
    )
    method: str = setting("gram", "gram; or svd, slower, with 5 digits", choices=METHODS)
    names: tuple[str, ...] = setting(
        ("effective_rank",), "metrics of a response, built in or your own; docs/extending.md"
    )
    of_groups: tuple[str, ...] = setting(
        (),
        "metrics of each group's mean states: elliptical_novelty, log_determinant, lidar; "
        "docs/metrics.md",
        each=GROUP_METRICS,
    )
    drift_every: int = setting(
        0, "between comparisons of final states with the reference's; 0: never", "steps", at_least=0
    )
    probes: tuple[str, ...] = setting(
        (),
        "modules with your own numbers for the log, repeat the flag; docs/extending.md",
        items=str,
    )
    layers: tuple[int, ...] = setting(
        (-1,), "-1: the final layer; i: the input of layer i", items=int
    )
    placement: str = setting(
        "trainer",
        "trainer; or rollout, on the replica, which then sends no states",
        choices=("trainer", "rollout"),
    )
    num_threads: int = setting(
        1, "host threads that measure", "threads", above=0, at_most=1024, may_change=True
    )
    device_batch: int = setting(
        0, "N responses at a time on the accelerator; 0: on the host", "responses", at_least=0
    )


def check(metrics: Section, name: str = "metrics") -> None:
    check_metrics(f"{name}.names", metrics["names"])
    layers = tuple(metrics["layers"])
    if FINAL_LAYER not in layers or min(layers) < FINAL_LAYER or len(set(layers)) < len(layers):
        raise UserError(
            f"{name}.layers={layers} must have -1, the final layer, and others from 0, each once."
        )
    if metrics["placement"] == "trainer":
        return
    if others := [layer for layer in layers if layer != FINAL_LAYER]:
        raise UserError(
            f"{name}.layers has {others[0]}, but {name}.placement={metrics['placement']!r} has "
            f"the final layer only; set it to 'trainer', or {name}.layers=(-1,)."
        )
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
