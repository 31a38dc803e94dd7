"""The vLLM engine: an unpatched vLLM whose workers load the plugin of third_party/vllm_patch.

It needs a separate Python environment (third_party/vllm_patch/make_env.sh). Every response is one
request to vLLM. The hidden states come through shared memory, where each request has a slot.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import functools
import inspect
import itertools
import json
import mmap
import os
import pathlib
import re
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from typing import Any

import ml_dtypes  # noqa: F401 - bfloat16 in NumPy
import numpy as np
from jaxtyping import Float, UInt8

from semrl_jax.data import StopMatcher, TokenBytes
from semrl_jax.rollout.engines.base import Engine, EngineDeadError
from semrl_jax.rollout.host_memory import available_bytes
from semrl_jax.rollout.wire.codec import GenerateCall, LimitExceeded, NotOffered
from semrl_jax.rollout.wire.shared_memory import layout
from semrl_jax.support.errors import UserError
from semrl_jax.types import (
    Adapter,
    FinishReason,
    HiddenStateParams,
    ReplicaDescription,
    Rollout,
    SampleRequest,
    SamplingParams,
    TensorSpec,
    TensorSum,
    VersionSpan,
    WeightVersion,
    distribution_of,
)

MAX_PROMPTS = 65_536  # responses of a call
EXTENSION = "semrl_vllm.extension.RolloutExtension"
ADAPTER_ID = 1  # of the only adapter
# vLLM has buffers of these sizes for adapters.
ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
CHECK_PROMPT_TOKENS = 5
CHECK_TOKENS = 8
CPU_CACHE_GIB = 4.0
NUM_LIKELIEST = 20  # tokens from which entropies are computed; vLLM's own limit
# The responses of all calls share its slots. With several calls, no slot is idle at the end of one.
CALLS_AT_ONCE = 4
# Relative error of the self-check. Correct rows differ by the rounding of another batch shape. The
# row of a neighbouring token differs by about its own length, a relative error of 1.
CHECK_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1}


@dataclasses.dataclass(frozen=True)
class VllmSettings:
    """How vLLM is started: `config.rollout.vllm_*`, by the names of vLLM's arguments, and more."""

    dtype: str = "bfloat16"  # of weights, activations and hidden states: "bfloat16" or "float32"
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 0
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.9
    kv_cache_gib: float = 0.0  # 0 takes the rest of the memory on a device, and 4 GiB on a CPU
    enforce_eager: bool = False
    quantization: str = ""
    max_tokens: int = 0  # of a prompt and its response together; 0: the sum of their limits
    inner_states: bool = False  # whether it gives those of all layers; without compilation
    sleeps: bool = False  # whether `sleep` may be called
    max_adapter_rank: int = 0  # of adapters that it applies unmerged; 0: none


@dataclasses.dataclass(frozen=True)
class VllmModel:
    """The model that the engine serves."""

    directory: str  # has config.json; the weights come from the trainer
    specs: tuple[TensorSpec, ...]  # tensors of a weight update
    model_hash: str
    tokenizer_hash: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    tokens: TokenBytes | None = None  # of the tokenizer; None: the engine takes no stop strings
    adapter_modules: tuple[str, ...] = ()  # of a layer, which may have adapters


