"""Families of models: one module for each `model_type`, which declares what `config.json` means.

A module of another package can declare one as well: `config.model.family` names it.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from semrl_jax.support.errors import UserError
from semrl_jax.support.modules import load_module, module_names, running

Fields = Mapping[str, Any]  # of a config.json
ACTIVATIONS = ("silu", "gelu_pytorch_tanh")


@dataclasses.dataclass(frozen=True)
class Family:
    """What all models of a family have in common. What differs is in `DecoderConfig`.

    A field of `config.json` that no family treats in its own way is read as Llama's: `hf_config`.
    """

    model_type: str  # as in `config.json`
    architecture: str  # the class in transformers
    attention_bias: bool = False  # whether the query, key and value projections have a bias
    query_key_norm: bool = False  # whether each head's queries and keys are normed before rotation
    head_dim: int | None = None  # default of `config.json`; None: hidden_size / num_attention_heads
    max_position_embeddings: int = 32_768  # default of `config.json`
    # Whether `num_key_value_heads` is required. Otherwise its default is num_attention_heads.
    needs_kv_heads: bool = True
    # Fields that the class in transformers reads and the decoder does not support. They may be
    # absent, and are written as false.
    must_be_false: tuple[str, ...] = ()
    # "none"; "all": `sliding_window` holds in every layer; "some": in the layers that `layer_types`
    # or `max_window_layers` select, if `use_sliding_window` is true.
    sliding_window: str = "none"
    activation: str = "silu"  # of the feed-forward gate, by transformers' name; see ACTIVATIONS
    offset_norms: bool = False  # norms multiply by 1 + weight, in float32, not by the weight
    post_norms: bool = False  # the outputs of attention and feed-forward are normed as well
    scaled_embedding: bool = False  # embeddings are multiplied by sqrt(hidden_size)
    has_experts: bool = False  # whether feed-forward layers are mixtures of experts
    # Fields of `DecoderConfig` that only some families have; the others leave them None.
    options: tuple[str, ...] = ()
    # Modules of a layer that are not named as Llama's: ours -> below "model.layers.<i>.".
    tensor_names: Mapping[str, str] = dataclasses.field(default_factory=dict)
    # Kernels of a layer that files hold as one: its name below "model.layers.<i>." -> our modules,
    # which follow each other in `hf_weights.LAYER_NAMES`. Everywhere else they are separate.
    fused: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    # Translates the fields of a `config.json` of this family to Llama's names, and back; None: they
    # have Llama's names.
    from_hf: Callable[[Fields], Fields] | None = None
    to_hf: Callable[[Fields], Fields] | None = None
    # From the sizes of a random model, by the names of `DecoderConfig`, its other fields.
    of_random: Callable[[Fields], Fields] | None = None

    def __post_init__(self) -> None:
        if self.sliding_window not in ("none", "all", "some"):
            raise ValueError(f"sliding_window={self.sliding_window!r} must be none, all or some")
        if self.head_dim is not None and not (type(self.head_dim) is int and self.head_dim > 0):
            raise ValueError(f"head_dim={self.head_dim!r} must be a whole number above 0, or None")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation={self.activation!r} must be one of {ACTIVATIONS}")
        for name, modules in self.fused.items():
            if self.attention_bias and {"query", "key", "value"}.intersection(modules):
                raise ValueError(
                    f"fused={name!r} has the {modules[0]}, whose bias lies between the kernels; "
                    "fuse only kernels without biases"
                )
        if isinstance(self.must_be_false, str):
            raise ValueError(f"must_be_false={self.must_be_false!r} must be a tuple of names")


@functools.cache
def find_family(name: str) -> Family:
    """A family by its `model_type`, or by a module that has it as `FAMILY`; or UserError."""
    if "." not in name and name not in model_types():
        raise UserError(
            f"model.family={name!r:.100} is unknown; choose one of {model_types()}, or name a "
            "module of your own as 'my_package.my_module'."
        )
    family = load_module("model.family", name, __name__, ("FAMILY",)).FAMILY
    if not isinstance(family, Family):
        raise UserError(f"model.family={name!r}: FAMILY must be a semrl_jax.models.Family.")
    return family


def translated(fields: Fields, translate: Callable[[Fields], Fields]) -> dict[str, Any]:
    """What a function of a family makes of fields; UserError if a user's function fails."""
    with running("model.family", inspect.getmodule(translate), translate.__name__):
        return dict(translate(fields))


def model_types() -> tuple[str, ...]:
    """The families of this package."""
    return module_names(__name__)
