"""The supervised warm start of a random model, made once per run directory."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import ml_collections

from semrl_jax import data
from semrl_jax.console import Reporter
from semrl_jax.models import Policy, find_directory, save_directory
from semrl_jax.training.supervised import fit_supervised


def starting_directory(
    config: ml_collections.ConfigDict,
    policy: Policy,
    tokenizer: Any,
    warm_start: pathlib.Path,
    reporter: Reporter,
) -> pathlib.Path:
    """The model that training starts from: `model.path`, or the warm start, made once a run."""
    if config.model.path:
        return find_directory(config.model.path)
    if not (warm_start / "config.json").exists():
        make_warm_start(config, policy, tokenizer, warm_start, reporter)
    return warm_start


def make_warm_start(
    config: ml_collections.ConfigDict,
    policy: Policy,
    tokenizer: Any,
    directory: pathlib.Path,
    reporter: Reporter,
) -> None:
    """Trains a random model on the forgetful teacher's demonstrations and saves it."""
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
    save_directory(directory, params, policy.config, tokenizer)
