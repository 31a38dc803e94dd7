"""Surrogates of the policy gradient: what a token adds to the loss, by name.

All take r = exp(logprobs - old_logprobs), the ratio of a token's probability now to that at the
start of the update, and its advantage A. "sg" stops the gradient.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from semrl_jax.support.choices import REC_RANGES
from semrl_jax.support.fields import setting

MAX_LOG_RATIO = 20.0
MAX_DYNAMIC_RATIO = 10.0

# The loss of each token, and whether the bounds changed its gradient.
Terms = tuple[Float[Array, "*tokens"], Bool[Array, "*tokens"]]


class Tokens(NamedTuple):
    """Arrays of one micro-batch: float32, 0 where a token does not count."""

    logprobs: Float[Array, "*tokens"]  # nats, with gradient
    old_logprobs: Float[Array, "*tokens"] | None  # nats; None for a surrogate without a ratio
    advantages: Float[Array, "*tokens"]  # without gradient
    # See `sum_over_sequences`; None for a surrogate of single tokens.
    sequence_ids: Int[Array, "*tokens"] | None

    def log_ratio(self) -> Float[Array, "*tokens"]:
        return self.logprobs - jax.lax.stop_gradient(self.old_logprobs)


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Settings of the surrogates; each reads those that its docstring names."""

    clip_epsilon: float = setting(0.2, "how far a ratio may fall below 1", within="(0, 1]")
    clip_epsilon_high: float = setting(0.0, "how far above 1; 0: as far as below")
    dual_clip: float = setting(0.0, "largest ratio at a negative advantage; 0: no limit")
    opmd_tau: float = setting(1.0, "strength of OPMD's regulariser", above=0)
    rec_range: str = setting("one_side", "rec: ratios that count", choices=REC_RANGES)
    rec_weighted: bool = setting(False, "rec: True: the ratio multiplies the gradient")
    rec_far_low: float = setting(
        0.6, "rec, ring: distance below 1 from which a positive advantage counts", within="(0, 1]"
    )
    rec_far_high: float = setting(
        2.0, "rec, ring: distance above 1 from which a negative advantage counts", above=0
    )
    real_tau: float = setting(0.5, "real: log-ratio over which the gradient fades", above=0)

    @property
    def high(self) -> float:
        return self.clip_epsilon_high or self.clip_epsilon


class Surrogate(NamedTuple):
    """A surrogate, and which arrays of `Tokens` it reads."""

    loss: Callable[[Tokens, Bounds], Terms]
    old_logprobs: bool = True
    sequence_ids: bool = False


def sum_over_sequences(
    values: Float[Array, "R U"], sequence_ids: Int[Array, "R U"]
) -> Float[Array, "R U"]:
    """Gives every token the sum over its sequence, where rows hold one or more sequences.

    A quantity of a sequence, such as a ratio of probabilities, is thus an array over tokens. The
    weights of "response_mean" sum to 1 / number of sequences over each sequence, so the weighted
    sum of such an array is its mean over sequences.

    Args:
      values: per token, summed in float32, with gradient.
      sequence_ids: number of each token's sequence in its row, from 1 to at most U; 0 at padding,
        where `values` may hold anything. For padded rows, the response mask as int32.

    Returns float32; 0.0 at padding. No sum crosses rows, so devices exchange nothing.
    """
    mask = sequence_ids > 0
    values = jnp.where(mask, values.astype(jnp.float32), 0.0)

    def of_row(values, ids):
        return jax.ops.segment_sum(values, ids, num_segments=values.shape[0] + 1)[ids]

    return jnp.where(mask, jax.vmap(of_row)(values, sequence_ids), 0.0)


def clip(tokens: Tokens, bounds: Bounds) -> Terms:
    """max(-A r, -A clip(r, 1 - clip_epsilon, 1 + clip_epsilon_high)); for A < 0 at most -A c.

    `clip_epsilon_high` above `clip_epsilon` is "clip-higher"; c is `dual_clip`.

    Source: arXiv:1707.06347, Eq. 7; arXiv:2503.14476, Sec. 3.1 (clip-higher, 0.2 and 0.28);
    arXiv:1912.09729, Eq. 5 (dual clip, c = 3).
    """
    return _clipped(tokens, tokens.log_ratio(), 1 - bounds.clip_epsilon, 1 + bounds.high, bounds)


