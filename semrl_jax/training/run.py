"""One attempt at a run: its resources, and the verbs of the train loop."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import pathlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float

from semrl_jax import data, models
from semrl_jax.choices import TOKEN_INDICATORS
from semrl_jax.cluster.agreement import Retry, together
from semrl_jax.cluster.exchange import gather_bytes
from semrl_jax.cluster.peers import Peers
from semrl_jax.evaluation import greedy_scalars
from semrl_jax.files import replacing
from semrl_jax.rewards import VerifierPool
from semrl_jax.rollout.client import RolloutClient
from semrl_jax.rollout.measuring import Measurer
from semrl_jax.shaping import init_shaping_state
from semrl_jax.training.batch import pad_batch
from semrl_jax.training.checkpoints import Checkpoints
from semrl_jax.training.clock import Clock
from semrl_jax.training.console import Bar, Reporter
from semrl_jax.training.owners import pack_scored, share_of, unpack_scored
from semrl_jax.training.packing import row_plan
from semrl_jax.training.policy_setup import starting_params
from semrl_jax.training.prompts import sampled_problems
from semrl_jax.training.scoring import ScoredRollout, score_and_measure
from semrl_jax.training.signals import StopRequest
from semrl_jax.training.state import (
    TrainState,
    abstract_state,
    init_state,
    learning_rate_at,
    num_optimizer_updates,
)
from semrl_jax.training.statistics import (
    logprob_mismatch,
    metric_scalars,
    state_differences,
    state_mismatch,
)
from semrl_jax.training.syncing import send_together
from semrl_jax.training.token_indicators import token_indicators
from semrl_jax.training.update import TokenPass, batch_logprobs, update_policy
from semrl_jax.training.workdir import Workdir
from semrl_jax.training.writer import write_rollouts
from semrl_jax.types import (
    HiddenStateParams,
    MetricParams,
    Rollout,
    RolloutBatch,
    SampleRequest,
    SamplingParams,
    WeightVersion,
)

TRAINING, EVALUATION = 1, 2  # streams of the sampling seeds


@dataclasses.dataclass
class Run:
    """What the loop works with. `opening.open_run` makes it."""

    config: ml_collections.ConfigDict
    workdir: Workdir
    reporter: Reporter
    stop: StopRequest
    peers: Peers
    owners: tuple[int, ...]  # processes that sample
    mesh: Mesh
    policy: models.Policy
    start: pathlib.Path  # model directory that training starts from
    reference: models.Params | None  # its parameters, the anchor of the KL; None without one
    optimizer: optax.GradientTransformation
    tokenizer: Any
    end_token_ids: tuple[int, ...]
    prompts: data.PromptDataset
    problems: Sequence[data.PromptExample]
    client: RolloutClient | None  # of an owner
    verifier: VerifierPool
    measurer: Measurer | None
    checkpoints: Checkpoints
    device_lock: threading.Lock
    counted: dict[str, int] = dataclasses.field(default_factory=dict)  # totals at the last step

    @property
    def leads(self) -> bool:
        """Whether this process writes what the run leaves."""
        return self.peers.index == 0

    def sync_weights(self, params: models.Params, step: int) -> WeightVersion | None:
        """Streams the policy to every replica; later calls sample with exactly this version.

        None in a process without replicas. With several processes each tensor is gathered by all
        of them at once. Raises RuntimeError after `rollout.call_timeout_s`, attempts that all had
        to repeat included.
        """
        config = self.policy.config
        dtype = self.config.rollout.weight_dtype or self.config.model.compute_dtype
        specs = models.tensor_specs(config, dtype)

        def read() -> Iterator[np.ndarray]:
            return (array for _, array in models.iterate_hf_tensors(params, config, dtype))

        def sync(read: Callable[[], Iterator[np.ndarray]]) -> WeightVersion:
            return self.client.sync_weights(specs, read, step=step)

        if self.peers.count == 1:
            with self.stop.interruptible():
                return sync(read)
        deadline = time.monotonic() + self.config.rollout.call_timeout_s
        reason = None

        def may_begin() -> None:
            self.stop.check()
            if reason is not None and time.monotonic() > deadline:
                raise RuntimeError(
                    f"no replica took the weights of step {step} within rollout.call_timeout_s="
                    f"{self.config.rollout.call_timeout_s:g} s ({reason})."
                )

        def send() -> WeightVersion | None:
            return send_together(self.peers, self.stop, self.client and sync, read())

        while True:
            # Agreed on before anything is gathered: who left alone would keep the others there.
            together(self.peers, "sync_weights", may_begin)
            try:
                return together(self.peers, "sync_weights", send)
            except Retry as retry:
                reason = retry
                self.reporter.line(f"the weights of step {step} are sent again: {reason}")

    def evaluates(self, step: int) -> bool:
        """Whether the held-out problems are due with the weights of this step."""
        every = self.config.evaluation.every_steps
        due = every and (step % every == 0 or step == self.config.training.num_steps)
        return bool(due and self.problems)

    def evaluate(
        self, params: models.Params, version: WeightVersion, step: int, clock: Clock, bar: Bar
    ) -> dict[str, float]:
        """Greedy accuracy on the held-out problems, in a call of its own; {} where not due."""
        if not self.evaluates(step):
            return {}
        asked = sampled_problems(self.problems, self.config.rollout.max_prompt_tokens)
        requests = [
            SampleRequest(
                sample_id=f"eval/{step}/{index}/0",
                group_id=index,
                sample_index=0,
                prompt_ids=problem.prompt_ids,
                seed=stream_seed(self.config.seed, EVALUATION, step, index, 0),
            )
            for index, problem in asked.items()
        ]
        with clock("evaluate"):
            scored = self._sample(
                requests,
                {index: problem.answer for index, problem in asked.items()},
                (params, version, step),
                temperature=0.0,
                measured=self.config.evaluation.metrics,
                arrived=counter(bar, "evaluate", len(requests)),
            )
        if self.leads and self.config.logging.rollouts_every_steps:
            with clock("write_rollouts"):
                benchmarks = [self.problems[item.rollout.group_id].data_source for item in scored]
                write_rollouts(self.workdir.rollouts, step, scored, self.full_text, benchmarks)
        scalars: dict[str, float] = {}
        sizes = collections.Counter(problem.data_source for problem in self.problems)
        for benchmark, num_problems in sizes.items():
            of_it = [s for s, p in zip(scored, asked.values()) if p.data_source == benchmark]
            scalars |= greedy_scalars(
                benchmark, [s.rollout for s in of_it], [s.verdict for s in of_it], num_problems
            )
            if self.config.evaluation.metrics and of_it:
                prefix = f"eval/{benchmark}/metrics"
                scalars |= metric_scalars(of_it, prefix)
                over_all = self.measurer.submit_batch([s.mean_states for s in of_it]).result()
                scalars |= {f"{prefix}/{name}": value for name, value in over_all.items()}
        return scalars

    def sample(
        self,
        examples: Sequence[data.PromptExample],
        params: models.Params,
        version: WeightVersion,
        step: int,
        clock: Clock,
        bar: Bar,
    ) -> list[ScoredRollout]:
        """G responses a prompt, scored and measured as they arrive, in (group, sample) order."""
        group_size = self.config.rollout.group_size
        groups = [step * len(examples) + draw for draw in range(len(examples))]
        requests = [
            SampleRequest(
                sample_id=f"train/{step}/{draw}/{sample}",
                group_id=groups[draw],
                sample_index=sample,
                prompt_ids=example.prompt_ids,
                seed=stream_seed(self.config.seed, TRAINING, step, draw, sample),
            )
            for draw, example in enumerate(examples)
            for sample in range(group_size)
        ]
        rollout = self.config.rollout
        with clock("sample"):
            return self._sample(
                requests,
                dict(zip(groups, (example.answer for example in examples))),
                (params, version, step),
                temperature=rollout.temperature,
                top_p=rollout.top_p,
                top_k=rollout.top_k,
                measured=self.config.hidden_states.source == "rollout",
                keep_states=self.compares(step),
                clock=clock,
                arrived=counter(bar, "sample", len(requests)),
            )

    def padded(
        self, scored: Sequence[ScoredRollout], rewards: Float[np.ndarray, "P G"]
    ) -> RolloutBatch:
        """The batch on the host, from where every pass lays its rows over the mesh."""
        config = self.config.rollout
        return pad_batch(
            [item.rollout for item in scored],
            rewards.reshape(-1),
            pad_token_id=self.tokenizer.pad_token_id,
            max_prompt_tokens=config.max_prompt_tokens,
            max_response_tokens=config.max_response_tokens,
        )

    def logprobs(self, params: models.Params, batch: RolloutBatch, **with_also: bool) -> TokenPass:
        """Log-probabilities of the responses under `params`, and what `batch_logprobs` can add."""
        with self.peers.phase("logprobs"), self.device_lock:
            return batch_logprobs(
                params,
                batch,
                policy=self.policy,
                temperature=self.config.rollout.temperature,
                plan=row_plan(self.mesh, self.config.training),
                **with_also,
            )

    def ref_logprobs(self, batch: RolloutBatch) -> Float[np.ndarray, "B T"] | None:
        """Log-probabilities of the responses under the reference; None without one."""
        return None if self.reference is None else self.logprobs(self.reference, batch).logprobs

    def measured(
        self, scored: list[ScoredRollout], batch: RolloutBatch, tokens: TokenPass
    ) -> list[ScoredRollout]:
        """With what the training model's own pass measures, as far as the config wants it."""
        indicators = token_indicators(self.token_indicators, tokens, batch.response_mask)
        scored = [item.with_metrics(found) for item, found in zip(scored, indicators)]
        if self.config.hidden_states.source != "policy":
            return scored

        def measure_own() -> list[ScoredRollout]:
            pending = {i: self.measurer.submit(states) for i, states in tokens.states.items()}
            self.measurer.flush()
            with self.stop.interruptible():
                return [scored[i].with_measured(future.result()) for i, future in pending.items()]

        return self._of_all(together(self.peers, "metrics", measure_own))

    def mismatch(
        self, scored: Sequence[ScoredRollout], tokens: TokenPass, step: int
    ) -> dict[str, float]:
        """`rollout/..._mismatch/{mean,max}`: how far the rollout engine is from the training model.

        States are compared of the responses that one process has from both.
        """
        rollout = self.config.rollout
        scalars = logprob_mismatch(
            [item.rollout for item in scored],
            tokens.logprobs,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
        )
        if self.compares(step):
            own = state_differences(scored, tokens.states)
            scalars |= state_mismatch(self.peers.gather("mismatch", own))
        return scalars

    def measure_batch(
        self, scored: Sequence[ScoredRollout]
    ) -> concurrent.futures.Future[dict[str, float]]:
        """Starts measuring the batch as one set, beside the update; for observation alone."""
        if self.measurer is None or not self.leads:
            nothing: concurrent.futures.Future[dict[str, float]] = concurrent.futures.Future()
            nothing.set_result({})
            return nothing
        return self.measurer.submit_batch([item.mean_states for item in scored])

    def update(
        self,
        state: TrainState,
        batch: RolloutBatch,
        old_logprobs: Float[np.ndarray, "B T"],
        ref_logprobs: Float[np.ndarray, "B T"] | None,
        advantages: Float[Array, "B T"],
    ) -> tuple[TrainState, dict[str, float]]:
        """One optimiser step a mini-batch of prompts; scalars are means over them.

        The parameters and optimiser state of `state` are donated.

        Raises:
          RuntimeError: after `training.max_skipped_updates` non-finite updates in a row; the batch
            is saved in the run directory.
        """
        config, training = self.config, self.config.training
        size = training.prompts_per_minibatch * config.rollout.group_size
        params, opt_state, skipped = state.params, state.optimizer, int(state.skipped_in_row)
        num_updates = num_optimizer_updates(opt_state)
        history = []
        arrays = (batch, old_logprobs, ref_logprobs, np.asarray(advantages))
        for start in range(0, len(old_logprobs), size):
            minibatch = jax.tree.map(lambda leaf: leaf[start : start + size], arrays)  # noqa: B023
            with self.peers.phase("update"), self.device_lock:
                params, opt_state, scalars = jax.block_until_ready(
                    update_policy(
                        params,
                        opt_state,
                        *minibatch,
                        policy=self.policy,
                        optimizer=self.optimizer,
                        temperature=config.rollout.temperature,
                        plan=row_plan(self.mesh, training),
                        aggregation=config.algorithms.aggregation,
                        loss_options=tuple(sorted(config.algorithms.loss.items())),
                    )
                )
            history.append({name: float(value) for name, value in scalars.items()})
            skipped = skipped + 1 if history[-1]["policy/update_skipped"] else 0
            if skipped >= config.training.max_skipped_updates:
                file = self.workdir.path / "nonfinite_batch.npz"
                if self.leads:
                    save_arrays(file, minibatch)
                raise RuntimeError(
                    f"the loss or gradient of {skipped} updates in a row was not finite; the last "
                    f"mini-batch is in {file}. Lower training.learning_rate, or resume from an "
                    "earlier checkpoint."
                )
        means = {name: float(np.mean([h[name] for h in history])) for name in history[0]}
        means["policy/learning_rate"] = float(
            learning_rate_at(
                num_updates,
                learning_rate=training.learning_rate,
                learning_rate_warmup_steps=training.learning_rate_warmup_steps,
            )
        )
        return (
            state._replace(
                params=params,
                optimizer=opt_state,
                skipped_in_row=models.from_host(np.int32(skipped), models.replicated(self.mesh)),
            ),
            means,
        )

    def full_text(self, token_ids: np.ndarray) -> str:
        """Text as it is recorded, special tokens kept."""
        return data.full_text(self.tokenizer, token_ids)

    def first_state(self) -> TrainState:
        """The newest sound checkpoint, or the state before the first update."""
        options = self.config.shaping
        shaping = init_shaping_state(options.indicators, guidance=options.guidance)
        restored = self.checkpoints.restore(
            abstract_state(self.policy.shapes(), self.optimizer, shaping, self.mesh)
        )
        if restored is not None:
            return restored
        if self.reference is not None and self.config.model.reference_dtype == "float32":
            params = jax.tree.map(jnp.copy, self.reference)  # updates donate theirs
        else:
            params = starting_params(self.start, self.policy, self.mesh)
        return init_state(params, self.optimizer, shaping, self.mesh)

    def counters(self) -> dict[str, float]:
        """Events and bytes on the wire since the last call: of one step, so that a resumed run
        logs what the uninterrupted one does."""
        totals = {}
        if self.client is not None:
            totals |= {f"rollout/{name}": value for name, value in self.client.counters.items()}
        totals |= {f"reward/{name}": value for name, value in self.verifier.counters.items()}
        counts = {name: float(n - self.counted.get(name, 0)) for name, n in totals.items()}
        self.counted = totals
        summed: collections.Counter[str] = collections.Counter()
        for part in self.peers.gather("count", counts):
            summed.update(part)
        return dict(summed)

    def needs_policy_states(self, step: int) -> bool:
        """Whether the pass that computes `old_logprobs` should keep its hidden states."""
        return self.config.hidden_states.source == "policy" or self.compares(step)

    @property
    def token_indicators(self) -> tuple[str, ...]:
        """What the shaping takes from the tokens of that pass."""
        shaping = self.config.shaping
        tracked = {*shaping.indicators, shaping.guidance} if shaping.target != "none" else set()
        return tuple(name for name in TOKEN_INDICATORS if name in tracked)

    @property
    def metric_params(self) -> MetricParams:
        """What a replica is to measure, with `metrics.placement='rollout'`."""
        metrics = self.config.metrics
        return MetricParams(
            names=tuple(metrics.names),
            stride=metrics.stride,
            window=metrics.window,
            method=metrics.method,
            window_growth=metrics.window_growth,
            dtype=self.config.hidden_states.dtype,
            num_threads=metrics.num_threads,
        )

    def compares(self, step: int) -> bool:
        """Whether this step takes hidden states from both sources and logs their mismatch."""
        every = self.config.hidden_states.compare_every
        return bool(every) and step % every == 0

    def _sample(
        self,
        requests: Sequence[SampleRequest],
        references: Mapping[int, str],
        weights: tuple[models.Params, WeightVersion, int],
        **options: Any,
    ) -> list[ScoredRollout]:
        """All requested responses, scored, in (group, sample) order and in every process; each
        owner samples its groups.

        Where a replica has lost its weights, all send them again; the owner then samples its groups
        anew, what had arrived included. RuntimeError where that goes on for longer than
        `rollout.call_timeout_s`.
        """
        groups = list(dict.fromkeys(request.group_id for request in requests))
        own_groups = set(share_of(groups, self.owners, self.peers.index))
        own = [request for request in requests if request.group_id in own_groups]
        scored: list[ScoredRollout] = []
        timeout_s = self.config.rollout.call_timeout_s
        deadline = time.monotonic() + timeout_s
        reason = None

        def sample_own() -> None:
            if reason is not None and time.monotonic() > deadline:
                raise RuntimeError(
                    f"the responses of step {weights[2]} did not come within "
                    f"rollout.call_timeout_s={timeout_s:g} s ({reason})."
                )
            if own and not scored:
                scored.extend(self._sample_here(own, references, weights, **options))

        while True:
            try:
                together(self.peers, "sample", sample_own)
                break
            except Retry as retry:
                reason = retry
                params, _, step = weights
                self.reporter.line(f"the weights of step {step} are sent again: {reason}")
                self.sync_weights(params, step)
        return self._of_all(scored)

    def _of_all(self, scored: Sequence[ScoredRollout]) -> list[ScoredRollout]:
        """The responses of all processes in (group, sample) order, each of them held by one.

        Hidden states stay with the process that has them.
        """
        if self.peers.count == 1:
            return list(scored)
        parts = gather_bytes(self.peers, "exchange", pack_scored(scored))
        everything = {
            item.rollout.sample_id: item for part in parts for item in unpack_scored(part)
        }
        everything |= {item.rollout.sample_id: item for item in scored}  # with hidden states
        return sorted(
            everything.values(), key=lambda item: (item.rollout.group_id, item.rollout.sample_index)
        )

    def _sample_here(
        self,
        requests: Sequence[SampleRequest],
        references: Mapping[int, str],
        weights: tuple[models.Params, WeightVersion, int],
        *,
        temperature: float,
        top_p: float = 1.0,
        top_k: int = 0,
        measured: bool = False,
        keep_states: bool = False,
        clock: Clock | None = None,
        arrived: Callable[[Rollout], None],
    ) -> list[ScoredRollout]:
        params, version, step = weights

        def resync() -> WeightVersion:
            """A replica that restarted holds no weights; the same ones give the same version."""
            if self.peers.count > 1:
                raise Retry("a replica has lost them")
            return self.sync_weights(params, step)

        sampling = SamplingParams(
            max_tokens=self.config.rollout.max_response_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            eos_token_ids=self.end_token_ids,
            stop_token_ids=tuple(self.config.rollout.stop_token_ids),
        )
        there = measured and self.config.metrics.placement == "rollout"
        here = measured and not there
        layers = self.measurer.layers if here else (-1,) if keep_states else ()
        rollouts = self.client.generate(
            requests,
            sampling,
            HiddenStateParams(layers, self.config.hidden_states.dtype),
            version=version,
            metrics=self.metric_params if there else None,
            resync=resync,
        )
        with self.stop.interruptible(), contextlib.closing(rollouts):
            return score_and_measure(
                clock.iterate("generate", rollouts) if clock else rollouts,
                decode=functools.partial(data.verifier_text, self.tokenizer),
                references=references,
                verifier=self.verifier,
                measurer=self.measurer if here else None,
                keep_states=keep_states,
                arrived=arrived,
            )


def counter(bar: Bar, what: str, total: int) -> Callable[[Rollout], None]:
    """Shows on the bar how many responses have arrived."""
    count = itertools.count(1)
    return lambda _rollout: bar.status(f"{what} {next(count)}/{total}")


def save_arrays(file: pathlib.Path, tree: Any) -> None:
    """Saves the arrays of a pytree under their path names, for a look at what went wrong."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    with replacing(file) as out:
        np.savez(out, **{jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves})


def stream_seed(*path: int) -> int:
    """An unsigned 64-bit seed that follows from (seed, stream, step, prompt, sample)."""
    return int(np.random.SeedSequence(path).generate_state(1, np.uint64)[0])
