"""The architecture of a decoder, read from and written as a Hugging Face `config.json`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from semrl_jax.errors import UserError
from semrl_jax.types import config_hash


class Family(NamedTuple):
    """What a Hugging Face `model_type` fixes; sizes and options are fields of `DecoderConfig`."""

    architecture: str  # the class in transformers
    attention_bias: bool = False  # query, key and value projections have a bias
    query_key_norm: bool = False  # queries and keys are normed, head by head, before rotary
    can_slide: bool = False  # knows sliding_window
    can_mix: bool = False  # may slide in some layers only


FAMILIES: Mapping[str, Family] = {
    "qwen2": Family("Qwen2ForCausalLM", attention_bias=True, can_slide=True, can_mix=True),
    "qwen3": Family("Qwen3ForCausalLM", query_key_norm=True, can_slide=True, can_mix=True),
    "llama": Family("LlamaForCausalLM"),
    "mistral": Family("MistralForCausalLM", can_slide=True),
}
MODEL_TYPES = tuple(FAMILIES)
# Beyond any model that is known: a larger number is a slip, or meant to keep us busy.
MAX_SIZE = 2**24
MAX_LAYERS = 2**12
MAX_POSITIONS = 2**31 - 1  # positions are int32


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the context of pretraining.

    Attributes:
      rope_type: "linear" divides every frequency by `factor`; "llama3" those whose wavelength is
        long beside the original context, and blends in between.
      factor: > 0.
      low_freq_factor, high_freq_factor: llama3 only: frequencies that turn fewer times than the
        first in the original context are divided, those that turn oftener than the second kept.
      original_max_position_embeddings: llama3 only: that context in tokens.
    """

    rope_type: str
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192

    def __post_init__(self):
        if self.rope_type not in ("linear", "llama3"):
            raise UserError(
                f"rope_type={self.rope_type!r:.100} is not supported; choose a model with "
                "'default', 'linear' or 'llama3'."
            )
        for name in ("factor", "original_max_position_embeddings"):
            if not 0 < getattr(self, name) < float("inf"):
                raise UserError(f"rope {name}={getattr(self, name)} must be above 0.")
        if self.rope_type == "llama3" and not 0 < self.low_freq_factor < self.high_freq_factor:
            raise UserError(
                f"rope low_freq_factor={self.low_freq_factor} must lie between 0 and "
                f"high_freq_factor={self.high_freq_factor}."
            )


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
      tie_embeddings: whether the output matrix is the embedding.
      rope_scaling: None leaves the rotary frequencies as they are.
      sliding_window: a token sees itself and the `sliding_window - 1` tokens before; None: all.
      full_attention_layers: indices of layers that see all the same.
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
    tie_embeddings: bool = False
    model_type: str = "qwen2"
    rope_scaling: RopeScaling | None = None
    sliding_window: int | None = None
    full_attention_layers: tuple[int, ...] = ()

    def __post_init__(self):
        if self.model_type not in MODEL_TYPES:
            raise UserError(
                f"model_type={self.model_type!r} is not supported; choose one of {MODEL_TYPES}."
            )
        for name in (
            "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads",
            "num_kv_heads", "head_dim", "max_position_embeddings",
        ):  # fmt: skip
            limit = {"num_layers": MAX_LAYERS, "max_position_embeddings": MAX_POSITIONS}
            check_size(f"model {name}", getattr(self, name), limit.get(name, MAX_SIZE))
        if self.num_heads % self.num_kv_heads:
            raise UserError(
                f"model num_heads={self.num_heads} must be a multiple of "
                f"num_kv_heads={self.num_kv_heads}."
            )
        if self.head_dim % 2:
            raise UserError(
                f"model head_dim={self.head_dim} must be even: rotary positions turn pairs."
            )
        for name in ("rope_theta", "rms_norm_eps"):
            value = getattr(self, name)
            if not 0 < value < float("inf"):
                raise UserError(f"model {name}={value!r} must be a finite number above 0.")
        if not isinstance(self.tie_embeddings, bool):
            raise UserError(f"model tie_embeddings={self.tie_embeddings!r} must be True or False.")
        self._check_windows()

    def _check_windows(self) -> None:
        """Only what the family's class in transformers would do as well."""
        family, window = FAMILIES[self.model_type], self.sliding_window
        if window is not None and not family.can_slide:
            raise UserError(f"model_type={self.model_type!r} has no sliding_window={window}.")
        if window is not None:
            check_size("model sliding_window", window, MAX_POSITIONS)
        layers = self.full_attention_layers
        if layers and (window is None or not family.can_mix):
            raise UserError(
                f"model full_attention_layers={layers} needs a sliding_window and a model_type "
                f"that mixes layers, not {self.model_type!r}."
            )
        if any(not 0 <= layer < self.num_layers for layer in layers):
            raise UserError(f"model full_attention_layers={layers} must be below num_layers.")

    @property
    def attention_bias(self) -> bool:
        """Whether query, key and value projections have a bias."""
        return FAMILIES[self.model_type].attention_bias

    @property
    def query_key_norm(self) -> bool:
        """Whether queries and keys are normed before the rotary embedding."""
        return FAMILIES[self.model_type].query_key_norm

    @property
    def hash(self) -> str:
        """Hex SHA-256 of the architecture; trainer and replica compare it."""
        description = dataclasses.asdict(self) | {"attention_bias": self.attention_bias}
        # Options that came later count only where they are used: earlier hashes stay as they were.
        for name in ("rope_scaling", "sliding_window", "full_attention_layers"):
            if not description[name]:
                del description[name]
        return config_hash(description)


