"""The baselines the shaping compares with, carried from step to step and into checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from semrl_jax.shaping.indicators import (
    EXPLOIT_WEIGHTS,
    EXPLORE_WEIGHTS,
    GUIDANCE,
    INDICATORS,
    Metrics,
    masked_mean,
    read_indicator,
    shapeable,
    tracked_indicators,
    used_indicators,
)
from semrl_jax.shaping.options import validate_shaping


class ShapingState(NamedTuple):
    """What the shaping remembers; all arrays, so it is checkpointed like any other state.

    I counts the indicators, and the guidance after them where it is none of them.

    Attributes:
      baseline: float32 EMA of each indicator's batch mean, in the indicator's unit.
      baseline_set: whether that EMA has taken a mean in.
      pending: float32 mean of the last batch, which waits one step under ema_lag=2.
      pending_set: whether one waits.
      reward_ema: float32 EMA of the mean raw reward, from 0.
      num_updates: int32 steps taken in.
    """

    baseline: Float[Array, " I"]
    baseline_set: Bool[Array, " I"]
    pending: Float[Array, " I"]
    pending_set: Bool[Array, " I"]
    reward_ema: Float[Array, ""]
    num_updates: Int[Array, ""]


def init_shaping_state(
    indicators: Sequence[str] = INDICATORS, *, guidance: str = GUIDANCE
) -> ShapingState:
    """State before the first step: no baseline yet, no reward seen."""
    num_tracked = len(tracked_indicators(indicators, guidance))
    # Fresh arrays for every field: a donated state may not hold one buffer twice.
    return ShapingState(
        baseline=jnp.zeros(num_tracked, jnp.float32),
        baseline_set=jnp.zeros(num_tracked, bool),
        pending=jnp.zeros(num_tracked, jnp.float32),
        pending_set=jnp.zeros(num_tracked, bool),
        reward_ema=jnp.zeros((), jnp.float32),
        num_updates=jnp.zeros((), jnp.int32),
    )


def update_shaping_state(
    state: ShapingState,
    metrics: Metrics,
    *,
    mean_reward: float | int | Float[Array, ""] | None = None,
    alpha: float | int = 0.3,
    ema_init: str = "first_batch",
    ema_lag: int = 1,
    invalid: str = "excluded",
    mixing: str = "adaptive",
    indicators: Sequence[str] = INDICATORS,
    explore_weights: Sequence[float | int] = EXPLORE_WEIGHTS,
    exploit_weights: Sequence[float | int] = EXPLOIT_WEIGHTS,
    guidance: str = GUIDANCE,
) -> ShapingState:
    """Takes one batch into the baselines; call it after the batch was shaped.

    mu <- (1 - alpha) mu + alpha * mean over the responses that are valid for shaping

    Args:
      state: of the step just shaped.
      metrics: `<indicator>` values of the B responses and `<indicator>_valid` beside them; what is
        not valid may hold anything.
      mean_reward: mean raw reward of the batch, for scale='performance'; None, or a value that is
        not finite, leaves its EMA alone.
      alpha, ema_init, ema_lag, invalid, mixing, indicators, explore_weights, exploit_weights,
        guidance: see `validate_shaping`; the same as for `shape_advantages`.

    Returns:
      The state of the next step. A baseline no valid response speaks for stays as it was.

    Raises:
      ValueError: for options out of their range, or a metric that is missing.

    Source: arXiv:2509.23808. Zero start and a lag of two steps are the reference implementation's;
    there every deviation of the first shaped step clips.
    """
    validate_shaping(
        alpha=alpha,
        ema_init=ema_init,
        ema_lag=ema_lag,
        invalid=invalid,
        mixing=mixing,
        indicators=indicators,
        explore_weights=explore_weights,
        exploit_weights=exploit_weights,
        guidance=guidance,
    )
    used = used_indicators(indicators, explore_weights, exploit_weights, guidance, mixing)
    shaped = shapeable(metrics, used, invalid)
    means, present = [], []
    for name in tracked_indicators(indicators, guidance):
        values, valid = read_indicator(metrics, name, invalid)
        means.append(masked_mean(values, valid & shaped))
        present.append(jnp.any(valid & shaped))
    batch_mean, batch_set = jnp.stack(means), jnp.stack(present)  # [I]
    if ema_lag == 2:
        mean, mean_set = state.pending, state.pending_set
        pending = jnp.where(batch_set, batch_mean, 0.0), batch_set
    else:
        mean, mean_set = batch_mean, batch_set
        pending = state.pending, state.pending_set
    average = (1 - alpha) * state.baseline + alpha * mean
    start = ~state.baseline_set if ema_init == "first_batch" else jnp.zeros_like(mean_set)
    baseline = jnp.where(mean_set, jnp.where(start, mean, average), state.baseline)
    reward_ema = state.reward_ema
    if mean_reward is not None:
        reward = jnp.asarray(mean_reward, jnp.float32)
        mixed = (1 - alpha) * reward_ema + alpha * reward
        reward_ema = jnp.where(jnp.isfinite(reward), mixed, reward_ema)
    return jax.lax.stop_gradient(
        ShapingState(
            baseline, state.baseline_set | mean_set, *pending, reward_ema, state.num_updates + 1
        )
    )
