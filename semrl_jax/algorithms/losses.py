"""The policy loss, as weighted sums over tokens.

Every mean here is sum(weights * x) with weights that sum to 1 over a mini-batch. Losses and
gradients of micro-batches therefore add up to the loss and the gradient of their mini-batch, for
any split into micro-batches.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from semrl_jax.algorithms.given import GIVEN_SURROGATES
from semrl_jax.algorithms.kl import kl_estimate
from semrl_jax.algorithms.surrogates import SURROGATES, Bounds, Tokens
from semrl_jax.support.choices import AGGREGATIONS
from semrl_jax.support.fields import setting

DEFAULT_BOUNDS = Bounds()


@dataclasses.dataclass(frozen=True)
class Aggregation:
    """Settings of `token_weights`."""

    aggregation: str = setting(
        "token_mean",
        "how token losses become one: token_mean, response_mean or constant_length",
        choices=AGGREGATIONS,
    )
    constant_length: int = setting(
        0, "limit of a response, for aggregation constant_length", "tokens", at_least=0
    )


def token_weights(
    response_mask: Bool[Array, "B T"], *, aggregation: str = "token_mean", constant_length: int = 0
) -> Float[Array, "B T"]:
    """Computes how much each token of a mini-batch counts.

    Args:
      response_mask: True on tokens that count, of the whole mini-batch; split the weights, not the
        mask, into micro-batches.
      aggregation: "token_mean": all tokens have the same weight; "response_mean": all responses
        with a token have the same weight, divided equally among its tokens; "constant_length":
        every token has the weight 1 / (B * constant_length), so that no length matters.
      constant_length: tokens, usually the limit of a response; used by that aggregation alone.

    Returns:
      Float32, 0.0 on masked-out tokens. Their sum is 1.0 (0.0 if no token counts), under
      "constant_length" the mean length over `constant_length`.

    Raises ValueError for another aggregation, or a constant_length below 1 where it is used.

    Source: "constant_length" is that of Dr. GRPO, arXiv:2503.20783. The reference implementation
    averages over the tokens of each micro-batch, then over micro-batches; with micro-batches of one
    response that is "response_mean".
    """
    mask = response_mask.astype(jnp.float32)
    if aggregation == "token_mean":
        return mask / jnp.maximum(jnp.sum(mask), 1.0)
    if aggregation == "response_mean":
        lengths = jnp.sum(mask, axis=1, keepdims=True)  # [B, 1]
        num_responses = jnp.sum(lengths > 0, dtype=jnp.float32)
        return mask / jnp.maximum(lengths, 1.0) / jnp.maximum(num_responses, 1.0)
    if aggregation == "constant_length":
        if constant_length < 1:
            raise ValueError(f"constant_length={constant_length} must be at least 1 token.")
        return mask / float(mask.shape[0] * constant_length)  # may exceed int32
    raise ValueError(
        f"aggregation={aggregation!r} is unknown; it must be one of {', '.join(AGGREGATIONS)}."
    )


def weighted_sum(x: Float[Array, "B T"], weights: Float[Array, "B T"]) -> Float[Array, ""]:
    """Sum of weights * x; where the weight is 0, x may hold anything."""
    return jnp.sum(jnp.where(weights > 0, x, 0.0) * weights)


def policy_loss(
    logprobs: Float[Array, "B T"],
    entropy: Float[Array, "B T"],
    *,
    old_logprobs: Float[Array, "B T"] | None,
    ref_logprobs: Float[Array, "B T"] | None,
    advantages: Float[Array, "B T"],
    weights: Float[Array, "B T"],
    sequence_ids: Int[Array, "B T"] | None = None,
    kl: Float[Array, "B T"] | None = None,
    given: Bool[Array, "B T"] | None = None,
    surrogate: str = "clip",
    bounds: Bounds = DEFAULT_BOUNDS,
    kl_coefficient: float | int | Float[Array, ""] = 0.001,
    entropy_coefficient: float | int | Float[Array, ""] = 0.001,
    kl_estimator: str = "low_var_kl",
    given_surrogate: str = "luffy",
    given_coefficient: float | int = 1.0,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """Computes the loss of a micro-batch: its share of the mini-batch mean.

    loss = pg - entropy_coefficient * entropy + kl_coefficient * kl

    Args:
      logprobs: nats of the response tokens under the policy now, with gradient.
      entropy: nats of the whole distribution at each token, with gradient.
      old_logprobs: nats at the start of the update; may be None if the surrogate has no ratio.
      ref_logprobs: under the reference; may be None if kl_coefficient is 0: no KL is computed.
      kl: from the reference in nats, with gradient, in place of an estimate; None: `kl_estimator`.
      advantages: of any sign, shaped or not; no gradient flows into them.
      weights: float32 from `token_weights` of the whole mini-batch. Tokens of weight 0 may hold
        anything in the other arrays.
      sequence_ids: for a surrogate of whole responses; see `sum_over_sequences`.
      given: True on tokens of given responses: `given_surrogate` of GIVEN_SURROGATES, multiplied by
        `given_coefficient`, is their loss in place of the surrogate. None: there are none.
      surrogate: one of SURROGATES, computed in float32; `bounds`: its settings.

    Returns:
      Float32 loss, and scalars to be summed over micro-batches like it: `policy/loss`,
      `policy/pg_loss`, `policy/clip_fraction` (share of tokens, by weight, whose term a bound
      changed), `policy/entropy`, with old_logprobs `policy/approx_kl` (of old_logprobs - logprobs),
      with a KL `policy/kl`, in nats, and with `given` its part `policy/given_loss` of the
      `pg_loss`; without gradient.

    Raises ValueError for an unknown surrogate or estimator, or if an array that is needed is None.
    """
    if surrogate not in SURROGATES:
        raise ValueError(
            f"surrogate={surrogate!r} is unknown; it must be one of {', '.join(SURROGATES)}."
        )
    chosen = SURROGATES[surrogate]
    without_kl = isinstance(kl_coefficient, float | int) and kl_coefficient == 0
    estimates = kl is None and not without_kl
    for name, array, reason in (
        ("ref_logprobs", ref_logprobs, f"kl_coefficient={kl_coefficient}" * estimates),
        ("old_logprobs", old_logprobs, f"surrogate={surrogate!r}" * chosen.old_logprobs),
        ("sequence_ids", sequence_ids, f"surrogate={surrogate!r}" * chosen.sequence_ids),
    ):
        if array is None and reason:
            raise ValueError(f"{reason} needs {name}, which is None.")
    mask = weights > 0

    def counted(x):  # before any arithmetic: a NaN would reach the gradient through 0 * NaN
        return None if x is None else jnp.where(mask, x.astype(jnp.float32), 0.0)

    logprobs, entropy, old_logprobs = map(counted, (logprobs, entropy, old_logprobs))
    ids = None if sequence_ids is None else jnp.where(mask, sequence_ids, 0)
    tokens = Tokens(logprobs, old_logprobs, jax.lax.stop_gradient(counted(advantages)), ids)
    terms, changed = chosen.loss(tokens, bounds)
    report = {}
    if given is not None:
        of_given = given_coefficient * GIVEN_SURROGATES[given_surrogate].loss(tokens)
        terms, changed = jnp.where(given, of_given, terms), changed & ~given
        report["policy/given_loss"] = weighted_sum(jnp.where(given, terms, 0.0), weights)
    pg_loss, mean_entropy = weighted_sum(terms, weights), weighted_sum(entropy, weights)
    loss = pg_loss - entropy_coefficient * mean_entropy
    if kl is None and ref_logprobs is not None:
        reference = jax.lax.stop_gradient(counted(ref_logprobs))
        kl = kl_estimate(logprobs, reference, estimator=kl_estimator)
    if kl is not None:
        mean_kl = weighted_sum(counted(kl), weights)
        loss = loss + kl_coefficient * mean_kl
        report["policy/kl"] = mean_kl
    if old_logprobs is not None:
        report["policy/approx_kl"] = weighted_sum(old_logprobs - logprobs, weights)
    report |= {
        "policy/loss": loss,
        "policy/pg_loss": pg_loss,
        "policy/clip_fraction": weighted_sum(changed.astype(jnp.float32), weights),
        "policy/entropy": mean_entropy,
    }
    return loss, jax.lax.stop_gradient(report)
