"""The baselines of the shaping, kept from step to step and in checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from semrl_jax.metrics.measurements import Metrics
from semrl_jax.shaping.indicators import masked_mean, read_indicators
from semrl_jax.shaping.options import GUIDANCE, INDICATORS, ShapingOptions, tracked_indicators


class ShapingState(NamedTuple):
    """The state of the shaping: arrays only, saved in checkpoints like any other state.

    K counts the indicators and, after them, the guidance if it is not an indicator.
    """

    # Float32 EMA of the batch means of each indicator, in the unit of the indicator.
    baseline: Float[Array, " K"]
    baseline_set: Bool[Array, " K"]  # whether it has had a batch mean
    # Float32 mean of the last batch, used one step later with reproduce_release.
    pending: Float[Array, " K"]
    pending_set: Bool[Array, " K"]  # whether there is such a mean
    reward_ema: Float[Array, ""]  # float32 EMA of the mean raw reward, from 0
    num_updates: Int[Array, ""]  # int32, number of steps

    def check(self, tracked: Sequence[str]) -> None:
        """Raises ValueError unless there is one baseline per indicator; runs while tracing only."""
        if self.baseline.shape != (len(tracked),):
            raise ValueError(
                f"state holds {self.baseline.size} baselines; indicators and guidance need "
                f"{len(tracked)}: {', '.join(tracked)}; make it by init_shaping_state with them."
            )


def init_shaping_state(
    indicators: Sequence[str] = INDICATORS, *, guidance: str = GUIDANCE
) -> ShapingState:
    """State before the first step, without a baseline; ValueError for a wrong name."""
    num_tracked = len(tracked_indicators(indicators, guidance))
    # A new array for every field: a donated state must not hold the same buffer twice.
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
    **options: Any,
) -> ShapingState:
    """Updates the baselines with one batch; call it after the batch was shaped.

    mu <- (1 - alpha) mu + alpha * mean over the responses that are valid for shaping

    Args:
      metrics: [B] values and validities of the responses, as `hidden_state_metrics` returns them;
        invalid values may hold anything.
      mean_reward: mean raw reward of the batch, for scale='performance'. None or a non-finite value
        leaves its EMA unchanged.
      **options: fields of `ShapingOptions`, the same as for `shape_advantages`; it raises as there.

    Returns the state of the next step. A baseline stays if no valid response has its indicator.

    Source: arXiv:2509.23808. The reference implementation starts at zero with a lag of two steps,
    so every deviation of the first shaped step is clipped.
    """
    checked = ShapingOptions(**options)
    state.check(checked.tracked)
    alpha = float(checked.alpha)
    values, present, valid = read_indicators(metrics, checked)
    batch_mean = jax.vmap(masked_mean)(values, present & valid[None])  # [K]
    batch_set = jnp.any(present & valid[None], axis=1)
    if checked.reproduce_release:
        mean, mean_set = state.pending, state.pending_set
        pending = jnp.where(batch_set, batch_mean, 0.0), batch_set
    else:
        mean, mean_set = batch_mean, batch_set
        pending = state.pending, state.pending_set
    average = (1 - alpha) * state.baseline + alpha * mean
    start = jnp.zeros_like(mean_set) if checked.reproduce_release else ~state.baseline_set
    baseline = jnp.where(mean_set, jnp.where(start, mean, average), state.baseline)
    reward_ema = state.reward_ema
    if mean_reward is not None:
        reward = jnp.asarray(mean_reward, jnp.float32)
        if reward.ndim != 0:
            raise ValueError(f"mean_reward has shape {reward.shape}; it must be a scalar.")
        counts = jnp.isfinite(reward)
        if checked.reproduce_release:  # from the second step on
            counts = counts & (state.num_updates > 0)
        reward_ema = jnp.where(counts, (1 - alpha) * reward_ema + alpha * reward, reward_ema)
    changed = baseline, state.baseline_set | mean_set, *pending
    return jax.lax.stop_gradient(ShapingState(*changed, reward_ema, state.num_updates + 1))
