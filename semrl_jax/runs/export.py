"""Writes the model of a run as a Hugging Face directory, and its adapters in PEFT's format."""

from __future__ import annotations

import pathlib
from typing import TYPE_CHECKING, Any, NamedTuple

from semrl_jax import models
from semrl_jax.cluster.agreement import on_first
from semrl_jax.cluster.peers import Peers
from semrl_jax.support.safe_files import read_json_object

if TYPE_CHECKING:
    from semrl_jax.runs.run import Run

MODEL, ADAPTER = "model", "adapter"  # in the directory of a finished run


def save_model(
    directory: pathlib.Path,
    params: models.Params,
    architecture: models.DecoderConfig,
    tokenizer: Any,
    base: pathlib.Path,
    peers: Peers,
    **options: Any,
) -> None:
    """Writes the directory like `base`, completely or not at all; all processes call it."""
    if peers.count > 1:
        params = models.to_host(params)

    def save() -> None:
        models.save_directory(
            directory,
            params,
            architecture,
            tokenizer,
            eos_token_id=models.eos_token_ids(base) or None,
            base=read_json_object(base / "config.json"),
            **options,
        )

    on_first(peers, "save_model", save)


class Exporter(NamedTuple):
    """Writes the policy of a train state like the model that training starts from.

    Each process has `whole` parameters on its host, and one of them writes.
    """

    frozen: models.Base | None  # what the parameters of the state are adapters of
    architecture: models.DecoderConfig
    tokenizer: Any
    base: pathlib.Path
    dtype: str

    def whole(self, params: models.Params, peers: Peers) -> models.Params:
        found = models.adapted(params, self.frozen)
        return models.to_host(found) if peers.count > 1 else found

    def write(self, directory: pathlib.Path, params: models.Params) -> None:
        own = self.architecture, self.tokenizer, self.base
        save_model(directory, params, *own, Peers(), dtype=self.dtype)


def save_trained(
    run: Run,
    params: models.Params,
    frozen: models.Base | None,
    architecture: models.DecoderConfig,
    base: pathlib.Path,
    peers: Peers,
    dtype: str = "float32",
) -> None:
    """Writes the model of a run, and its adapters for `peft` and `lora.path`; as `save_model`."""
    path, whole = run.workdir.path, models.adapted(params, frozen)
    save_model(path / MODEL, whole, architecture, run.tokenizer, base, peers, dtype=dtype)
    if (record := run.checkpoints.adapter) is None:
        return
    if peers.count > 1:
        params = models.to_host(params)

    def save() -> None:
        target, name = path / ADAPTER, record.base
        models.peft.save_adapter(target, params, record.lora, architecture, base, name)

    on_first(peers, "save_adapter", save)
