"""What runs inside a vLLM worker: the tap on its hidden states, and the exchange of its weights.

vLLM mixes `RolloutExtension` into its worker class (`worker_extension_cls`) and calls its methods
by name (`collective_rpc`). Names begin with `semrl_`: one that the worker has is refused.

The tap wraps two methods of the model runner, on the instance: `execute_model` learns which
requests are new, `sample_tokens` takes the rows that the logits of this step are computed from. Row
and request meet by `output index = sequence length - prompt length`: chunked prefill, prefix
caching, preemption and asynchronous scheduling change which rows are computed when, and not that.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from semrl_vllm.pool import PoolShape, RowPool


class _Request(NamedTuple):
    slot: int
    tag: int
    prompt_len: int


class _Rows(NamedTuple):
    """States of one step and where they belong."""

    states: torch.Tensor  # [N, D]
    slots: list[int]
    indices: list[int]  # output token
    tags: list[int]


class RolloutExtension:
    """Mixed into vLLM's worker."""

    def semrl_install(self, path: str, shape: dict[str, int]) -> dict[str, Any]:
        """Opens the pool and taps the model runner; answers what the asking process checks."""
        runner = self.model_runner
        config = runner.vllm_config
        if config.speculative_config is not None:
            raise ValueError("speculative decoding maps rows to tokens in another way.")
        if config.parallel_config.pipeline_parallel_size > 1:
            raise ValueError("only the last pipeline stage has final states.")
        self.semrl_requests: dict[str, _Request] = {}
        self.semrl_pool = None
        if self.rank == 0:  # after the final norm all tensor ranks hold the same rows
            self.semrl_pool = _Writer(PoolShape(**shape), path, runner.model_config.dtype)
        execute_model, sample_tokens = runner.execute_model, runner.sample_tokens

        def tapped_execute_model(scheduled, *args, **options):
            for request_id in scheduled.finished_req_ids:
                self.semrl_requests.pop(request_id, None)
            for new in scheduled.scheduled_new_reqs:
                extra = (new.sampling_params and new.sampling_params.extra_args) or {}
                if "semrl_slot" in extra:
                    self.semrl_requests[new.req_id] = _Request(
                        extra["semrl_slot"], extra["semrl_tag"], len(new.prompt_token_ids)
                    )
            return execute_model(scheduled, *args, **options)

        def tapped_sample_tokens(*args, **options):
            state = runner.execute_model_state  # gone once tokens are sampled
            taps = self.semrl_pool is not None and state is not None
            rows = self._semrl_rows(state) if taps else None
            with _undrawn_generators(runner):
                output = sample_tokens(*args, **options)
            return self.semrl_pool.store(rows, output) if rows is not None else output

        # On every rank: all of them sample, and need their generators kept.
        runner.execute_model = tapped_execute_model
        runner.sample_tokens = tapped_sample_tokens
        return {
            "width": runner.model_config.get_hidden_size(),
            "dtype": str(runner.model_config.dtype).removeprefix("torch."),
            "runner": type(runner).__module__,
        }

    def _semrl_rows(self, state: Any) -> _Rows | None:
        """The rows of this step that belong to requests with a slot; discarded ones left out."""
        runner = self.model_runner
        if hasattr(state, "input_batch"):  # the second model runner
            batch = state.input_batch
            request_ids = batch.req_ids
            count = len(request_ids)
            lengths = batch.num_computed_tokens_np[:count] + batch.num_scheduled_tokens[:count]
            kept = lengths >= batch.prefill_len_np[:count]

            def rows_of(places):
                return state.hidden_states[batch.logits_indices[places]]

        else:
            request_ids = runner.input_batch.req_ids
            count = len(request_ids)
            lengths = runner.optimistic_seq_lens_cpu[:count].numpy()
            kept = ~runner.discard_request_mask.np[:count]

            def rows_of(places):
                return state.sample_hidden_states[places]

        found = [
            (place, self.semrl_requests[request_id])
            for place, request_id in enumerate(request_ids)
            if kept[place] and request_id in self.semrl_requests
        ]
        if not found:
            return None
        places = torch.tensor([place for place, _ in found], device=self.device)
        return _Rows(
            rows_of(places),
            [request.slot for _, request in found],
            [int(lengths[place]) - request.prompt_len for place, request in found],
            [request.tag for _, request in found],
        )

    def semrl_load_weights(self, path: str, tensors: list[list]) -> None:
        """Replaces all weights in place.

        Args:
          path: of a file with the tensors one behind the other.
          tensors: [Hugging Face name, dtype, shape, first byte] of each.
        """
        with open(path, "rb") as file:
            # Private: torch wants memory it may write to.
            memory = mmap.mmap(
                file.fileno(), os.fstat(file.fileno()).st_size, flags=mmap.MAP_PRIVATE
            )

        def pieces():
            for name, dtype, shape, offset in tensors:
                count = 1
                for extent in shape:
                    count *= extent
                tensor = torch.frombuffer(
                    memory, dtype=getattr(torch, dtype), count=count, offset=offset
                )
                yield name, tensor.view(shape)

        try:
            self.reload_weights(weights_iterator=pieces())
        except BaseException:
            _restore_layers(self.model_runner.model)
            raise
        _repack_tied_head(self.model_runner.model)


