"""Semantic-space shaping: from indicators of the hidden states to a bonus on the advantages.

    d_ik = clip((m_ik - mu_k) / (|mu_k| + 1e-8), -5, 5)
  beta_i = sigmoid(gain * d_i,guidance)
    w_i  = beta_i * explore_weights + (1 - beta_i) * exploit_weights
   Phi_i = eta * sum_k w_ik tanh(d_ik)
bonus_it = min(max(Phi_i, 0), |A_it| / kappa)
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from semrl_jax.metrics.measurements import MetricKey, Metrics
from semrl_jax.shaping.baselines import ShapingState
from semrl_jax.shaping.indicators import (
    has_indicators,
    masked_correlation,
    masked_mean,
    read_indicator,
    read_indicators,
)
from semrl_jax.shaping.options import ShapingOptions

DEVIATION_LIMIT = 5.0
EPSILON = 1e-8


class Signal(NamedTuple):
    """The signal of each response and its parts.

    I is the number of indicators, K the number of baselines, see `ShapingState`.
    """

    phi: Float[Array, " B"]  # float32, signed, eta included; 0.0 if not valid or not active
    valid: Bool[Array, " B"]  # responses that have all used indicators
    active: Bool[Array, ""]  # whether there are baselines; without them no response has a signal
    beta: Float[Array, " B"]  # float32 in [0, 1]; 0.5 with mixing='half', 0.0 with 'sum'
    deviations: Float[Array, "K B"]  # float32 in [-5, 5], 0.0 where not compared
    weights: Float[Array, "I B"]  # float32 w of each response
    compared: Bool[Array, "K B"]  # valid responses that have the indicator, if it has a baseline


def shape_advantages(
    advantages: Float[Array, "B T"],
    metrics: Metrics,
    response_mask: Bool[Array, "B T"],
    state: ShapingState,
    **options: Any,
) -> tuple[Float[Array, "B T"], dict[str, Float[Array, ""]]]:
    """Adds to each advantage a bonus that is never negative and never changes its sign.

    A response above its baselines gets a bonus. The effective rank counts (explore) if the
    acceleration is high, the velocity (exploit) if it is low. A wrong response may get a bonus too,
    which reduces its penalty by at most |A| / kappa.

    Args:
      advantages: computed in float32; masked-out tokens may hold anything. Non-finite advantages
        stay unchanged.
      metrics: [B] values and validities of the responses, as `hidden_state_metrics` returns them;
        invalid values may hold anything.
      response_mask: True on tokens that count.
      state: baselines before this batch.
      **options: fields of `ShapingOptions`. target: "reward" (see `reward_bonus`) and "none" leave
        the advantages unchanged and report a bonus of zero; "none" needs no metrics.

    Returns:
      Float32 shaped advantages, 0.0 on masked-out tokens, without gradient; and float32 scalars by
      log key. Without a baseline (the first step), `shaping/active` is 0.0 and nothing is shaped. A
      response that lacks a used indicator gets no bonus. Means are over valid responses, that of a
      deviation over those with the indicator, `shaping/bonus/mean` over all response tokens, and
      `shaping/clipped_fraction/mean` over the tokens that may get a bonus.

    Raises ValueError for wrong options, shapes that differ, or a metric that is missing.

    Source: arXiv:2509.23808. The reference implementation shapes the last token only, or none with
    its documented advantage-only setting. Here every token of the response is shaped.
    """
    checked = ShapingOptions(**options)
    _check_arrays(advantages, response_mask)
    mask = jnp.asarray(response_mask)
    advantages = jnp.where(mask, jnp.asarray(advantages).astype(jnp.float32), 0.0)
    if checked.target == "none" and not has_indicators(metrics, checked.tracked):
        report = _correlations(metrics, checked.reproduce_release)
        report["shaping/active"] = jnp.float32(0)
        return jax.lax.stop_gradient((advantages, report))
    signal = _signal(metrics, state, checked)
    if signal.phi.shape[0] != advantages.shape[0]:
        raise ValueError(
            f"metrics hold {signal.phi.shape[0]} responses, advantages {advantages.shape[0]}; "
            "there must be one value per response."
        )
    finite = mask & jnp.isfinite(advantages)
    counted = signal.valid & signal.active
    receives = finite & counted[:, None]  # [B, T]
    if checked.reproduce_release:
        last = jnp.cumsum(mask[:, ::-1].astype(jnp.int32), axis=1)[:, ::-1] == 1
        receives = receives & mask & last
    if checked.target in ("reward", "none"):
        receives = jnp.zeros_like(receives)
    wish = jnp.maximum(signal.phi, 0.0)[:, None]  # [B, 1]
    limit = jnp.abs(advantages) / float(checked.kappa)
    bonus = jnp.where(receives, jnp.minimum(wish, limit), 0.0)
    magnitude = masked_mean(jnp.abs(advantages), finite)
    mean_bonus = masked_mean(bonus, mask)
    everyone = jnp.ones_like(signal.valid)
    report = {
        "shaping/active": signal.active.astype(jnp.float32),
        "shaping/valid_fraction/mean": masked_mean(signal.valid.astype(jnp.float32), everyone),
        "shaping/beta/mean": masked_mean(signal.beta, counted),
        "shaping/phi/mean": masked_mean(signal.phi, counted),
        "shaping/bonus/mean": mean_bonus,
        "shaping/clipped_fraction/mean": masked_mean((wish > limit).astype(jnp.float32), receives),
        "shaping/bonus_to_advantage/mean": jnp.where(
            magnitude > 0, mean_bonus / jnp.where(magnitude > 0, magnitude, 1.0), 0.0
        ),
        "shaping/reward_ema": state.reward_ema,
        "shaping/scale": _scale(state, checked),
    }
    for k, name in enumerate(checked.indicators):
        report[f"shaping/weight/{name}/mean"] = masked_mean(signal.weights[k], counted)
    for k, name in enumerate(checked.tracked):
        report[f"shaping/deviation/{name}/mean"] = masked_mean(
            signal.deviations[k], signal.compared[k] & signal.active
        )
        report[f"shaping/baseline/{name}"] = state.baseline[k]
    report |= _correlations(metrics, checked.reproduce_release)
    return jax.lax.stop_gradient((advantages + bonus, report))


def reward_bonus(metrics: Metrics, state: ShapingState, **options: Any) -> Float[Array, " B"]:
    """Computes Phi of each response, which target='reward' and 'both' add to the last reward.

    Signed and not clipped, unlike the bonus on an advantage; 0.0 if not valid or not active, see
    `Signal`. Options and errors as in `shape_advantages`.
    """
    return compute_signal(metrics, state, **options).phi


def compute_signal(metrics: Metrics, state: ShapingState, **options: Any) -> Signal:
    """Computes Phi and its parts; options and errors as in `shape_advantages`."""
    return _signal(metrics, state, ShapingOptions(**options))


def _signal(metrics: Metrics, state: ShapingState, options: ShapingOptions) -> Signal:
    tracked = options.tracked
    state.check(tracked)
    values, present, valid = read_indicators(metrics, options)
    baseline = state.baseline[:, None]  # [K, 1]
    compared = present & valid[None]
    if not options.reproduce_release:
        compared = compared & state.baseline_set[:, None]
    relative = (values - baseline) / (jnp.abs(baseline) + EPSILON)
    clipped = jnp.clip(relative, -DEVIATION_LIMIT, DEVIATION_LIMIT)
    deviations = jnp.where(compared, clipped, 0.0)  # [K, B]
    explore, exploit = (
        jnp.asarray(weights, jnp.float32)[:, None]
        for weights in (options.explore_weights, options.exploit_weights)
    )
    guidance = deviations[tracked.index(options.guidance)]
    beta = {
        "adaptive": jax.nn.sigmoid(float(options.gain) * guidance),
        "half": jnp.full(valid.shape, 0.5, jnp.float32),
        "sum": jnp.zeros(valid.shape, jnp.float32),
    }[options.mixing]  # [B]
    if options.mixing == "sum":
        weights = jnp.broadcast_to(explore + exploit, (len(explore), *valid.shape))
    else:
        weights = beta[None] * explore + (1.0 - beta[None]) * exploit  # [I, B]
    phi = _scale(state, options) * jnp.sum(weights * jnp.tanh(deviations[: len(weights)]), axis=0)
    # The reference implementation skips the first step, too.
    active = state.num_updates > 0
    if not options.reproduce_release:
        required = jnp.asarray([name in options.used for name in tracked])
        active = active & jnp.all(state.baseline_set | ~required)
    phi = jnp.where(valid & active, phi, 0.0)
    return jax.lax.stop_gradient(Signal(phi, valid, active, beta, deviations, weights, compared))


def _check_arrays(advantages: Any, response_mask: Any) -> None:
    """Raises ValueError for shapes that differ or a mask that is not bool, while tracing."""
    if jnp.shape(advantages) != jnp.shape(response_mask) or jnp.ndim(advantages) != 2:
        raise ValueError(
            f"advantages has shape {jnp.shape(advantages)} and response_mask "
            f"{jnp.shape(response_mask)}; both must be [B, T]."
        )
    if jnp.result_type(response_mask) != jnp.bool_:
        raise ValueError(
            f"response_mask has dtype {jnp.result_type(response_mask)}; it must be bool, True on "
            "tokens that count (integer masks: response_mask != 0)."
        )


def _scale(state: ShapingState, options: ShapingOptions) -> Float[Array, ""]:
    """eta, or with scale="performance" eta falling to zero as the mean raw reward rises to 1."""
    eta = jnp.float32(options.eta)
    return eta if options.scale == "fixed" else eta * (1.0 - (state.reward_ema + 1.0) / 2.0)


def _correlations(metrics: Metrics, with_zeros: bool) -> dict[str, Float[Array, ""]]:
    """Correlation of effective rank with its two orders, if these were measured."""
    report = {}
    for order in ("velocity", "acceleration"):
        name = MetricKey("effective_rank", order).label
        if has_indicators(metrics, ("effective_rank", name)):
            x, x_valid = read_indicator(metrics, "effective_rank", with_zeros)
            y, y_valid = read_indicator(metrics, name, with_zeros)
            report[f"metrics/correlation/{name}"] = masked_correlation(x, y, x_valid & y_valid)
    return report
