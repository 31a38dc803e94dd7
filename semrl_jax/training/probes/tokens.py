"""Indicators of the tokens of a response, from the training model's own pass."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Bool

from semrl_jax.metrics import Measurement, MetricKey
from semrl_jax.support.choices import TOKEN_INDICATORS
from semrl_jax.training.passes import PassNeeds
from semrl_jax.training.policy_update import TokenPass
from semrl_jax.training.probes import Probe, Seen, Tools


def probe(tools: Tools) -> Probe | None:
    shaping = tools.config.shaping
    tracked = {*shaping.indicators, shaping.guidance} if shaping.target != "none" else set()
    names = tuple(name for name in TOKEN_INDICATORS if name in tracked)
    return Tokens(names) if names else None


@dataclasses.dataclass
class Tokens(Probe):
    """Indicators of the tokens that the shaping uses."""

    names: tuple[str, ...]

    def needs(self, step: int) -> PassNeeds:
        return PassNeeds(entropies=True)

    def before(self, seen: Seen) -> Seen:
        found = token_indicators(self.names, seen.tokens, seen.batch.response_mask)
        return seen.with_metrics(found)


def token_indicators(
    names: Sequence[str], tokens: TokenPass, mask: Bool[np.ndarray, "B T"]
) -> dict[MetricKey, Measurement]:
    """Float64 means [B] over the tokens of each response, nats; `names` are of TOKEN_INDICATORS."""
    found = {}
    for name in names:
        values = np.asarray(getattr(tokens, TOKEN_INDICATORS[name]), np.float64)
        means = np.mean(values, axis=1, where=mask)
        found[MetricKey(name)] = Measurement(means, np.isfinite(means))
    return found
