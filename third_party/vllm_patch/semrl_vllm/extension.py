"""Runs inside a vLLM worker: copies hidden states out (the tap), and loads new weights.

vLLM adds `RolloutExtension` to the bases of its worker class (`worker_extension_cls`) and calls its
methods by name (`collective_rpc`). vLLM refuses names that the worker already has, so these methods
begin with `semrl_`.

The tap wraps two methods of the model runner, on the instance. `execute_model` learns which
requests are new. `sample_tokens` copies the rows that the logits of this step are computed from. A
row is assigned to a token by `output index = sequence length - prompt length`. Chunked prefill,
prefix caching, preemption and asynchronous scheduling change the order in which rows are computed,
but not this equation.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import mmap
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch

from semrl_vllm.pool import PoolShape, RowPool

ADAPTER_ID = 1  # of the only adapter, as requests name it


@dataclasses.dataclass
class _Request:
    slot: int
    tag: int
    prompt_len: int
    wants_prompt: bool
    has_tokens: bool = False


class _Rows(NamedTuple):
    """The states of one step, and their places in the pool."""

    states: torch.Tensor  # [N, D], or [N, L D + D] with those of inner layers
    places: torch.Tensor  # [N, 3] slot, row, tag; on the host


class RolloutExtension:
    """Mixed into vLLM's worker."""

    def semrl_install(
        self, path: str, shape: dict[str, int], num_layers: int = 0
    ) -> dict[str, Any]:
        """Opens the pool and wraps the model runner; returns values that the engine checks.

        With `num_layers`, a row has the inputs of all layers before the final state.
        """
        runner = self.model_runner
        config = runner.vllm_config
        if config.speculative_config is not None:
            raise ValueError("speculative decoding maps rows to tokens in another way.")
        if config.parallel_config.pipeline_parallel_size > 1:
            raise ValueError("only the last pipeline stage has final states.")
        _drop_unused_packing(runner.model)
        self.semrl_requests: dict[str, _Request] = {}
        self.semrl_inputs: dict[int, torch.Tensor] = {}  # of the last step, by layer
        if num_layers:
            _keep_inputs(runner.model, num_layers, self.semrl_inputs)
        self.semrl_pool = None
        if self.rank == 0:  # after the final norm all tensor-parallel ranks have the same rows
            self.semrl_pool = _Writer(PoolShape(**shape), path, runner.model_config.dtype)
        execute_model, sample_tokens = runner.execute_model, runner.sample_tokens

        def tapped_execute_model(scheduled, *args, **options):
            for request_id in scheduled.finished_req_ids:
                self.semrl_requests.pop(request_id, None)
            for new in scheduled.scheduled_new_reqs:
                extra = (new.sampling_params and new.sampling_params.extra_args) or {}
                # Model runner V2 reports a request as new again after a preemption.
                if "semrl_slot" in extra and new.req_id not in self.semrl_requests:
                    self.semrl_requests[new.req_id] = _Request(
                        extra["semrl_slot"],
                        extra["semrl_tag"],
                        len(new.prompt_token_ids),
                        extra["semrl_prompt"],
                    )
            return execute_model(scheduled, *args, **options)

        def tapped_sample_tokens(*args, **options):
            state = runner.execute_model_state  # cleared when tokens are sampled
            taps = self.semrl_pool is not None and state is not None
            rows = self._semrl_rows(state) if taps else None
            with _undrawn_generators(runner):
                output = sample_tokens(*args, **options)
            return self.semrl_pool.store(rows, output) if rows is not None else output

        # On every rank, because every rank samples and needs `_undrawn_generators`.
        runner.execute_model = tapped_execute_model
        runner.sample_tokens = tapped_sample_tokens
        return {
            "width": runner.model_config.get_hidden_size(),
            "dtype": str(runner.model_config.dtype).removeprefix("torch."),
            "runner": type(runner).__module__,
        }

    def _semrl_rows(self, state: Any) -> _Rows | None:
        """The rows of this step that belong to requests with a slot, without discarded ones.

        A step computes some consecutive tokens of each request. The state of the last one gives the
        next token. After a preemption, or when the cache was cleared, the prompt is computed again.
        Those prompt states are not stored, because the weights may have changed since the first
        token.
        """
        runner = self.model_runner
        if hasattr(state, "input_batch"):  # model runner V2
            batch = state.input_batch
            request_ids = batch.req_ids
            count = len(request_ids)
            lengths = batch.num_computed_tokens_np[:count] + batch.num_scheduled_tokens[:count]
            kept = lengths >= batch.prefill_len_np[:count]
            bounds = batch.query_start_loc_np[: count + 1]
        else:
            request_ids = runner.input_batch.req_ids
            count = len(request_ids)
            lengths = runner.optimistic_seq_lens_cpu[:count].numpy()
            kept = ~runner.discard_request_mask.np[:count]
            bounds = runner.query_start_loc.np[: count + 1]
        tokens: list[np.ndarray] = []  # indices among the step's tokens
        places: list[np.ndarray] = []

        def take(request: _Request, first_token: int, first_row: int, count: int) -> None:
            tokens.append(np.arange(first_token, first_token + count))
            place = np.full((count, 3), request.slot)
            place[:, 1] = np.arange(first_row, first_row + count)
            place[:, 2] = request.tag
            places.append(place)

        num_rows = self.semrl_pool.shape.num_rows
        for request_id, length, is_kept, start, end in zip(
            request_ids, lengths.tolist(), kept.tolist(), bounds[:-1].tolist(), bounds[1:].tolist()
        ):
            request = self.semrl_requests.get(request_id)
            if request is None:
                continue
            if request.wants_prompt and not request.has_tokens:
                first = length - (end - start)  # position of the step's first token
                count = min(length, request.prompt_len) - first
                take(request, start, num_rows + first, count)
            index = length - request.prompt_len
            if is_kept and index < num_rows:  # vLLM may compute a state after the last token
                take(request, end - 1, index, 1)
                request.has_tokens = True
        if not tokens:
            return None
        chosen = torch.from_numpy(np.concatenate(tokens)).to(self.device)
        states = state.hidden_states[chosen]
        if inner := self.semrl_inputs:
            states = torch.cat([*(inner[layer][chosen] for layer in sorted(inner)), states], dim=1)
        return _Rows(states, torch.from_numpy(np.concatenate(places)))

    def semrl_load_weights(self, path: str, tensors: list[list]) -> None:
        """Replaces all weights in place.

        Args:
          path: a file that contains all tensors.
          tensors: [Hugging Face name, dtype, shape, first byte in the file] of each tensor.

        Raises:
          ValueError: if vLLM did not load all weights of a layer; the layers are then restored, but
            have no valid weights until a load succeeds.
        """
        runner = self.model_runner
        is_tied = runner.model_config.hf_config.tie_word_embeddings
        checked = False

        def pieces():
            nonlocal checked
            yield from _tensors(path, tensors)
            # vLLM has now processed all tensors, but has not yet finished incomplete layers.
            checked = True
            if left := _left_out(runner.model, is_tied):
                raise ValueError(
                    f"vLLM left {len(left)} layers without their weights, the first is {left[0]}."
                )

        try:
            self.reload_weights(weights_iterator=pieces())
            if not checked:
                raise ValueError("vLLM did not ask for all of the weights.")
        except BaseException:
            _restore_layers(runner.model)
            raise
        if is_tied:
            _repack_tied_head(runner.model)
        _repack_experts(runner.model)

    def semrl_load_adapter(self, path: str, tensors: list[list], rank: int) -> None:
        """Applies this adapter, whose second matrices are scaled, in place of an earlier one.

        Args:
          path, tensors: as in `semrl_load_weights`, by the names <module>.lora_A.weight and lora_B.
        """
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper

        manager = self.model_runner.lora_manager._adapter_manager
        mapper = getattr(manager.model, "hf_to_vllm_mapper", None)
        adapter = LoRAModel.from_lora_tensors(
            ADAPTER_ID,
            {f"base_model.model.{name}": tensor for name, tensor in _tensors(path, tensors)},
            PEFTHelper(r=rank, lora_alpha=rank, target_modules=[]),
            device="cpu",
            dtype=manager.lora_config.lora_dtype,
            weights_mapper=mapper and mapper.get_rename_mapper(),
        )
        manager.remove_adapter(ADAPTER_ID)
        manager.add_adapter(adapter)
        manager.activate_adapter(ADAPTER_ID)

    def semrl_tensor_sums(self, tensors: list[list]) -> list[list]:
        """Sums of the weights as vLLM holds them, without a copy of a whole tensor.

        Args:
          tensors: [Hugging Face name, shape] of each tensor.

        Returns:
          [name, dtype, checksum, norm] of each one that is a parameter, or rows of one into which
          vLLM fuses several. Those that are split, quantised or packed are left out.
        """
        model, shapes = self.model_runner.model, dict(tensors)
        held = {  # without kernels that a CPU packs
            name.replace(".base_layer.", "."): tensor for name, tensor in model.named_parameters()
        }
        wholes = {}
        for whole, parts in getattr(model, "packed_modules_mapping", {}).items():
            wholes |= dict.fromkeys(parts, (whole, parts))
        found = []
        for name, shape in tensors:
            *parents, module, leaf = name.rsplit(".", 2)  # lm_head.weight has no parent
            path = "".join(f"{parent}." for parent in parents)
            whole, parts = wholes.get(module, (module, [module]))
            rows = [shapes.get(f"{path}{part}.{leaf}", [0])[0] for part in parts]
            tensor = held.get(f"{path}{whole}.{leaf}")
            if tensor is None or str(tensor.dtype) not in _BITS:
                continue
            # A vocabulary may have rows of padding.
            if list(tensor.shape[1:]) != list(shape[1:]) or len(tensor) < sum(rows):
                continue
            first = sum(rows[: parts.index(module)])
            dtype = str(tensor.dtype).removeprefix("torch.")
            found.append([name, dtype, *_sums(tensor.data[first : first + shape[0]])])
        return found


