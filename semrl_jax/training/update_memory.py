"""An estimate of the memory of an update; docs/memory.md compares it with measured peaks."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from semrl_jax.models import DecoderConfig, Params
from semrl_jax.models.attention import block_columns
from semrl_jax.models.policy import logits_at_once
from semrl_jax.training.optimizer import Optimizer


class PerParameter(NamedTuple):
    """Bytes per parameter of a model that is trained."""

    parameter: int  # of the parameter itself
    # State of the optimiser, with masters; an update has it on the device, wherever it is kept.
    state: float
    gradients: int  # of their float32 sum, and of one micro-batch

    @classmethod
    def of(cls, optimizer: Optimizer, shapes: Params) -> PerParameter:
        """The bytes that an optimiser keeps for parameters of these shapes."""
        state = jax.eval_shape(optimizer.first_state, shapes)
        count = sum(leaf.size for leaf in jax.tree.leaves(shapes))
        size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state)) / count
        width = jnp.dtype(optimizer.param_dtype).itemsize
        return cls(width, size, 4 + width)

    @property
    def in_update(self) -> float:
        return self.parameter + self.state + self.gradients

    @property
    def in_checkpoint(self) -> float:
        return self.parameter + self.state


def update_parts(
    architecture: DecoderConfig,
    remat: str,
    *,
    num_rows: float | int,
    num_columns: float | int,
    num_slots: float | int,
    platform: str,
    dtype: str = "float32",
    fsdp: int = 1,
    tensor: int = 1,
    expert: int = 1,
) -> dict[str, float | int]:
    """Bytes that an update holds on one device in addition to the state and its gradients.

    Measured peaks, without a reference, range from 12 % below to 14 % above the sum of both.

    Args:
      remat: as config.model.remat.
      num_rows, num_columns: size of a micro-batch on the device.
      num_slots: response tokens of the micro-batch.
      dtype: of the computation. A CPU computes with float32 copies.
      fsdp, tensor, expert: sizes of the mesh's axes. Over `fsdp`, kernels are gathered for their
        products.
    """
    number = 2 if dtype == "bfloat16" and platform != "cpu" else 4
    width, vocabulary = architecture.hidden_size, architecture.vocab_size / tensor
    inner = architecture.intermediate_size / tensor
    queries = architecture.num_heads * architecture.head_dim / tensor
    keys = architecture.num_kv_heads * architecture.head_dim / tensor
    # The backward pass of attention in blocks computes the scores again.
    in_blocks = block_columns(int(num_columns), platform)
    attention = 0 if in_blocks else 2 * architecture.num_heads / tensor * num_columns
    products = 2 * inner  # of a feed-forward layer, which "dots" keeps
    whole = 7 * width + 4 * queries + 5 * keys + 4 * inner + attention
    kernels = 3 * width * inner
    if experts := architecture.experts:
        # Each token has one row per expert, and their blocks a quarter more. "dots" computes the
        # experts again.
        of_experts = 1.25 * experts.experts_per_token * (3 * width + 4 * experts.intermediate_size)
        products = experts.num_experts
        whole += of_experts + 2 * experts.num_experts - 4 * inner
        kernels = 3 * width * experts.intermediate_size / tensor * experts.num_experts / expert
        kernels += width * experts.num_experts  # of the router
    dots = 3 * width + queries + 2 * keys + products
    kept = {"full": width, "dots": dots, "none": whole}[remat]
    working = 0 if remat == "none" else whole
    # The logits exist in tiles, see `models.token_logprobs`.
    parts = {
        "activations": number * num_rows * num_columns * kept * architecture.num_layers,
        "working layer": number * num_rows * num_columns * working,
        "logits": 16 * min(num_slots * vocabulary, logits_at_once(platform)),
    }
    if fsdp > 1:  # two layers, the output matrix, and its float32 gradient, which is summed whole
        layer = 2 * width * queries + 2 * width * keys + kernels
        parts["gathered"] = number * 2 * layer + (number + 4) * vocabulary * width
    return parts
