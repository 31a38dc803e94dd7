"""Group-relative advantages: each response is compared with the others to its prompt."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Shaped


def group_relative_advantages(
    rewards: Float[Array, "P G"],
    *,
    epsilon: float | int = 1e-6,
    lengths: Float[Array, "P G"] | None = None,
) -> Float[Array, "P G"]:
    """Normalises rewards within each group of responses to one prompt.

    A_pg = (r_pg - mean_g r_pg) / (std_g r_pg + epsilon)

    Args:
      rewards: verifier rewards, computed in float32; row p is the group of one prompt.
      epsilon: keeps the quotient finite; same unit as the rewards.
      lengths: as in `by_size`.

    Returns float32 advantages, dimensionless, without gradient; 0.0 throughout a group of equal
    rewards. Raises ValueError if the group size G is below 2.

    Source: arXiv:2402.03300, Sec. 4.1.2. The paper leaves the estimator of the standard deviation
    open; this takes the sample one (G - 1), as the reference implementation does. The latter also
    accepts a group of one: the raw reward is then the advantage.
    """
    differences = centred(rewards, lengths)
    total = jnp.sum(differences**2, axis=1, keepdims=True)
    std = jnp.sqrt(total * by_size(per_other, rewards, lengths))
    return jax.lax.stop_gradient(differences / (std + epsilon))


def zero_variance_group_fraction(
    rewards: Float[Array | np.ndarray, "P G"],
) -> Float[Array, ""] | np.floating:
    """Share of groups whose rewards are all equal, so without an advantage; 0.0 without groups."""
    check_groups(rewards)
    equal = (rewards == rewards[:, :1]).all(axis=1)
    return equal.sum() / max(rewards.shape[0], 1)


def broadcast_to_tokens(
    advantages: Float[Array, "*responses"], response_mask: Bool[Array, "B T"]
) -> Float[Array, "B T"]:
    """Gives every token the float32 advantage of its response ([B] or [P, G]); 0.0 if masked."""
    return jnp.where(response_mask, advantages.astype(jnp.float32).reshape(-1, 1), 0.0)


def is_last(response_mask: Bool[Array, "B T"]) -> Bool[Array, "B T"]:
    """True on the last token of each response that counts."""
    return response_mask & ~(jnp.cumsum(response_mask[:, ::-1], axis=1)[:, ::-1] > 1)


def by_size(
    function: Callable[[int], float | int],
    rewards: Float[Array, "P G"],
    lengths: Float[Array, "P G"] | None = None,
) -> float | int | Shaped[Array, "P 1"]:
    """The value of a function of the number of responses that are compared, in each group.

    Responses whose `lengths`, in tokens, are 0 are absent; None: none is. Both cases give
    the numbers of the function, so that the same responses have the same advantages.
    """
    if lengths is None:
        return function(rewards.shape[1])
    table = jnp.asarray([function(max(size, 1)) for size in range(rewards.shape[1] + 1)])
    return table[jnp.sum(lengths > 0, axis=1, keepdims=True)]


def per_other(size: int) -> float:
    """1 / (size - 1); 1.0 for a group of one response."""
    return 1 / max(size - 1, 1)


def group_mean(
    rewards: Float[Array, "P G"], lengths: Float[Array, "P G"] | None = None
) -> Float[Array, "P 1"]:
    """The mean reward of the responses that are compared, see `by_size`; 0.0 without one."""
    if lengths is None:
        return jnp.mean(rewards, axis=1, keepdims=True)
    total = jnp.sum(jnp.where(lengths > 0, rewards, 0.0), axis=1, keepdims=True)
    return total * by_size(lambda size: 1 / size, rewards, lengths)  # a compiled mean multiplies


def first_reward(
    rewards: Float[Array, "P G"], lengths: Float[Array, "P G"] | None = None
) -> Float[Array, "P 1"]:
    """The reward of the first response of each group that is compared, see `by_size`."""
    if lengths is None:
        return rewards[:, :1]
    return jnp.take_along_axis(rewards, jnp.argmax(lengths > 0, axis=1, keepdims=True), axis=1)


def centred(
    rewards: Float[Array, "P G"],
    lengths: Float[Array, "P G"] | None = None,
    *,
    baseline: Float[Array, "P _"] | None = None,
) -> Float[Array, "P G"]:
    """Float32 rewards less a baseline of their group, its mean by default; 0.0 if all are equal.

    With `lengths`, as in `by_size`, 0.0 for absent responses. Raises ValueError if the group size G
    is below 2.
    """
    check_groups(rewards)
    # Less the first reward: equal rewards have a mean that rounds, equal differences of 0 do not.
    first = first_reward(rewards, lengths).astype(jnp.float32)
    rewards = rewards.astype(jnp.float32) - first
    offset = group_mean(rewards, lengths) if baseline is None else baseline - first
    differences = rewards - offset
    return differences if lengths is None else jnp.where(lengths > 0, differences, 0.0)


def check_groups(rewards: Array | np.ndarray) -> None:
    """Raises ValueError unless rewards are [P, G] with G of at least 2."""
    if jnp.ndim(rewards) != 2 or rewards.shape[1] < 2:
        raise ValueError(
            f"rewards has shape {jnp.shape(rewards)}; it must be [P, G] with a group size G of at "
            "least 2. Raise rollout.group_size or choose another estimator."
        )