class VllmEngine(Engine):
    """vLLM's asynchronous engine. `start` starts its processes, on the server's event loop.

    UserError: vLLM or the plugin is missing or not supported, or the hidden states of
    `max_num_seqs` responses do not fit into memory.
    """

    def __init__(
        self,
        model: VllmModel,
        settings: VllmSettings,
        *,
        max_prompt_tokens: int = 4096,
        max_response_tokens: int = 32_768,
    ):
        self.start_s: dict[str, float] = {}  # seconds that each part of `start` took, by name
        self._version_of_vllm = checked_version()
        self._model, self._settings = model, settings
        self._description = ReplicaDescription(
            engine="vllm",
            engine_version=self._version_of_vllm,
            model_hash=model.model_hash,
            tokenizer_hash=model.tokenizer_hash,
            vocab_size=model.vocab_size,
            layers=(*range(model.num_layers * settings.inner_states), -1, model.num_layers),
            state_kinds=("decode", "prefill"),
            logprob_kinds=("sampling", "entropy"),
            sampling_kinds=() if model.tokens is None else ("stop_strings",),
            max_prompts=MAX_PROMPTS,
            max_prompt_tokens=max_prompt_tokens,
            max_response_tokens=max_response_tokens,
            calls_at_once=CALLS_AT_ONCE,
            max_adapter_rank=settings.max_adapter_rank,
            layers_reason=""
            if settings.inner_states
            else "vLLM's compiled model gives out no inner ones; set rollout.vllm_inner_states, or "
            "take the JAX engine",
        )
        # More slots than running responses: a request can start while the rows of an ended one are
        # still being read.
        num_slots = settings.max_num_seqs + max(settings.max_num_seqs // 8, 1)
        self._pool_shape = _pool_shape(
            model, settings, num_slots, max_prompt_tokens, max_response_tokens
        )
        self._free_slots: asyncio.LifoQueue[int] = asyncio.LifoQueue()
        for slot in reversed(range(num_slots)):
            self._free_slots.put_nowait(slot)
        self._tags = itertools.count(1)
        self._running: set[str] = set()  # request ids
        self._num_aborts = 0  # a call that began before the last abort is ended by it
        self._staged: _Staging | None = None
        # What to restore after a failed update: weights, and perhaps a later adapter.
        self._serving: list[_Staging] = []
        self._spare: _Staging | None = None  # for the next update: new memory costs page faults
        self._is_asleep = False
        self._versions: dict[str, WeightVersion] = {}  # by vLLM's label of the weights
        self._llm: Any = None
        self._pool: Any = None

    def describe(self) -> ReplicaDescription:
        return self._description

    async def start(self) -> None:
        """Starts vLLM, installs the tap in its workers, and checks the rows.

        Raises UserError if vLLM cannot serve the model here; EngineDeadError if the hidden states
        of generated tokens differ from those of a prefill.
        """
        from semrl_vllm.pool import RowPool

        with self._timed("imports"):
            from vllm.v1.engine.async_llm import AsyncLLM  # noqa: F401
        with self._timed("engine"):
            self._llm = self._start_vllm()
        with self._timed("self-check"):
            self._pool = RowPool(self._pool_shape)
            inner = self._model.num_layers * self._settings.inner_states
            args = self._pool.path, dataclasses.asdict(self._pool_shape), *[inner] * bool(inner)
            (worker, *_) = await self._llm.collective_rpc("semrl_install", args=args)
            expected = {"width": self._model.hidden_size, "dtype": self._settings.dtype}
            if any(worker[name] != value for name, value in expected.items()):
                raise EngineDeadError(f"vLLM's worker has {worker}, not {expected}.")
            await self._check_alignment()

    async def generate(self, call: GenerateCall) -> AsyncIterator[Rollout]:
        started, num_aborts = time.monotonic(), self._num_aborts
        kinds = call.hidden_states.kinds if call.hidden_states.layers else ()
        if "prefill" in kinds:
            self._check_prompt_rows(call.requests)

        async def sample(request: SampleRequest) -> Rollout:
            found = await self._sample(
                request.prompt_ids,
                request.seed,
                call.sampling,
                kinds,
                num_aborts,
                on_tokens=call.on_tokens and functools.partial(call.on_tokens, request.sample_id),
                prompt_logprobs=call.prompt_logprobs,
                entropies=call.entropies,
            )
            return self._rollout(request, found, call.hidden_states, started)

        tasks = [asyncio.create_task(sample(request)) for request in call.requests]
        try:
            for task in asyncio.as_completed(tasks):
                yield await task
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def expected_tensors(self) -> Sequence[TensorSpec]:
        return self._model.specs

    def adapter_modules(self) -> Sequence[str]:
        return self._model.adapter_modules

    def begin_weight_update(
        self, specs: Sequence[TensorSpec], adapter: Adapter | None = None
    ) -> Mapping[str, np.ndarray]:
        self._staged, self._spare = self._spare, None
        if self._staged is None or self._staged.specs != tuple(specs):
            self._staged = _Staging(specs)
        self._staged.adapter = adapter
        return self._staged.buffers

    async def commit_weight_update(self, version: WeightVersion) -> None:
        staged, self._staged = self._staged, None
        label = str(len(self._versions) + 1)
        with _engine_errors():
            # The prefix cache was computed with the old weights: it is cleared.
            await self._llm.pause_generation(mode="abort", clear_cache=True)
            try:
                await self._wake("weights")
                await self._load(staged)
                await self._wake("kv_cache")
                self._is_asleep = False
                await self._llm.update_weight_version(label)
                self._versions[label] = version
            finally:
                await self._llm.resume_generation()

    def abort_weight_update(self) -> None:
        self._spare, self._staged = self._staged or self._spare, None

    async def tensor_sums(self) -> Sequence[TensorSum]:
        tensors = [[spec.name, list(spec.shape)] for spec in self._model.specs]
        with _engine_errors():
            (worker, *_) = await self._llm.collective_rpc("semrl_tensor_sums", args=(tensors,))
        adapter, changed = self._serving[-1].adapter, set()
        if adapter is not None:  # these are the base's
            names = (spec.name for spec in adapter.specs(self._model.specs))
            changed = {f"{name.rsplit('.', 2)[0]}.weight" for name in names}
        return [TensorSum(*each) for each in worker if each[0] not in changed]

    async def sleep(self) -> str:
        if not self._settings.sleeps:
            raise NotOffered("it was started without rollout.in_turns=True.")
        from vllm.platforms import current_platform

        with _engine_errors():
            # Level 1 would copy the weights to the host. New ones come in any case.
            await self._llm.sleep(level=2)
        self._is_asleep = True
        if current_platform.is_sleep_mode_available():
            return ""
        return "its vLLM frees no memory on this platform while it sleeps"

    async def _wake(self, part: str) -> None:
        """The part gets memory again. Its contents are lost."""
        if self._is_asleep:
            await self._llm.wake_up([part])

    async def abort(self) -> None:
        self._num_aborts += 1
        with _engine_errors():
            await self._llm.abort(list(self._running))

    def check(self) -> None:
        if self._llm is not None and self._llm.errored:
            raise EngineDeadError("vLLM's engine process is gone.")

    def close(self) -> None:
        if self._llm is not None:
            self._llm.shutdown()
            self._llm = None
        if self._pool is not None:
            self._pool.close()
            self._pool = None

    def _start_vllm(self) -> Any:
        from vllm import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        settings = self._settings
        kv_cache_gib = settings.kv_cache_gib or (CPU_CACHE_GIB if current_platform.is_cpu() else 0)
        limits = self._description
        errors = pathlib.Path(self._model.directory) / "errors.log"
        try:
            _log_errors_to(errors)
            config = AsyncEngineArgs(
                model=self._model.directory,
                skip_tokenizer_init=True,
                load_format="dummy",
                dtype=settings.dtype,
                max_model_len=settings.max_tokens
                or limits.max_prompt_tokens + limits.max_response_tokens,
                max_num_seqs=settings.max_num_seqs,
                max_num_batched_tokens=settings.max_num_batched_tokens or None,
                tensor_parallel_size=settings.tensor_parallel_size,
                gpu_memory_utilization=settings.gpu_memory_utilization,
                kv_cache_memory_bytes=int(kv_cache_gib * 2**30) or None,
                # A compiled model calls no hooks.
                enforce_eager=settings.enforce_eager or settings.inner_states,
                quantization=settings.quantization or None,
                **_lora_arguments(self._model, settings),
                enable_sleep_mode=settings.sleeps and current_platform.is_sleep_mode_available(),
                # The log-probabilities are of the distribution that is sampled from: after
                # temperature, top-k and top-p.
                logprobs_mode="processed_logprobs",
                worker_extension_cls=EXTENSION,
            ).create_engine_config()
            model = config.model_config
            _check_heads(model.hf_config, model.get_head_size())
            if config.parallel_config.distributed_executor_backend == "mp":
                check_queue_space(_queue_bytes(settings.tensor_parallel_size))
            return AsyncLLM.from_vllm_config(config, disable_log_stats=True)
        except UserError:
            raise
        except (ValueError, RuntimeError, OSError) as error:
            rounded = settings.quantization and f" with {settings.quantization} weights here"
            raise UserError(
                f"vLLM {self._version_of_vllm} cannot serve this model{rounded}: "
                f"{_root_cause(errors) or _reason(error)}"
            ) from error

    @contextlib.contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.start_s[part] = time.monotonic() - started

    async def _check_alignment(self) -> None:
        """Compares the states of one generation with prefills of its prefixes, token by token."""
        random, limits = np.random.default_rng(0), self._description
        length = min(CHECK_PROMPT_TOKENS, limits.max_prompt_tokens)
        prompt = random.integers(0, self._model.vocab_size, length, np.int32)
        sampling = SamplingParams(max_tokens=min(CHECK_TOKENS, limits.max_response_tokens))
        found = await self._sample(prompt, 0, sampling, ("decode", "prefill"), 0)
        # The state at the prompt's last token is in both kinds.
        rows = np.concatenate([found.rows["prefill"][:-1], found.rows["decode"]])
        one, tokens = SamplingParams(max_tokens=1), np.concatenate([prompt, found.token_ids])
        again = await asyncio.gather(
            *(self._sample(tokens[:end], 0, one, ("decode",), 0) for end in range(1, len(tokens)))
        )
        rows = self._as_states(rows, "float32")
        expected = self._as_states(np.concatenate([s.rows["decode"] for s in again]), "float32")
        difference = np.linalg.norm(rows - expected, axis=1) / np.linalg.norm(expected, axis=1)
        if not difference.max() < CHECK_TOLERANCE[self._settings.dtype]:
            raise EngineDeadError(
                f"hidden states of generated tokens differ from their own prefill by "
                f"{difference.max():.2g}: the plugin does not fit vLLM {self._version_of_vllm}."
            )

    async def _sample(
        self,
        prompt: np.ndarray,
        seed: int,
        sampling: SamplingParams,
        kinds: Sequence[str],
        num_aborts: int,
        on_tokens: Callable[[list[int]], None] | None = None,
        prompt_logprobs: bool = False,
        entropies: bool = False,
    ) -> _Sample:
        """Runs one request in a free slot, and reads its states of the given kinds."""
        async with self._slot() if kinds else contextlib.nullcontext() as slot:
            tag = next(self._tags)
            if self._num_aborts > num_aborts:
                rows = self._rows(kinds, slot, tag, 0, 0)
                empty = np.zeros(0, np.float32)
                return _Sample(np.zeros(0, np.int32), empty, "aborted", [], rows, None, None)
            request_id = str(tag)
            self._running.add(request_id)
            try:
                with _engine_errors():
                    found, num_kept = await self._last_output(
                        request_id, prompt, seed, sampling, kinds, slot, tag, on_tokens,
                        prompt_logprobs, entropies,
                    )  # fmt: skip
            finally:
                self._running.discard(request_id)
            output = found.outputs[0]
            ids = np.array(output.token_ids[:num_kept], np.int32)
            rows = self._rows(kinds, slot, tag, len(prompt), len(ids))
        # [T, 1]: of the sampled token. With entropies [T, 21]: of the likeliest tokens, too.
        found_logprobs = np.zeros((0, 1), np.float32)
        if len(ids):
            found_logprobs = np.array(output.logprobs.logprobs, np.float32)
            found_logprobs = found_logprobs.reshape(len(output.token_ids), -1)[: len(ids)]
        logprobs = found_logprobs[:, 0]
        assert len(logprobs) == len(ids), "one log-probability per token was asked for"
        reason = _finish_reason(output, sampling)
        if num_kept is not None:  # by a stop string
            reason = "eos" if ids[-1] in sampling.eos_token_ids else "stop"
        spans = [
            (span.version, span.start, min(span.end, len(ids)))
            for span in output.weight_versions or ()
            if span.start < len(ids)
        ]
        of_prompt = None
        if prompt_logprobs:
            pairs = zip(found.prompt_logprobs[1:], prompt[1:].tolist())
            of_prompt = np.array([0.0, *(each[i].logprob for each, i in pairs)], np.float32)
        of_tokens = None
        if entropies:
            of_tokens = least_entropies(found_logprobs[:, 1:]) if len(ids) else logprobs
        return _Sample(ids, logprobs, reason, spans, rows, of_prompt, of_tokens)

    def _rows(
        self, kinds: Sequence[str], slot: int | None, tag: int, prompt_len: int, num_tokens: int
    ) -> dict[str, UInt8[np.ndarray, "_ bytes"]]:
        """The rows of a request that has ended, by kind of state."""
        rows = {}
        if "decode" in kinds:
            rows["decode"] = self._pool.read(slot, tag, num_tokens)
        if "prefill" in kinds:
            # Without a token, the request may have been aborted in the middle of its prompt.
            count = prompt_len if num_tokens else 0
            rows["prefill"] = self._pool.take_prompt(slot, tag, count)
        return rows

    def _check_prompt_rows(self, requests: Sequence[SampleRequest]) -> None:
        """Refuses a call if its prompt states do not fit into memory."""
        num_concurrent = min(len(requests), self._pool_shape.num_slots)
        longest = max(len(request.prompt_ids) for request in requests)
        wanted = num_concurrent * longest * self._pool_shape.row_bytes
        available = available_bytes()
        if wanted > available:
            raise LimitExceeded(
                f"states of {num_concurrent} prompts of {longest} tokens need {wanted / 2**30:.1f} "
                f"GiB, but {available / 2**30:.1f} GiB are free; ask for fewer samples at once."
            )

    async def _last_output(
        self,
        request_id,
        prompt,
        seed,
        sampling,
        kinds,
        slot,
        tag,
        on_tokens,
        prompt_logprobs,
        entropies,
    ) -> tuple[Any, int | None]:
        """The final output; how many of its tokens stay if a stop string ended it, else None."""
        import vllm
        from vllm.inputs import tokens_input
        from vllm.lora.request import LoRARequest
        from vllm.sampling_params import RequestOutputKind

        wants_prompt = "prefill" in kinds
        extra = {"semrl_slot": slot, "semrl_tag": tag, "semrl_prompt": wants_prompt}
        params = vllm.SamplingParams(
            **distribution_of(sampling),
            max_tokens=sampling.max_tokens,
            seed=seed,
            stop_token_ids=[*sampling.eos_token_ids, *sampling.stop_token_ids],
            ignore_eos=True,  # only the end tokens of the call end a response
            logprobs=NUM_LIKELIEST if entropies else 0,
            prompt_logprobs=0 if prompt_logprobs else None,
            flat_logprobs=True,
            detokenize=False,
            # An output has all tokens so far. If nobody looks at them, only the last one is needed.
            output_kind=RequestOutputKind.CUMULATIVE
            if sampling.stop_strings or on_tokens
            else RequestOutputKind.FINAL_ONLY,
            extra_args=extra if kinds else None,
            # Tokens read from the prefix cache are not computed, so they would have no states.
            skip_reading_prefix_cache=wants_prompt,
        )
        matcher = None
        if sampling.stop_strings:
            matcher = StopMatcher(self._model.tokens, sampling.stop_strings)
        num_read, num_kept = 0, None
        adapter = None
        if self._serving and self._serving[-1].adapter is not None:
            # Workers have it already, so that they do not read the path.
            adapter = LoRARequest("adapter", ADAPTER_ID, lora_path="in memory")
        outputs = self._llm.generate(
            tokens_input(prompt.tolist()), params, request_id, lora_request=adapter
        )
        async for found in outputs:
            output = found.outputs[0]
            if num_kept is not None:  # what was sampled until vLLM ended it
                continue
            new_ids = list(output.token_ids[num_read:])
            count = matcher.feed(new_ids) if matcher else None
            if on_tokens and new_ids:
                on_tokens(new_ids[:count])
            if count is not None:
                num_kept = num_read + count
                if not found.finished:
                    await self._llm.abort(request_id)
            num_read += len(new_ids)
        return found, num_kept

    @contextlib.asynccontextmanager
    async def _slot(self) -> AsyncIterator[int]:
        slot = await self._free_slots.get()
        try:
            yield slot
        finally:
            self._free_slots.put_nowait(slot)

    def _rollout(
        self,
        request: SampleRequest,
        found: _Sample,
        hidden_states: HiddenStateParams,
        started: float,
    ) -> Rollout:
        spans = [VersionSpan(self._versions[label], *span) for label, *span in found.spans]
        planes = {}
        for kind, rows in found.rows.items():
            states = self._as_states(rows, hidden_states.dtype)
            count = 1 + self._model.num_layers * self._settings.inner_states  # final ones are last
            states = states.reshape(len(states), count, self._model.hidden_size)
            final = -1, self._model.num_layers
            places = [-1 if layer in final else layer for layer in hidden_states.layers]
            planes[kind] = states[:, places]
        return Rollout(
            **request.rollout_fields,
            response_ids=found.token_ids,
            rollout_logprobs=found.logprobs,
            rollout_raw_logprobs=None,
            finish_reason=found.finish_reason,
            versions=tuple(spans),
            hidden_states=planes.get("decode"),
            prompt_states=planes.get("prefill"),
            layers=hidden_states.layers,
            prompt_logprobs=found.prompt_logprobs,
            entropies=found.entropies,
            generate_s=time.monotonic() - started,
        )

    def _as_states(
        self, rows: UInt8[np.ndarray, "T bytes"], dtype: str
    ) -> Float[np.ndarray, "T D"]:
        return rows.view(np.dtype(self._settings.dtype)).astype(np.dtype(dtype), copy=False)

    async def _load(self, staged: _Staging) -> None:
        """Loads new weights into the workers; if that fails, the previous ones again."""
        try:
            await self._load_one(staged)
        except Exception as error:
            if not self._serving:
                raise EngineDeadError(f"vLLM took no weights: {error}") from error
            try:
                for earlier in self._serving:
                    await self._load_one(earlier)
            except Exception as again:
                raise EngineDeadError(f"vLLM took neither new nor old weights: {again}") from error
            raise
        kept = [] if staged.manifests[0] else self._serving[:1]
        self._spare = self._serving[-1] if len(self._serving) > len(kept) else None
        self._serving = [*kept, staged]

    async def _load_one(self, staged: _Staging) -> None:
        base, adapter = staged.manifests
        if base:
            await self._llm.collective_rpc("semrl_load_weights", args=(staged.path, base))
        if adapter:  # after its base, which removes an earlier one
            args = staged.path, adapter, staged.adapter.rank
            await self._llm.collective_rpc("semrl_load_adapter", args=args)


@dataclasses.dataclass(frozen=True)
class _Sample:
    token_ids: np.ndarray
    logprobs: np.ndarray
    finish_reason: FinishReason
    spans: Sequence[tuple[str, int, int]]  # vLLM's label of the weights, first token, end
    rows: dict[str, np.ndarray]  # uint8 [T, bytes] by kind of state
    prompt_logprobs: np.ndarray | None
    entropies: np.ndarray | None  # of `least_entropies`


def least_entropies(logprobs: Float[np.ndarray, "T K"]) -> Float[np.ndarray, " T"]:
    """Float32 entropies in nats, from the K likeliest tokens and all others as one.

    H = -sum_k p_k log p_k - r log r, r = max(1 - sum_k p_k, 0)

    At most the entropy, and equal to it if one token besides these has probability. `logprobs` may
    be -inf.
    """
    p = np.exp(logprobs.astype(np.float64))
    p = np.concatenate([p, np.maximum(1 - p.sum(axis=1, keepdims=True), 0)], axis=1)
    return -np.sum(p * np.log(np.where(p > 0, p, 1)), axis=1).astype(np.float32)


class _Staging:
    """The weights of one update, in an anonymous file that workers can map."""

    def __init__(self, specs: Sequence[TensorSpec]):
        self.specs = tuple(specs)
        self.adapter: Adapter | None = None  # whose tensors are the last ones
        starts, num_bytes = layout(specs)
        self._file = os.memfd_create("semrl-staging", os.MFD_CLOEXEC)
        os.ftruncate(self._file, max(num_bytes, 1))
        self._memory = mmap.mmap(self._file, max(num_bytes, 1))
        # Opens the file in other processes of the same user.
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        self.manifest = [  # name, dtype, shape, first byte
            [spec.name, spec.dtype, list(spec.shape), start] for spec, start in zip(specs, starts)
        ]
        self.buffers = {  # uint8, writable
            spec.name: np.frombuffer(self._memory, np.uint8, spec.num_bytes, start)
            for spec, start in zip(specs, starts)
        }

    @property
    def manifests(self) -> tuple[list[list], list[list]]:
        """The tensors of an adapter come after all others."""
        parts: tuple[list[list], list[list]] = ([], [])
        for entry in self.manifest:
            parts[".lora_" in entry[0]].append(entry)
        return parts

    def __del__(self):
        os.close(self._file)


def _lora_arguments(model: VllmModel, settings: VllmSettings) -> dict[str, Any]:
    """vLLM's arguments for one adapter. Modules without adapters, as of experts, get no buffers."""
    if not settings.max_adapter_rank:
        return {}
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": next(n for n in ADAPTER_RANKS if n >= settings.max_adapter_rank),
        "lora_target_modules": [name.rpartition(".")[2] for name in model.adapter_modules],
    }


