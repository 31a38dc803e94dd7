"""The options of the shaping, their defaults and their checks."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Sequence
from typing import Any

import numpy as np

from semrl_jax.support.fields import setting

INDICATORS = ("effective_rank_acceleration", "effective_rank_velocity", "effective_rank")
GUIDANCE = INDICATORS[0]

CHOICES = {
    "target": ("advantage", "reward", "both", "none"),
    "mixing": ("adaptive", "half", "sum"),
    "scale": ("fixed", "performance"),
    "reproduce_release": (False, True),
}

_FLOAT32_MAX = float(np.finfo(np.float32).max)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShapingOptions:
    """All of `config.shaping`; the functions of this room take its fields as keywords.

    They are Python values, fixed while tracing. Each function uses the options it needs.
    ValueError for a wrong value, with field, value, rule and way out.

    Attributes:
      target: what the signal is added to: "advantage"; "reward": the reward of the last token,
        before the estimator; "both", which counts it twice; "none".
      mixing: "adaptive": beta from the guidance; "half": beta = 0.5; "sum": both weights in full.
      scale: "fixed": eta; "performance": eta (1 - (q + 1) / 2), q the EMA of the mean raw reward.
        For rewards in [-1, 1]: with larger rewards the signal changes its sign.
      reproduce_release: True: as the reference implementation. The last response token alone gets
        the bonus. Baselines start at 0, not at the first batch's means, and lag: step t uses means
        up to step t - 2, not t - 1, and q omits the first step. Responses too short for a needed
        velocity or acceleration count with 0; else they are left out. Non-finite ones never count.
      alpha: EMA rate in (0, 1].
      gain: slope of the meta-controller, finite.
      eta: scale of the signal, finite and not negative.
      kappa: above 1; the bonus stays below |A| / kappa.
      indicators: labels of metrics, see `metrics.MetricKey.label`, no two equal.
      explore_weights, exploit_weights: one finite weight per indicator.
      guidance: the indicator the meta-controller reads; one of `indicators` or another.
    """

    target: str = setting("advantage", "What gets the bonus: advantage, reward, both or none")
    mixing: str = setting(
        "adaptive", "Weight of exploration: adaptive, by the guidance; half, 0.5; sum, no mixing"
    )
    scale: str = setting("fixed", "fixed; or performance: the bonus falls as the mean reward rises")
    reproduce_release: bool = setting(
        False,
        "With the release's defects: bonus on the last token, late baselines from zero, zeros "
        "for short responses, metrics.window=release unless set; docs/verl.md",
    )
    alpha: float | int = setting(0.3, "update rate of the baselines, in (0, 1]")
    gain: float | int = setting(2.0, "effect of the guidance on the weight of exploration")
    eta: float | int = setting(1.0, "strength of the bonus; 0: none")
    kappa: float | int = setting(2.0, "the bonus is at most |A| / kappa")
    indicators: Sequence[str] = setting(
        INDICATORS, "metrics whose deviations from their baselines give the bonus"
    )
    explore_weights: Sequence[float | int] = setting(
        (0.0, 0.0, 1.0), "a weight per indicator, for exploration"
    )
    exploit_weights: Sequence[float | int] = setting(
        (0.0, 1.0, 0.0), "a weight per indicator, for exploitation"
    )
    guidance: str = setting(GUIDANCE, "indicator that decides between exploration and exploitation")

    def __post_init__(self) -> None:
        for field, choices in CHOICES.items():
            _check_choice(field, getattr(self, field), choices)
        for field in ("alpha", "gain", "eta", "kappa"):
            _check_number(f"shaping.{field}=", getattr(self, field))
        if not 0 < self.alpha <= 1:
            raise ValueError(f"shaping.alpha={self.alpha} must lie in (0, 1].")
        # In float32, as in the division: 1 + 1e-9 is 1 there.
        if not np.float32(self.kappa) > 1:
            raise ValueError(
                f"shaping.kappa={self.kappa} must be above 1 in float32, so that no bonus changes "
                "the sign of an advantage; shaping.target='none' switches shaping off."
            )
        if self.eta < 0:
            raise ValueError(f"shaping.eta={self.eta} must not be negative; negate the weights.")
        tracked_indicators(self.indicators, self.guidance)
        for field in ("explore_weights", "exploit_weights"):
            self._check_weights(field)
        weights = [*self.explore_weights, *self.exploit_weights]
        if not any(weights):
            raise ValueError(
                "shaping.explore_weights and shaping.exploit_weights are all zero; "
                "shaping.target='none' switches shaping off."
            )
        if self.eta * math.fsum(map(abs, weights)) > _FLOAT32_MAX:
            raise ValueError(f"shaping.eta={self.eta} times the weights leaves float32; lower it.")

    @property
    def tracked(self) -> tuple[str, ...]:
        """Indicators that have a baseline, in its order."""
        return tracked_indicators(self.indicators, self.guidance)

    @property
    def used(self) -> tuple[str, ...]:
        """Indicators that a response must have to be shaped: those with a weight, the guidance."""
        weights = zip(self.indicators, self.explore_weights, self.exploit_weights)
        weighted = tuple(name for name, explore, exploit in weights if explore or exploit)
        # Only adaptive mixing uses the guidance.
        return (*weighted, self.guidance) if self.mixing == "adaptive" else weighted

    def _check_weights(self, field: str) -> None:
        weights = getattr(self, field)
        if isinstance(weights, str) or not isinstance(weights, Sequence):
            raise ValueError(
                f"shaping.{field}={weights!r} must be a tuple of numbers, such as (0.0, 1.0)."
            )
        if len(weights) != len(self.indicators):
            raise ValueError(
                f"shaping.{field}={tuple(weights)} has {len(weights)} weights; it must have one "
                f"for each of the {len(self.indicators)} indicators {tuple(self.indicators)}."
            )
        for weight in weights:
            _check_number(f"shaping.{field} has ", weight)


def tracked_indicators(indicators: Any, guidance: Any) -> tuple[str, ...]:
    """The indicators, then the guidance if not among them; ValueError for wrong or equal names."""
    if isinstance(indicators, str) or not isinstance(indicators, Sequence):
        raise ValueError(
            f"shaping.indicators={indicators!r} must be a tuple of names, such as ({GUIDANCE!r},)."
        )
    for field, names in (("indicators", indicators), ("guidance", (guidance,))):
        for name in names:
            if not isinstance(name, str) or not name:
                raise ValueError(
                    f"shaping.{field} has {name!r}; it must be a name, such as {GUIDANCE!r}."
                )
    if len(indicators) == 0 or len(set(indicators)) != len(indicators):
        raise ValueError(
            f"shaping.indicators={tuple(indicators)} must name one or more, each once; "
            "shaping.target='none' switches shaping off."
        )
    return tuple(dict.fromkeys((*indicators, guidance)))


def _check_choice(field: str, value: Any, choices: Sequence[Any]) -> None:
    # The type first: True equals 1, and an array cannot be compared with the choices.
    if type(value) is not type(choices[0]) or value not in choices:
        allowed = ", ".join(map(repr, choices))
        raise ValueError(f"shaping.{field}={value!r} is unknown; it must be one of {allowed}.")


def _check_number(prefix: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise ValueError(
            f"{prefix}{value!r} must be a Python number, which a traced array is not: under "
            "jax.jit close over it or name it in static_argnames."
        )
    if not abs(value) <= _FLOAT32_MAX:
        raise ValueError(
            f"{prefix}{value} must be finite, in float32 too: at most {_FLOAT32_MAX:.1e} in size."
        )
