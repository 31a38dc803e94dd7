"""The architecture of a decoder, read from and written as a Hugging Face `config.json`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from semrl_jax.errors import UserError
from semrl_jax.types import config_hash

MODEL_TYPES = ("qwen2",)


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """What fixes the mathematics of a decoder; hashable, so that it can be static under jit.

    Attributes:
      model_type: Hugging Face family; one of `MODEL_TYPES`.
      vocab_size: rows of the embedding, padding included.
      hidden_size: D.
      intermediate_size: width of the gated feed-forward layer.
      num_layers, num_heads, num_kv_heads, head_dim: as named.
      rope_theta: base of the rotary embedding.
      rms_norm_eps: epsilon of the root mean square norms.
      max_position_embeddings: context length in tokens.
      attention_bias: whether query, key and value projections have a bias.
      tie_embeddings: whether the output matrix is the embedding.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10_000.0
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 32_768
    attention_bias: bool = True
    tie_embeddings: bool = False
    model_type: str = "qwen2"

    def __post_init__(self):
        if self.model_type not in MODEL_TYPES:
            raise UserError(
                f"model_type={self.model_type!r} is not supported; choose one of {MODEL_TYPES}."
            )
        for name in (
            "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads",
            "num_kv_heads", "head_dim",
        ):  # fmt: skip
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise UserError(f"model {name}={value!r} must be a whole number of at least 1.")
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"model num_heads={self.num_heads} must be a multiple of "
                f"num_kv_heads={self.num_kv_heads}."
            )
        if self.head_dim % 2:
            raise UserError(
                f"model head_dim={self.head_dim} must be even: rotary positions turn pairs."
            )

    @property
    def hash(self) -> str:
        """Hex SHA-256 of the architecture; trainer and replica compare it."""
        return config_hash(dataclasses.asdict(self))


def config_from_hf(hf: Mapping[str, Any]) -> DecoderConfig:
    """Reads the fields of a Hugging Face `config.json`; UserError names what is not supported."""
    if not isinstance(hf, Mapping):
        raise UserError(f"config.json must hold a JSON object, not {type(hf).__name__}.")
    model_type = hf.get("model_type")
    if model_type not in MODEL_TYPES:
        raise UserError(
            f"config.json: model_type={model_type!r} is not supported; choose a model of one of "
            f"{MODEL_TYPES}."
        )
    try:
        num_heads = hf["num_attention_heads"]
        # transformers 5 nests the base in `rope_parameters`; earlier files have it flat.
        rope = hf.get("rope_parameters") or hf.get("rope_scaling") or {}
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        if rope_type != "default":
            raise UserError(f"config.json: rope_type={rope_type!r} is not supported.")
        if hf.get("use_sliding_window"):
            raise UserError("config.json: use_sliding_window=true is not supported.")
        return DecoderConfig(
            model_type=model_type,
            vocab_size=hf["vocab_size"],
            hidden_size=hf["hidden_size"],
            intermediate_size=hf["intermediate_size"],
            num_layers=hf["num_hidden_layers"],
            num_heads=num_heads,
            num_kv_heads=hf.get("num_key_value_heads", num_heads),
            head_dim=hf.get("head_dim") or hf["hidden_size"] // num_heads,
            rope_theta=float(rope.get("rope_theta", hf.get("rope_theta", 10_000.0))),
            rms_norm_eps=float(hf.get("rms_norm_eps", 1e-6)),
            max_position_embeddings=hf.get("max_position_embeddings", 32_768),
            tie_embeddings=bool(hf.get("tie_word_embeddings", False)),
        )
    except KeyError as error:
        raise UserError(f"config.json: field {error.args[0]!r} is missing.") from None
    except (TypeError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(f"config.json: a field has the wrong type ({error}).") from None


def config_to_hf(config: DecoderConfig, *, eos_token_id: int, pad_token_id: int) -> dict[str, Any]:
    """The `config.json` that transformers and vLLM read; weights are float32."""
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": config.model_type,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_embeddings,
        "use_sliding_window": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": eos_token_id,
        "pad_token_id": pad_token_id,
        "dtype": "float32",
    }
