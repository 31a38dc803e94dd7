"""Floating point operations of a model's products, in closed forms.

Source: "How to scale your model" (jax-ml.github.io/scaling-book), chapter on transformers.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from semrl_jax.models.decoder_config import DecoderConfig
from semrl_jax.models.hf_weights import hf_tensors


class Products(NamedTuple):
    """Floating point operations of one pass forward over all tokens, by where they are."""

    layers: float | int  # the kernels of the layers, 2 per parameter and token
    head: float | int  # the output matrix, for the tokens that get logits
    attention: float | int  # scores and attended values of the pairs that a causal mask leaves
    adapters: float | int = 0  # of LoRA; 0 if all parameters are trained

    @property
    def forward(self) -> float | int:
        return self.layers + self.head + self.attention + self.adapters

    @property
    def training(self) -> float | int:
        """Forward and backward, nothing twice: 6 N D (4 with adapters), 3 times the attention."""
        frozen = self.layers + self.head if self.adapters else 0
        return 3 * self.forward - frozen


def products(
    architecture: DecoderConfig,
    *,
    num_tokens: float | int,
    num_columns: float | int,
    num_slots: float | int,
    num_adapters: float | int = 0,
) -> Products:
    """What a model needs in closed forms; `num_slots` of the tokens get logits."""
    heads = architecture.num_heads * architecture.head_dim
    return Products(
        layers=2 * num_tokens * active_parameters(architecture),
        head=2 * num_slots * architecture.hidden_size * architecture.vocab_size,
        # Two products of 2 heads each; half of the pairs are in the past.
        attention=2 * num_tokens * num_columns * heads * architecture.num_layers,
        adapters=2 * num_tokens * num_adapters,
    )


@functools.cache
def active_parameters(architecture: DecoderConfig) -> int:
    """Numbers in the kernels of all layers that one token meets: of experts, only its own."""
    experts = architecture.experts
    return sum(
        math.prod(tensor.shape)
        for tensor in hf_tensors(architecture)
        if tensor.layer is not None and tensor.is_kernel
        if tensor.expert is None or tensor.expert < experts.experts_per_token
    )
