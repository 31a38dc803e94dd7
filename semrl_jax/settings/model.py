"""Settings of `config.model`."""

from __future__ import annotations

import dataclasses

from semrl_jax.settings.rules import Section, divides
from semrl_jax.support.choices import ATTENTION_KERNELS, DTYPES, REMAT_POLICIES
from semrl_jax.support.fields import setting


@dataclasses.dataclass(frozen=True)
class Model:
    path: str = setting(
        "", "Hugging Face directory, hub id, run or checkpoint of a run; empty: a random model"
    )
    family: str = setting(
        "",
        'A family of semrl_jax/models/families or "my_package.my_module"; empty: by config.json, '
        "else qwen2",
    )
    compute_dtype: str = setting(
        "float32", "Dtype of activations: float32 or bfloat16", choices=DTYPES
    )
    param_dtype: str = setting(
        "float32",
        "Dtype of parameters: float32, or bfloat16 with float32 copies in the optimiser. "
        "docs/memory.md",
        choices=DTYPES,
    )
    reference_path: str = setting(
        "",
        "directory or hub id, such as of a teacher; empty: the weights that training starts from",
    )
    reference_dtype: str = setting("float32", "float32 or bfloat16", choices=DTYPES)
    remat: str = setting(
        "dots",
        "What the backward pass recomputes: none, dots (all but the products) or full; "
        "docs/memory.md",
        choices=REMAT_POLICIES,
        may_change=True,
    )
    attention: str = setting(
        "auto",
        "xla; splash, a kernel for TPUs; triton, one for GPUs; auto: splash on TPUs where it "
        "can be used, else xla",
        choices=ATTENTION_KERNELS,
        may_change=True,
    )
    hidden_size: int = setting(128, "width of a random model", above=0)
    intermediate_size: int = setting(256, "feed-forward width of a random model")
    num_layers: int = setting(3, "layers of a random model")
    num_heads: int = setting(4, "query heads of a random model; they divide hidden_size", above=0)
    num_kv_heads: int = setting(2, "key and value heads of a random model; they divide num_heads")
    tie_embeddings: bool = setting(True, "one matrix for input and output of a random model")


def check(model: Section) -> None:
    if not model["path"]:  # `DecoderConfig` checks the sizes
        divides("model.num_heads", model["num_heads"], "model.hidden_size", model["hidden_size"])
