"""The model that training starts from: a given one, or a random one after a warm start."""

from __future__ import annotations

import pathlib
from typing import Any

import jax
import ml_collections

from semrl_jax import data
from semrl_jax.cluster.peers import Peers
from semrl_jax.data.arithmetic import demonstration_texts
from semrl_jax.models import Policy, find_directory, make_mesh, save_directory
from semrl_jax.models.of_config import build_policy
from semrl_jax.runs.export import save_model
from semrl_jax.runs.policies import PolicySource, find_policies
from semrl_jax.support.console import Reporter
from semrl_jax.support.errors import UserError
from semrl_jax.support.run_directory import START, names_run
from semrl_jax.training.warm_start import fit_demonstrations


def with_own_model(
    config: ml_collections.ConfigDict, workdir: pathlib.Path, peers: Peers, reporter: Reporter
) -> ml_collections.ConfigDict:
    """The config with a model directory as `model.path`, also if that names a run or a checkpoint.

    The parameters are then written to WORKDIR/start at the first start. Later starts need the other
    run no more. UserError if there are none, or for several processes.
    """
    path, start = config.model.path, workdir / START
    if not path or not (start.is_dir() or names_run(path)):
        return config
    config = config.copy_and_resolve_references()
    if not (start / "config.json").is_file():
        if peers.count > 1:
            raise UserError(
                f"model.path={path} is a run or an adapter, from which one process can start; "
                f"python -m launch.convert --source={path} --target=DIR makes a model of it."
            )
        source = source_of(path)
        reporter.line(f"start: {source.name}, written to {start}")
        config.model.path = str(source.model)
        policy, tokenizer = build_policy(config)
        params = source.params(policy, make_mesh(config.mesh.to_dict()))
        save_model(start, params, policy.config, tokenizer, source.model, peers)
    config.model.path = str(start)
    return config


def source_of(path: str) -> PolicySource:
    """The policy of a run or checkpoint that `model.path` names."""
    (source,) = find_policies(path, None, "model.path")
    return source


def starting_directory(
    config: ml_collections.ConfigDict,
    policy: Policy,
    tokenizer: Any,
    warm_start: pathlib.Path,
    reporter: Reporter,
) -> pathlib.Path:
    """The directory of `model.path`, or the warm start, which is made if it is missing."""
    if config.model.path:
        return find_directory(config.model.path)
    if (warm_start / "config.json").exists():
        return warm_start
    params = policy.init(jax.random.key(config.seed))
    options = config.warm_start
    if options.num_steps:
        texts = demonstration_texts(
            config.seed, options.num_demonstrations, forget_probability=options.forget_probability
        )
        demonstrations = data.demonstration_rows(tokenizer, texts)
        with reporter.bar("warm start", options.num_steps, "steps") as bar:

            def report(step: int, loss: float) -> None:
                bar.advance(status=f"loss {loss:.3f}")
                if (step + 1) % 100 == 0 or step + 1 == options.num_steps:
                    bar.line(f"warm start {step + 1:>4}/{options.num_steps}  loss {loss:.4f}")

            params = fit_demonstrations(
                policy, params, demonstrations,
                num_steps=options.num_steps, batch_size=options.batch_size,
                micro_batch_size=options.micro_batch_size, learning_rate=options.learning_rate,
                seed=config.seed, report=report,
            )  # fmt: skip
    save_directory(warm_start, params, policy.config, tokenizer)
    return warm_start