def gspo(tokens: Tokens, bounds: Bounds) -> Terms:
    """`clip` with one ratio per response: s = exp(mean over its tokens of log r).

    The gradient of s is spread evenly over the tokens of the response: token t has the ratio
    sg(s) exp(logprobs_t - sg(logprobs_t)), so advantages may differ between tokens ("GSPO-token").
    With equal advantages and `aggregation="response_mean"`, this is GSPO.

    Source: arXiv:2507.18071; bounds there 3e-4 and 4e-4.
    """
    log_ratio = _of_response(tokens)
    return _clipped(tokens, log_ratio, 1 - bounds.clip_epsilon, 1 + bounds.high, bounds)


def dcpo(tokens: Tokens, bounds: Bounds) -> Terms:
    """`clip` with bounds that widen for tokens that were improbable, q = exp(old_logprobs).

    low = 1/2 + sqrt(max(1 - 4 clip_epsilon / q, 0)) / 2,
    high = 1/2 + sqrt(1 + 4 clip_epsilon_high / q) / 2, at most 10

    Source: arXiv:2509.02333, Sec. 3, with bounds 0.16 and 0.2, and `dual_clip` 10.

    The bounds solve |r - 1| r q <= epsilon.
    """
    q = jnp.exp(jax.lax.stop_gradient(tokens.old_logprobs))
    q = jnp.maximum(q, jnp.finfo(jnp.float32).tiny)
    low = 0.5 + 0.5 * jnp.sqrt(jnp.maximum(1 - 4 * bounds.clip_epsilon / q, 0.0))
    high = jnp.minimum(0.5 + 0.5 * jnp.sqrt(1 + 4 * bounds.high / q), MAX_DYNAMIC_RATIO)
    return _clipped(tokens, tokens.log_ratio(), low, high, bounds)


def cispo(tokens: Tokens, bounds: Bounds) -> Terms:
    """-sg(clip(r, 1 - clip_epsilon, 1 + clip_epsilon_high)) A logprobs: all tokens have a gradient.

    Source: arXiv:2506.13585, Eqs. 4 and 5; no lower bound there: `clip_epsilon` close to 1.
    """
    ratio = _ratio(tokens.log_ratio())
    clipped = jnp.clip(ratio, 1 - bounds.clip_epsilon, 1 + bounds.high)
    return -jax.lax.stop_gradient(clipped) * tokens.advantages * tokens.logprobs, clipped != ratio


def reinforce(tokens: Tokens, bounds: Bounds) -> Terms:
    """-A logprobs: no ratio and no bounds, so `old_logprobs` is not computed for it.

    Source: Williams 1992, "Simple statistical gradient-following algorithms".
    """
    return -tokens.advantages * tokens.logprobs, jnp.zeros(tokens.logprobs.shape, bool)


def opmd(tokens: Tokens, bounds: Bounds) -> Terms:
    """(-A logprobs + opmd_tau / (2 length) (sum over the response of log r)^2) / max(1, opmd_tau).

    The sum over the tokens of a response is its policy gradient and half the squared log-ratio of
    the whole response: online mirror descent without a clip.

    Source: arXiv:2501.12599, the surrogate gradient.

    Here it is divided by max(1, tau), so that a large tau makes no large step. Trinity-RFT's "opmd"
    has no square and divides by 1 + tau.
    """
    ids = tokens.sequence_ids
    total = sum_over_sequences(tokens.log_ratio(), ids)
    length = jnp.maximum(sum_over_sequences(jnp.ones_like(total), ids), 1.0)
    penalty = 0.5 * bounds.opmd_tau * total**2 / length
    loss = (-tokens.advantages * tokens.logprobs + penalty) / max(1.0, bounds.opmd_tau)
    return loss, jnp.zeros(loss.shape, bool)


