"""Group-relative advantages: each response is compared with the others to its prompt."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float


def group_relative_advantages(
    rewards: Float[Array, "P G"], *, epsilon: float | int = 1e-6
) -> Float[Array, "P G"]:
    """Normalises rewards within each group of responses to one prompt.

    A_pg = (r_pg - mean_g r_pg) / (std_g r_pg + epsilon)

    Args:
      rewards: verifier rewards, computed in float32; row p is the group of one prompt.
      epsilon: keeps the quotient finite; same unit as the rewards.

    Returns:
      Float32 advantages, dimensionless, without gradient; 0.0 throughout a group of equal rewards.

    Raises:
      ValueError: if the group size G is below 2.

    Source: arXiv:2402.03300, Sec. 4.1.2. The paper leaves the estimator of the standard deviation
    open; this takes the sample one (G - 1), as the reference implementation does. The latter also
    accepts a group of one: the raw reward is then the advantage.
    """
    check_groups(rewards)
    # Minus the first reward: the mean of equal rewards may round, that of zeros does not.
    centred = rewards.astype(jnp.float32) - rewards[:, :1].astype(jnp.float32)
    centred = centred - jnp.mean(centred, axis=1, keepdims=True)
    std = jnp.sqrt(jnp.sum(centred**2, axis=1, keepdims=True) / (rewards.shape[1] - 1))
    return jax.lax.stop_gradient(centred / (std + epsilon))


def zero_variance_group_fraction(
    rewards: Float[Array | np.ndarray, "P G"],
) -> Float[Array, ""] | np.floating:
    """Share of groups whose rewards are all equal, so that every advantage is exactly 0.0.

    NumPy rewards are compared on the host; 0.0 if there is no group.
    """
    check_groups(rewards)
    equal = (rewards == rewards[:, :1]).all(axis=1)
    return equal.sum() / max(rewards.shape[0], 1)


def broadcast_to_tokens(
    advantages: Float[Array, "*responses"], response_mask: Bool[Array, "B T"]
) -> Float[Array, "B T"]:
    """Gives every token of a response its advantage, in float32; 0.0 on masked-out tokens.

    `advantages` are of B responses, [B] or [P, G].
    """
    return jnp.where(response_mask, advantages.astype(jnp.float32).reshape(-1, 1), 0.0)


def centred(
    rewards: Float[Array, "P G"], baseline: Float[Array, "P _"] | None = None
) -> Float[Array, "P G"]:
    """Float32 rewards less a baseline of their group, its mean by default; 0.0 if all are equal.

    Raises:
      ValueError: if the group size G is below 2.
    """
    check_groups(rewards)
    # Less the first reward: equal rewards have a mean that rounds, equal differences of 0 do not.
    first = rewards[:, :1].astype(jnp.float32)
    rewards = rewards.astype(jnp.float32) - first
    if baseline is not None:
        return rewards - (baseline - first)
    return rewards - jnp.mean(rewards, axis=1, keepdims=True)


def check_groups(rewards: Array | np.ndarray) -> None:
    """Raises ValueError unless rewards are [P, G] with G of at least 2."""
    if jnp.ndim(rewards) != 2 or rewards.shape[1] < 2:
        raise ValueError(
            f"rewards has shape {jnp.shape(rewards)}; it must be [P, G] with a group size G of at "
            "least 2, so that responses can be compared. Raise rollout.group_size or choose "
            "another estimator."
        )
