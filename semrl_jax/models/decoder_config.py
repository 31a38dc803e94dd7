"""The architecture of a decoder: sizes and options, checked."""

from __future__ import annotations

import dataclasses
from typing import Any

from semrl_jax.models.families import Family, find_family, translated
from semrl_jax.support.errors import UserError
from semrl_jax.types import config_hash

# Above every known model: a larger number is a mistake or an attack.
MAX_SIZE, MAX_LAYERS = 2**24, 2**12
MAX_POSITIONS = 2**31 - 1  # positions are int32
# The modules of a feed-forward layer.
DENSE_MODULES = ("gate", "up", "down")
EXPERT_MODULES = ("router", "expert_gate", "expert_up", "expert_down")
OPTIONS = (
    "local_rope_theta", "query_pre_attn_scalar", "final_logit_softcap", "attention_logit_softcap",
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """How rotary frequencies are changed for contexts longer than in pretraining.

    "linear" divides every frequency by `factor`. "llama3" divides the low ones, keeps the high ones
    and blends in between: a frequency is low if it makes fewer than `low_freq_factor` turns in the
    original context, and high if it makes more than `high_freq_factor`.
    """

    rope_type: str  # "linear" or "llama3"; only the second uses the last three fields
    factor: float  # above 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 8192  # tokens

    def __post_init__(self):
        if self.rope_type not in ("linear", "llama3"):
            known = "'default', 'linear' and 'llama3'"
            raise UserError(f"rope_type={self.rope_type!r:.100} is not supported, only {known}.")
        for name in ("factor", "original_max_position_embeddings"):
            if not 0 < getattr(self, name) < float("inf"):
                raise UserError(f"rope {name}={getattr(self, name)} must be above 0.")
        low, high = self.low_freq_factor, self.high_freq_factor
        if self.rope_type == "llama3" and not 0 < low < high:
            raise UserError(
                f"rope low_freq_factor={low} must lie between 0 and high_freq_factor={high}."
            )


@dataclasses.dataclass(frozen=True)
class Experts:
    """The mixtures of experts in the place of feed-forward layers."""

    num_experts: int
    experts_per_token: int  # each token goes to those with the highest router probabilities
    intermediate_size: int  # width of one expert
    normalize_weights: bool  # whether the probabilities of a token's experts are scaled to sum 1
    dense_layers: tuple[int, ...] = ()  # indices of the layers without experts

    def __post_init__(self):
        for name in ("num_experts", "experts_per_token", "intermediate_size"):
            check_size(f"model {name}", getattr(self, name), MAX_SIZE)
        chosen, most = self.experts_per_token, self.num_experts
        if chosen > most:
            raise UserError(f"model experts_per_token={chosen} must be at most num_experts={most}.")


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """What fixes the mathematics of a decoder; hashable, so that it can be static under jit."""

    vocab_size: int  # rows of the embedding, padding included
    hidden_size: int
    intermediate_size: int  # width of the gated feed-forward layer
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float = 10_000.0  # base of the rotary embedding
    rms_norm_eps: float = 1e-6  # epsilon of the root mean square norms
    max_position_embeddings: int = 32_768  # context length in tokens
    tie_embeddings: bool = False  # whether the output matrix is the embedding
    model_type: str = "qwen2"  # as in a Hugging Face config.json
    rope_scaling: RopeScaling | None = None  # None leaves the rotary frequencies as they are
    # A token attends to itself and to the `sliding_window - 1` tokens before it; None: to all.
    sliding_window: int | None = None
    full_attention_layers: tuple[int, ...] = ()  # indices of the layers without the window
    # Options of some families, see `Family.options`; None: the model does not have it.
    local_rope_theta: float | None = None  # base of the rotary embedding in layers with the window
    query_pre_attn_scalar: float | None = None  # scores are divided by its root, not head_dim's
    final_logit_softcap: float | None = None  # c: logits z become c tanh(z / c)
    attention_logit_softcap: float | None = None  # the same for the scores of attention
    experts: Experts | None = None  # None: every feed-forward layer is dense
    # The module that declares the family, such as "my_package.my_module"; "": the one in `families`
    # that `model_type` names.
    family: str = ""

    def __post_init__(self):
        limits = {"num_layers": MAX_LAYERS, "max_position_embeddings": MAX_POSITIONS}
        for name in (
            "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads",
            "num_kv_heads", "head_dim", "max_position_embeddings",
        ):  # fmt: skip
            check_size(f"model {name}", getattr(self, name), limits.get(name, MAX_SIZE))
        heads, kv_heads = self.num_heads, self.num_kv_heads
        if heads % kv_heads:
            raise UserError(
                f"model num_heads={heads} must be a multiple of num_kv_heads={kv_heads}."
            )
        if self.head_dim % 2:
            raise UserError(f"model head_dim={self.head_dim} must be even: pairs are rotated.")
        for name in ("rope_theta", "rms_norm_eps", *OPTIONS):
            value = getattr(self, name)
            if name in OPTIONS and value is None:
                continue
            if name in OPTIONS and name not in self.declared.options:
                raise UserError(f"model_type={self.model_type!r} has no {name}={value!r}.")
            if not 0 < value < float("inf"):
                raise UserError(f"model {name}={value!r} must be a finite number above 0.")
        if not isinstance(self.tie_embeddings, bool):
            raise UserError(f"model tie_embeddings={self.tie_embeddings!r} must be True or False.")
        self._check_windows()
        self._check_experts()

    def _check_experts(self) -> None:
        if (self.experts is not None) != self.declared.has_experts:
            has = "needs" if self.declared.has_experts else "has no"
            raise UserError(f"model_type={self.model_type!r} {has} experts.")
        if self.experts is None:
            return
        dense = self.experts.dense_layers
        if any(not 0 <= layer < self.num_layers for layer in dense):
            raise UserError(f"model dense_layers={dense} must be below num_layers.")
        if len(set(dense)) == self.num_layers:
            raise UserError("model experts: no layer has them; use a model_type without experts.")

    def _check_windows(self) -> None:
        """Refuses what the family's class in transformers would not do."""
        kind, window = self.declared.sliding_window, self.sliding_window
        if window is not None and kind == "none":
            raise UserError(f"model_type={self.model_type!r} has no sliding_window={window}.")
        if window is not None:
            check_size("model sliding_window", window, MAX_POSITIONS)
        layers = self.full_attention_layers
        if layers and (window is None or kind != "some"):
            raise UserError(
                f"model full_attention_layers={layers} needs a sliding_window and a model_type "
                f"that mixes layers, not {self.model_type!r}."
            )
        theta = self.local_rope_theta
        if window is None and theta is not None:
            raise UserError(f"model local_rope_theta={theta} needs layers with a sliding_window.")
        if any(not 0 <= layer < self.num_layers for layer in layers):
            raise UserError(f"model full_attention_layers={layers} must be below num_layers.")

    @property
    def declared(self) -> Family:
        """What all models of the family have in common."""
        return find_family(self.family or self.model_type)

    def place(self, module: str, layer: int) -> int | None:
        """Index of a layer in the stack of a module's parameters; None if it has no such module."""
        dense = range(self.num_layers) if self.experts is None else self.experts.dense_layers
        if module in DENSE_MODULES:
            return sorted(dense).index(layer) if layer in dense else None
        if module in EXPERT_MODULES:
            return None if layer in dense else layer - sum(other < layer for other in dense)
        return layer

    @property
    def routed_experts(self) -> tuple[int, ...]:
        """Layers with experts, experts per token, and experts of a layer; () without experts."""
        if self.experts is None:
            return ()
        num_layers = self.num_layers - len(set(self.experts.dense_layers))
        return num_layers, self.experts.experts_per_token, self.experts.num_experts

    @property
    def layer_products(self) -> int:
        """Multiplications for a token in the matrix products of a layer, of one with experts."""
        width = self.num_heads * self.head_dim + self.num_kv_heads * self.head_dim
        features = self.intermediate_size
        if experts := self.experts:
            features = experts.experts_per_token * experts.intermediate_size
        return self.hidden_size * (2 * width + 3 * features)

    @property
    def hash(self) -> str:
        """Hex SHA-256 of the architecture; trainer and replica compare it."""
        description = dataclasses.asdict(self) | {"attention_bias": self.declared.attention_bias}
        # Options of later releases count only where they are used: other hashes stay the same.
        later = ("rope_scaling", "sliding_window", "full_attention_layers", "family", "experts")
        for name in (*later, *OPTIONS):
            if not description[name]:
                del description[name]
        return config_hash(description)


def random_config(family: str, **sizes: Any) -> DecoderConfig:
    """The architecture of a random model; `sizes` are fields of `DecoderConfig`."""
    declared = find_family(family)
    added = translated(sizes, declared.of_random) if declared.of_random else {}
    if added.get("experts"):
        added["experts"] = Experts(**added["experts"])
    own = family if "." in family else ""
    return DecoderConfig(**{"model_type": declared.model_type, "family": own, **sizes, **added})


def check_size(name: str, value: Any, limit: int) -> None:
    """UserError naming the field unless it is a whole number from 1 to `limit`."""
    if type(value) is not int or not 1 <= value <= limit:  # a bool is an int
        raise UserError(f"{name}={value!r:.100} must be a whole number from 1 to {limit}.")
