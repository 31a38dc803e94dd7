"""Responses of given weights for a trainer, scored and measured."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import ml_collections
import numpy as np

from semrl_jax import data, models
from semrl_jax.clock import Clock
from semrl_jax.cluster.agreement import Retry, run_phase
from semrl_jax.cluster.peers import Processes
from semrl_jax.cluster.preemption import StopElsewhere, StopRequest
from semrl_jax.console import Reporter
from semrl_jax.metrics.names import FINAL_LAYER
from semrl_jax.rewards import VerifierPool
from semrl_jax.rollout.client import RolloutClient
from semrl_jax.rollout.client.replica import Figures
from semrl_jax.rollout.measurer import Measurer
from semrl_jax.sampling.annealing import distribution_at
from semrl_jax.sampling.dynamic import Rewards, sample_until_kept
from semrl_jax.sampling.exchange import of_all, share_of
from semrl_jax.sampling.replicas import is_embedded
from semrl_jax.sampling.scoring import Scored, score_and_measure
from semrl_jax.sampling.weight_sync import send_together
from semrl_jax.settings.algorithms import MAX_ROUNDS
from semrl_jax.settings.rollout import weight_dtype
from semrl_jax.types import (
    HiddenStateParams,
    MetricParams,
    Rollout,
    SampleRequest,
    SamplingParams,
    WeightVersion,
)

TRAINING, EVALUATION, GENERATION = 1, 2, 3  # streams of the sampling seeds


REPLICA_OPTIONS = ("stride", "window", "method", "window_growth", "num_threads")


class Measuring(NamedTuple):
    """Which metrics of the rollouts are measured, and by whom.

    `options` is a section such as `config.metrics`. With `options.placement="rollout"` the replicas
    measure, else the measurer.
    """

    options: ml_collections.ConfigDict
    measurer: Measurer | None


class Weights(NamedTuple):
    """The policy that is sampled from.

    Attributes:
      step: of the loop.
      read: starts a pass over the arrays of `models.tensor_specs`. They are on the devices if one
        process trains and samples.
      read_together: every process must read, to the end, at the same time.
      version: None before the weights are sent, and in a process without replicas.
    """

    step: int
    read: Callable[[], Iterator[np.ndarray | jax.Array]]
    read_together: bool
    version: WeightVersion | None = None


class Draw(NamedTuple):
    """Responses to be sampled for a training step; references and rows of prompts by group."""

    requests: list[SampleRequest]
    references: dict[int, str]
    columns: dict[int, str]


class Sample(NamedTuple):
    """The responses of one training step.

    Attributes:
      scored: B = P * G, in (group, sample) order.
      position: (epoch, prompts taken of it) after this step.
      scalars: of the dynamic sampling; empty without it.
    """

    scored: Scored
    position: tuple[int, int]
    scalars: dict[str, float]


@dataclasses.dataclass
class Sampler:
    """Holds the order of the prompts, the replicas, the verifier and the measurer.

    The result of a step depends only on the config, the weights and the step. With several
    processes, each process in `sampling` samples its share of the groups. Every process gets all
    responses. Hidden states stay in the process that sampled them.
    """

    config: ml_collections.ConfigDict
    architecture: models.DecoderConfig
    tokenizer: Any
    end_token_ids: tuple[int, ...]
    prompts: data.PromptDataset
    client: RolloutClient | None  # None if this process does not sample
    verifier: VerifierPool | None  # None: every call of `sample` names one
    measurer: Measurer | None
    peers: Processes
    sampling: tuple[int, ...]  # the processes that sample
    stop: StopRequest | StopElsewhere
    reporter: Reporter
    weights: Weights | None = None  # of the last sync
    _counted: dict[str, int] = dataclasses.field(default_factory=dict)  # totals at the last call
    _figures: dict[int, Figures] = dataclasses.field(default_factory=dict)  # as `_counted`
    _figures_at: float = dataclasses.field(default_factory=time.monotonic)

    def offer(self, weights: Sequence[models.Params], step: int) -> None:
        """Gives the weights of this step, the last of `weights`, to the replicas."""
        self.sync_weights(weights[-1], step)

    def sync_weights(self, params: models.Params, step: int) -> WeightVersion | None:
        """Gives the policy to every replica; later calls sample with exactly this version.

        An embedded replica takes it from device to device. With several processes, all gather each
        tensor together, on the host. Returns None in a process without replicas.

        Raises:
          RuntimeError: if all attempts together take longer than `rollout.call_timeout_s`.
        """
        together = self.peers.count > 1
        read = functools.partial(
            self._read, params, on_host=together or not is_embedded(self.config)
        )
        self._send(Weights(step, read, read_together=together))
        return self.weights.version

    def _read(
        self, params: models.Params, *, on_host: bool = True
    ) -> Iterator[np.ndarray | jax.Array]:
        dtype = weight_dtype(self.config)
        tensors = models.iterate_hf_tensors(params, self.architecture, dtype, on_host=on_host)
        return (array for _, array in tensors)

    def _send(self, weights: Weights) -> None:
        """Sends weights that are not sent yet, or once more; all processes call it together."""
        check_time = self._deadline(f"no replica took the weights of step {weights.step}")
        reason = None

        def may_begin() -> None:
            self.stop.check()
            check_time(reason)

        def send() -> WeightVersion | None:
            if weights.read_together:
                sync = functools.partial(self._send_own, weights.step)
                return send_together(self.peers, self.stop, self.client and sync, weights.read())
            if self.client is None:
                return None
            with self.stop.interruptible():
                return self._send_own(weights.step, weights.read)

        while True:
            # Agree first: a process that stops here alone would block the others in a gather.
            run_phase(self.peers, "sync_weights", may_begin)
            try:
                version = run_phase(self.peers, "sync_weights", send)
                break
            except Retry as retry:
                reason = retry
                self.reporter.line(f"the weights of step {weights.step} are sent again: {reason}")
        self.weights = weights._replace(version=version)

    def _send_own(self, step: int, read: Callable[[], Iterator[np.ndarray]]) -> WeightVersion:
        """Sends weights to the replicas of this process."""
        specs = models.tensor_specs(self.architecture, weight_dtype(self.config))
        return self.client.sync_weights(specs, read, step=step)

    def next(
        self, step: int, position: tuple[int, int], clock: Clock, rewards_of: Rewards
    ) -> Sample:
        """G responses to each of the next P prompts; scored and measured as they arrive.

        With `batch_rules.max_sampling_rounds`, these are the next P prompts whose groups are kept.
        The position is then after the last of them: prompts whose groups were sampled but not
        needed come again in the next step.

        Args:
          rewards_of: rewards that decide which groups are kept.

        Raises:
          TooFewGroups: if the rounds do not give P groups.
        """
        count, rules = self.config.data.prompts_per_step, self.config.algorithms.batch_rules
        num_responses = count * self.config.rollout.group_size

        def prompts(start: tuple[int, int], count: int) -> tuple[list[data.PromptExample], Any]:
            return data.next_prompts(self.prompts, self.config.seed, start, count)

        def sample_round(number: int, num_kept: int) -> Scored:
            _, start = prompts(position, number * count)
            what = f"sample round {number + 1}, {num_kept}/{count} groups kept,"
            shown = counter(clock, what, num_responses, already=number)
            return self._sample_prompts(step, number, prompts(start, count)[0], clock, shown)

        with clock("sample"):
            if not rules.max_sampling_rounds:
                examples, position = prompts(position, count)
                shown = counter(clock, "sample", num_responses)
                return Sample(self._sample_prompts(step, 0, examples, clock, shown), position, {})
            kept = sample_until_kept(
                sample_round,
                rewards_of,
                num_groups=count,
                max_rounds=rules.max_sampling_rounds,
                keep_by=rules.keep_groups_by,
            )
        return Sample(kept.scored, prompts(position, kept.num_prompts)[1], kept.scalars)

    def _sample_prompts(
        self,
        step: int,
        number: int,
        examples: Sequence[data.PromptExample],
        clock: Clock,
        arrived: Callable[[Rollout], None],
    ) -> Scored:
        """The responses to the prompts of a round of this number."""
        draw = self._draw(step, number, examples)
        return self.sample(
            draw.requests,
            draw.references,
            columns=draw.columns,
            **self._training_options(step),
            clock=clock,
            arrived=arrived,
        )

    def _draw(self, step: int, number: int, examples: Sequence[data.PromptExample]) -> Draw:
        """The responses to sample of the prompts of a round of this number."""
        # Groups of a run have different ids, whatever limit of rounds each of its starts has.
        num_rounds = MAX_ROUNDS if self.config.algorithms.batch_rules.max_sampling_rounds else 1
        first = step * num_rounds * len(examples)  # group of the first prompt of the step
        draws = dict(enumerate(examples, number * len(examples)))
        requests = [
            SampleRequest(
                sample_id=f"train/{step}/{draw}/{sample}",
                group_id=first + draw,
                sample_index=sample,
                prompt_ids=example.prompt_ids,
                seed=stream_seed(self.config.seed, TRAINING, step, draw, sample),
            )
            for draw, example in draws.items()
            for sample in range(self.config.rollout.group_size)
        ]
        return Draw(
            requests,
            {first + draw: example.answer for draw, example in draws.items()},
            {first + draw: example.columns for draw, example in draws.items()},
        )

    def _training_options(self, step: int) -> dict[str, Any]:
        """How the responses of a training step are sampled and measured."""
        return {
            **distribution_at(step, self.config.rollout),
            "stop_strings": self.config.rollout.stop_strings,
            "measuring": self._measuring(),
            "states": HiddenStateParams((FINAL_LAYER,)) if self.compares(step) else None,
        }

    def sample(
        self, requests: Sequence[SampleRequest], references: Mapping[int, str], **options: Any
    ) -> Scored:
        """All requested responses, scored, in (group, sample) order, in every process.

        `options` are those of `_sample_here`: of the verdicts, metrics and distribution.

        If a replica has lost its weights, all processes send the weights again. The process that
        uses the replica then samples all its groups again.

        Raises:
          RuntimeError: if all attempts together take longer than `rollout.call_timeout_s`.
        """
        own = self._own_share(requests)
        scored = Scored(())

        def sample_own() -> None:
            nonlocal scored
            if own and not scored:
                scored = self._sample_here(own, references, **options)

        self._until_sampled(sample_own)
        return self._of_all(scored)

    def _own_share(self, requests: Sequence[SampleRequest]) -> list[SampleRequest]:
        """The requests of the groups that this process samples."""
        groups = list(dict.fromkeys(request.group_id for request in requests))
        own_groups = set(share_of(groups, self.sampling, self.peers.index))
        return [request for request in requests if request.group_id in own_groups]

    def _until_sampled(self, sample_own: Callable[[], None]) -> None:
        """Calls it in all processes, again after replicas have got weights that they had lost."""
        weights = self.weights
        check_time = self._deadline(f"the responses of step {weights.step} did not come")
        reason = None

        def attempt() -> None:
            check_time(reason)
            sample_own()

        while True:
            try:
                return run_phase(self.peers, "sample", attempt)
            except Retry as retry:
                reason = retry
                self.reporter.line(f"the weights of step {weights.step} are sent again: {reason}")
                self._send(weights)

    def counters(self) -> dict[str, float]:
        """Events and bytes on the wire since the last call, summed over all processes.

        Counts per step, because totals would start again from 0 in a resumed run.
        """
        totals = {f"reward/{name}": value for name, value in self.verifier.counters.items()}
        if self.client is not None:
            totals |= {f"rollout/{name}": value for name, value in self.client.counters.items()}
            if not self.config.rollout.groups_per_call:
                totals.pop("rollout/taken_over", None)
        counts = {name: float(n - self._counted.get(name, 0)) for name, n in totals.items()}
        self._counted = totals
        summed: collections.Counter[str] = collections.Counter()
        for part in self.peers.gather("count", counts):
            summed.update(part)
        return dict(summed)

    def replica_figures(self) -> dict[str, float]:
        """What each of several replicas did since the last call; all processes call it together.

        `rollout/replica/<n>/tokens_per_s` is its speed while it had a call, and
        `time/replica/<n>/busy_fraction` the share of the time in which it had one.
        """
        now, found = time.monotonic(), {}
        for number, figures in (self.client.figures if self.client is not None else {}).items():
            before = self._figures.get(number, Figures())
            self._figures[number] = figures
            name = number * len(self.sampling) + self.sampling.index(self.peers.index)
            busy_s = figures.busy_s - before.busy_s
            if busy_s > 0:
                tokens_per_s = (figures.tokens - before.tokens) / busy_s
                found[f"rollout/replica/{name}/tokens_per_s"] = tokens_per_s
            found[f"time/replica/{name}/busy_fraction"] = busy_s / max(now - self._figures_at, 1e-9)
        self._figures_at = now
        of_all: dict[str, float] = {}
        for part in self.peers.gather("count", found):
            of_all.update(part)
        num_replicas = sum(name.startswith("time/") for name in of_all)
        return of_all if num_replicas > 1 else {}

    def check_stop(self) -> None:
        """Raises Preempted in all processes if one of them was asked to end."""
        run_phase(self.peers, "advantages", self.stop.check)

    def compares(self, step: int) -> bool:
        """Whether the hidden states of this step stay, to be compared with the policy's own."""
        every = self.config.hidden_states.compare_every
        return bool(every) and step % every == 0

    @functools.cached_property
    def _stop_token_ids(self) -> tuple[int, ...]:
        rollout = self.config.rollout
        of_words = data.stop_word_ids(self.tokenizer, rollout.stop_words)
        return tuple(dict.fromkeys((*rollout.stop_token_ids, *of_words)))

    def _measuring(self) -> Measuring | None:
        """What is measured of the rollouts of a training step."""
        if self.config.hidden_states.source != "rollout":
            return None
        return Measuring(self.config.metrics, self.measurer)

    def _deadline(self, failure: str) -> Callable[[Retry | None], None]:
        """A function that raises RuntimeError if an attempt failed and the time is over."""
        timeout_s = self.config.rollout.call_timeout_s
        deadline = time.monotonic() + timeout_s

        def check(reason: Retry | None) -> None:
            if reason is not None and time.monotonic() > deadline:
                raise RuntimeError(
                    f"{failure} within rollout.call_timeout_s={timeout_s:g} s ({reason})."
                )

        return check

    def _of_all(self, scored: Scored) -> Scored:
        return of_all(self.peers, scored)

    def _sample_here(
        self,
        requests: Sequence[SampleRequest],
        references: Mapping[int, str],
        *,
        stop_strings: Sequence[str] = (),
        measuring: Measuring | None = None,
        states: HiddenStateParams | None = None,
        clock: Clock | None = None,
        columns: Mapping[int, str] | None = None,
        verifier: VerifierPool | None = None,
        arrived: Callable[[Rollout], None],
        **distribution: Any,  # temperature, top_p, top_k, annealing
    ) -> Scored:
        """The responses of these requests, in (group, sample) order.

        Args:
          states: layers and kinds of hidden states that stay in the rollouts, beside those that are
            only measured. Their dtype is `hidden_states.dtype` of the config.
        """
        shared = {"stop_strings": stop_strings, "measuring": measuring, "states": states}
        rollouts = self._generate(requests, **shared, **distribution)
        with self.stop.interruptible(), contextlib.closing(rollouts):
            return self._scored(
                clock.iterate("generate", rollouts) if clock else rollouts,
                references,
                columns=columns,
                verifier=verifier,
                arrived=arrived,
                **shared,
            )

    def _generate(
        self,
        requests: Sequence[SampleRequest],
        *,
        max_tokens: int = 0,  # 0: rollout.max_response_tokens
        stop_strings: Sequence[str],
        measuring: Measuring | None,
        states: HiddenStateParams | None,
        **distribution: Any,
    ) -> Iterator[Rollout]:
        """The responses of these requests as they arrive; the arguments are as above."""
        weights = self.weights

        def resync() -> WeightVersion:
            """Sends the weights to a replica that restarted; their version stays the same."""
            if weights.read_together:
                raise Retry("a replica has lost them")
            return self._send_own(weights.step, weights.read)

        sampling = SamplingParams(
            max_tokens=max_tokens or self.config.rollout.max_response_tokens,
            eos_token_ids=self.end_token_ids,
            stop_token_ids=self._stop_token_ids,
            stop_strings=tuple(stop_strings),
            **distribution,
        )
        metrics, layers, kinds = None, (), ("decode",)
        dtype = self.config.hidden_states.dtype
        if measuring is not None and measuring.options.placement == "rollout":
            options = {name: measuring.options[name] for name in REPLICA_OPTIONS}
            metrics = MetricParams(names=tuple(measuring.options.names), dtype=dtype, **options)
        elif measuring is not None:
            layers = tuple(measuring.options.layers)
        if states is not None:
            kinds = tuple(sorted({*states.kinds, *(kinds if layers else ())}))
            layers = tuple(dict.fromkeys((*layers, *states.layers)))
        return self.client.generate(
            requests,
            sampling,
            HiddenStateParams(layers, dtype, kinds),
            version=weights.version,
            metrics=metrics,
            groups_per_call=groups_per_call(requests, self.config.rollout),
            resync=resync,
            read=None if weights.read_together else weights.read,
        )

    def _scored(
        self,
        rollouts: Iterable[Rollout],
        references: Mapping[int, str],
        *,
        stop_strings: Sequence[str],
        measuring: Measuring | None,
        states: HiddenStateParams | None,
        columns: Mapping[int, str] | None,
        verifier: VerifierPool | None = None,
        arrived: Callable[[Rollout], None],
    ) -> Scored:
        """The same responses with verdicts and metrics, in (group, sample) order."""
        measures_here = measuring is not None and measuring.options.placement != "rollout"
        return score_and_measure(
            rollouts,
            decode=functools.partial(
                data.verifier_text, self.tokenizer, stop_strings=tuple(stop_strings)
            ),
            references=references,
            columns=columns,
            verifier=verifier or self.verifier,
            measurer=measuring.measurer if measures_here else None,
            keep_states=states is not None,
            arrived=arrived,
        )


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