def _tensors(path: str, tensors: list[list]) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors in a file by [name, dtype, shape, first byte]."""
    with open(path, "rb") as file:
        # Private, because torch wants writable memory.
        memory = mmap.mmap(file.fileno(), os.fstat(file.fileno()).st_size, flags=mmap.MAP_PRIVATE)
    for name, dtype, shape, offset in tensors:
        tensor = torch.frombuffer(
            memory, dtype=getattr(torch, dtype), count=math.prod(shape), offset=offset
        )
        yield name, tensor.view(shape)


_BITS = {"torch.float32": torch.int32, "torch.bfloat16": torch.int16, "torch.float16": torch.int16}


def _sums(tensor: torch.Tensor) -> tuple[int, float]:
    """Checksum and norm, as `semrl_jax.models.array_sums` has them."""
    kind = _BITS[str(tensor.dtype)]
    checksum, square, start = 0, 0.0, 0
    width = 32 if kind is torch.int32 else 16
    per_row = tensor[0].numel() if len(tensor) else 1
    for rows in tensor.split(max((1 << 20) // per_row, 1)):
        flat = rows.reshape(-1)
        bits = flat.view(kind).to(torch.int64) & (1 << width) - 1
        places = torch.arange(start, start + len(flat), dtype=torch.int64, device=flat.device)
        checksum += int((bits * (2 * places + 1 & 0xFFFFFFFF) & 0xFFFFFFFF).sum())
        square += float(flat.double().square().sum())
        start += len(flat)
    return checksum & 0xFFFFFFFF, square**0.5


@contextlib.contextmanager
def _undrawn_generators(runner: Any) -> Iterator[None]:
    """On a CPU, hides the generators of seeded requests that are in the middle of their prompt.

    vLLM samples a token for such a request, discards it, and then resets the generator. A CPU
    generator cannot be reset, and vLLM raises. Without its own generator the request uses the
    common one.
    """
    if runner.device.type != "cpu":
        yield
        return
    count = len(runner.input_batch.req_ids)
    generators = runner.input_batch.generators  # by index in the batch
    discarded = runner.discard_request_mask.np[:count].nonzero()[0].tolist()
    hidden = {index: generators.pop(index) for index in discarded if index in generators}
    try:
        yield
    finally:
        generators.update(hidden)


class _Writer:
    """Writes rows of the worker into the pool."""

    def __init__(self, shape: PoolShape, path: str, dtype: torch.dtype):
        self.shape = shape
        self._pool = RowPool(shape, path)
        self._rows = torch.from_numpy(self._pool.rows).view(dtype)  # [slots, rows, D]
        self._tags = torch.from_numpy(self._pool.tags)

    def store(self, rows: _Rows, output: Any) -> Any:
        """Writes rows before the worker returns the tokens sampled from them.

        Returns:
          The output to return from the worker. On a GPU with an asynchronous output, its
          `get_output` first waits for the copy of the rows.
        """
        if not rows.states.is_cuda:
            self._write(rows.states, rows)
            return output
        # On the stream of this step, so that the next step cannot overwrite the states first.
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
        slots, indices, tags = rows.places.T
        self._rows[slots, indices] = states
        self._tags[slots, indices] = tags


def _keep_inputs(model: torch.nn.Module, num_layers: int, inputs: dict[int, torch.Tensor]) -> None:
    """Keeps the input of each decoder layer, by hooks that PyTorch calls in a model as it is."""
    found = [m for m in model.modules() if isinstance(m, torch.nn.ModuleList)]
    found = [layers for layers in found if len(layers) == num_layers]
    if len(found) != 1:
        raise ValueError(f"{type(model).__name__} has no list of {num_layers} layers to hook.")

    def hook(index):
        def keep(_module, args, options):
            given = [*args, *options.values()]
            wide = [x for x in given if isinstance(x, torch.Tensor) and x.is_floating_point()]
            # States, and with vLLM's fused norms the residual that is still to be added.
            inputs[index] = wide[0] + wide[1] if len(wide) > 1 else wide[0].clone()

        return keep

    for index, layer in enumerate(found[0]):
        layer.register_forward_pre_hook(hook(index), with_kwargs=True)


def _heads(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Output matrices that are modules of their own. Gemma 2 multiplies with its embeddings."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    return [module for module in model.modules() if isinstance(module, ParallelLMHead)]


def _drop_unused_packing(model: torch.nn.Module) -> None:
    """Ends the packing of tied embeddings, which vLLM 0.32 repeats at every load on a CPU.

    It packs the embeddings and their head, and multiplies with the head only.
    """
    heads = _heads(model)
    packed = [module for module in model.modules() if hasattr(module, "cpu_linear")]
    for module in packed:
        if module not in heads and any(module.weight is head.weight for head in heads):
            module.quant_method.process_weights_after_loading = lambda layer: None
            del module.cpu_linear


def _repack_tied_head(model: torch.nn.Module) -> None:
    """Packs the tied output matrix again: on a CPU it is a copy that a reload does not update."""
    for head in _heads(model):
        if hasattr(head, "cpu_linear"):
            head.quant_method.process_weights_after_loading(head)


def _repack_experts(model: torch.nn.Module) -> None:
    """Packs the kernels of experts: on a CPU, vLLM 0.32 does so at the first load only."""
    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        experts = getattr(kernel, "fused_experts", None)
        if type(experts).__module__.endswith(".cpu_moe"):
            experts.process_weights_after_loading(module)


def _left_out(model: torch.nn.Module, has_tied_head: bool) -> list[str]:
    """Layers that did not get all of their weights in the current reload.

    vLLM would continue with their old weights. Buffers, padding rows of the vocabulary, a tied
    output matrix and scales of attention do not count: a checkpoint may lack them.
    """
    from vllm.model_executor.layers.attention import is_deferred_attention_layer
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        VocabParallelEmbedding,
    )
    from vllm.model_executor.model_loader.reload import layerwise

    left = []
    for name, layer in model.named_modules():
        info = layerwise.get_layerwise_info(layer)
        if not info.can_load() or is_deferred_attention_layer(layer):
            continue
        wanted = sum(parameter.numel() for parameter in layer.parameters(recurse=False))
        if isinstance(layer, VocabParallelEmbedding):
            wanted = layer.shard_indices.num_org_elements * layer.embedding_dim
        is_tied = isinstance(layer, ParallelLMHead) and has_tied_head
        if info.load_numel < wanted and not is_tied:
            left.append(f"{name} ({type(layer).__name__})")
    return left


def _restore_layers(model: torch.nn.Module) -> None:
    """Restores the tensors that a failed reload had replaced.

    Otherwise its pieces would stay buffered, and every later reload would also fail.
    """
    from vllm.model_executor.model_loader.reload import layerwise

    for layer in model.modules():
        info = layerwise.get_layerwise_info(layer)
        if info.can_load():
            if info.kernel_tensors is not None:
                layerwise._place_kernel_tensors(layer, info)
            info.reset()
