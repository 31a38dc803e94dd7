"""The JAX engine: samples on devices of this process, with its own copy of the weights."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import functools
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from semrl_jax.data import StopMatcher, TokenBytes
from semrl_jax.models import (
    AXES,
    Params,
    ParamsFilling,
    Piece,
    Policy,
    make_mesh,
    parameter_shardings,
    tensor_specs,
)
from semrl_jax.rollout.engines.base import Engine
from semrl_jax.rollout.engines.decoding import DecodingCall
from semrl_jax.rollout.wire.codec import GenerateCall
from semrl_jax.types import ReplicaDescription, Rollout, TensorSpec, WeightVersion

_ALIGNMENT = 64  # bytes


class JaxEngine(Engine):
    """Prefill and decoding with a KV cache, on `Policy`.

    Programs are compiled for padded sizes; at most `decoding.MAX_PROGRAMS` are kept.

    Args:
      policy: the architecture and the compute dtype; its mesh is not used.
      mesh: devices of this process only, so that the engine never waits for another one; None
        takes the first device. Responses are split over the data axes (a power of two in total),
        parameters, heads and vocabulary over `tensor`, as far as `check_mesh` permits.
      tokenizer_hash: of the tokenizer that the token ids belong to.
      tokens: of that tokenizer; None: the engine takes no stop strings.
      max_batch, chunk: as in `DecodingCall`.
      max_prompts: limit on the responses of a call.
      max_prompt_tokens, max_response_tokens: limits per response.
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
        self._policy = dataclasses.replace(policy, mesh=mesh)
        self._shardings = parameter_shardings(policy.shapes(), mesh)
        self._description = ReplicaDescription(
            engine="jax",
            engine_version=jax.__version__,
            model_hash=policy.config.hash,
            tokenizer_hash=tokenizer_hash,
            vocab_size=policy.config.vocab_size,
            layers=(*range(policy.config.num_layers + 1), -1),
            state_kinds=("decode", "prefill"),
            logprob_kinds=("sampling", "raw"),
            sampling_kinds=("annealed",) if tokens is None else ("annealed", "stop_strings"),
            max_prompts=max_prompts,
            max_prompt_tokens=max_prompt_tokens,
            max_response_tokens=max_response_tokens,
        )
        self._tokens = tokens
        self._max_batch = max_batch
        self._chunk = chunk
        self._device_lock = device_lock or contextlib.nullcontext()
        self._params: Params | None = None
        self._staged: _StagedWeights | None = None
        # In one thread the programs run one after the other, and the event loop stays free.
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="jax-engine")
        self._one_call = asyncio.Lock()
        self._num_aborts = 0  # a call that began before the last abort is ended by it

    def describe(self) -> ReplicaDescription:
        return self._description

    async def generate(self, call: GenerateCall) -> AsyncIterator[Rollout]:
        loop = asyncio.get_running_loop()
        num_aborts = self._num_aborts
        async with self._one_call:  # calls never share a batch
            decoding = await loop.run_in_executor(self._thread, self._start, call)
            while not decoding.done:
                is_aborted = self._num_aborts > num_aborts
                step = decoding.abort if is_aborted else self._locked_step(decoding)
                for rollout in await loop.run_in_executor(self._thread, step):
                    yield rollout

    def expected_tensors(self) -> Sequence[TensorSpec]:
        return tensor_specs(self._policy.config, "float32")

    def begin_weight_update(self, specs: Sequence[TensorSpec]) -> Mapping[str, np.ndarray]:
        self._staged = _StagedWeights(
            specs, self._policy.config, self._shardings, self._device_lock
        )
        return self._staged

    def load_tensors(self, names: Sequence[str]) -> None:
        self._staged.load(names)

    async def commit_weight_update(self, version: WeightVersion) -> None:
        staged, self._staged = self._staged, None
        # Waits for the program that runs, then for the last pieces on the devices.
        loop = asyncio.get_running_loop()
        self._params = await loop.run_in_executor(self._thread, staged.finish)

    def abort_weight_update(self) -> None:
        self._staged = None

    async def abort(self) -> None:
        self._num_aborts += 1

    def close(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._params = None

    def _start(self, call: GenerateCall) -> DecodingCall:
        stop_strings, new_matcher = call.sampling.stop_strings, None
        if stop_strings:
            new_matcher = functools.partial(StopMatcher, self._tokens, stop_strings)
        with self._device_lock:
            return DecodingCall(
                self._policy,
                self._params,
                call,
                max_batch=self._max_batch,
                chunk=self._chunk,
                new_matcher=new_matcher,
            )

    def _locked_step(self, decoding: DecodingCall) -> Callable[[], list[Rollout]]:
        def step():
            with self._device_lock:
                return decoding.step()

        return step


class _StagedWeights(Mapping[str, np.ndarray]):
    """The weights of one update, which go to the devices tensor by tensor.

    Host memory holds the tensors that have not been loaded yet.
    """

    def __init__(self, specs, config, shardings, device_lock):
        self._specs = {spec.name: spec for spec in specs}
        self._config, self._shardings = config, shardings
        self._device_lock = device_lock
        self._buffers: dict[str, np.ndarray] = {}
        self._free: list[np.ndarray] = []  # loaded tensors' memory, for others of the same size
        self._one_at_a_time = threading.Lock()
        self._filling: ParamsFilling | None = None
        # New memory costs as much time as loading: it is made while the first tensor is on its way.
        threading.Thread(target=self._prepare, name="new-weights", daemon=True).start()

    def __len__(self) -> int:
        return len(self._specs)

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __getitem__(self, name: str) -> np.ndarray:
        if name not in self._buffers:
            self._buffers[name] = self._take(self._specs[name].num_bytes)
        return self._buffers[name]

    def load(self, names: Sequence[str]) -> None:
        specs = [self._specs[name] for name in names]
        buffers = [self._buffers.pop(name) for name in names]
        pieces = [
            Piece(spec.name, 0, buffer.view(np.dtype(spec.dtype)).reshape(spec.shape))
            for spec, buffer in zip(specs, buffers)
        ]
        self._prepare()
        with self._one_at_a_time, self._device_lock:
            self._filling.put(pieces)
        self._free += buffers

    def finish(self) -> Params:
        self.load(tuple(self._buffers))  # what has not been loaded yet
        return self._filling.finish()

    def _prepare(self) -> None:
        with self._one_at_a_time, self._device_lock:
            if self._filling is None:
                self._filling = ParamsFilling(self._config, self._shardings)

    def _take(self, num_bytes: int) -> np.ndarray:
        """Memory that was used before costs no page faults."""
        for index, buffer in enumerate(self._free):
            if buffer.nbytes == num_bytes:
                return self._free.pop(index)
        # On a CPU, aligned memory is read without a copy.
        memory = np.empty(num_bytes + _ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % _ALIGNMENT
        return memory[start : start + num_bytes]
