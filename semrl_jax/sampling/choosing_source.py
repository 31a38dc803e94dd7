"""Which source a run has: the one place that decides it from the config."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import pathlib
from collections.abc import Iterator

import jax
import ml_collections

from semrl_jax import data, models
from semrl_jax.cluster.peers import Processes
from semrl_jax.metrics.measurer import Measurer
from semrl_jax.rollout.host_memory import available_bytes
from semrl_jax.sampling.ahead import Ahead
from semrl_jax.sampling.batch_rewards import unshuffled_rewards
from semrl_jax.sampling.branched import Branched
from semrl_jax.sampling.counters import Events, ReplicaFigures
from semrl_jax.sampling.episodes import Episodes
from semrl_jax.sampling.in_parts import InParts
from semrl_jax.sampling.recorded import Recorded
from semrl_jax.sampling.sampler import Sampler
from semrl_jax.sampling.selecting import Selecting
from semrl_jax.sampling.source import Batches, Counted, Now, Rounds, Source
from semrl_jax.settings.rollout import num_parts, weight_dtype
from semrl_jax.support.errors import UserError
from semrl_jax.types import experts_dtype

TOKEN_BYTES = 12  # an id and two log-probabilities


@contextlib.contextmanager
def open_source(
    config: ml_collections.ConfigDict,
    sampler: Sampler,
    prompts: data.PromptDataset,
    measurer: Measurer | None,
) -> Iterator[tuple[Source, Sampler | Ahead]]:
    """The source of a run, and what evaluations sample with; all processes call it together.

    Without a measurer, no hidden states are measured while responses arrive. UserError: the source
    cannot play the sampler's episodes.
    """
    if run := config.rollout.recorded:
        yield Recorded(pathlib.Path(run), config.rollout.router_replay), sampler
        return
    check_episodes(config, sampler.episodes)
    sync, lag, parts = sampler.sync, config.rollout.max_staleness, num_parts(config.rollout)

    def batches_from(sampler: Sampler) -> Batches:
        shared = config, prompts, sampler, measurer
        if parts > 1:
            return InParts(*shared)
        rounds = Rounds(*shared, Branched.of(config, sampler.tokenizer))
        if config.algorithms.batch_rules.max_sampling_rounds:
            rewards_of = functools.partial(unshuffled_rewards, config=config)
            return Selecting(config, rounds, rewards_of)
        return rounds

    def events_on(peers: Processes) -> Events:
        may_take_over = bool(config.rollout.groups_per_call)
        return Events(sync.client, sampler.verifier, sampler.episodes, peers, may_take_over)

    figures = ReplicaFigures(sync.client, sync.peers, sampler.sampling)
    if not lag:
        now = Now(sampler, batches_from(sampler))
        yield Counted(now, (events_on(sync.peers), figures)), sampler
        return
    channel = sync.peers.channel("sampling")
    thread_sync = dataclasses.replace(sync, peers=channel, stop=sync.stop.elsewhere())
    thread_sampler = dataclasses.replace(sampler, sync=thread_sync)
    ahead = Ahead(
        lag=lag,
        ready=1 if parts > 1 else lag,
        num_steps=config.training.num_steps,
        sampler=sampler,
        thread_sampler=thread_sampler,
        batches=batches_from(thread_sampler),
        count=events_on(channel),
    )
    with ahead:
        yield Counted(ahead, (figures,)), ahead


def check_episodes(config: ml_collections.ConfigDict, episodes: Episodes) -> None:
    """Raises UserError if responses are sampled in parts, and episodes cannot be divided."""
    if num_parts(config.rollout) > 1 and not episodes.is_divisible:
        raise UserError(
            f"rollout.in_flight='keep' with rollout.max_staleness={config.rollout.max_staleness} "
            f"samples responses in parts of equal length, but {type(episodes).__name__} has turns "
            "of its own; set in_flight='wait'."
        )


def check_memory(
    config: ml_collections.ConfigDict,
    architecture: models.DecoderConfig,
    lora: models.Lora | None = None,
) -> None:
    """Raises UserError if a run ahead of its updates does not fit into the memory of this process.

    The process keeps copies of the weights of max_staleness + 1 steps, which with adapters share
    one base, and the tokens of max_staleness batches. Hidden states are dropped once they are
    measured, which is when a response is complete. On a CPU, the copies of `TrainState.earlier` are
    in the same memory.
    """
    lag, rollout = config.rollout.max_staleness, config.rollout
    specs = models.tensor_specs(architecture, weight_dtype(config))
    copy, shared = sum(spec.num_bytes for spec in specs), 0
    if lora is not None:
        copy, shared = 4 * models.peft.num_parameters(architecture, lora), copy
    tokens = config.data.prompts_per_step * rollout.group_size * rollout.max_response_tokens
    copies = lag + 1 + (lag if jax.default_backend() == "cpu" else 0)
    per_token, what, states = TOKEN_BYTES, "tokens", config.hidden_states
    if num_parts(rollout) > 1 and states.source == "rollout":
        size = architecture.hidden_size * jax.numpy.dtype(states.dtype).itemsize
        per_token += len(config.metrics.layers) * size
        what = "tokens with hidden states"
    if rollout.router_replay:
        num_layers, chosen, num_experts = architecture.routed_experts
        per_token += num_layers * chosen * experts_dtype(num_experts).itemsize
    needed, limit = shared + copies * copy + lag * tokens * per_token, available_bytes()
    if lag and needed > limit:
        raise UserError(
            f"rollout.max_staleness={lag} keeps {needed / 2**30:.1f} GiB in this process "
            f"({copies} copies of the weights of {copy / 2**30:.3g} GiB, {lag} batches of up to "
            f"{tokens} {what}), and {limit / 2**30:.1f} GiB are free; lower it, or "
            "rollout.weight_dtype to 'bfloat16'."
        )
