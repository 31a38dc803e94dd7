"""How far the states of a policy have moved from those of its reference."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from semrl_jax.metrics.directions import row_lengths, unit_rows
from semrl_jax.metrics.valid_rows import AnyArray, check_states


class Drift(NamedTuple):
    """Means over the tokens; float32 scalars."""

    # |z - r| / |r|, where z is the policy's state and r the reference's state.
    distance: Float[Array, ""]
    angle: Float[Array, ""]  # angle between z and r, in radians


@jax.jit
def drift(
    policy: Float[AnyArray, "T D"], reference: Float[AnyArray, "T D"], mask: Bool[AnyArray, " T"]
) -> Drift:
    """Compares the states of two models with one basis at the same tokens.

    Args:
      policy, reference: any real float dtype; rows outside the mask may hold anything.
      mask: True on tokens that count. A token where one of the two states is zero is left out.

    Returns 0.0 twice if no token remains or a valid row is not finite. `linear_cka` is for models
    whose bases differ.
    """
    check_states(policy, mask, fields=("policy", "mask"))
    check_states(reference, mask, fields=("reference", "mask"))
    if policy.shape != reference.shape:
        raise ValueError(
            f"reference has shape {reference.shape}; it must be that of policy, {policy.shape}."
        )
    mask = jnp.asarray(mask)
    z, r = (
        jnp.where(mask[:, None], jnp.asarray(states).astype(jnp.float32), 0.0)
        for states in (policy, reference)
    )
    finite = jnp.all(jnp.isfinite(z)) & jnp.all(jnp.isfinite(r))
    (u, has_u), (v, has_v) = unit_rows(z), unit_rows(r)
    kept = mask & has_u & has_v
    count = jnp.maximum(jnp.sum(kept, dtype=jnp.float32), 1.0)
    relative = row_lengths(z - r) / jnp.where(has_v, row_lengths(r), 1.0)
    # The half-angle form: arccos would lose half of the digits near 0.
    angles = 2.0 * jnp.arctan2(row_lengths(u - v), row_lengths(u + v))
    means = (jnp.sum(jnp.where(kept, x, 0.0)) / count for x in (relative, angles))
    return Drift(*(jnp.where(finite, mean, 0.0) for mean in means))
