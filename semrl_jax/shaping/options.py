"""The options of the shaping and their one check."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from semrl_jax.shaping.indicators import (
    EXPLOIT_WEIGHTS,
    EXPLORE_WEIGHTS,
    GUIDANCE,
    INDICATORS,
    KNOWN_INDICATORS,
)

CHOICES = {
    "target": ("advantage", "reward", "both", "none"),
    "tokens": ("all", "last"),
    "mixing": ("adaptive", "half", "sum"),
    "scale": ("fixed", "performance"),
    "ema_init": ("first_batch", "zero"),
    "ema_lag": (1, 2),
    "invalid": ("excluded", "zeros"),
}


def validate_shaping(
    *,
    target: str = "advantage",
    tokens: str = "all",
    mixing: str = "adaptive",
    scale: str = "fixed",
    ema_init: str = "first_batch",
    ema_lag: int = 1,
    invalid: str = "excluded",
    alpha: float | int = 0.3,
    gain: float | int = 2.0,
    eta: float | int = 1.0,
    kappa: float | int = 2.0,
    indicators: Sequence[str] = INDICATORS,
    explore_weights: Sequence[float | int] = EXPLORE_WEIGHTS,
    exploit_weights: Sequence[float | int] = EXPLOIT_WEIGHTS,
    guidance: str = GUIDANCE,
) -> None:
    """Checks options of the shaping, those of one function or all of `config.shaping`.

    Args:
      target: where the signal goes: "advantage"; "reward", the last token's reward before the
        estimator; "both", counted twice; "none".
      tokens: "all" response tokens get the bonus, or the "last" one only.
      mixing: "adaptive": beta from the guidance; "half": beta = 0.5; "sum": both weights in full.
      scale: "fixed": eta; "performance": eta (1 - (q + 1) / 2), q the EMA of the mean raw reward.
      ema_init: "first_batch": baselines start at the first batch's means; "zero": at 0.
      ema_lag: 1: step t sees means up to step t - 1; 2: up to t - 2.
      invalid: responses without a needed indicator are "excluded", or count with "zeros".
      alpha: EMA rate in (0, 1].
      gain: slope of the meta-controller, finite.
      eta: scale of the signal, finite and not negative.
      kappa: above 1; the bonus stays below |A| / kappa.
      indicators: names out of KNOWN_INDICATORS, no two equal.
      explore_weights, exploit_weights: one finite weight per indicator.
      guidance: the indicator the meta-controller reads.

    Raises:
      ValueError: with field, value and rule.
    """
    chosen: dict[str, Any] = {
        "target": target,
        "tokens": tokens,
        "mixing": mixing,
        "scale": scale,
        "ema_init": ema_init,
        "ema_lag": ema_lag,
        "invalid": invalid,
    }
    for field, value in chosen.items():
        if value not in CHOICES[field]:
            allowed = ", ".join(map(repr, CHOICES[field]))
            raise ValueError(f"shaping.{field}={value!r} is unknown; it must be one of {allowed}.")
    if not 0 < alpha <= 1:
        raise ValueError(f"shaping.alpha={alpha} must lie in (0, 1]; 1 forgets all but one batch.")
    if not (kappa > 1 and math.isfinite(kappa)):
        raise ValueError(
            f"shaping.kappa={kappa} must be finite and above 1, so that no bonus turns the sign of "
            "an advantage; shaping.target='none' switches shaping off."
        )
    if not math.isfinite(gain):
        raise ValueError(f"shaping.gain={gain} must be finite.")
    if not 0 <= eta < math.inf:
        raise ValueError(f"shaping.eta={eta} must be finite and not negative.")
    if len(indicators) == 0 or len(set(indicators)) != len(indicators):
        raise ValueError(
            f"shaping.indicators={tuple(indicators)} must name one or more, each once."
        )
    for field, names in (("indicators", indicators), ("guidance", (guidance,))):
        for name in names:
            if name not in KNOWN_INDICATORS:
                raise ValueError(
                    f"shaping.{field} names {name!r}, which is unknown; it must be one of "
                    f"{', '.join(KNOWN_INDICATORS)}."
                )
    for field, weights in (
        ("explore_weights", explore_weights),
        ("exploit_weights", exploit_weights),
    ):
        if len(weights) != len(indicators):
            raise ValueError(
                f"shaping.{field}={tuple(weights)} has {len(weights)} weights; it must have one "
                f"for each of the {len(indicators)} indicators {tuple(indicators)}."
            )
        if not all(math.isfinite(weight) for weight in weights):
            raise ValueError(f"shaping.{field}={tuple(weights)} must be finite.")
    if not any(explore_weights) and not any(exploit_weights):
        raise ValueError(
            "shaping.explore_weights and shaping.exploit_weights are all zero; "
            "shaping.target='none' switches shaping off."
        )
