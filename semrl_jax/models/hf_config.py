"""A decoder's architecture, read from and written as a Hugging Face `config.json`.

The classes of transformers (5.23) do not replace this. They give absent sizes those of one large
model, accept negative ones, and make a list of as many layers as a hostile file names. Importing
them takes seconds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from semrl_jax.models.decoder_config import (
    MAX_LAYERS,
    MAX_POSITIONS,
    MAX_SIZE,
    DecoderConfig,
    Experts,
    RopeScaling,
    check_size,
)
from semrl_jax.models.families import Family, find_family, model_types, translated
from semrl_jax.support.errors import UserError

# Sizes by our names and by those of `config.json`.
SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
}
EXPERT_SIZES = {
    "num_experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
    "intermediate_size": "moe_intermediate_size",
}
# Options of some families, likewise.
OPTIONS = {
    "local_rope_theta": "rope_local_base_freq",
    "query_pre_attn_scalar": "query_pre_attn_scalar",
    "final_logit_softcap": "final_logit_softcapping",
    "attention_logit_softcap": "attn_logit_softcapping",
}
# Fields that change what transformers computes in every family: the only value that the decoder
# supports, in addition to null, and why or what to do. The other fields of transformers' classes
# are read below or have no effect on logits (tests/models/test_config_fields.py).
ONLY: Mapping[str, tuple[Any, str]] = {
    "is_causal": (True, "a token attends to earlier tokens alone"),
    "is_encoder_decoder": (False, "models with an encoder are not read"),
    "add_cross_attention": (False, "models with an encoder are not read"),
    "partial_rotary_factor": (1, "all of a head is rotated"),
    "per_layer_config": ({}, "all layers have the same sizes"),
    "quantization_config": ({}, "give a directory with weights that are not quantised"),
}
OPTIONAL_SIZES = ("num_kv_heads", "head_dim")


def config_from_hf(hf: Mapping[str, Any], family: str = "") -> DecoderConfig:
    """Reads the fields of a Hugging Face `config.json`; UserError names what is not supported.

    `family` is a name in `families`, or the path of a module; "": `model_type` decides.
    """
    if not isinstance(hf, Mapping):
        raise UserError(f"config.json must hold a JSON object, not {type(hf).__name__}.")
    model_type = hf.get("model_type")
    if not family and model_type not in model_types():
        way_out = "or name a module with its family by model.family"
        if "text_config" in hf:
            way_out = "or save its text part as a model of its own (docs/models.md)"
        raise UserError(
            f"config.json: model_type={model_type!r:.100} is not supported; choose a model of one "
            f"of {model_types()}, {way_out}."
        )
    declared = find_family(family or model_type)
    if model_type != declared.model_type:
        raise UserError(
            f"config.json: model_type={model_type!r:.100} is not {declared.model_type!r}, which "
            f"model.family={family!r} reads; name another family, or none."
        )
    try:
        hf = translated(hf, declared.from_hf) if declared.from_hf else hf
        _refuse_unsupported(declared, hf)
        # Sizes first: the rest is computed from them.
        sizes = {
            ours: _size(hf, theirs, MAX_LAYERS if ours == "num_layers" else MAX_SIZE)
            for ours, theirs in SIZES.items()
            if ours not in OPTIONAL_SIZES or hf.get(theirs) is not None
        }
        if declared.needs_kv_heads and "num_key_value_heads" not in hf:
            # In transformers the default is the number of one large model.
            raise KeyError("num_key_value_heads")
        sizes.setdefault("num_kv_heads", sizes["num_heads"])
        default_width = declared.head_dim or sizes["hidden_size"] // sizes["num_heads"]
        sizes.setdefault("head_dim", default_width)
        positions = {"max_position_embeddings": declared.max_position_embeddings, **hf}
        theta, scaling = _rope_from_hf(hf)
        window, full_attention_layers = _windows_from_hf(declared, hf)
        options = {
            ours: _number(hf, theirs)
            for ours, theirs in OPTIONS.items()
            if ours in declared.options and hf.get(theirs) is not None
        }
        if window is None:
            options.pop("local_rope_theta", None)
        return DecoderConfig(
            model_type=model_type,
            **sizes,
            rope_theta=theta,
            rms_norm_eps=_number(hf, "rms_norm_eps", 1e-6),
            max_position_embeddings=_size(positions, "max_position_embeddings", MAX_POSITIONS),
            tie_embeddings=_flag(hf, "tie_word_embeddings"),
            rope_scaling=scaling,
            sliding_window=window,
            full_attention_layers=full_attention_layers,
            **options,
            experts=_experts_from_hf(hf) if declared.has_experts else None,
            family=family if "." in family else "",
        )
    except KeyError as error:
        raise UserError(f"config.json: field {error.args[0]!r} is missing.") from None
    except UserError as error:
        raise UserError(f"config.json: {error}") from None


def _size(fields: Mapping[str, Any], name: str, limit: int) -> int:
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
    """The `config.json` that transformers and vLLM read; other fields of `base` stay.

    `dtype` is of the weights in the same directory. UserError if `base` has another architecture.
    """
    family = config.declared
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        rope |= dataclasses.asdict(config.rope_scaling)
        if config.rope_scaling.rope_type == "linear":
            rope = {key: rope[key] for key in ("rope_type", "rope_theta", "factor")}
    # Remote code is never run. The older name of the dtype must not contradict the newer one.
    kept = {k: v for k, v in (base or {}).items() if k not in ("auto_map", "torch_dtype")}
    hf = {
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        **kept,
        "architectures": [family.architecture],
        "model_type": config.model_type,
        **{theirs: getattr(config, ours) for ours, theirs in SIZES.items()},
        "hidden_act": family.activation,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": rope,
        # Where readers older than `rope_parameters` look.
        "rope_scaling": None if config.rope_scaling is None else rope,
        "max_position_embeddings": config.max_position_embeddings,
        "tie_word_embeddings": config.tie_embeddings,
        **_windows_to_hf(family, config),
        **_experts_to_hf(config),
        **{OPTIONS[ours]: getattr(config, ours) for ours in family.options},
        **dict.fromkeys(family.must_be_false, False),
        "dtype": dtype,
    }
    if eos_token_id is not None:
        hf["eos_token_id"] = eos_token_id if isinstance(eos_token_id, int) else [*eos_token_id]
    if pad_token_id is not None:
        hf["pad_token_id"] = pad_token_id
    hf = translated(hf, family.to_hf) if family.to_hf else hf
    if config_from_hf(hf, config.family) != config:
        raise UserError(
            f"the given config.json is of another model than {config}; give its own, or none."
        )
    return hf


def _refuse_unsupported(family: Family, hf: Mapping[str, Any]) -> None:
    """Options of the class in transformers that the decoder does not have."""
    for name in (*family.must_be_false, "mlp_bias"):
        if _flag(hf, name):
            raise UserError(f"{name}=true is not supported.")
    for name, (only, reason) in ONLY.items():
        if (value := hf.get(name)) is not None and value != only:
            raise UserError(f"{name}={value!r:.100} is not supported, only {only!r}: {reason}.")
    if (given := hf.get("hidden_act", family.activation)) != family.activation:
        raise UserError(f"hidden_act={given!r:.100} is not supported, only {family.activation!r}.")


def _rope_from_hf(hf: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """Base and scaling. transformers 5 nests both in `rope_parameters`; earlier files do not."""
    field = "rope_scaling" if hf.get("rope_scaling") else "rope_parameters"
    rope = hf.get(field) or {}
    if not isinstance(rope, Mapping):
        raise UserError(f"{field}={rope!r:.100} must be an object, or null.")
    partial = rope.get("partial_rotary_factor")
    if partial not in (None, 1):
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


def _experts_from_hf(hf: Mapping[str, Any]) -> Experts:
    """Reads the names of Qwen3. Defaults are sizes of one large model, so all are required."""
    hf = {"num_experts": hf.get("num_local_experts"), "decoder_sparse_step": 1, **hf}
    if hf["num_experts"] is None:
        raise KeyError("num_experts")
    step, num_layers = _size(hf, "decoder_sparse_step", MAX_LAYERS), hf["num_hidden_layers"]
    only = hf.get("mlp_only_layers") or []
    if not isinstance(only, list | tuple) or any(type(layer) is not int for layer in only):
        raise UserError(f"mlp_only_layers={only!r:.100} must be a list of layers.")
    dense = (layer for layer in range(num_layers) if (layer + 1) % step or layer in only)
    sizes = {ours: _size(hf, theirs, MAX_SIZE) for ours, theirs in EXPERT_SIZES.items()}
    weights = _flag(hf, "norm_topk_prob")
    return Experts(**sizes, normalize_weights=weights, dense_layers=tuple(dense))


def _experts_to_hf(config: DecoderConfig) -> dict[str, Any]:
    """The inverse of `_experts_from_hf`."""
    experts = config.experts
    if experts is None:
        return {}
    return {
        **{theirs: getattr(experts, ours) for ours, theirs in EXPERT_SIZES.items()},
        "norm_topk_prob": experts.normalize_weights,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [*experts.dense_layers],
    }


def _windows_from_hf(family: Family, hf: Mapping[str, Any]) -> tuple[int | None, tuple[int, ...]]:
    """Window, and the layers without it; absent fields as the classes in transformers fill them."""
    num_layers = hf["num_hidden_layers"]
    if family.sliding_window == "none":
        return None, ()
    window = hf.get("sliding_window", 4096)
    if family.sliding_window == "some" and not _flag(hf, "use_sliding_window"):
        window = None
    if window is not None:
        check_size("sliding_window", window, MAX_POSITIONS)
    if family.sliding_window == "all":
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


def _windows_to_hf(family: Family, config: DecoderConfig) -> dict[str, Any]:
    """The inverse of `_windows_from_hf`."""
    full = config.full_attention_layers
    if family.sliding_window == "none":
        return {}
    if family.sliding_window == "all":
        return {"sliding_window": config.sliding_window}
    if config.sliding_window is None:
        return {"use_sliding_window": False, "layer_types": ["full_attention"] * config.num_layers}
    return {
        "use_sliding_window": True,
        "sliding_window": config.sliding_window,
        "max_window_layers": len(full),  # the same if the first layers are those without a window
        "layer_types": [
            "full_attention" if layer in full else "sliding_attention"
            for layer in range(config.num_layers)
        ],
    }
