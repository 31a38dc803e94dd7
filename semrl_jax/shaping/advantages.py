"""Semantic-space shaping: from indicators of the hidden states to a bonus on the advantages.

    d_ik = clip((m_ik - mu_k) / (|mu_k| + 1e-8), -5, 5)
  beta_i = sigmoid(gain * d_i,guidance)
    w_i  = beta_i * explore_weights + (1 - beta_i) * exploit_weights
   Phi_i = eta * sum_k w_ik tanh(d_ik)
bonus_it = min(max(Phi_i, 0), |A_it| / kappa)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from semrl_jax.shaping.indicators import (
    EXPLOIT_WEIGHTS,
    EXPLORE_WEIGHTS,
    GUIDANCE,
    INDICATORS,
    Metrics,
    masked_correlation,
    masked_mean,
    read_indicator,
    shapeable,
    tracked_indicators,
    used_indicators,
)
from semrl_jax.shaping.options import validate_shaping
from semrl_jax.shaping.state import ShapingState

DEVIATION_LIMIT = 5.0
EPSILON = 1e-8


class Signal(NamedTuple):
    """The signal of each response and how it came about; zeros where not valid.

    Attributes:
      phi: [B] float32, signed, eta included.
      valid: [B] responses that have all used indicators.
      active: whether there are baselines to compare with; no response has a signal otherwise.
      beta: [B] float32 in (0, 1); 0.5 with mixing='half', 0.0 with 'sum'.
      deviations, weights: [I, B] float32 per indicator, without a foreign guidance.
    """

    phi: Float[Array, " B"]
    valid: Bool[Array, " B"]
    active: Bool[Array, ""]
    beta: Float[Array, " B"]
    deviations: Float[Array, "I B"]
    weights: Float[Array, "I B"]


def shape_advantages(
    advantages: Float[Array, "B T"],
    metrics: Metrics,
    response_mask: Bool[Array, "B T"],
    state: ShapingState,
    *,
    target: str = "advantage",
    tokens: str = "all",
    mixing: str = "adaptive",
    scale: str = "fixed",
    ema_init: str = "first_batch",
    invalid: str = "excluded",
    eta: float | int = 1.0,
    gain: float | int = 2.0,
    kappa: float | int = 2.0,
    indicators: Sequence[str] = INDICATORS,
    explore_weights: Sequence[float | int] = EXPLORE_WEIGHTS,
    exploit_weights: Sequence[float | int] = EXPLOIT_WEIGHTS,
    guidance: str = GUIDANCE,
) -> tuple[Float[Array, "B T"], dict[str, Float[Array, ""]]]:
    """Adds to each advantage a bonus that is never negative and never turns its sign.

    A response far above its baselines gets a bonus: judged by effective rank (explore) where its
    acceleration is high, by the velocity (exploit) where it is low. A wrong response may get one
    too; it shortens the penalty by |A| / kappa at most.

    Args:
      advantages: computed in float32; masked-out tokens may hold anything.
      metrics: `<indicator>` values of the B responses and `<indicator>_valid` beside them; what is
        not valid may hold anything.
      response_mask: True on tokens that count.
      state: baselines before this batch.
      target: "advantage" and "both" add the bonus here; "reward" and "none" leave the advantages as
        they are and the report of the bonus at zero (see `reward_bonus`); "none" needs no metrics.
      tokens, mixing, scale, ema_init, invalid, eta, gain, kappa, indicators, explore_weights,
        exploit_weights, guidance: see `validate_shaping`.

    Returns:
      Float32 shaped advantages, 0.0 on masked-out tokens, without gradient; and the report of
      float32 scalars under their log keys. `shaping/active` is 0.0 while there is no baseline (the
      first step; the first two with ema_lag=2), and nothing is shaped then. A response without a
      used indicator gets no bonus. Means are over valid responses, `shaping/bonus/mean` over all
      response tokens, `shaping/clipped_fraction/mean` over the tokens of valid responses.

    Raises:
      ValueError: for options out of their range, shapes that differ, or a metric that is missing.

    Source: arXiv:2509.23808. The reference implementation shapes the last token only, and the
    documented advantage-only setting not at all; here every token of the response is shaped.
    """
    validate_shaping(
        target=target,
        tokens=tokens,
        mixing=mixing,
        scale=scale,
        ema_init=ema_init,
        invalid=invalid,
        eta=eta,
        gain=gain,
        kappa=kappa,
        indicators=indicators,
        explore_weights=explore_weights,
        exploit_weights=exploit_weights,
        guidance=guidance,
    )
    if jnp.shape(advantages) != jnp.shape(response_mask) or jnp.ndim(advantages) != 2:
        raise ValueError(
            f"advantages has shape {jnp.shape(advantages)} and response_mask "
            f"{jnp.shape(response_mask)}; both must be [B, T]."
        )
    mask = jnp.asarray(response_mask)
    advantages = jnp.where(mask, jnp.asarray(advantages).astype(jnp.float32), 0.0)
    missing = [name for name in tracked_indicators(indicators, guidance) if name not in metrics]
    if target == "none" and missing:
        report = {"shaping/active": jnp.float32(0)} | _correlations(metrics, invalid)
        return jax.lax.stop_gradient((advantages, report))
    signal = compute_signal(
        metrics,
        state,
        mixing=mixing,
        scale=scale,
        ema_init=ema_init,
        invalid=invalid,
        eta=eta,
        gain=gain,
        indicators=indicators,
        explore_weights=explore_weights,
        exploit_weights=exploit_weights,
        guidance=guidance,
    )
    if signal.phi.shape[0] != advantages.shape[0]:
        raise ValueError(
            f"metrics hold {signal.phi.shape[0]} responses, advantages {advantages.shape[0]}; "
            "there must be one value per response."
        )
    receives = mask & (signal.valid & signal.active)[:, None]  # [B, T]
    if tokens == "last":
        receives = receives & _is_last(mask)
    if target in ("reward", "none"):
        receives = jnp.zeros_like(receives)
    wish = jnp.maximum(signal.phi, 0.0)[:, None]  # [B, 1]
    limit = jnp.abs(advantages) / kappa
    bonus = jnp.where(receives, jnp.minimum(wish, limit), 0.0)
    magnitude = masked_mean(jnp.abs(advantages), mask)
    mean_bonus = masked_mean(bonus, mask)
    names = tuple(indicators)
    counted = signal.valid & signal.active
    report = {
        "shaping/active": signal.active.astype(jnp.float32),
        "shaping/valid_fraction/mean": _mean_of(signal.valid),
        "shaping/beta/mean": masked_mean(signal.beta, counted),
        "shaping/phi/mean": masked_mean(signal.phi, counted),
        "shaping/bonus/mean": mean_bonus,
        "shaping/clipped_fraction/mean": masked_mean((wish > limit).astype(jnp.float32), receives),
        "shaping/bonus_to_advantage/mean": jnp.where(
            magnitude > 0, mean_bonus / jnp.where(magnitude > 0, magnitude, 1.0), 0.0
        ),
        "shaping/reward_ema": state.reward_ema,
        "shaping/scale": _scale(scale, eta, state),
    }
    for k, name in enumerate(names):
        report[f"shaping/weight/{name}/mean"] = masked_mean(signal.weights[k], counted)
        report[f"shaping/deviation/{name}/mean"] = masked_mean(signal.deviations[k], counted)
    for k, name in enumerate(tracked_indicators(indicators, guidance)):
        report[f"shaping/baseline/{name}"] = state.baseline[k]
    report |= _correlations(metrics, invalid)
    return jax.lax.stop_gradient((advantages + bonus, report))


def reward_bonus(
    metrics: Metrics,
    state: ShapingState,
    *,
    mixing: str = "adaptive",
    scale: str = "fixed",
    ema_init: str = "first_batch",
    invalid: str = "excluded",
    eta: float | int = 1.0,
    gain: float | int = 2.0,
    indicators: Sequence[str] = INDICATORS,
    explore_weights: Sequence[float | int] = EXPLORE_WEIGHTS,
    exploit_weights: Sequence[float | int] = EXPLOIT_WEIGHTS,
    guidance: str = GUIDANCE,
) -> Float[Array, " B"]:
    """Computes Phi of each response: what target='reward' and 'both' add to the last reward.

    Signed and unclipped, unlike the bonus on an advantage; 0.0 for a response without a used
    indicator and while there are no baselines. Options and errors as in `shape_advantages`.
    """
    validate_shaping(
        mixing=mixing,
        scale=scale,
        ema_init=ema_init,
        invalid=invalid,
        eta=eta,
        gain=gain,
        indicators=indicators,
        explore_weights=explore_weights,
        exploit_weights=exploit_weights,
        guidance=guidance,
    )
    return compute_signal(
        metrics,
        state,
        mixing=mixing,
        scale=scale,
        ema_init=ema_init,
        invalid=invalid,
        eta=eta,
        gain=gain,
        indicators=indicators,
        explore_weights=explore_weights,
        exploit_weights=exploit_weights,
        guidance=guidance,
    ).phi


def compute_signal(
    metrics: Metrics,
    state: ShapingState,
    *,
    mixing: str,
    scale: str,
    ema_init: str,
    invalid: str,
    eta: float | int,
    gain: float | int,
    indicators: Sequence[str],
    explore_weights: Sequence[float | int],
    exploit_weights: Sequence[float | int],
    guidance: str,
) -> Signal:
    """Computes Phi with all that leads to it; arguments as in `shape_advantages`, unchecked."""
    tracked = tracked_indicators(indicators, guidance)
    if state.baseline.shape != (len(tracked),):
        raise ValueError(
            f"state holds {state.baseline.shape[0]} baselines; indicators and guidance need "
            f"{len(tracked)}: {', '.join(tracked)}. Make it by init_shaping_state with the same."
        )
    used = used_indicators(indicators, explore_weights, exploit_weights, guidance, mixing)
    valid = shapeable(metrics, used, invalid)
    deviations = []
    for k, name in enumerate(tracked):
        values, present = read_indicator(metrics, name, invalid)
        baseline = state.baseline[k]
        relative = (values - baseline) / (jnp.abs(baseline) + EPSILON)
        clipped = jnp.clip(relative, -DEVIATION_LIMIT, DEVIATION_LIMIT)
        deviations.append(jnp.where(present & valid, clipped, 0.0))
    deviation = jnp.stack(deviations)  # [I, B]
    explore, exploit = (
        jnp.asarray(weights, jnp.float32)[:, None] for weights in (explore_weights, exploit_weights)
    )
    beta = {
        "adaptive": jax.nn.sigmoid(gain * deviation[tracked.index(guidance)]),
        "half": jnp.full(valid.shape, 0.5),
        "sum": jnp.zeros(valid.shape),
    }[mixing]  # [B]
    if mixing == "sum":
        weights = jnp.broadcast_to(explore + exploit, (len(indicators), *valid.shape))
    else:
        weights = beta[None] * explore + (1.0 - beta[None]) * exploit  # [I, B]
    deviation = deviation[: len(indicators)]
    phi = _scale(scale, eta, state) * jnp.sum(weights * jnp.tanh(deviation), axis=0)
    # From zero, the first step has no baseline either: the reference implementation skips it.
    active = state.num_updates > 0
    if ema_init == "first_batch":
        required = jnp.asarray([name in used for name in tracked])
        active = active & jnp.all(state.baseline_set | ~required)
    return jax.lax.stop_gradient(
        Signal(jnp.where(valid & active, phi, 0.0), valid, active, beta, deviation, weights)
    )


def _scale(scale: str, eta: float | int, state: ShapingState) -> Float[Array, ""]:
    """eta as used: in full, or falling as the mean raw reward goes from -1 to 1."""
    if scale == "performance":
        return eta * (1.0 - (state.reward_ema + 1.0) / 2.0)
    return jnp.float32(eta)


def _is_last(mask: Bool[Array, "B T"]) -> Bool[Array, "B T"]:
    """True on the last True of each row."""
    after = jnp.cumsum(mask[:, ::-1].astype(jnp.int32), axis=1)[:, ::-1]
    return mask & (after == 1)


def _mean_of(flags: Bool[Array, " B"]) -> Float[Array, ""]:
    """Share of True, 0.0 of nothing."""
    return jnp.sum(flags, dtype=jnp.float32) / max(flags.shape[0], 1)


def _correlations(metrics: Metrics, invalid: str) -> dict[str, Float[Array, ""]]:
    """Correlation of effective rank with its two orders, where the metrics hold them."""
    report = {}
    for name in ("effective_rank_velocity", "effective_rank_acceleration"):
        if "effective_rank" in metrics and name in metrics:
            rank, rank_valid = read_indicator(metrics, "effective_rank", invalid)
            order, order_valid = read_indicator(metrics, name, invalid)
            report[f"metrics/correlation/{name}"] = masked_correlation(
                rank, order, rank_valid & order_valid
            )
    return report
