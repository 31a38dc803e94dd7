"""Floating point operations that the passes and the update of a step need."""

from __future__ import annotations

import numpy as np

from semrl_jax.models import DecoderConfig
from semrl_jax.models.products import Products, products
from semrl_jax.types import RolloutBatch


def batch_products(
    architecture: DecoderConfig, batch: RolloutBatch, *, num_adapters: int = 0, head: bool = True
) -> Products:
    """The products of one pass forward over a batch.

    Each response counts with its prompt, also where responses share one, and padding does not.
    Without `head`, states are not multiplied by the output matrix.
    """
    segments = np.asarray(batch.segment_ids)
    lengths = np.stack(
        [(segments == number).sum(axis=1) for number in range(1, segments.max() + 1)]
    ).astype(np.float64)
    num_tokens = float(lengths.sum())
    return products(
        architecture,
        num_tokens=num_tokens,
        num_columns=float((lengths**2).sum()) / num_tokens,
        num_slots=float(np.sum(batch.response_mask)) if head else 0.0,
        num_adapters=num_adapters,
    )