def check_size(name: str, value: Any, limit: int) -> None:
    """UserError naming the field unless it is a whole number from 1 to `limit`."""
    if type(value) is not int or not 1 <= value <= limit:  # a bool is an int
        raise UserError(f"{name}={value!r:.100} must be a whole number from 1 to {limit}.")


def config_from_hf(hf: Mapping[str, Any]) -> DecoderConfig:
    """Reads the fields of a Hugging Face `config.json`; UserError names what is not supported.

    Fields that are absent have the values that transformers gives them.
    """
    if not isinstance(hf, Mapping):
        raise UserError(f"config.json must hold a JSON object, not {type(hf).__name__}.")
    model_type = hf.get("model_type")
    if model_type not in MODEL_TYPES:
        raise UserError(
            f"config.json: model_type={model_type!r:.100} is not supported; choose a model of one "
            f"of {MODEL_TYPES}."
        )
    try:
        _refuse_unsupported(hf)
        # Sizes first: the rest is computed from them.
        vocab_size, width, inner, num_heads = (
            _size(hf, name)
            for name in ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads")
        )
        num_layers = _size(hf, "num_hidden_layers", MAX_LAYERS)
        num_kv_heads, head_dim = num_heads, 128 if model_type == "qwen3" else width // num_heads
        if model_type != "llama" and "num_key_value_heads" not in hf:
            # transformers' default is that of one large model: rather ask
            raise KeyError("num_key_value_heads")
        if hf.get("num_key_value_heads") is not None:
            num_kv_heads = _size(hf, "num_key_value_heads")
        if hf.get("head_dim") is not None:
            head_dim = _size(hf, "head_dim")
        positions = {"max_position_embeddings": 32_768, **hf}
        theta, scaling = _rope_from_hf(hf)
        window, full_attention_layers = _windows_from_hf(hf)
        return DecoderConfig(
            model_type=model_type,
            vocab_size=vocab_size,
            hidden_size=width,
            intermediate_size=inner,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rope_theta=theta,
            rms_norm_eps=_number(hf, "rms_norm_eps", 1e-6),
            max_position_embeddings=_size(positions, "max_position_embeddings", MAX_POSITIONS),
            tie_embeddings=_flag(hf, "tie_word_embeddings"),
            rope_scaling=scaling,
            sliding_window=window,
            full_attention_layers=full_attention_layers,
        )
    except KeyError as error:
        raise UserError(f"config.json: field {error.args[0]!r} is missing.") from None
    except UserError as error:
        raise UserError(f"config.json: {error}") from None


def _size(fields: Mapping[str, Any], name: str, limit: int = MAX_SIZE) -> int:
    """A field that is a whole number from 1 to `limit`; KeyError if it is absent."""
    check_size(name, fields[name], limit)
    return fields[name]


def _flag(hf: Mapping[str, Any], name: str) -> bool:
    """A field that is true, false, or null or absent for false."""
    value = hf.get(name)
    if value is not None and not isinstance(value, bool):
        raise UserError(f"{name}={value!r:.100} must be true or false.")
    return bool(value)


def _number(fields: Mapping[str, Any], name: str, default: float | None = None) -> float:
    """A field that is a finite number; KeyError if it is absent and has no default."""
    value = fields[name] if default is None else fields.get(name, default)
    # Whole numbers may have thousands of digits.
    if type(value) not in (int, float) or not abs(value) < 1e30:
        raise UserError(f"{name}={value!r:.100} must be a number, and below 1e30.")
    return float(value)


