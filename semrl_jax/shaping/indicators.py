"""Which metrics steer the shaping, which responses have them, and means over those responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Shaped

Metrics = Mapping[str, Shaped[Array | np.ndarray, " B"]]

INDICATORS = (
    "effective_rank_acceleration",
    "effective_rank_velocity",
    "effective_rank",
)
EXPLORE_WEIGHTS = (0.0, 0.0, 1.0)
EXPLOIT_WEIGHTS = (0.0, 1.0, 0.0)
GUIDANCE = INDICATORS[0]

# Every metric of a response with its orders, and what later revisions of the reference
# implementation take from the tokens.
KNOWN_INDICATORS = (
    *(
        f"{metric}{order}"
        for metric in (
            "effective_rank",
            "log_effective_rank",
            "traditional_rank",
            "response_entropy",
            "curvature",
        )
        for order in ("", "_velocity", "_acceleration")
    ),
    "avg_log_probs",
    "avg_logits_entropy",
    "avg_response_entropy",
)


def tracked_indicators(indicators: Sequence[str], guidance: str) -> tuple[str, ...]:
    """Indicators that need a baseline: the weighted ones, then the guidance if it is another."""
    names = tuple(indicators)
    return names if guidance in names else (*names, guidance)


def read_indicator(
    metrics: Metrics, name: str, invalid: str
) -> tuple[Float[Array, " B"], Bool[Array, " B"]]:
    """Values without NaN, and which responses have one.

    A missing `<name>_valid` means valid wherever finite. With invalid='zeros' every response counts
    and one without a value has 0.0.
    """
    if name not in metrics:
        raise ValueError(
            f"metrics has no {name!r}, which the shaping needs; it holds "
            f"{', '.join(sorted(metrics)) or 'nothing'}. Compute it, or change shaping.indicators "
            "or shaping.guidance."
        )
    values = jax.lax.stop_gradient(jnp.asarray(metrics[name]).astype(jnp.float32))
    valid = jnp.isfinite(values)
    if f"{name}_valid" in metrics:
        valid = valid & jnp.asarray(metrics[f"{name}_valid"])
    values = jnp.where(valid, values, 0.0)
    return values, jnp.ones_like(valid) if invalid == "zeros" else valid


def used_indicators(
    indicators: Sequence[str],
    explore_weights: Sequence[float],
    exploit_weights: Sequence[float],
    guidance: str,
    mixing: str,
) -> tuple[str, ...]:
    """Indicators a response must have to be shaped: those of non-zero weight, and the guidance."""
    weighted = [
        name
        for name, explore, exploit in zip(indicators, explore_weights, exploit_weights)
        if explore != 0 or exploit != 0
    ]
    # Fixed mixing never looks at the guidance.
    return tuple(weighted) + ((guidance,) if mixing == "adaptive" else ())


def shapeable(metrics: Metrics, used: Sequence[str], invalid: str) -> Bool[Array, " B"]:
    """Responses that have every used indicator."""
    valid = [read_indicator(metrics, name, invalid)[1] for name in used]
    return jnp.all(jnp.stack(valid), axis=0)


def masked_mean(values: Float[Array, "*axes"], mask: Bool[Array, "*axes"]) -> Float[Array, ""]:
    """Mean under the mask, 0.0 of nothing."""
    count = jnp.sum(mask, dtype=jnp.float32)
    return jnp.sum(jnp.where(mask, values, 0.0)) / jnp.maximum(count, 1.0)


def masked_correlation(
    x: Float[Array, " B"], y: Float[Array, " B"], mask: Bool[Array, " B"]
) -> Float[Array, ""]:
    """Pearson correlation under the mask; 0.0 of fewer than two responses or a constant."""
    x = jnp.where(mask, x - masked_mean(x, mask), 0.0)
    y = jnp.where(mask, y - masked_mean(y, mask), 0.0)
    # Normalised before the product, which could leave the range of float32.
    x = x / jnp.maximum(jnp.max(jnp.abs(x), initial=0.0), jnp.finfo(jnp.float32).tiny)
    y = y / jnp.maximum(jnp.max(jnp.abs(y), initial=0.0), jnp.finfo(jnp.float32).tiny)
    norm = jnp.sqrt(jnp.sum(x * x) * jnp.sum(y * y))
    return jnp.where(norm > 0, jnp.sum(x * y) / jnp.where(norm > 0, norm, 1.0), 0.0)
