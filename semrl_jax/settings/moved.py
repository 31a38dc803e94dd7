"""Fields that an earlier version had: under another name, or that no longer exist."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

# Old name -> present name, both in full.
MOVED: dict[str, str] = {}
# Removed name -> the value with which it did nothing. A run with that value goes on without it.
REMOVED: dict[str, Any] = {
    "rollout.annealing.enabled": False,
    "rollout.annealing.maximum": 1.2,
    "rollout.annealing.minimum": 0.1,
    "rollout.annealing.warmup_tokens": 10,
    "rollout.annealing.decay_tokens": 500.0,
    "rollout.annealing.decay_growth": 100.0,
    "rollout.annealing.max_decay_tokens": 800_000.0,
    "algorithms.batch_rules.ace_alpha": 0.0,
    "algorithms.batch_rules.arm_alpha": 0.0,
    "algorithms.batch_rules.arm_low_fraction": 0.2,
    "metrics.window_growth": 1.0,
    "evaluation.metric_options.window_growth": 1.0,
    "shaping.tokens": "all",
    "shaping.ema_init": "first_batch",
    "shaping.ema_lag": 1,
    "shaping.invalid": "excluded",
}
# What shaping.reproduce_release sets at once.
RELEASE = {
    "shaping.tokens": "last",
    "shaping.ema_init": "zero",
    "shaping.ema_lag": 2,
    "shaping.invalid": "zeros",
}


def with_present_names(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a record by their present names; a removed one stays if it did something."""
    if RELEASE.items() <= fields.items():
        others = {name: value for name, value in fields.items() if name not in RELEASE}
        fields = others | {"shaping.reproduce_release": True}
    way, lag = fields.get("rollout.in_flight"), fields.get("rollout.max_staleness", 0)
    if way == "abort" or (way == "keep" and lag < 2):  # which did nothing
        fields = {**fields, "rollout.in_flight": "wait"}
    return {
        MOVED.get(name, name): value
        for name, value in fields.items()
        if name not in REMOVED or REMOVED[name] != value
    }


def new_places(name: str) -> str:
    """What became of a field, or of each field of a former section; "" if nothing is known."""
    moved = {old: f"is now {new}" for old, new in MOVED.items()}
    gone = dict.fromkeys(REMOVED, "was removed, see docs/changelog.md")
    return "; ".join(
        f"{old} {what}"
        for old, what in (moved | gone).items()
        if old == name or old.startswith(f"{name}.")
    )
