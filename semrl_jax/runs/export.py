"""Writes the model of a run as a Hugging Face directory, and its adapters in PEFT's format."""

from __future__ import annotations

import pathlib
from typing import Any

from semrl_jax import models
from semrl_jax.cluster.agreement import run_phase
from semrl_jax.cluster.peers import Peers
from semrl_jax.runs.adapters import AdapterRecord
from semrl_jax.support.safe_files import read_json_object

ADAPTER = "adapter"  # in a run directory


def save_model(
    directory: pathlib.Path,
    params: models.Params,
    architecture: models.DecoderConfig,
    tokenizer: Any,
    base: pathlib.Path,
    peers: Peers,
    dtype: str = "float32",
) -> None:
    """Writes the directory, completely or not at all; one that exists is replaced.

    Only process 0 writes; all must call it.

    Args:
      directory: for transformers, vLLM and config.model.path.
      params: of the policy, perhaps on several hosts.
      architecture, tokenizer: of the policy.
      base: model directory that training began with. Other settings of its config.json are kept.
      peers: the processes of the run.
      dtype: of the weights in the files.
    """
    if peers.count > 1:
        params = models.to_host(params)

    def save() -> None:
        if peers.index == 0:
            models.save_directory(
                directory,
                params,
                architecture,
                tokenizer,
                dtype=dtype,
                eos_token_id=models.eos_token_ids(base) or None,
                base=read_json_object(base / "config.json"),
            )

    run_phase(peers, "save_model", save)


def save_adapter(
    directory: pathlib.Path,
    params: models.Params,
    record: AdapterRecord,
    architecture: models.DecoderConfig,
    base: pathlib.Path,
    peers: Peers,
) -> None:
    """Writes adapters, perhaps on several hosts, for `peft` and `lora.path`; as `save_model`."""
    if peers.count > 1:
        params = models.to_host(params)

    def save() -> None:
        if peers.index == 0:
            name = record.base
            models.peft.save_adapter(directory, params, record.lora, architecture, base, name)

    run_phase(peers, "save_adapter", save)