def _finish_reason(output: Any, sampling: SamplingParams) -> FinishReason:
    if output.finish_reason == "stop":
        return "eos" if output.stop_reason in sampling.eos_token_ids else "stop"
    return "length" if output.finish_reason == "length" else "aborted"


@contextlib.contextmanager
def _engine_errors() -> Iterator[None]:
    """Converts vLLM's error for a dead engine to the service's."""
    from vllm.v1.engine.exceptions import EngineDeadError as VllmDead

    try:
        yield
    except VllmDead as error:
        raise EngineDeadError(f"vLLM's engine process is gone: {error}") from error


def _reason(error: Exception) -> str:
    """The line of vLLM's error with the reason, which pydantic puts after a title."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = [line for line in lines if line.startswith("Value error")]
    return (said or lines or [type(error).__name__])[0]


def _log_errors_to(file: pathlib.Path) -> None:
    """Makes vLLM's processes log their errors to a file too; the parent's has no root cause."""
    from vllm.logger import DEFAULT_LOGGING_CONFIG

    if os.environ.get("VLLM_LOGGING_CONFIG_PATH") or os.environ.get("VLLM_CONFIGURE_LOGGING"):
        return  # the user has configured logging
    config = copy.deepcopy(DEFAULT_LOGGING_CONFIG)
    config["formatters"]["plain"] = {"format": "%(message)s"}
    config["handlers"]["errors"] = {
        "class": "logging.FileHandler", "filename": str(file), "delay": True, "level": "ERROR",
        "formatter": "plain",
    }  # fmt: skip
    config["loggers"]["vllm"]["handlers"].append("errors")
    path = file.with_name("logging.json")
    path.write_text(json.dumps(config))
    os.environ["VLLM_LOGGING_CONFIG_PATH"] = str(path)


def _root_cause(file: pathlib.Path) -> str:
    """The last exception in a log that is not a reference to another one, or ""."""
    lines = file.read_text(errors="replace").splitlines() if file.exists() else []
    errors = [
        f"{line.rstrip()} {after}" if line.rstrip().endswith(":") else line  # a list of reasons
        for line, after in zip(lines, [*lines[1:], ""])
        if re.match(r"[\w.]+(Error|Exception): ", line)
    ]
    causes = [line for line in errors if "root cause" not in line] or [""]
    hint = " (here: rollout.vllm_kv_cache_gib)" if "cache" in causes[-1] else ""
    return causes[-1] + hint


def checked_version() -> str:
    """The version of vLLM; raises UserError if it or the plugin is missing or does not fit."""
    try:
        import semrl_vllm
    except ModuleNotFoundError:
        raise UserError(
            "--engine=vllm needs the plugin semrl_vllm, which is not installed here; make the "
            "replica's environment with third_party/vllm_patch/make_env.sh and use its python."
        ) from None
    try:
        return semrl_vllm.vllm_version()
    except semrl_vllm.VersionError as error:
        raise UserError(str(error)) from None


def _pool_shape(
    model: VllmModel,
    settings: VllmSettings,
    num_slots: int,
    max_prompt_tokens: int,
    max_response_tokens: int,
) -> Any:
    """The shape of the pool; UserError if the rows of the responses do not fit into memory."""
    from semrl_vllm.pool import PoolShape

    shape = PoolShape(
        num_slots=num_slots,
        num_rows=max_response_tokens,
        num_prompt_rows=max_prompt_tokens,
        width=model.hidden_size * (1 + model.num_layers * settings.inner_states),
        item_bytes=np.dtype(settings.dtype).itemsize,
    )
    of_responses = dataclasses.replace(shape, num_prompt_rows=0).num_bytes
    available = available_bytes()
    if of_responses > available:
        raise UserError(
            f"hidden states of rollout.vllm_max_num_seqs={settings.max_num_seqs} responses of "
            f"{max_response_tokens} tokens need {of_responses / 2**30:.1f} GiB of shared "
            f"memory, and {available / 2**30:.1f} GiB are available; lower "
            "rollout.vllm_max_num_seqs or rollout.max_response_tokens."
        )
    return shape


def _check_heads(hf_config: Any, head_size: int) -> None:
    """Refuses head sizes that vLLM's Qwen2 would take for others without an error."""
    wanted = hf_config.hidden_size // hf_config.num_attention_heads
    if hf_config.model_type == "qwen2" and head_size != wanted:
        raise UserError(
            f"the model's heads are {head_size} wide, and vLLM's Qwen2 has heads of hidden size "
            f"/ number of heads, here {wanted}; sample with --engine=jax."
        )
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    sizes = CPUAttentionBackend.get_supported_head_sizes()
    if head_size not in sizes:
        raise UserError(
            f"the model's heads are {head_size} wide, and vLLM's attention on CPU takes "
            f"{', '.join(map(str, sizes))}; sample with --engine=jax, or on a GPU."
        )


def _queue_bytes(num_workers: int) -> int:
    """Bytes of shared memory for vLLM's queues to and from workers, which are rings of chunks."""
    from vllm import envs
    from vllm.distributed.device_communicators.shm_broadcast import MessageQueue

    defaults = {
        name: parameter.default
        for name, parameter in inspect.signature(MessageQueue.__init__).parameters.items()
    }
    chunks = envs.VLLM_MQ_MAX_CHUNK_BYTES_MB * 2**20 + num_workers * defaults["max_chunk_bytes"]
    return defaults["max_chunks"] * chunks


def check_queue_space(num_bytes: int, directory: str = "/dev/shm") -> None:
    """Raises UserError if too little shared memory is free; vLLM's own error is lost in a child."""
    free = shutil.disk_usage(directory).free
    if num_bytes > free:
        raise UserError(
            f"the queues between vLLM's processes need {num_bytes / 2**20:.0f} MiB of {directory}, "
            f"where {free / 2**20:.0f} MiB are free; give the container more (docker run "
            "--shm-size=1g, or --ipc=host), or, with one device, set "
            "VLLM_ENABLE_V1_MULTIPROCESSING=0: its worker then needs no queue."
        )
