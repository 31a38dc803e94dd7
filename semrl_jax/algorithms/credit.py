"""Credit: from rewards and metrics to what an update trains on, in one program.

    rewards [+ bonus] -> estimator -> batch rules [+ bonus] -> importance weights -> advantages

The bonus of the shaping is added to the rewards, to the advantages, to both or to none.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from semrl_jax.algorithms.algorithm import Algorithm, Passes, Spans, State
from semrl_jax.algorithms.given import without_given
from semrl_jax.algorithms.importance import importance_weights
from semrl_jax.algorithms.turn_credit import placed_rewards
from semrl_jax.algorithms.values import explained_variance
from semrl_jax.metrics.measurements import Measurement, Metrics
from semrl_jax.shaping import (
    ShapingOptions,
    ShapingState,
    reward_bonus,
    shape_advantages,
    update_shaping_state,
)
from semrl_jax.shaping.indicators import has_indicators

Options = tuple[tuple[str, Any], ...]  # keywords of a function, as a static argument


@dataclasses.dataclass(frozen=True)
class CreditRules:
    """How credit is assigned; hashable, so that it can be static under `jax.jit`."""

    algorithm: Algorithm
    shaping: ShapingOptions
    # Whether responses that were truncated are not trained on. They still count in the statistics
    # of their group.
    mask_truncated: bool = False
    # Options of `importance_weights`; empty: the advantages are not multiplied by these weights
    # here.
    importance: Options = ()


class Tokens(NamedTuple):
    """The responses of a batch."""

    response_mask: Bool[Array, "B T"]  # True on tokens that count
    truncated: Bool[Array, " B"]  # whether a response ended at the limit of its length
    # Nats, as the engine reported; read only for importance weights.
    rollout_logprobs: Float[Array, "B T"] | None = None
    spans: Spans | None = None  # read only with `Needs.turn_rewards` or `Needs.spans`
    given: Bool[Array, " B"] | None = None  # responses that nobody sampled; None: there are none
    # Which prompt of the data each group answers; read only with `Needs.prompt_state`.
    prompts: Int[Array, " P"] | None = None


class Memory(NamedTuple):
    """What credit keeps from step to step; the train state has fields of the same names."""

    shaping: ShapingState  # baselines of the indicators
    algorithm: State  # {} if it has none


class Credit(NamedTuple):
    """What the update trains on."""

    # Float32, shaped, with importance weights; 0.0 on masked-out tokens.
    advantages: Float[Array, "B T"]
    returns: Float[Array, "B T"] | None = None  # what a critic learns, without the bonus
    # True on tokens that are trained on; None: on all tokens that count.
    response_mask: Bool[Array, "B T"] | None = None
    scalars: dict[str, Float[Array, ""]] = {}  # noqa: RUF012 - never changed; by log key
    memory: Memory | None = None  # that the next step starts with


@functools.partial(jax.jit, static_argnames="rules")
def assign_credit(
    rules: CreditRules,
    rewards: Float[Array, "P G"],
    metrics: Metrics,
    passes: Passes,
    tokens: Tokens,
    memory: Memory,
) -> Credit:
    """Turns the rewards of a batch into advantages, returns and the memory of the next step.

    Args:
      rewards: float32, one row per group; B = P * G responses in this order.
      metrics: [B] values and validities; {} if nothing is measured.
      passes: results of the forward passes before the update.
      memory: before this step.
    """
    algorithm, shaping = rules.algorithm, vars(rules.shaping)
    passes = passes._replace(spans=tokens.spans)
    mask, (baselines, kept), scalars = tokens.response_mask, memory, {}
    of_engine, sampled = mask, None  # None: all responses are sampled
    if tokens.given is not None:
        of_engine, sampled = mask & ~tokens.given[:, None], ~tokens.given.reshape(rewards.shape)
        # The shaping compares what the policy samples.
        metrics = {key: Measurement(x, ok & ~tokens.given) for key, (x, ok) in metrics.items()}
    state = kept
    if algorithm.needs.prompt_state:
        state = jax.tree.map(lambda leaf: leaf[tokens.prompts], kept)

    def placed(rewards: Float[Array, "P G"]) -> Float[Array, "P G *tokens"]:
        """The rewards as the algorithm takes them: of responses, or of turns."""
        if not algorithm.needs.turn_rewards:
            return rewards
        return placed_rewards(rewards, tokens.spans.rewards, tokens.response_mask)

    def apart(rewards: Float[Array, "P G"]) -> Float[Array, "P G"]:
        """The rewards without those of given responses, if these do not count in their groups."""
        is_apart = sampled is not None and algorithm.needs.given_apart
        return without_given(rewards, sampled) if is_apart else rewards

    counted = apart(rewards)
    if algorithm.needs.selects:
        selected = algorithm.selected(counted, passes, mask)
        passes = passes._replace(selected=selected)
        scalars |= {"algorithm/selected_fraction": jnp.mean(selected, dtype=jnp.float32)}
    credited = counted
    if metrics and rules.shaping.target in ("reward", "both"):
        bonus = reward_bonus(metrics, baselines, **shaping).reshape(rewards.shape)
        credited = apart(rewards + bonus)
        scalars |= extent("reward/shaped", credited, jnp.ones_like(credited, bool))
    plain = algorithm.advantages(placed(credited), passes, mask, state)
    shaped, of_shaping = shape_advantages(plain, metrics, mask, baselines, **shaping)
    scalars |= extent("advantage", plain, mask) | extent("advantage/shaped", shaped, mask)
    scalars |= of_shaping
    if rules.importance:
        weights, _ = importance_weights(
            passes.old_logprobs, tokens.rollout_logprobs, of_engine, **dict(rules.importance)
        )
        shaped = shaped * weights
    returns = None
    if algorithm.needs.values:
        returns = algorithm.returns(placed(rewards), passes, mask, state)
        explained = explained_variance(passes.values, returns, mask)
        scalars |= {"critic/explained_variance": explained}
        scalars |= extent("critic/return", returns, mask)
        scalars |= extent("critic/value", passes.values, mask)
    if rules.mask_truncated:
        mask = mask & ~tokens.truncated[:, None]
    if algorithm.needs.selects:
        mask = mask & selected.reshape(-1, 1)
    if has_indicators(metrics, rules.shaping.tracked):  # else the baselines stay unchanged
        mean_reward = rewards.mean(where=sampled)
        baselines = update_shaping_state(baselines, metrics, mean_reward=mean_reward, **shaping)
    if algorithm.needs.keeps:
        scalars |= {f"algorithm/{name}": x for name, x in state.items() if jnp.ndim(x) == 0}
        state = algorithm.next_state(state, credited, passes, tokens.response_mask)
    if algorithm.needs.prompt_state:
        state = with_rows(kept, tokens.prompts, state)
    return Credit(shaped, returns, mask, scalars, Memory(baselines, state))


def with_rows(kept: State, rows: Int[Array, " P"], new: State) -> State:
    """The leaves with new values at these rows; of equal rows, the last counts."""
    again = jnp.triu(rows[:, None] == rows[None], 1).any(axis=1)

    def placed(leaf: Array, values: Array) -> Array:
        return leaf.at[jnp.where(again, len(leaf), rows)].set(values, mode="drop")

    return jax.tree.map(placed, kept, new)


def extent(prefix: str, values: Array, mask: Array) -> dict[str, Float[Array, ""]]:
    """`<prefix>/{mean,max,min}` of the values under the mask."""
    count = jnp.maximum(jnp.sum(mask), 1)
    return {
        f"{prefix}/mean": jnp.sum(jnp.where(mask, values, 0.0)) / count,
        f"{prefix}/max": jnp.max(jnp.where(mask, values, -jnp.inf)),
        f"{prefix}/min": jnp.min(jnp.where(mask, values, jnp.inf)),
    }
