"""Checkpoints of adapters: what they say about their base, and the policy that both make."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from semrl_jax import models
from semrl_jax.models import peft
from semrl_jax.models.of_config import starting_params
from semrl_jax.runs.checkpoint_files import read_meta, restore_params
from semrl_jax.support.errors import UserError

META = "lora"  # in the meta data of a checkpoint


class AdapterRecord(NamedTuple):
    """What a checkpoint of adapters says about them and their base."""

    base: str  # its name: a hub id as the user gave it, else the absolute directory
    base_sample: str  # identifies its weights, see `peft.base_sample`
    base_dtype: str  # that it was trained with
    # Further fields are those of `models.Lora`.
    modules: tuple[str, ...]
    rank: int
    alpha: float
    rank_stabilized: bool
    dropout: float = 0.0

    @classmethod
    def of(
        cls, lora: models.Lora, path: str, directory: pathlib.Path, base_dtype: str
    ) -> AdapterRecord:
        """The record of adapters upon the model in `directory`, which the user named `path`."""
        is_hub_id = path and not pathlib.Path(path).exists()  # a GGUF file is no hub id
        name = path if is_hub_id else str(directory.absolute())
        sample = peft.base_sample(directory)
        options = lora.modules, lora.rank, lora.alpha, lora.rank_stabilized, lora.dropout
        return cls(name, sample, base_dtype, *options)

    @property
    def lora(self) -> models.Lora:
        options = self.rank, self.alpha, self.rank_stabilized, self.dropout
        return models.Lora(tuple(self.modules), *options)

    def meta(self) -> dict[str, Any]:
        """For the meta data of a checkpoint."""
        found = self._asdict() | {"modules": list(self.modules)}
        if not self.dropout:  # which earlier versions do not know
            del found["dropout"]
        return {META: found}


def adapter_record(folder: pathlib.Path) -> AdapterRecord | None:
    """The record of a valid checkpoint; None: all parameters. UserError if it is of a new kind."""
    found = read_meta(folder).get(META)
    if found is None:
        return None
    try:
        return AdapterRecord(**found | {"modules": tuple(found["modules"])})
    except (TypeError, KeyError):
        raise UserError(
            f"checkpoint {folder} has adapters of a newer version; update semrl_jax."
        ) from None


def check_base(folder: pathlib.Path, record: AdapterRecord, directory: pathlib.Path) -> None:
    """Raises UserError if the adapters of a checkpoint belong to other weights."""
    if record.base_sample != peft.base_sample(directory):
        raise UserError(
            f"checkpoint {folder} has adapters of {record.base}, but the weights in {directory} "
            "are others; restore the weights that the run began with."
        )


def restore_policy(
    folder: pathlib.Path, policy: models.Policy, model: pathlib.Path, mesh: Mesh | None = None
) -> models.Params:
    """The policy of a valid checkpoint; adapters are joined with their base, in `model`.

    Without a mesh, it is on the host or the default device. UserError if it does not fit.
    """
    record, shapes = adapter_record(folder), policy.shapes()
    like = shapes if record is None else record.lora.shapes(shapes)
    if mesh is not None:
        like = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            like,
            models.parameter_shardings(like, mesh),
        )
    if record is None:
        return restore_params(folder, like)
    check_base(folder, record, model)
    adapters = restore_params(folder, like)
    base = starting_params(model, policy, mesh, record.base_dtype)
    return models.adapted(adapters, record.lora.base(base))


def check_resumed(meta: Mapping[str, Any], own: AdapterRecord | None, folder: pathlib.Path) -> None:
    """Raises UserError if a checkpoint cannot be resumed because its base is another one."""
    there = meta.get(META)
    if there and own and there["base_sample"] != own.base_sample:
        raise UserError(
            f"checkpoint {folder} has adapters of {there['base']}, whose weights are not those of "
            f"{own.base}; restore the weights that the run began with."
        )
