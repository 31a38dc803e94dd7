"""Settings of `config.model`."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from semrl_jax.settings.rules import Section, divides
from semrl_jax.support.addresses import split_address
from semrl_jax.support.choices import ATTENTION_KERNELS, DTYPES, REMAT_POLICIES
from semrl_jax.support.errors import UserError
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
        "directory or hub id, such as of a teacher with the same tokenizer; empty: the "
        "weights that training starts from",
    )
    references: tuple[str, ...] = setting(
        (),
        "SOURCE=PATH, repeat the flag: another reference for the prompts of a data source. "
        "docs/algorithms.md",
        items=str,
    )
    reference_addresses: tuple[str, ...] = setting(
        (),
        "host:port, or SOURCE=host:port, of replicas that compute a reference, repeat the flag; "
        "empty: the trainer does. docs/algorithms.md",
        items=str,
        may_change=True,
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


class ReferenceModel(NamedTuple):
    """A reference that is a model of its own."""

    field: str  # the entry that names it, for messages
    path: str
    addresses: tuple[str, ...] = ()  # of the replicas that compute it; (): the trainer does


def reference_models(model: Section) -> dict[str, ReferenceModel]:
    """The references that are models of their own, by data source; "": of all other prompts.

    UserError for an entry that is wrong, or does not belong to a model.
    """
    field, path = "model.references", model["reference_path"]
    found = {"": ReferenceModel("model.reference_path", path)} if path else {}
    for entry in model["references"]:
        source, _, path = entry.partition("=")
        if not source or not path:
            raise UserError(f"{field}={entry!r:.200} must be SOURCE=PATH.")
        if source in found:
            raise UserError(f"{field}: {source!r:.100} has two references; keep one.")
        found[source] = ReferenceModel(f"{field}[{source!r:.100}]", path)
    field, serves = "model.reference_addresses", {}
    for entry in model["reference_addresses"]:
        source, _, address = entry.rpartition("=")
        split_address(address, field)
        if source not in found:
            way_out = f"{source}=PATH in model.references" if source else "model.reference_path"
            raise UserError(
                f"{field}={entry!r:.200} needs the model that it serves, because the trainer has "
                f"its output matrix; set {way_out}."
            )
        known = found[source]
        if address in known.addresses:
            raise UserError(f"{field} has {entry!r} more than once; name each replica once.")
        if serves.setdefault(address, known.path) != known.path:
            raise UserError(
                f"{field}: {address!r} serves both {serves[address]!r} and {known.path!r}; a "
                "replica has one model: start another one."
            )
        found[source] = known._replace(addresses=(*known.addresses, address))
    return found


def check(model: Section) -> None:
    reference_models(model)
    if not model["path"]:  # `DecoderConfig` checks the sizes
        divides("model.num_heads", model["num_heads"], "model.hidden_size", model["hidden_size"])
