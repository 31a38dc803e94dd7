"""The JAX engine: samples on devices of this process, with its own copy of the weights."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import threading
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Bool

from semrl_jax.data import StopMatcher, TokenBytes
from semrl_jax.models import (
    AXES,
    Params,
    Policy,
    UnstackedParams,
    array_sums,
    iterate_engine_tensors,
    layer_kernels,
    make_mesh,
    parameter_shardings,
    tensor_specs,
    unstacked,
)
from semrl_jax.rollout import host_memory
from semrl_jax.rollout.engines.base import Engine
from semrl_jax.rollout.engines.decoding import DecodingCall
from semrl_jax.rollout.engines.keeping import Kept
from semrl_jax.rollout.wire.codec import GenerateCall
from semrl_jax.support.programs import is_one_cpu, num_side_by_side
from semrl_jax.types import (
    Adapter,
    ReplicaDescription,
    Rollout,
    TensorSpec,
    TensorSum,
    WeightVersion,
)

MIN_PART = 16  # responses in a part of a call
_ALIGNMENT = 64  # bytes


class JaxEngine(Engine):
    """Prefill and decoding with a KV cache, on `Policy`.

    Programs are compiled for padded sizes; at most `decoding.MAX_PROGRAMS` are kept. On a CPU, a
    call is decoded in parts, as many side by side as there are cores. If it has more responses than
    slots, the next part begins when all its responses have a slot: none then reads the columns of
    the cache that only an older one needs.

    Args:
      policy: the architecture and the compute dtype; its mesh is not used.
      mesh: devices of this process only, so that the engine never waits for another one; None
        takes the first device. Responses are split over the data axes (a power of two in total),
        parameters, heads and vocabulary over `tensor`, as far as `check_mesh` permits.
      tokenizer_hash, tokens: of the tokenizer; no tokens: the engine takes no stop strings.
      max_batch, chunk: as in `DecodingCall`.
      max_prompts: limit on the responses of a call.
      device_lock: held while a program runs. The trainer shares it with its embedded replica, so
        that sampling and updates do not run concurrently.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        mesh: Mesh | None = None,
        tokenizer_hash: str = "",
        tokens: TokenBytes | None = None,
        max_batch: int = 64,
        chunk: int = 16,
        max_prompts: int = 65_536,
        max_prompt_tokens: int = 4096,
        max_response_tokens: int = 32_768,
        device_lock: contextlib.AbstractContextManager | None = None,
    ):
        if mesh is None:
            mesh = make_mesh(dict.fromkeys(AXES, 1), jax.local_devices()[:1])
        policy.check_attention(mesh)
        self._policy = dataclasses.replace(policy, mesh=mesh)
        by_layer = functools.partial(unstacked, config=policy.config)
        self._shardings = parameter_shardings(jax.eval_shape(by_layer, policy.shapes()), mesh)
        self._description = ReplicaDescription(
            engine="jax",
            engine_version=jax.__version__,
            model_hash=policy.config.hash,
            tokenizer_hash=tokenizer_hash,
            vocab_size=policy.config.vocab_size,
            layers=(*range(policy.config.num_layers + 1), -1),
            state_kinds=("decode", "prefill"),
            logprob_kinds=("sampling", "raw", "entropy"),
            sampling_kinds=() if tokens is None else ("stop_strings",),
            max_prompts=max_prompts,
            max_prompt_tokens=max_prompt_tokens,
            max_response_tokens=max_response_tokens,
            is_deterministic=True,
            calls_at_once=1,  # `generate` does one after the other
            max_adapter_rank=policy.config.hidden_size,  # a side of every kernel
            routed_experts=policy.config.routed_experts,
        )
        self._tokens = tokens
        self._max_batch = max_batch
        self._chunk = chunk
        self._device_lock = device_lock or contextlib.nullcontext()
        self._params: Params | None = None
        self._adapter: Adapter | None = None  # in the parameters
        self._staged: _StagedWeights | None = None
        # In one thread the programs run one after the other, and the event loop stays free.
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="jax-engine")
        self._one_call = asyncio.Lock()
        # Two programs of 32 rows on two cores took 0.7 times as long as one of 64 rows on both.
        self._in_parts = is_one_cpu(mesh)
        self._parallel = num_side_by_side(mesh)
        self._parts = concurrent.futures.ThreadPoolExecutor(self._parallel, "jax-engine-part")
        self._kept: list[dict[str, Kept]] = []  # by call, then by sample id; see keeping.py
        self._num_aborts = 0  # a call that began before the last abort is ended by it

    def describe(self) -> ReplicaDescription:
        return self._description

    async def generate(self, call: GenerateCall) -> AsyncIterator[Rollout]:
        loop = asyncio.get_running_loop()
        num_aborts = self._num_aborts
        async with self._one_call:  # calls never share a batch
            parts = calls = await loop.run_in_executor(self._thread, self._start, call)
            ended: list[Rollout] = []
            while calls or ended:
                is_aborted = self._num_aborts > num_aborts
                step = loop.run_in_executor(self._thread, self._step, calls, is_aborted)
                for rollout in ended:  # the devices go on while these are sent
                    yield rollout
                ended = await step
                calls = [part for part in calls if not part.done]
                if not calls:  # before the last ones are sent: the client may end the call then
                    self._keep(parts)

    def expected_tensors(self) -> Sequence[TensorSpec]:
        return tensor_specs(self._policy.config, "float32")

    def release(self, weights: bool = False) -> None:
        self._kept = []
        if weights:
            self._params = None
            host_memory.give_back()  # where the device is a CPU, a layer's weights are small arrays

    async def sleep(self) -> str:
        self.release(weights=True)
        return ""

    def adapter_modules(self) -> Sequence[str]:
        return [kernel.name for kernel in layer_kernels(self._policy.config).values()]

    def begin_weight_update(
        self, specs: Sequence[TensorSpec], adapter: Adapter | None = None
    ) -> Mapping[str, np.ndarray]:
        self.release()  # the memory is needed for these weights
        policy, (first, *_) = self._policy, self.expected_tensors()
        has_base = any(spec.name == first.name for spec in specs)
        base = None if has_base else self._params
        params = UnstackedParams(policy.config, self._shardings, policy.compute_dtype, adapter)
        self._staged = _StagedWeights(specs, params, self._device_lock, adapter, base)
        return self._staged

    def lend_tensors(self, tensors: Mapping[str, np.ndarray]) -> bool:
        self._staged.lend(tensors)
        return True

    def load_tensors(self, names: Sequence[str]) -> None:
        self._staged.load(names)

    def load_arrays(self, arrays: Iterable[tuple[str, np.ndarray | jax.Array]]) -> list[str]:
        return self._staged.load_arrays(arrays)

    async def commit_weight_update(self, version: WeightVersion) -> None:
        staged, self._staged = self._staged, None
        self.release()  # what was kept since the update began
        # Waits for the program that runs, then for the last tensors on the devices.
        loop = asyncio.get_running_loop()
        self._params = await loop.run_in_executor(self._thread, staged.finish)
        self._adapter = staged.adapter

    def abort_weight_update(self) -> None:
        self._staged = None

    async def tensor_sums(self) -> Sequence[TensorSum]:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._sums)

    async def abort(self) -> None:
        self._num_aborts += 1

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._parts.shutdown()
        self._params = None

    def _sums(self) -> list[TensorSum]:
        found = []
        with self._device_lock:
            # One tensor after the other: no more than one is held in another layout.
            for spec, array in iterate_engine_tensors(
                self._params, self._policy.config, self._adapter
            ):
                checksum, norm = array_sums(array)
                found.append(TensorSum(spec.name, spec.dtype, int(checksum), float(norm)))
        return found

    def _start(self, call: GenerateCall) -> list[DecodingCall]:
        """The parts of the call in the order in which they begin."""
        stop_strings, new_matcher = call.sampling.stop_strings, None
        if stop_strings:
            new_matcher = functools.partial(StopMatcher, self._tokens, stop_strings)
        kept = self._taken(call)
        num_requests = len(call.requests)
        num_parts = max(1, min(self._parallel, min(num_requests, self._max_batch) // MIN_PART))
        max_batch = self._max_batch // num_parts
        if num_requests <= self._max_batch:  # no response waits, also not in the larger parts
            max_batch = self._max_batch
        ends = [num_requests * part // num_parts for part in range(num_parts + 1)]
        size = self._max_batch // max(num_parts, 2)  # at least two, else only one would run
        if self._in_parts and num_requests > self._max_batch and size >= MIN_PART:
            ends = [*range(0, num_requests, size), num_requests]
        return [
            DecodingCall(
                self._policy,
                self._params,
                call._replace(requests=call.requests[start:end]),
                max_batch=max_batch,
                chunk=self._chunk,
                new_matcher=new_matcher,
                kept=kept,
            )
            for start, end in itertools.pairwise(ends)
        ]

    def _taken(self, call: GenerateCall) -> dict[str, Kept]:
        """What was kept for requests of this call; the calls that kept it keep nothing more."""
        ids = {request.sample_id for request in call.requests}
        used = [kept for kept in self._kept if not ids.isdisjoint(kept)]
        self._kept = [kept for kept in self._kept if ids.isdisjoint(kept)]
        found = {name: each for kept in used for name, each in kept.items()}
        if call.routed_experts:
            found = {name: kept for name, kept in found.items() if kept.experts is not None}
        return {
            request.sample_id: found[request.sample_id]
            for request in call.requests
            if request.sample_id in found and found[request.sample_id].begins(request)
        }

    def _keep(self, parts: Sequence[DecodingCall]) -> None:
        """Keeps what the parts of a call leave; forgets the oldest calls beyond the limit."""
        if found := {name: kept for part in parts for name, kept in part.kept.items()}:
            self._kept = [kept for kept in self._kept if kept.keys() != found.keys()] + [found]
        while sum(map(len, self._kept)) > self._max_batch:
            del self._kept[0]

    def _step(self, calls: Sequence[DecodingCall], is_aborted: bool) -> list[Rollout]:
        """One step of the calls with slots. All wait for the slowest: time has no influence."""
        if is_aborted:
            return [rollout for call in calls for rollout in call.abort()]
        taken = itertools.accumulate(call.num_slots for call in calls)
        running = [call for call, slots in zip(calls, taken) if slots <= self._max_batch]
        # The last one to begin is a short one, so that all threads end at about the same time.
        running.sort(key=lambda call: call.num_entries, reverse=True)
        with self._device_lock:
            ended = list(self._parts.map(DecodingCall.step, running))
        return [rollout for part in ended for rollout in part]


class _StagedWeights(Mapping[str, np.ndarray]):
    """The weights of one update. Host memory holds the tensors that are not on the devices yet."""

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        params: UnstackedParams,
        device_lock: contextlib.AbstractContextManager,
        adapter: Adapter | None,
        base: Params | None,  # that stay, if only an adapter comes
    ):
        self.adapter, self._base = adapter, base
        self._specs = {spec.name: spec for spec in specs}
        self._params = params
        self._device_lock = device_lock
        self._buffers: dict[str, np.ndarray] = {}
        self._free: list[np.ndarray] = []  # loaded tensors' memory, for others of the same size
        self._one_at_a_time = threading.Lock()

    def __len__(self) -> int:
        return len(self._specs)

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._buffers:
            self._buffers[name] = self._take(self._specs[name].num_bytes)
        return self._buffers[name]

    def lend(self, buffers: Mapping[str, np.ndarray]) -> None:
        self._buffers |= buffers

    def load(self, names: Sequence[str]) -> None:
        specs = [self._specs[name] for name in names]
        buffers = [self._buffers.pop(name) for name in names]
        with self._one_at_a_time, self._device_lock:
            self._params.put(
                {
                    spec.name: buffer.view(np.dtype(spec.dtype)).reshape(spec.shape)
                    for spec, buffer in zip(specs, buffers)
                }
            )
            self._params.wait()
        # Lent memory is not the engine's to write to.
        self._free += [buffer for buffer in buffers if buffer.flags.writeable]

    def load_arrays(self, arrays: Iterable[tuple[str, np.ndarray | jax.Array]]) -> list[str]:
        unsound = []
        for _, layer in itertools.groupby(arrays, lambda item: self._params.layer_of(item[0])):
            tensors = dict(layer)
            with self._one_at_a_time, self._device_lock:
                placed = self._params.put(tensors)
                is_unsound = np.asarray(_not_finite(placed))
                self._params.wait()
            unsound += itertools.compress(tensors, is_unsound)
        self._buffers.clear()  # that nobody fills
        return unsound

    def finish(self) -> Params:
        self.load(tuple(self._buffers))  # what has not been loaded yet
        return self._params.finish(self._base)

    def _take(self, num_bytes: int) -> np.ndarray:
        """Memory that was used before costs no page faults."""
        for index, buffer in enumerate(self._free):
            if buffer.nbytes == num_bytes:
                return self._free.pop(index)
        # On a CPU, aligned memory is read without a copy.
        memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % _ALIGNMENT
        return memory[start : start + num_bytes]


@jax.jit
def _not_finite(arrays: Sequence[Array]) -> Bool[Array, " N"]:
    return jnp.stack([~jnp.isfinite(array).all() for array in arrays])