def rec(tokens: Tokens, bounds: Bounds) -> Terms:
    """-A w logprobs if r counts, else 0; w is 1, or sg(r) with `rec_weighted`.

    `rec_range` says which r count. "one_side": r <= 1 + clip_epsilon_high for A > 0, r >= 1 -
    clip_epsilon for A < 0. "two_side": both bounds for both signs. "ring": as "two_side", and r <=
    1 - rec_far_low for A > 0, r >= 1 + rec_far_high for A < 0, where the step leads back.
    "one_side" with `rec_weighted` has the gradient of `clip`.

    Source: arXiv:2509.24203 (REC-OneSide, REC-TwoSide, REC-Ring) and its code in Trinity-RFT,
    with `dr_grpo` and bounds 0.2, or 0.6 and 2.0.
    """
    ratio, advantages = _ratio(jax.lax.stop_gradient(tokens.log_ratio())), tokens.advantages
    above, below = ratio > 1 + bounds.high, ratio < 1 - bounds.clip_epsilon
    positive, negative = advantages > 0, advantages < 0
    outside = (above & positive) | (below & negative)
    if bounds.rec_range != "one_side":
        outside = (above | below) & (positive | negative)
    if bounds.rec_range == "ring":
        outside &= ~(positive & (ratio <= 1 - bounds.rec_far_low))
        outside &= ~(negative & (ratio >= 1 + bounds.rec_far_high))
    weight = ratio if bounds.rec_weighted else 1.0
    return jnp.where(outside, 0.0, -advantages * weight * tokens.logprobs), outside


def real(tokens: Tokens, bounds: Bounds) -> Terms:
    """|A| log(1 + exp(-sign(A) s / real_tau)), s the mean of log r over the response.

    The sign of A is a label, which s predicts: the gradient fades once s agrees with it, and is at
    most |A| / real_tau. The gradient of s is spread over the tokens as in `gspo`.

    Source: arXiv:2602.05630, the binary cross-entropy, real_tau 0.5, responses with A = 1 or -1:
    `sample_reinforcement` with weights 1 and `aggregation="response_mean"`.

    The softmax over a group of REAL itself needs the log-ratios of all its responses in one
    micro-batch.
    """
    margin = jnp.sign(tokens.advantages) * _of_response(tokens) / bounds.real_tau
    loss = jnp.abs(tokens.advantages) * jax.nn.softplus(-margin)
    return loss, jnp.zeros(loss.shape, bool)


SURROGATES = {
    "clip": Surrogate(clip),
    "gspo": Surrogate(gspo, sequence_ids=True),
    "dcpo": Surrogate(dcpo),
    "cispo": Surrogate(cispo),
    "reinforce": Surrogate(reinforce, old_logprobs=False),
    "opmd": Surrogate(opmd, sequence_ids=True),
    "rec": Surrogate(rec),
    "real": Surrogate(real, sequence_ids=True),
}


def _of_response(tokens):
    """The mean of log r over each response, with the gradient of the token's own log r."""
    ids, log_ratio = tokens.sequence_ids, jax.lax.stop_gradient(tokens.log_ratio())
    lengths = sum_over_sequences(jnp.ones_like(log_ratio), ids)
    mean = sum_over_sequences(log_ratio, ids) / jnp.maximum(lengths, 1.0)
    return mean + tokens.logprobs - jax.lax.stop_gradient(tokens.logprobs)


def _ratio(log_ratio):
    """Kept within e^+-20, so that it stays in the range of float32."""
    return jnp.exp(jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO))


def _clipped(tokens, log_ratio, low, high, bounds):
    ratio = _ratio(log_ratio)
    plain = -tokens.advantages * ratio
    clipped = -tokens.advantages * jnp.clip(ratio, low, high)
    loss, changed = jnp.maximum(plain, clipped), clipped > plain
    if bounds.dual_clip:
        limit = -tokens.advantages * bounds.dual_clip
        above = (tokens.advantages < 0) & (loss > limit)
        loss, changed = jnp.where(above, limit, loss), changed | above
    return loss, changed