def config_to_hf(
    config: DecoderConfig,
    *,
    eos_token_id: int | Sequence[int] | None = None,
    pad_token_id: int | None = None,
    base: Mapping[str, Any] | None = None,
    dtype: str = "float32",
) -> dict[str, Any]:
    """The `config.json` that transformers and vLLM read.

    Args:
      config: the architecture.
      eos_token_id, pad_token_id: None leaves what `base` has.
      base: the `config.json` the model came with; what is not architecture stays as it is there.
      dtype: of the weights beside it.

    Raises:
      UserError: if `base` describes another architecture than `config`.
    """
    family = FAMILIES[config.model_type]
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        rope |= dataclasses.asdict(config.rope_scaling)
        if config.rope_scaling.rope_type == "linear":
            rope = {key: rope[key] for key in ("rope_type", "rope_theta", "factor")}
    # Remote code is never run, and the older name of the dtype must not contradict the newer.
    kept = {k: v for k, v in (base or {}).items() if k not in ("auto_map", "torch_dtype")}
    hf = {
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        **kept,
        "architectures": [family.architecture],
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
        "rope_parameters": rope,
        # Where readers older than `rope_parameters` look.
        "rope_scaling": None if config.rope_scaling is None else rope,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_embeddings,
        **_windows_to_hf(config),
        "dtype": dtype,
    }
    if not (family.attention_bias or config.model_type == "mistral"):
        hf["attention_bias"] = False
    if eos_token_id is not None:
        hf["eos_token_id"] = eos_token_id if isinstance(eos_token_id, int) else [*eos_token_id]
    if pad_token_id is not None:
        hf["pad_token_id"] = pad_token_id
    if config_from_hf(hf) != config:
        raise UserError(
            f"the config.json to start from belongs to another model than {config}; give that of "
            "the directory the model came from, or none."
        )
    return hf


def _refuse_unsupported(hf: Mapping[str, Any]) -> None:
    """Options of the families' classes in transformers that the decoder does not have."""
    # Qwen2 and Mistral do not read attention_bias.
    if hf["model_type"] in ("llama", "qwen3") and _flag(hf, "attention_bias"):
        raise UserError("attention_bias=true is not supported.")
    if _flag(hf, "mlp_bias"):
        raise UserError("mlp_bias=true is not supported.")
    if hf.get("hidden_act", "silu") != "silu":
        raise UserError(f"hidden_act={hf['hidden_act']!r:.100} is not supported, only 'silu'.")


def _rope_from_hf(hf: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base and scaling; transformers 5 nests both in `rope_parameters`, earlier files do not."""
    field = "rope_scaling" if hf.get("rope_scaling") else "rope_parameters"
    rope = hf.get(field) or {}
    if not isinstance(rope, Mapping):
        raise UserError(f"{field}={rope!r:.100} must be an object, or null.")
    partial = rope.get("partial_rotary_factor", hf.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise UserError(f"partial_rotary_factor={partial!r:.100} is not supported.")
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise UserError("rope_parameters of each kind of layer are not supported.")
    thetas = (rope.get("rope_theta"), hf.get("rope_theta"), 10_000.0)
    theta = _number({"rope_theta": next(t for t in thetas if t is not None)}, "rope_theta")
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(rope_type, str):
        raise UserError(f"rope_type={rope_type!r:.100} must be text.")
    if rope_type == "default":
        return theta, None
    if rope_type != "llama3":
        return theta, RopeScaling(rope_type, _number(rope, "factor", 1.0))
    original = hf.get("original_max_position_embeddings") or rope.get(
        "original_max_position_embeddings", hf.get("max_position_embeddings", 2048)
    )
    check_size("original_max_position_embeddings", original, MAX_POSITIONS)
    factors = [_number(rope, name) for name in ("factor", "low_freq_factor", "high_freq_factor")]
    return theta, RopeScaling(rope_type, *factors, original)


def _windows_from_hf(hf: Mapping[str, Any]) -> tuple[int | None, tuple[int, ...]]:
    """Window, and the layers that have none; absent fields as transformers' classes fill them."""
    model_type, num_layers = hf["model_type"], hf["num_hidden_layers"]
    if not FAMILIES[model_type].can_slide:
        return None, ()
    window = hf.get("sliding_window", 4096)
    if model_type != "mistral" and not _flag(hf, "use_sliding_window"):
        window = None
    if window is not None:
        check_size("sliding_window", window, MAX_POSITIONS)
    if model_type == "mistral":
        return window, ()
    kinds = hf.get("layer_types")
    if kinds is None:
        first = _number(hf, "max_window_layers", 28.0)
        kinds = ["full_attention" if i < first else "sliding_attention" for i in range(num_layers)]
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list | tuple) or len(kinds) != num_layers:
        raise UserError(
            f"layer_types={kinds!r:.100} must be a list of num_hidden_layers={num_layers} kinds."
        )
    if unknown := [kind for kind in kinds if kind not in known]:
        raise UserError(f"layer_types has {unknown[0]!r:.100}; each must be one of {known}.")
    full = tuple(layer for layer, kind in enumerate(kinds) if kind == "full_attention")
    if window is None or len(full) == num_layers:
        return None, ()
    return window, full


def _windows_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The inverse of `_windows_from_hf`."""
    family, full = FAMILIES[config.model_type], config.full_attention_layers
    if not family.can_slide:
        return {}
    if not family.can_mix:
        return {"sliding_window": config.sliding_window}
    if config.sliding_window is None:
        return {"use_sliding_window": False, "layer_types": ["full_attention"] * config.num_layers}
    return {
        "use_sliding_window": True,
        "sliding_window": config.sliding_window,
        "max_window_layers": len(full),  # the same where the first layers are the full ones
        "layer_types": [
            "full_attention" if layer in full else "sliding_attention"
            for layer in range(config.num_layers)
        ],
    }
