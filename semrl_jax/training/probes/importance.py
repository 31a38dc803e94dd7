"""The importance weights of a batch, for the log."""

from __future__ import annotations

import dataclasses
import functools

import jax
import numpy as np
from jaxtyping import Array, Bool, Float

from semrl_jax.algorithms import importance_weights
from semrl_jax.algorithms.credit import Options, extent
from semrl_jax.training.probes import Probe, Seen, Tools


def probe(tools: Tools) -> Probe | None:
    return Importance(tools.plan.importance) if tools.plan.importance else None


@dataclasses.dataclass
class Importance(Probe):
    """The weights that `assign_credit` or the update multiplies the advantages by."""

    options: Options

    def after(self, seen: Seen) -> dict[str, Float[np.ndarray, ""]]:
        if seen.logprobs is None or not seen.counted.any():
            return {}
        arrays = seen.logprobs, seen.batch.rollout_logprobs, seen.counted
        return jax.device_get(importance_scalars(*arrays, options=self.options))


@functools.partial(jax.jit, static_argnames="options")
def importance_scalars(
    old_logprobs: Float[Array, "B T"],
    rollout_logprobs: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    options: Options,
) -> dict[str, Float[Array, ""]]:
    """`policy/importance_weight/...`: the weights under the mask, and the share out of bounds."""
    weights, outside = importance_weights(old_logprobs, rollout_logprobs, mask, **dict(options))
    what = {"truncate": "capped", "mask": "masked"}[dict(options)["outside"]]
    report = extent("policy/importance_weight", weights, mask)
    return report | {f"policy/importance_weight/{what}_fraction": outside}
