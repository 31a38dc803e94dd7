"""Responses of given weights, scored and measured."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import ml_collections
import numpy as np
from jaxtyping import Int

from semrl_jax import data, models
from semrl_jax.cluster.agreement import Retry, run_phase
from semrl_jax.rewards import VerifierPool
from semrl_jax.sampling.episodes import Episodes, SingleTurn
from semrl_jax.sampling.exchange import of_all, own_requests
from semrl_jax.sampling.given import with_given
from semrl_jax.sampling.requests import Draw, Measuring, asked_of_replicas, groups_per_call
from semrl_jax.sampling.scoring import Scored, score_and_measure
from semrl_jax.sampling.weights import Weights, WeightSync
from semrl_jax.support.clock import Clock
from semrl_jax.types import HiddenStateParams, Rollout, SampleRequest, SamplingParams, WeightVersion


@dataclasses.dataclass
class Sampler:
    """Samples what is asked for with the weights that were sent last.

    With several processes, each process in `sampling` samples its share of the groups. Every
    process gets all responses. Hidden states stay in the process that sampled them.
    """

    config: ml_collections.ConfigDict
    tokenizer: Any
    end_token_ids: tuple[int, ...]
    sync: WeightSync  # it has the replicas, and the connection to the other processes
    verifier: VerifierPool | None = None  # None: every call of `sample` names one
    sampling: tuple[int, ...] = (0,)  # the processes that sample
    episodes: Episodes = SingleTurn()  # noqa: RUF009 - has no state
    weights: Weights | None = None  # those that were sent last

    def send(self, weights: Weights) -> None:
        """Gives weights to every replica, in all processes; later calls sample with these."""
        self.weights = self.sync.send(weights)

    def sync_weights(self, params: models.Params, step: int) -> WeightVersion | None:
        """Sends the policy of a step; returns its version, None in a process without replicas."""
        self.send(self.sync.of(params, step))
        return self.weights.version

    def sample(
        self,
        requests: Sequence[SampleRequest],
        references: Mapping[int, str],
        *,
        columns: Mapping[int, str] | None = None,
        given: Mapping[int, Sequence[Int[np.ndarray, " _"]]] = {},
        **options: Any,
    ) -> Scored:
        """All requested responses, scored, in (group, sample) order, in every process.

        All processes call it together. If a replica has lost its weights, all send them again, and
        the process that uses the replica samples all its groups again.

        Args:
          references: reference answer by group.
          columns: row of the prompt by group, see `data.PromptExample`; None: no prompt has one.
          given: token ids of given responses by group, see `with_given`.
          options: see `sample_here`.

        RuntimeError: all attempts together take longer than `rollout.call_timeout_s`.
        """
        mine = own_requests(requests, self.sampling, self.sync.peers.index)
        own = Draw(mine, references, columns or {}, self.weights.step, given)
        scored = Scored(())

        def sample_own() -> None:
            nonlocal scored
            if own.requests and not scored:
                scored = self.sample_here(own, **options)

        self.sync.sampled(self.weights, sample_own)
        return of_all(self.sync.peers, scored)

    def sample_here(
        self,
        draw: Draw,
        *,
        stop_strings: Sequence[str] = (),
        measuring: Measuring | None = None,
        states: HiddenStateParams | None = None,
        clock: Clock | None = None,
        verifier: VerifierPool | None = None,
        episodes: Episodes | None = None,
        arrived: Callable[[Rollout], None],
        **distribution: Any,
    ) -> Scored:
        """The responses of a draw, sampled in this process alone, in (group, sample) order.

        Args:
          states: layers and kinds of hidden states that stay in the rollouts, in addition to those
            that are only measured. Their dtype is `hidden_states.dtype` of the config.
          clock: times the waits for responses, for verdicts and for environments.
          verifier, episodes: None: the sampler's own.
          arrived: called for each rollout, to show progress.
          distribution: temperature, top_p, top_k; and `routed_experts` of `generate`.
        """
        shared = {"stop_strings": stop_strings, "measuring": measuring, "states": states}
        ask = functools.partial(self.generate, **shared, **distribution)
        clock = clock or Clock()
        rollouts = (episodes or self.episodes).play(draw, ask, clock)
        try:
            with self.sync.stop.interruptible(), contextlib.closing(rollouts):
                timed = clock.iterate("generate", rollouts)
                return self.score(
                    timed, draw, verifier=verifier, arrived=arrived, clock=clock, **shared
                )
        finally:
            self.sync.client.release()

    def release_weights(self, clock: Clock) -> None:
        """Frees those of a replica in this process, with `rollout.in_turns` those of every replica.

        `sync_weights` comes before the next sample.
        """

        def release() -> None:
            if self.sync.client is not None:
                with self.sync.stop.interruptible():
                    self.sync.client.release(weights=True)

        if not self.config.rollout.in_turns:
            return release()
        with clock("sleep"):
            run_phase(self.sync.peers, "sleep", release)

    def generate(
        self,
        requests: Sequence[SampleRequest],
        *,
        max_tokens: int = 0,
        keep: bool = False,
        stop_strings: Sequence[str] = (),
        measuring: Measuring | None = None,
        states: HiddenStateParams | None = None,
        routed_experts: bool = False,
        entropies: bool = False,
        **distribution: Any,
    ) -> Iterator[Rollout]:
        """What the policy writes after each prompt, by one call, as it arrives.

        Args:
          max_tokens: of each response; 0: `rollout.max_response_tokens`.
          keep: whether further turns follow. With `groups_per_call` they are prefilled: time
            decides which replica gets a call, and a prefill is rounded in another way.
          stop_strings, measuring, states, distribution: see `sample_here`.
          routed_experts: whether the rollouts have the experts that tokens went to.
          entropies: whether the rollouts have the entropy at each token.
        """
        weights, rollout = self.weights, self.config.rollout

        def resync() -> WeightVersion:
            """Sends the weights to a replica that restarted; their version stays the same."""
            if weights.read_together:
                raise Retry("a replica has lost them")
            return self.sync.send_here(weights)

        limit = max_tokens or rollout.max_response_tokens
        # A later turn of an episode may have less room.
        distribution["min_tokens"] = min(distribution.get("min_tokens", 0), limit)
        sampling = SamplingParams(
            max_tokens=limit,
            eos_token_ids=self.end_token_ids,
            stop_token_ids=self._stop_token_ids,
            stop_strings=tuple(stop_strings),
            **distribution,
        )
        sent, metrics = asked_of_replicas(measuring, states, self.config.hidden_states.dtype)
        return self.sync.client.generate(
            requests,
            sampling,
            sent,
            version=weights.version,
            metrics=metrics,
            groups_per_call=groups_per_call(requests, rollout),
            keep=keep and not rollout.groups_per_call,
            routed_experts=routed_experts,
            entropies=entropies,
            resync=resync,
            read=None if weights.read_together else weights.read,
        )

    def score(
        self,
        rollouts: Iterable[Rollout],
        draw: Draw,
        *,
        stop_strings: Sequence[str],
        measuring: Measuring | None,
        states: HiddenStateParams | None,
        verifier: VerifierPool | None = None,
        arrived: Callable[[Rollout], None] = lambda rollout: None,
        clock: Clock | None = None,
    ) -> Scored:
        """Responses of a draw with verdicts and metrics, in (group, sample) order."""
        measures_here = measuring is not None and measuring.is_here
        score = functools.partial(
            score_and_measure,
            decode=functools.partial(self._text, stop_strings=tuple(stop_strings)),
            references=draw.references,
            columns=draw.columns,
            verifier=verifier or self.verifier,
            step_ends=self._step_ends,
            failure_score=self.config.rewards.failure_score,
            clock=clock,
        )
        scored = score(
            rollouts,
            measurer=measuring.measurer if measures_here else None,
            keep_states=states is not None,
            arrived=arrived,
        )
        if not draw.given:
            return scored
        return with_given(
            scored, draw, self.config.rollout, functools.partial(score, measurer=None)
        )

    def _text(self, rollout: Rollout, stop_strings: Sequence[str]) -> str:
        """The text of a response for a verifier; all turns of an episode."""
        if rollout.turn_rewards is not None:
            return data.full_text(self.tokenizer, rollout.response_ids)
        return data.verifier_text(self.tokenizer, rollout.response_ids, stop_strings)

    def _step_ends(self, rollout: Rollout, text: str, ends: Sequence[int]) -> Int[np.ndarray, " N"]:
        return data.tokens_of_ends(self.token_bytes, rollout.response_ids, text, ends)

    @functools.cached_property
    def token_bytes(self) -> data.TokenBytes:
        return data.TokenBytes(self.tokenizer)

    @functools.cached_property
    def _stop_token_ids(self) -> tuple[int, ...]:
        rollout = self.config.rollout
        of_words = data.stop_word_ids(self.tokenizer, rollout.stop_words)
        return tuple(dict.fromkeys((*rollout.stop_token_ids, *of_words)))
