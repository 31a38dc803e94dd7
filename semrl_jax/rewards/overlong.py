"""A penalty for responses that come close to the limit of their length."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, Int


def overlong_penalty(
    lengths: Int[np.ndarray, " B"], *, limit: int, buffer: int
) -> Float[np.ndarray, " B"]:
    """Computes what is added to the rewards: clip((limit - buffer - length) / buffer, -1, 0).

    Args:
      limit: tokens at which a response is cut off.
      buffer: tokens below the limit in which the penalty grows from 0 to 1; above 0.

    Returns:
      Float32 from -1.0 to 0.0, in the unit of the rewards.

    Source: arXiv:2503.14476 (DAPO), Eq. 13; there the limit is 20480 and the buffer 4096.
    """
    return np.clip((limit - buffer - lengths) / buffer, -1.0, 0.0).astype(np.float32)
