"""Values along a response: of each token, and of each growing prefix."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from semrl_jax import models
from semrl_jax.analysis.responses import rank_curve

MICRO_BATCH = 8
MIN_BUCKET = 64  # tokens; sequences are padded to powers of two, so that few programs are compiled


class Along(NamedTuple):
    """Values along one response under some weights; NaN where a value is not defined.

    Prefixes are of the policy's own tokens: context between them has no value.
    """

    # Float32, nats, of the distribution that each token was drawn from, at temperature 1
    logprob: Float[np.ndarray, " T"]
    entropy: Float[np.ndarray, " T"]
    num_tokens: Int[np.ndarray, " K"]  # int64, of each prefix: 1, 2, ... strides
    effective_rank: Float[np.ndarray, " K"]  # float32, m_j of prefix j
    # Float32, m_j minus the mean of all earlier ones. Their mean is the response's ERV
    velocity: Float[np.ndarray, " K"]
    # Float32, the velocity minus the one before. Their mean is the response's ERA
    acceleration: Float[np.ndarray, " K"]


def along_responses(
    policy: models.Policy,
    params: models.Params,
    prompts: Sequence[Int[np.ndarray, " _"]],
    responses: Sequence[Int[np.ndarray, " _"]],
    masks: Sequence[Bool[np.ndarray, " _"]] | None = None,
    *,
    stride: int,
) -> list[Along]:
    """Computes the values of each response from one forward pass per `MICRO_BATCH` of them.

    Args:
      prompts, responses: int32 token ids; no response is empty.
      masks: True on the policy's own tokens of each response; None: all tokens are its own.
      stride: as in `metrics.rank_dynamics`, of which the window is "exact".
    """
    masks = masks or [np.ones(len(response), bool) for response in responses]
    longest = max(len(p) + len(r) for p, r in zip(prompts, responses, strict=True))
    size = max(1 << (longest - 1).bit_length(), MIN_BUCKET)
    found = []
    for start in range(0, len(prompts), MICRO_BATCH):
        rows = list(zip(prompts, responses))[start : start + MICRO_BATCH]
        own = masks[start : start + MICRO_BATCH]
        ids = np.zeros((MICRO_BATCH, size), np.int32)
        segments = np.zeros_like(ids)
        for row, both in enumerate(map(np.concatenate, rows)):
            ids[row, : len(both)] = both
            segments[row, : len(both)] = 1
        states, logprobs, entropies = jax.device_get(_forward(policy, params, ids, segments))
        for row, (prompt, response) in enumerate(rows):
            tokens = slice(len(prompt) - 1, len(prompt) + len(response) - 1)
            mask = np.zeros(size - 1, bool)
            mask[tokens] = own[row]
            curve = rank_curve(states[row], mask, stride=stride)
            orders = velocity_and_acceleration(curve.effective_rank)
            values = (
                np.where(own[row], of_all[row, tokens], np.nan) for of_all in (logprobs, entropies)
            )
            found.append(Along(*values, *curve, *orders))
    return found


@functools.partial(jax.jit, static_argnames="policy")
def _forward(
    policy: models.Policy,
    params: models.Params,
    ids: Int[Array, "B S"],
    segments: Int[Array, "B S"],
) -> tuple[Array, Array, Array]:
    """Final states, log-probabilities and entropies of all tokens but the first of each row."""
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1], dtype=jnp.int32), ids.shape)
    states = policy.final_states(params, ids, positions, segments)[:, :-1]
    return states, *policy.token_logprobs(params, states, ids[:, 1:])


def velocity_and_acceleration(
    series: Float[np.ndarray, " K"],
) -> tuple[Float[np.ndarray, " K"], Float[np.ndarray, " K"]]:
    """The terms at each prefix of which ERV and ERA are the means; see `Along`."""
    velocity = np.full(len(series), np.nan, np.float32)
    if len(series) > 1:
        counts = np.arange(1, len(series))
        velocity[1:] = series[1:] - np.cumsum(series)[:-1] / counts
    return velocity, np.diff(velocity, prepend=np.float32(np.nan)).astype(np.float32)
