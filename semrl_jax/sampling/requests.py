"""Which responses a training step asks for: their ids, their seeds and how they are sampled."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import ml_collections
import numpy as np
from jaxtyping import Int

from semrl_jax import data
from semrl_jax.metrics.measurer import Measurer
from semrl_jax.metrics.names import FINAL_LAYER
from semrl_jax.settings.algorithms import MAX_ROUNDS
from semrl_jax.support.clock import Clock
from semrl_jax.types import HiddenStateParams, MetricParams, Rollout, SampleRequest, distribution_of

TRAINING, EVALUATION, GENERATION = 1, 2, 3  # streams of the sampling seeds
REPLICA_OPTIONS = ("stride", "window", "method", "num_threads")


class Draw(NamedTuple):
    """Responses to be sampled."""

    requests: Sequence[SampleRequest]  # one per response
    references: Mapping[int, str]  # reference answer by group
    columns: Mapping[int, str]  # row of the prompt by group, see `data.PromptExample`, if any
    step: int = 0  # of the weights that sample them
    given: Mapping[int, Sequence[Int[np.ndarray, " _"]]] = {}  # token ids by group


class Measuring(NamedTuple):
    """Which metrics of the rollouts are measured, and by whom.

    `options` is a section such as `config.metrics`. With `options.placement="rollout"` the replicas
    measure, else the measurer.
    """

    options: ml_collections.ConfigDict
    measurer: Measurer | None

    @property
    def is_here(self) -> bool:
        return self.options.placement != "rollout"


def training_draw(
    config: ml_collections.ConfigDict,
    step: int,
    number: int,
    examples: Sequence[data.PromptExample],
) -> Draw:
    """The responses to the prompts of round `number` of a training step."""
    # MAX_ROUNDS, not the limit itself, which a later start of the run may set to another one.
    num_rounds = MAX_ROUNDS if config.algorithms.batch_rules.max_sampling_rounds else 1
    first = step * num_rounds * len(examples)  # group of the first prompt of the step
    draws = dict(enumerate(examples, number * len(examples)))
    rollout = config.rollout
    given = {draw: example.given[: rollout.given_responses] for draw, example in draws.items()}
    is_late = rollout.given_when == "failed"  # the verdicts of all sampled responses come first
    requests = [
        SampleRequest(
            sample_id=f"train/{step}/{draw}/{sample}",
            group_id=first + draw,
            sample_index=sample,
            prompt_ids=example.prompt_ids,
            seed=stream_seed(config.seed, TRAINING, step, draw, sample),
        )
        for draw, example in draws.items()
        for sample in range(rollout.group_size - (0 if is_late else len(given[draw])))
    ]
    return Draw(
        requests,
        {first + draw: example.answer for draw, example in draws.items()},
        {first + draw: example.columns for draw, example in draws.items()},
        given={first + draw: ids for draw, ids in given.items() if ids},
    )


def training_options(
    config: ml_collections.ConfigDict, measurer: Measurer | None, step: int
) -> dict[str, Any]:
    """How responses of a training step are sampled and measured: options of `Sampler.sample`."""
    states, every = config.hidden_states, config.hidden_states.compare_every
    compares = every and step % every == 0  # with the policy's own states
    return {
        **distribution_of(config.rollout),
        "stop_strings": config.rollout.stop_strings,
        "measuring": Measuring(config.metrics, measurer) if states.source == "rollout" else None,
        "states": HiddenStateParams((FINAL_LAYER,)) if compares else None,
        "routed_experts": config.rollout.router_replay,
    }


def asked_of_replicas(
    measuring: Measuring | None, states: HiddenStateParams | None, dtype: str
) -> tuple[HiddenStateParams, MetricParams | None]:
    """The hidden states that replicas send, in this dtype, and the metrics that they measure.

    `states` are layers and kinds that stay in the rollouts, in addition to the measured ones.
    """
    metrics, layers, kinds = None, (), ("decode",)
    if measuring is not None and not measuring.is_here:
        options = {name: measuring.options[name] for name in REPLICA_OPTIONS}
        metrics = MetricParams(names=tuple(measuring.options.names), dtype=dtype, **options)
    elif measuring is not None:
        layers = tuple(measuring.options.layers)
    if states is not None:
        kinds = tuple(sorted({*states.kinds, *(kinds if layers else ())}))
        layers = tuple(dict.fromkeys((*layers, *states.layers)))
    return HiddenStateParams(layers, dtype, kinds), metrics


def groups_per_call(requests: Sequence[SampleRequest], rollout: ml_collections.ConfigDict) -> int:
    """Groups of these requests with about the responses of `groups_per_call` training groups.

    0 stays 0. An evaluation may have one response a group; calls of few responses are slow.
    """
    if not rollout.groups_per_call or not requests:
        return 0
    largest = max(collections.Counter(request.group_id for request in requests).values())
    return max(rollout.groups_per_call * rollout.group_size // largest, 1)


def counter(clock: Clock, what: str, total: int, already: int = 0) -> Callable[[Rollout], None]:
    """A function that shows the number of responses that have arrived, after `already` totals."""
    count, end = itertools.count(already * total + 1), (already + 1) * total
    return lambda _rollout: clock.say(f"{what} {next(count)}/{end}")


def stream_seed(*path: int) -> int:
    """An unsigned 64-bit seed, derived from (seed, stream, step, prompt, sample)."""
    return int(np.random.SeedSequence(path).generate_state(1, np.uint64)[0])
