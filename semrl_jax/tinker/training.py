"""Adapters upon one frozen base: gradients that add up, steps of AdamW, directories."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int
from safetensors import safe_open

from semrl_jax import models
from semrl_jax.models import peft
from semrl_jax.support.errors import UserError
from semrl_jax.support.rounding import next_power_of_two, next_size
from semrl_jax.support.safe_files import replacing_directory
from semrl_jax.support.tensor_files import write_tensors
from semrl_jax.tinker.losses import LOSSES
from semrl_jax.tinker.messages import Example, Pass
from semrl_jax.tinker.requests import AdamParams, LoraConfig

ALPHA = 32.0  # of every adapter; their product is scaled by ALPHA / rank
OPTIMIZER_FILE = "optimizer.safetensors"  # in addition to the files of PEFT's format
_SMALLEST = 32  # columns of a micro-batch


@dataclasses.dataclass
class Trained:
    """An adapter that is trained.

    Attributes:
      moments: Adam's.
      gradient: the sum since the last step; None: no pass since then.
      seq: number of the last request that changed it.
    """

    lora: models.Lora
    adapter: models.Params
    moments: optax.ScaleByAdamState
    gradient: models.Params | None = None
    seq: int = 0


class Output(NamedTuple):
    """Log-probabilities of the targets of each example, and the sum of the loss over all."""

    logprobs: list[Float[np.ndarray, " _"]]
    loss: float


class Batch(NamedTuple):
    """Rows of K adapters, padded on the right; zeros at padding. A pytree."""

    token_ids: Int[Array | np.ndarray, "K B T"]
    segment_ids: Int[Array | np.ndarray, "K B T"]  # 1 on tokens
    targets: Int[Array | np.ndarray, "K B T"]
    inputs: Mapping[str, Float[Array | np.ndarray, "K B T"]]


class Trainer:
    """Trains adapters on the devices of this process.

    Args:
      base: the frozen parameters, on the mesh.
      directory: of the base.
      max_tokens: of a micro-batch, padding included; a longer sequence is one by itself.
    """

    def __init__(
        self,
        policy: models.Policy,
        base: models.Params,
        directory: pathlib.Path,
        mesh: Mesh,
        max_tokens: int,
    ):
        self.policy = dataclasses.replace(policy, mesh=mesh)
        self.base, self._directory, self._mesh = base, directory.absolute(), mesh
        self._max_tokens = max_tokens

    def lora(self, wanted: LoraConfig) -> models.Lora:
        """What a client asks for; raises UserError if it cannot be trained."""
        parts = {"self_attn.*": wanted.train_attn, "mlp.*": wanted.train_mlp}
        targets = [pattern for pattern, is_trained in parts.items() if is_trained]
        if not targets:
            raise UserError(
                "lora_config trains the output matrix only, which has no adapter here; set "
                "train_attn or train_mlp."
            )
        architecture = self.policy.config
        lora = models.Lora(peft.find_modules(architecture, targets), wanted.rank, ALPHA)
        try:
            peft.check_rank(architecture, lora)
        except UserError as error:
            raise UserError(str(error).replace("lora.rank", "lora_config.rank")) from None
        return lora

    def create(self, lora: models.Lora, seed: int) -> Trained:
        return self._trained(lora, lora.init(self.base, seed))

    def params(self, path: pathlib.Path | None) -> models.Params:
        """The base with the adapter of a directory; None: the base alone."""
        if path is None:
            return self.base
        found = self.load(path, optimizer=False)
        return models.adapted(found.adapter, found.lora.base(self.base))

    def passes(self, jobs: Sequence[tuple[Trained, Pass]]) -> list[Output]:
        """The passes of different models of one `Lora`, all of one kind, in one program.

        Adds the gradients to those that the models have.
        """
        (kind,) = {job.kind for _, job in jobs}
        loss, options, is_backward = kind
        # A program has a power of two of adapters.
        adapters = [trained.adapter for trained, _ in jobs]
        adapters += adapters[:1] * (next_power_of_two(len(jobs)) - len(jobs))
        frozen = jobs[0][0].lora.base(self.base)
        names = LOSSES[loss].inputs
        found: list[dict[int, np.ndarray]] = [{} for _ in jobs]
        totals = np.zeros(len(jobs))
        sums: list[models.Params] | None = None
        for rows in self._micro_batches([job.examples for _, job in jobs]):
            batch, lengths = _padded([job.examples for _, job in jobs], rows, len(adapters), names)
            values, logprobs, gradients = _pass(
                tuple(adapters), frozen, batch, dict(options),
                policy=self.policy, loss=loss, is_backward=is_backward,
            )  # fmt: skip
            if is_backward:
                sums = gradients if sums is None else _sum(sums, gradients)
            totals += np.asarray(values, np.float64)[: len(jobs)]
            logprobs = np.asarray(logprobs)
            for job, (indices, of_job) in enumerate(zip(rows.indices, lengths)):
                for row, (index, length) in enumerate(zip(indices, of_job)):
                    found[job][index] = logprobs[job, row, :length]
        for index, (trained, _) in enumerate(jobs):
            if sums is not None:
                own = sums[index]
                trained.gradient = own if trained.gradient is None else _sum(trained.gradient, own)
        return [
            Output([of_job[i] for i in range(len(of_job))], float(total))
            for of_job, total in zip(found, totals)
        ]

    def step(self, trained: Trained, adam: AdamParams) -> dict[str, float]:
        """One step of AdamW on the sum of the gradients; raises ValueError if it is not finite."""
        gradient = trained.gradient
        if gradient is None:
            gradient = jax.tree.map(jnp.zeros_like, trained.adapter)
        trained.gradient = None
        values = {name: np.float32(value) for name, value in adam.model_dump().items()}
        adapter, moments, norm = _step(trained.adapter, trained.moments, gradient, values)
        if not np.isfinite(norm):
            raise ValueError(
                "the gradient is not finite, so the model was not changed; lower the learning rate "
                "or the advantages."
            )
        trained.adapter, trained.moments = adapter, moments
        return {"grad_norm": float(norm)}

    def save(self, trained: Trained, path: pathlib.Path, *, optimizer: bool = True) -> None:
        """Writes a directory in PEFT's format, and with `optimizer` what continues the training."""
        with replacing_directory(path) as staging:
            peft.save_adapter(
                staging, jax.device_get(trained.adapter), trained.lora, self.policy.config,
                self._directory, str(self._directory),
            )  # fmt: skip
            if optimizer:
                moments = jax.device_get(trained.moments)
                tensors = _named("mu", moments.mu) | _named("nu", moments.nu)
                meta = json.dumps({"count": int(moments.count), "seq": trained.seq})
                with open(staging / OPTIMIZER_FILE, "xb") as out:
                    write_tensors(out, tensors, {"meta": meta})

    def load(self, path: pathlib.Path, *, optimizer: bool) -> Trained:
        """The adapter of a directory; raises UserError if it cannot be read."""
        files = peft.find_adapter(path)
        adapter, lora = peft.load_adapter(
            files, self.policy.config, self._directory, files.base_name
        )
        trained = self._trained(lora, adapter)
        if optimizer:
            if not (path / OPTIMIZER_FILE).is_file():
                raise UserError("these weights were saved for sampling, without the optimizer.")
            with safe_open(str(path / OPTIMIZER_FILE), framework="numpy") as tensors:
                meta = json.loads(tensors.metadata()["meta"])
                mu, nu = (
                    jax.tree.map(tensors.get_tensor, _names(name, adapter)) for name in ("mu", "nu")
                )
            count = np.int32(meta["count"])
            trained.moments = optax.ScaleByAdamState(count, self._placed(mu), self._placed(nu))
            trained.seq = meta["seq"]
        return trained

    def _trained(self, lora: models.Lora, adapter: models.Params) -> Trained:
        zeros = jax.tree.map(np.zeros_like, adapter)
        moments = optax.ScaleByAdamState(np.int32(0), self._placed(zeros), self._placed(zeros))
        return Trained(lora, self._placed(adapter), moments)

    def _placed(self, tree: models.Params) -> models.Params:
        return jax.device_put(tree, models.parameter_shardings(tree, self._mesh))

    def _micro_batches(self, jobs: Sequence[Sequence[Example]]) -> list[_Rows]:
        """The examples of all jobs in micro-batches, the longest first; few different sizes."""
        left = [
            sorted(range(len(job)), key=lambda i, job=job: -len(job[i].token_ids)) for job in jobs
        ]
        found = []
        while any(left):
            longest = max(len(job[own[0]].token_ids) for job, own in zip(jobs, left) if own)
            columns = next_size(longest, _SMALLEST)
            most = max(1, self._max_tokens // (columns * len(jobs)))
            fitting = 1 << (most.bit_length() - 1)
            size = min(next_power_of_two(max(map(len, left))), fitting)
            found.append(_Rows(size, columns, [own[:size] for own in left]))
            left = [own[size:] for own in left]
        return found


class _Rows(NamedTuple):
    """A micro-batch: its size, and the examples that each job has in it."""

    size: int
    columns: int
    indices: list[list[int]]


def _padded(
    jobs: Sequence[Sequence[Example]], rows: _Rows, num_adapters: int, names: Sequence[str]
) -> tuple[Batch, list[list[int]]]:
    """A micro-batch, and the lengths of its examples."""
    shape = num_adapters, rows.size, rows.columns
    token_ids, segment_ids, targets = (np.zeros(shape, np.int32) for _ in range(3))
    inputs = {name: np.zeros(shape, np.float32) for name in names}
    lengths: list[list[int]] = []
    for job, (examples, indices) in enumerate(zip(jobs, rows.indices)):
        lengths.append([len(examples[index].token_ids) for index in indices])
        for row, (index, length) in enumerate(zip(indices, lengths[-1])):
            place, example = (job, row, slice(length)), examples[index]
            token_ids[place], targets[place] = example.token_ids, example.targets
            segment_ids[place] = 1
            for name in names:
                inputs[name][place] = example.inputs[name]
    return Batch(token_ids, segment_ids, targets, inputs), lengths


@functools.partial(jax.jit, static_argnames=("policy", "loss", "is_backward"))
def _pass(adapters, frozen, batch, options, *, policy, loss, is_backward):
    """Losses [K], log-probabilities [K, B, T] and K gradients, None without a backward pass."""

    def of_one(adapter, batch):
        is_token = batch.segment_ids > 0
        positions = jnp.arange(is_token.shape[1], dtype=jnp.int32)[None] * batch.segment_ids

        def total(adapter):
            params = models.adapted(adapter, frozen)
            states = policy.final_states(params, batch.token_ids, positions, batch.segment_ids)
            found, _ = policy.token_logprobs(params, states, batch.targets)
            found = jnp.where(is_token, found, 0.0)
            terms = LOSSES[loss].terms(found, batch.inputs, options)
            return jnp.sum(jnp.where(is_token, terms, 0.0)), found

        if not is_backward:
            return *total(adapter), None
        (value, found), gradient = jax.value_and_grad(total, has_aux=True)(adapter)
        return value, found, gradient

    if len(adapters) == 1:  # without the batching rule of every operation
        one = jax.tree.map(lambda leaf: leaf[0], batch)
        value, logprobs, gradient = of_one(adapters[0], one)
        return value[None], logprobs[None], [gradient]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *adapters)
    values, logprobs, gradients = jax.vmap(of_one)(stacked, batch)
    return (
        values,
        logprobs,
        [jax.tree.map(lambda leaf, k=k: leaf[k], gradients) for k in range(len(adapters))],
    )


