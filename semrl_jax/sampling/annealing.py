"""The distribution that a training step samples from."""

from __future__ import annotations

from typing import Any

import ml_collections

from semrl_jax.types import Annealing


def distribution_at(step: int, rollout: ml_collections.ConfigDict) -> dict[str, Any]:
    """Temperature, top-p, top-k and annealing; `rollout` is the section of the config."""
    settings = {name: rollout[name] for name in ("temperature", "top_p", "top_k")}
    return settings | {"annealing": annealing_at(step, **rollout.annealing)}


def annealing_at(
    step: int,
    *,
    enabled: bool,
    maximum: float,
    minimum: float,
    warmup_tokens: int,
    decay_tokens: float,
    decay_growth: float,
    max_decay_tokens: float,
) -> Annealing | None:
    """The annealing of a step; the decay slows down over the steps, as responses grow longer.

    d_s = min(decay_tokens + decay_growth * step, max_decay_tokens)

    Args:
      step: updates done so far.
      enabled: False gives None.
      maximum, minimum, warmup_tokens: see `types.Annealing`.
      decay_tokens, decay_growth, max_decay_tokens: at step 0, added per step, and the limit.

    Source: arXiv:2510.05251 (EAD). It prints d_s = min(25 + 5 s, 40000). The sampler of the
    published code divides t by 20 d_s, so its results belong to decay_tokens 500, decay_growth 100
    and max_decay_tokens 800000, the defaults here. With 25, the least temperature would be reached
    after 19 tokens.
    """
    if not enabled:
        return None
    decay = min(decay_tokens + decay_growth * step, max_decay_tokens)
    return Annealing(maximum, minimum, warmup_tokens, float(decay))
