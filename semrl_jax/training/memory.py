"""An estimate of the memory of an update; docs/memory.md compares it with measured peaks."""

from __future__ import annotations

from semrl_jax.models import DecoderConfig

BYTES_PER_PARAMETER = 20  # parameter, two Adam moments, sum of gradients, gradient
CHECKPOINT_BYTES_PER_PARAMETER = 12  # parameter, two Adam moments


def update_bytes(
    architecture: DecoderConfig,
    remat: str,
    num_params: float | int,
    *,
    num_rows: float | int,
    num_columns: float | int,
    num_slots: float | int,
) -> float | int:
    """20 P + n k L + w n k + 16 l V bytes of one device, in float32 without a reference.

    Only the first term is exact. Measured peaks range from 9 % below to 23 % above the sum.

    Args:
      architecture: of the policy: D, N H, K H, F, L, V.
      remat: as config.model.remat; decides k and w.
      num_params: P, parameters on the device.
      num_rows, num_columns: of a micro-batch on the device; n is their product.
      num_slots: l, response tokens of the micro-batch.
    """
    width, inner = architecture.hidden_size, architecture.intermediate_size
    queries = architecture.num_heads * architecture.head_dim
    keys = architecture.num_kv_heads * architecture.head_dim
    attention = 2 * architecture.num_heads * num_columns
    products = 2 * inner  # of a feed-forward layer, which "dots" keeps
    whole = 7 * width + 4 * queries + 5 * keys + 4 * inner + attention
    if experts := architecture.experts:
        # Each token has one row per expert, and their blocks a quarter more. "dots" computes the
        # experts again.
        of_experts = 1.25 * experts.experts_per_token * (3 * width + 4 * experts.intermediate_size)
        products = experts.num_experts
        whole += of_experts + 2 * experts.num_experts - 4 * inner
    kept = {
        "full": width,
        "dots": 3 * width + queries + 2 * keys + products,
        "none": whole,
    }[remat]
    working = 0 if remat == "none" else whole
    return (
        BYTES_PER_PARAMETER * num_params
        + 4 * num_rows * num_columns * (kept * architecture.num_layers + working)
        + 16 * num_slots * architecture.vocab_size
    )
