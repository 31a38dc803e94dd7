"""The curve of a run: a sigmoid over compute, whose ceiling says where the run is heading.

R_C = R_0 + (A - R_0) / (1 + (M / C)^B)

R_0 is the first evaluation, before any update; A the ceiling, B the efficiency, M the compute at
half of the gain. If no value is outside 0 to 1, A is at most 1.

Source: arXiv:2510.13786, Eq. 1 and App. A.7: a grid over A and M there, and the first 1,500 GPU
hours left out. Here the best A of each B and M is known in closed form, and the grid is over these.
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure

from semrl_jax.analysis.responses import write_columns
from semrl_jax.support.errors import UserError

COMPUTE = {"hours": "time/step_s", "flops": "policy/flops", "steps": None}
MIN_POINTS = 4  # one more than there are parameters
_BOUNDS = np.log([[0.1, 1e-3], [20.0, 1e3]])  # of B, and of M in units of the last compute
_GRID = 41  # in each direction
_CELLS = 8  # of the grid before, on both sides of its best point: the valley is narrow and oblique
_REFINEMENTS = 20


class Curve(NamedTuple):
    """A fitted curve."""

    first: float  # R_0
    ceiling: float  # A, in the unit of the values
    efficiency: float  # B
    midpoint: float  # M, in the unit of the compute

    def at(self, compute: Float[np.ndarray, " N"]) -> Float[np.ndarray, " N"]:
        """Float64 values at an amount of compute of at least 0."""
        return self.first + (self.ceiling - self.first) * _share(
            compute, self.midpoint, self.efficiency
        )


class Points(NamedTuple):
    """The evaluations of a run, and the compute before each."""

    steps: Float[np.ndarray, " N"]
    compute: Float[np.ndarray, " N"]  # 0.0 at step 0
    values: Float[np.ndarray, " N"]


def points(rows: Sequence[Mapping[str, Any]], key: str, unit: str) -> Points:
    """The values of `key` in the rows of a log; `unit` is one of COMPUTE. UserError without one.

    Hours are those of whole steps, evaluation included; operations those of passes and updates.
    """
    name, spent, found = COMPUTE[unit], 0.0, []
    for row in rows:
        if (value := row.get(key)) is not None and math.isfinite(value):
            found.append((row["step"], row["step"] if name is None else spent, value))
        spent += (row.get(name) or 0.0) / (3600 if unit == "hours" else 1)
    if len(found) < 2 or found[0][0] != 0:
        raise UserError(f"the log has no value of {key!r} at step 0 and later; name another --key.")
    if name is not None and spent == 0:
        raise UserError(f"the log has no {name!r}; choose another --compute.")
    return Points(*np.array(found, np.float64).T)


def fit(compute: Float[np.ndarray, " N"], values: Float[np.ndarray, " N"], first: float) -> Curve:
    """The curve with the smallest squared error; `compute` is above 0.

    ValueError below MIN_POINTS points.
    """
    if len(compute) < MIN_POINTS:
        raise ValueError(f"{len(compute)} points are too few; a curve needs {MIN_POINTS}.")
    gains = values - first
    is_rate = min(values.min(), first) >= 0 and max(values.max(), first) <= 1
    most = 1 - first if is_rate else np.inf
    low, high = _BOUNDS
    for _ in range(_REFINEMENTS):
        axes = [np.linspace(*ends, _GRID) for ends in zip(low, high)]
        log_b, log_m = (grid.reshape(-1, 1) for grid in np.meshgrid(*axes, indexing="ij"))
        shares = _share(compute, np.exp(log_m) * compute[-1], np.exp(log_b))
        squares = np.maximum(np.sum(shares**2, axis=1), np.finfo(float).tiny)
        gain = np.minimum(np.sum(shares * gains, axis=1) / squares, most)
        errors = np.sum((gains - gain[:, None] * shares) ** 2, axis=1)
        best = int(np.argmin(errors))
        centre = np.array([log_b[best, 0], log_m[best, 0]])
        cells = _CELLS * (high - low) / (_GRID - 1)
        low, high = np.maximum(centre - cells, _BOUNDS[0]), np.minimum(centre + cells, _BOUNDS[1])
    efficiency, midpoint = np.exp(centre)
    return Curve(first, first + float(gain[best]), float(efficiency), midpoint * compute[-1])


def write_curve(
    output: pathlib.Path, of_run: Points, curve: Curve, chosen: slice, key: str, unit: str
) -> list[str]:
    """Writes curve.csv and curve.png, and returns their names; the `chosen` points were fitted."""
    columns = of_run._asdict() | {"fitted": curve.at(of_run.compute)}
    write_columns(output / "curve.csv", columns)
    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    axes = figure.add_subplot()
    line = np.linspace(0, of_run.compute[-1], 200)
    axes.plot(line, curve.at(line), color="#d1662a", label=f"fit, ceiling {curve.ceiling:.3g}")
    axes.plot(of_run.compute, of_run.values, "o", color="#999999", label="not fitted")
    axes.plot(of_run.compute[chosen], of_run.values[chosen], "o", color="#1f5fa8", label="fitted")
    axes.set_xlabel(unit)
    axes.set_ylabel(key)
    axes.legend(frameon=False, fontsize=9)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(output / "curve.png", dpi=110)
    return ["curve.csv", "curve.png"]


def _share(compute, midpoint, efficiency):
    """1 / (1 + (M / C)^B) without overflow; 0.0 at compute 0."""
    with np.errstate(divide="ignore"):
        exponent = efficiency * (np.log(midpoint) - np.log(compute))
    return np.exp(-np.logaddexp(0.0, exponent))