@contextlib.contextmanager
def _undrawn_generators(runner: Any) -> Iterator[None]:
    """Seeded requests in the middle of their prompt draw nothing on a CPU.

    What is drawn for them is thrown away, and vLLM then winds their generators back, which those of
    a CPU cannot: it raises. Without a generator the row is drawn from the common one.
    """
    if runner.device.type != "cpu":
        yield
        return
    count = len(runner.input_batch.req_ids)
    generators = runner.input_batch.generators  # by place in the batch
    thrown_away = runner.discard_request_mask.np[:count].nonzero()[0].tolist()
    aside = {place: generators.pop(place) for place in thrown_away if place in generators}
    try:
        yield
    finally:
        generators.update(aside)


class _Writer:
    """The worker's end of a pool."""

    def __init__(self, shape: PoolShape, path: str, dtype: torch.dtype):
        self._pool = RowPool(shape, path)
        self._rows = torch.from_numpy(self._pool.rows).view(dtype)  # [slots, rows, D]
        self._tags = torch.from_numpy(self._pool.tags)

    def store(self, rows: _Rows, output: Any) -> Any:
        """Writes rows before the tokens they gave leave the worker; returns what then leaves."""
        if not rows.states.is_cuda:
            self._write(rows.states, rows)
            return output
        # On the stream of the step and before the next one may overwrite the states.
        host = torch.empty(rows.states.shape, dtype=rows.states.dtype, pin_memory=True)
        host.copy_(rows.states, non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        if not hasattr(output, "get_output"):
            copied.synchronize()
            self._write(host, rows)
            return output
        get_output = output.get_output

        def get_output_after_rows():
            found = get_output()
            copied.synchronize()
            self._write(host, rows)
            return found

        output.get_output = get_output_after_rows
        return output

    def _write(self, states: torch.Tensor, rows: _Rows) -> None:
        slots, indices = torch.tensor(rows.slots), torch.tensor(rows.indices)
        self._rows[slots, indices] = states
        self._tags[slots, indices] = torch.tensor(rows.tags)


def _repack_tied_head(model: torch.nn.Module) -> None:
    """On CPU the output matrix is a packed copy, which a reload of tied weights does not reach."""
    for module in model.modules():
        weight = getattr(module, "weight", None)
        packed = hasattr(module, "cpu_linear") and weight is not None
        if packed and weight.dim() == 2 and weight.numel():
            module.quant_method.process_weights_after_loading(module)


def _restore_layers(model: torch.nn.Module) -> None:
    """Puts back the tensors that a reload which broke off had set aside.

    Without it the pieces that came stay buffered, and every later reload fails as this one did.
    """
    from vllm.model_executor.model_loader.reload import layerwise

    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load():
            if info.kernel_tensors is not None:
                layerwise._place_kernel_tensors(layer, info)
            info.reset()