@jax.jit
def _sum(first, second):
    return jax.tree.map(jnp.add, first, second)


@jax.jit
def _step(adapter, moments, gradient, adam):
    """AdamW as in PyTorch, after the gradient was scaled to a norm of at most `grad_clip_norm`."""
    norm, most = optax.tree.norm(gradient), adam["grad_clip_norm"]
    scale = jnp.where((most > 0) & (norm > most), most / norm, 1.0)
    gradient = jax.tree.map(lambda leaf: leaf * scale, gradient)
    adam_direction = optax.scale_by_adam(adam["beta1"], adam["beta2"], adam["eps"])
    direction, moments = adam_direction.update(gradient, moments)
    rate, decay = adam["learning_rate"], adam["weight_decay"]
    adapter = jax.tree.map(lambda p, d: p - rate * (d + decay * p), adapter, direction)
    return adapter, moments, norm


def _names(prefix: str, tree: models.Params) -> models.Params:
    """The tree with a name in place of each leaf."""
    return jax.tree_util.tree_map_with_path(
        lambda path, _: prefix + jax.tree_util.keystr(path), tree
    )


def _named(prefix: str, tree: models.Params) -> dict[str, np.ndarray]:
    names = jax.tree.leaves(_names(prefix, tree))
    return dict(zip(names, map(np.asarray, jax.tree.leaves(tree))))
