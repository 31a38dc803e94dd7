"""The model that training starts from: a given one, or a random one after a warm start."""

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
    """The directory of `model.path`, or the warm start, which is made if it is missing.

    The warm start trains a random model on demonstrations of a teacher that forgets carries.
    """
    if config.model.path:
        return find_directory(config.model.path)
    if (warm_start / "config.json").exists():
        return warm_start
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
    save_directory(warm_start, params, policy.config, tokenizer)
    return warm_start
