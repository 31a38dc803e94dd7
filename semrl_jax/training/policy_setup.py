"""The policy a run starts from: a given directory, or a random model and its warm start."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import jax
import ml_collections

from semrl_jax import data
from semrl_jax.models import (
    DecoderConfig,
    Params,
    Policy,
    load_config,
    load_params,
    save_directory,
)
from semrl_jax.training.console import Reporter
from semrl_jax.training.supervised import fit_supervised


@dataclasses.dataclass(frozen=True)
class StartingPolicy:
    """A policy with the parameters training starts from (also the KL reference).

    Attributes:
      policy: the architecture.
      params: float32 host parameters.
      tokenizer: a transformers tokenizer.
      directory: the Hugging Face directory both came from.
    """

    policy: Policy
    params: Params
    tokenizer: Any
    directory: pathlib.Path


def starting_policy(
    config: ml_collections.ConfigDict, warm_start: pathlib.Path, reporter: Reporter
) -> StartingPolicy:
    """Loads `model.path`, or makes `warm_start` (once a run) and loads that.

    Raises:
      UserError: if the directory is missing, unsupported or does not fit its tokenizer.
    """
    directory = pathlib.Path(config.model.path) if config.model.path else warm_start
    if not config.model.path and not (warm_start / "config.json").exists():
        make_warm_start(config, warm_start, reporter)
    architecture = load_config(directory)
    return StartingPolicy(
        policy=Policy(architecture, config.model.compute_dtype, config.model.remat),
        params=load_params(directory, architecture),
        tokenizer=data.load_tokenizer(directory),
        directory=directory,
    )


def random_architecture(config: ml_collections.ConfigDict, vocab_size: int) -> DecoderConfig:
    """The architecture of `config.model`'s sizes."""
    model = config.model
    return DecoderConfig(
        vocab_size=vocab_size,
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_layers=model.num_layers,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.hidden_size // model.num_heads,
        max_position_embeddings=2048,
        tie_embeddings=model.tie_embeddings,
    )


def make_warm_start(
    config: ml_collections.ConfigDict, directory: pathlib.Path, reporter: Reporter
) -> None:
    """Trains a random model on the forgetful teacher's demonstrations and saves it."""
    tokenizer = data.character_tokenizer()
    architecture = random_architecture(config, len(tokenizer))
    policy = Policy(architecture, config.model.compute_dtype, config.model.remat)
    params = policy.init(jax.random.key(config.seed))
    options = config.warm_start
    if options.num_steps:
        demonstrations = data.arithmetic_demonstrations(
            tokenizer,
            config.seed,
            options.num_demonstrations,
            forget_probability=options.forget_probability,
        )
        with reporter.bar("warm start", options.num_steps, "steps") as bar:

            def report(step: int, loss: float) -> None:
                bar.advance(status=f"loss {loss:.3f}")
                if (step + 1) % 100 == 0 or step + 1 == options.num_steps:
                    reporter.line(f"warm start {step + 1:>4}/{options.num_steps}  loss {loss:.4f}")

            params = fit_supervised(
                policy, params, demonstrations,
                num_steps=options.num_steps, batch_size=options.batch_size,
                micro_batch_size=options.micro_batch_size, learning_rate=options.learning_rate,
                seed=config.seed, report=report,
            )  # fmt: skip
    save_directory(directory, params, architecture, tokenizer)
