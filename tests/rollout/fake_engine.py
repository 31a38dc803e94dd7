"""An engine for tests whose output can be worked out by hand. It serves no model."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import os
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence

import numpy as np
from jaxtyping import Int

from semrl_jax.rollout.engines.base import Engine, EngineDeadError
from semrl_jax.rollout.wire.codec import STATE_DTYPES, WEIGHT_DTYPES, GenerateCall, as_bytes
from semrl_jax.types import (
    Adapter,
    HiddenStateParams,
    ReplicaDescription,
    Rollout,
    SampleRequest,
    SamplingParams,
    TensorSpec,
    VersionSpan,
    WeightVersion,
)

FAKE_SPECS = (
    TensorSpec("embed.weight", (16, 8), "float32"),
    TensorSpec("norm.weight", (8,), "float32"),
)


@dataclasses.dataclass
class FakeScript:
    """Which failures occur, and when; can be changed while the engine runs."""

    delay_s: float = 0.0  # before every response
    # The index of a response, counted over the engine's life, at which the engine
    hang_after: int | None = None  # hangs
    fail_after: int | None = None  # raises
    die_after: int | None = None  # raises EngineDeadError
    exit_after: int | None = None  # ends the process
    backwards: bool = False  # the responses come
    commit_delay_s: float = 0.0
    fail_commit: bool = False
    sleeps: bool = True
    remark: str = ""  # of a sleep


DESCRIPTION = {
    "engine": "fake", "engine_version": "1", "model_hash": "fake-model",
    "tokenizer_hash": "fake-tokenizer", "vocab_size": 101, "layers": (-1, 0, 1, 2),
    "state_kinds": ("decode", "prefill"), "logprob_kinds": ("sampling", "raw"),
    "max_prompts": 1024, "max_prompt_tokens": 64, "max_response_tokens": 4096,
}  # fmt: skip


class FakeEngine(Engine):
    """Closed forms in place of a model, see `fake_rollout`; `description` changes the defaults."""

    def __init__(self, *, specs=FAKE_SPECS, hidden_size=8, script=None, **description):
        self.script = script or FakeScript()
        self.weights: dict[str, np.ndarray] = {}  # the committed tensors by name
        self.num_yielded = 0  # responses so far
        self.num_hung = 0  # calls that hung so far, and hang until they are aborted
        self.num_closed = 0  # calls that have ended
        self.num_staged = 0  # weight updates begun
        self.num_sleeps = 0
        self._specs = tuple(specs)
        self._hidden_size = hidden_size
        self._description = ReplicaDescription(**DESCRIPTION | description)
        self.asked: list[tuple[str, ...]] = []  # the sample ids of every call
        self.most_at_once = 0  # calls that ran at the same time
        self._staged: dict[str, np.ndarray] = {}
        self._staged_specs: tuple[TensorSpec, ...] = ()
        self._calls: set[asyncio.Event] = set()  # one per running call, set to abort it

    def describe(self) -> ReplicaDescription:
        return self._description

    async def generate(self, call: GenerateCall) -> AsyncIterator[Rollout]:
        aborting = asyncio.Event()
        self._calls.add(aborting)
        self.asked.append(tuple(request.sample_id for request in call.requests))
        self.most_at_once = max(self.most_at_once, len(self._calls))
        try:
            for request in reversed(call.requests) if self.script.backwards else call.requests:
                await self._play(aborting)
                rollout = fake_rollout(
                    request,
                    call.sampling,
                    call.hidden_states,
                    call.version,
                    vocab_size=self._description.vocab_size,
                    hidden_size=self._hidden_size,
                )
                if aborting.is_set():
                    rollout = _aborted(rollout)
                self.num_yielded += 1
                yield rollout
        finally:
            self._calls.discard(aborting)
            self.num_closed += 1

    def expected_tensors(self) -> Sequence[TensorSpec]:
        return self._specs

    def adapter_modules(self) -> Sequence[str]:
        return ("mlp.up_proj", "mlp.down_proj")

    def begin_weight_update(
        self, specs: Sequence[TensorSpec], adapter: Adapter | None = None
    ) -> Mapping[str, np.ndarray]:
        self.num_staged += 1
        self._staged_specs = tuple(specs)
        self._staged = {spec.name: np.empty(spec.num_bytes, np.uint8) for spec in specs}
        return self._staged

    def load_arrays(self, arrays: Iterable[tuple[str, np.ndarray]]) -> list[str]:
        unsound = []
        for name, array in arrays:
            self._staged[name][:] = as_bytes(array)
            if not np.isfinite(array).all():
                unsound.append(name)
        return unsound

    async def commit_weight_update(self, version: WeightVersion) -> None:
        await asyncio.sleep(self.script.commit_delay_s)
        if self.script.fail_commit:
            raise RuntimeError("the script says so")
        whole = {spec.name for spec in self._specs} <= self._staged.keys()
        kept = {} if whole else {spec.name: self.weights[spec.name] for spec in self._specs}
        self.weights = kept | {
            spec.name: self._staged[spec.name].view(WEIGHT_DTYPES[spec.dtype]).reshape(spec.shape)
            for spec in self._staged_specs
        }
        self.abort_weight_update()

    async def sleep(self) -> str:
        self.num_sleeps += 1
        if not self.script.sleeps:
            return await super().sleep()
        await asyncio.sleep(self.script.commit_delay_s)
        self.weights = {}
        return self.script.remark

    def abort_weight_update(self) -> None:
        self._staged, self._staged_specs = {}, ()

    @property
    def is_staging(self) -> bool:
        return bool(self._staged)

    async def abort(self) -> None:
        for aborting in self._calls:
            aborting.set()

    async def _play(self, aborting: asyncio.Event) -> None:
        script, count = self.script, self.num_yielded
        if aborting.is_set():
            return
        if script.fail_after is not None and count >= script.fail_after:
            raise RuntimeError("the script says so")
        if script.die_after is not None and count >= script.die_after:
            raise EngineDeadError("the script says so")
        if script.exit_after is not None and count >= script.exit_after:
            os._exit(1)
        hangs = script.hang_after is not None and count >= script.hang_after
        self.num_hung += hangs
        if hangs or script.delay_s:
            with contextlib.suppress(TimeoutError):  # `abort` ends a delay and even a hang
                await asyncio.wait_for(aborting.wait(), None if hangs else script.delay_s)


def fake_rollout(
    request: SampleRequest,
    sampling: SamplingParams,
    hidden_states: HiddenStateParams,
    version: WeightVersion,
    *,
    vocab_size: int,
    hidden_size: int,
) -> Rollout:
    """The response of the fake engine.

    Token t is (sum of the prompt + seed + t) mod vocabulary. There are 1 + seed mod max_tokens of
    them, fewer where an end or stop token comes first. Log-probabilities are -(t + 1) / 8 and, raw,
    -(t + 1) / 4. The hidden state of token id x in layer l is (x + 3 l + d) mod 128 at d, of a
    prompt's, too: every value is exact in bfloat16.
    """
    num_tokens = 1 + request.seed % sampling.max_tokens
    first = (int(request.prompt_ids.sum()) + request.seed) % vocab_size
    ids = ((first + np.arange(num_tokens)) % vocab_size).astype(np.int32)
    reason = "length"
    ends = np.isin(ids, (*sampling.eos_token_ids, *sampling.stop_token_ids))
    if ends.any():
        ids = ids[: int(ends.argmax()) + 1]
        reason = "eos" if int(ids[-1]) in sampling.eos_token_ids else "stop"
    steps = np.arange(1, len(ids) + 1, dtype=np.float32)
    return Rollout(
        **request.rollout_fields,
        response_ids=ids,
        rollout_logprobs=-steps / 8,
        rollout_raw_logprobs=-steps / 4,
        finish_reason=reason,
        versions=(VersionSpan(version, 0, len(ids)),),
        hidden_states=_fake_states("decode", ids, hidden_states, hidden_size),
        prompt_states=_fake_states("prefill", request.prompt_ids, hidden_states, hidden_size),
        layers=hidden_states.layers,
    )


def _fake_states(
    kind: str, ids: Int[np.ndarray, " T"], params: HiddenStateParams, hidden_size: int
):
    if not params.layers or kind not in params.kinds:
        return None
    return _state_table(params, hidden_size)[ids % 128]


@functools.lru_cache
def _state_table(params: HiddenStateParams, hidden_size: int) -> np.ndarray:
    """[128, L, D]: the states of every token id modulo 128."""
    planes = 3 * np.array(params.layers, np.int32)[:, None] + np.arange(hidden_size, dtype=np.int32)
    table = (np.arange(128, dtype=np.int32)[:, None, None] + planes) % 128
    return table.astype(STATE_DTYPES[params.dtype])


def _aborted(rollout: Rollout) -> Rollout:
    """The response as if it had been aborted before its first token."""
    states, prompt_states = rollout.hidden_states, rollout.prompt_states
    return dataclasses.replace(
        rollout,
        response_ids=rollout.response_ids[:0],
        rollout_logprobs=rollout.rollout_logprobs[:0],
        rollout_raw_logprobs=None,
        response_mask=rollout.response_mask[:0],
        finish_reason="aborted",
        versions=(),
        hidden_states=None if states is None else states[:0],
        prompt_states=None if prompt_states is None else prompt_states[:0],
    )
