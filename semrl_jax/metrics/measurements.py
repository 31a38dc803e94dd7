"""Keys and values of measured metrics, and their names in messages, files and logs; no JAX."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from semrl_jax.metrics.names import FINAL_LAYER

_VALID = "_valid"
_LABEL = re.compile(r"(?:layer_(\d{1,6})/)?(.+?)(?:_(velocity|acceleration))?")


class MetricKey(NamedTuple):
    """What was measured."""

    name: str  # of a metric, or an indicator of tokens such as "avg_log_probs", in the final layer
    # "value", "velocity", "acceleration", or "series": the values of all prefixes, which are not a
    # number and have no label.
    order: str = "value"
    layer: int = FINAL_LAYER  # -1: the final layer after the final norm; i: the input of layer i

    @property
    def label(self) -> str:
        """The key in logs, files and messages: `[layer_<i>/]<name>[_velocity]`."""
        layer = "" if self.layer == FINAL_LAYER else f"layer_{self.layer}/"
        return layer + (self.name if self.order == "value" else f"{self.name}_{self.order}")

    @property
    def dataset_label(self) -> str:
        """The label for a set of responses: `[layer_<i>/]{global,cumulative}/...`."""
        part = "global" if self.order == "value" else "cumulative"
        layer, slash, _ = self._replace(name="").label.rpartition("/")
        return f"{layer}{slash}{part}/{self._replace(layer=FINAL_LAYER).label}"

    @classmethod
    def parse(cls, label: str) -> MetricKey:
        found = _LABEL.fullmatch(label)
        if found is None:
            return cls(label)
        layer, name, order = found.groups()
        return cls(name, order or "value", FINAL_LAYER if layer is None else int(layer))


class Measurement(NamedTuple):
    """One metric in one order."""

    value: Any  # float32 array, or float of one response on the host; 0.0 where not valid
    # Bool array of the same shape, or bool. False where the response is too short for this metric
    # and order, or not finite.
    valid: Any


Metrics = Mapping[MetricKey, Measurement]


def joined(parts: Sequence[tuple[int, Metrics]]) -> dict[MetricKey, Measurement]:
    """One column per metric, from parts: (number of responses, their metrics as columns).

    A part of one response may have numbers. If a part lacks a metric, its responses have no valid
    value of it.
    """
    keys = dict.fromkeys(key for _, metrics in parts for key in metrics)
    found = {}
    for key in keys:
        nothing = ((np.zeros(size, np.float32), np.zeros(size, bool)) for size, _ in parts)
        columns = [metrics.get(key, none) for (_, metrics), none in zip(parts, nothing)]
        found[key] = Measurement(*map(np.hstack, zip(*columns)))
    return found


def flatten(metrics: Metrics) -> dict[str, Any]:
    """Values under `<label>` and validities under `<label>_valid`, sorted by name."""
    flat = {}
    for key, (value, valid) in metrics.items():
        flat |= {key.label: value, f"{key.label}{_VALID}": valid}
    return dict(sorted(flat.items()))


def encode(metrics: Metrics) -> dict[str, float]:
    """The metrics of one response as named floats; a validity is 1.0 or 0.0."""
    return {name: float(value) for name, value in flatten(metrics).items()}


def decode(scalars: Mapping[str, float]) -> dict[MetricKey, Measurement]:
    """The inverse of `encode`, sorted; a value without a validity is not valid."""
    return {
        MetricKey.parse(name): Measurement(scalars[name], bool(scalars.get(f"{name}{_VALID}")))
        for name in sorted(scalars)
        if not name.endswith(_VALID)
    }
