"""Credit by turn or step: the reward of each in place of one reward per response.

A turn is a run of the policy's tokens in an episode. A step is a part of a response that its reward
function judged by itself; here it is a turn, too, and so are the tokens after the last step.

The return of turn t is the sum of the rewards of turns t, t + 1, ... of its episode. An estimator
that compares responses compares the returns of the turns t of a group, of all episodes that have a
turn t. The baseline of a turn then follows from other episodes and from the past of its own,
not from what it chose, so it adds no bias. A baseline of single rewards, added up over the turns of
an episode, would: their number is the policy's choice.

Source: returns of turns as advantages, normalised in the group: arXiv:2511.14846 (GTPO), and with a
sum of later scores arXiv:2507.11948 (Kevin). Both discount; there is no discount here.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from semrl_jax.algorithms.algorithm import Passes, Spans
from semrl_jax.algorithms.groups import broadcast_to_tokens, is_last
from semrl_jax.support.choices import CREDITS
from semrl_jax.support.fields import setting

# Sums that differ by at most this share of their terms' sizes are equal: 33 roundings of float32.
ROUNDING = 2e-6

Estimate = Callable[[Float[Array, "P G"], Float[Array, "P G"] | None], Float[Array, "P G"]]


@dataclasses.dataclass(frozen=True)
class TurnCredit:
    """How the rewards of an environment are credited."""

    credit: str = setting(
        "episode",
        "episode; or turn: each turn, or each step of a response, by its own and later rewards, "
        "docs/environments.md and docs/verifiers.md",
        choices=CREDITS,
    )


def placed_rewards(
    rewards: Float[Array, "P G"], of_spans: Float[Array, "B T"], response_mask: Bool[Array, "B T"]
) -> Float[Array, "P G T"]:
    """The rewards of turns at their last tokens, and 0.0 elsewhere.

    The last turn has what the others leave of the response's reward, so that the sum is `rewards`,
    also if a penalty, a bonus or a bound has changed it. `of_spans` are `Spans.rewards`; one at the
    last token of a response is not read.
    """
    last = is_last(response_mask)
    earlier = jnp.where(last, 0.0, of_spans)
    rest = rewards.astype(jnp.float32).reshape(-1, 1) - jnp.sum(earlier, axis=1, keepdims=True)
    return jnp.where(last, rest, earlier).reshape(*rewards.shape, -1)


def turn_ends(response_mask: Bool[Array, "B T"], spans: Spans | None = None) -> Bool[Array, "B T"]:
    """True on the last token of each turn: of a run of True in the mask, and of each of `spans`."""
    ends = response_mask & ~jnp.pad(response_mask[:, 1:], ((0, 0), (0, 1)))
    return ends if spans is None else ends | (spans.ends & response_mask)


def turn_begins(
    response_mask: Bool[Array, "B T"], spans: Spans | None = None
) -> Bool[Array, "B T"]:
    """True on the first token of each turn; see `turn_ends`."""
    goes_on = response_mask & ~turn_ends(response_mask, spans)
    return response_mask & ~jnp.pad(goes_on[:, :-1], ((0, 0), (1, 0)))


def turn_numbers(begins: Bool[Array, "B T"]) -> Int[Array, "B T"]:
    """The number of each token's turn, from 0; context has the number of the turn before it."""
    return jnp.maximum(jnp.cumsum(begins, axis=1) - 1, 0)


def returns_to_go(rewards: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """The sum of the rewards from each token on."""
    return jnp.cumsum(rewards[:, ::-1], axis=1)[:, ::-1]


def by_turn(
    estimate: Estimate,
    rewards: Float[Array, "P G *tokens"],
    response_mask: Bool[Array, "B T"],
    spans: Spans | None = None,
) -> Float[Array, "B T"]:
    """Gives every token the advantage of its response, or of its turn.

    Args:
      estimate: advantages of responses from their rewards. Its second argument is the number of
        tokens of each; those without are absent from their group. None: all are present.
      rewards: [P, G], of responses; or [P, G, T], see `placed_rewards`. Then `estimate` gets the
        returns of the turns t of each group, for every t.
      spans: where steps end inside a run of the mask; None: there are none.

    Returns:
      Float32, 0.0 on masked-out tokens.
    """
    if rewards.ndim == 2:
        return broadcast_to_tokens(estimate(rewards, None), response_mask)
    num_rows, length = response_mask.shape
    # At most: there is context between two turns, but none between two steps.
    num_turns = (length + 1) // 2 if spans is None else length
    begins = turn_begins(response_mask, spans)
    number = turn_numbers(begins)  # [B, T]
    returns = returns_to_go(rewards.reshape(response_mask.shape))
    zeros, rows = jnp.zeros((num_rows, num_turns)), jnp.arange(num_rows)[:, None]
    firsts = zeros.at[rows, number].add(jnp.where(begins, returns, 0.0))
    lengths = zeros.at[rows, number].add(response_mask.astype(jnp.float32))
    shape = *rewards.shape[:2], num_turns
    firsts, lengths = firsts.reshape(shape), lengths.reshape(shape)
    firsts = _without_rounding(firsts, lengths > 0, rewards)
    found = jax.vmap(estimate, in_axes=2, out_axes=2)(firsts, lengths)
    of_tokens = jnp.take_along_axis(found.reshape(num_rows, num_turns), number, axis=1)
    return jnp.where(response_mask, of_tokens, 0.0)


def total_rewards(rewards: Float[Array, "P G T"]) -> Float[Array, "P G"]:
    """The reward of each response: the sum of the rewards of its turns, see `placed_rewards`."""
    totals = jnp.sum(rewards, axis=2, keepdims=True)
    return _without_rounding(totals, jnp.ones(totals.shape, bool), rewards)[:, :, 0]


def _without_rounding(
    returns: Float[Array, "P G K"], present: Bool[Array, "P G K"], rewards: Float[Array, "P G T"]
) -> Float[Array, "P G K"]:
    """The returns of the turns of each group; where they differ by rounding alone, they are equal.

    Responses of one reward have one return at their first turns, which is a sum of other terms in
    each: a division by the deviation of the group would make advantages of the rounding. A return
    of 0 is 0, which is not above a threshold of 0.
    """
    limit = ROUNDING * jnp.max(jnp.sum(jnp.abs(rewards), axis=2), axis=1)[:, None, None]
    returns = jnp.where(jnp.abs(returns) <= limit, 0.0, returns)
    shared = {"axis": 1, "keepdims": True, "where": present}
    highest = jnp.max(returns, initial=-jnp.inf, **shared)
    spread = highest - jnp.min(returns, initial=jnp.inf, **shared)  # -inf without a turn
    return jnp.where((spread >= 0) & (spread <= limit), highest, returns)


def each_turn(estimate: Callable[..., Float[Array, "P G"]]) -> Callable[..., Float[Array, "B T"]]:
    """Makes the `advantages` of an algorithm of an estimate from rewards, see `by_turn`.

    It gets the options as its third argument, and the state if the algorithm has one.
    """

    def advantages(
        rewards: Float[Array, "P G *tokens"],
        passes: Passes,
        response_mask: Bool[Array, "B T"],
        options: Any,
        **state: Any,
    ) -> Float[Array, "B T"]:
        own = functools.partial(estimate, options=options, **state)
        return by_turn(own, rewards, response_mask, passes.spans)

    return advantages
