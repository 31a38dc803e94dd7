"""Samples from a given policy without training it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import secrets
import threading
from collections.abc import Iterator
from typing import Any

import ml_collections
import numpy as np
from jax.sharding import Mesh

from semrl_jax import models
from semrl_jax.cluster.peers import Peers
from semrl_jax.cluster.preemption import StopRequest
from semrl_jax.environments.pool import EnvironmentPools
from semrl_jax.models.of_config import end_token_ids
from semrl_jax.rollout.building import configured_mesh
from semrl_jax.rollout.wire.codec import weights_digest
from semrl_jax.runs.dry_run import Summary, check_replicas, say_model
from semrl_jax.runs.policies import PolicySource
from semrl_jax.runs.setup import check_metrics_of, check_model_limits, open_measurer
from semrl_jax.sampling.multi_turn import MultiTurn
from semrl_jax.sampling.replicas import is_embedded, open_client, take_addresses
from semrl_jax.sampling.requests import Measuring
from semrl_jax.sampling.sampler import Sampler
from semrl_jax.sampling.weights import WeightSync
from semrl_jax.support.console import Reporter
from semrl_jax.support.errors import UserError


@dataclasses.dataclass
class Inference:
    """A policy's architecture, tokenizer and replicas."""

    config: ml_collections.ConfigDict
    policy: models.Policy
    tokenizer: Any
    mesh: Mesh
    sampler: Sampler  # has no verifier

    def load(self, source: PolicySource) -> str:
        """Sends the weights to the replicas; returns their digest."""
        sync = self.sampler.sync
        sync.client.forget_base()  # an adapter may belong to another one
        version = self.sampler.sync_weights(source.params(self.policy, self.mesh), source.step)
        if version.digest:
            return version.digest
        weights = self.sampler.weights
        return weights_digest(sync.specs(weights.adapter), map(np.asarray, weights.read()))


def check_inference(
    config: ml_collections.ConfigDict, policy: models.Policy, tokenizer: Any
) -> Mesh:
    """The mesh; UserError if the model does not fit it or the limits. Reads addresses_file."""
    mesh = models.make_mesh(config.mesh.to_dict())
    take_addresses(config)
    check_model_limits(config, policy.config, tokenizer)
    models.check_mesh(policy.config, mesh)
    policy.check_attention(mesh)
    if is_embedded(config):
        configured_mesh(config, policy.config)
    return mesh


def open_measuring(
    config: ml_collections.ConfigDict, policy: models.Policy, stack: contextlib.ExitStack
) -> Measuring | None:
    """What measures the responses if `config.evaluation.metrics`; or UserError."""
    if not config.evaluation.metrics:
        return None
    options = config.evaluation.metric_options
    check_metrics_of(options, policy)
    measurer = open_measurer(config, options, config.evaluation.metric_series)
    return Measuring(options, stack.enter_context(measurer))


@contextlib.contextmanager
def open_inference(
    config: ml_collections.ConfigDict,
    policy: models.Policy,
    tokenizer: Any,
    directory: pathlib.Path,
    *,
    run_id: str,
    num_requests: int,
    reporter: Reporter,
    stop: StopRequest,
    environments: EnvironmentPools | None = None,
) -> Iterator[Inference]:
    """Connects to the replicas of `config.rollout`, in one process; UserError if one is unfit.

    `config.model.path` names a directory with the architecture. A child process writes below
    `directory`. `num_requests` is the largest number of responses of one call.
    """
    mesh = check_inference(config, policy, tokenizer)
    with open_client(
        config,
        policy,
        tokenizer,
        threading.Lock(),  # nothing is trained at the same time
        reporter,
        run_id=run_id,
        attempt_id=secrets.token_hex(8),
        directory=directory,
        num_problems=num_requests,
    ) as client:
        sync = WeightSync(config, policy.config, client, Peers(), stop, reporter)
        end_tokens = end_token_ids(config, tokenizer)
        sampler = Sampler(config, tokenizer, end_tokens, sync)
        if environments:
            sampler.episodes = MultiTurn.of(config, tokenizer, end_tokens, environments)
        yield Inference(config, policy, tokenizer, mesh, sampler)


def dry_run_policy(
    config: ml_collections.ConfigDict,
    source: PolicySource,
    policy: models.Policy,
    tokenizer: Any,
    output: pathlib.Path,
    reporter: Reporter,
    *counts: str,
) -> None:
    """Checks what sampling from a policy needs: weights, mesh, limits, replicas, directory."""
    summary = Summary(reporter)
    check_inference(config, policy, tokenizer)
    source.check(policy)
    summary("policy", source.name)
    say_model(config, source, policy, summary)
    check_replicas(config, policy, tokenizer, output, summary)
    summary("to sample", *counts)
    existing = next(d for d in (output.absolute(), *output.absolute().parents) if d.exists())
    if not (existing.is_dir() and os.access(existing, os.W_OK)):
        raise UserError(f"--output={output} cannot be made: {existing} cannot be written to.")
    state = "exists; the same command continues it" if output.exists() else "new"
    summary("output", str(output), state)
    summary("dry run", "all checks passed; nothing was started or written")
