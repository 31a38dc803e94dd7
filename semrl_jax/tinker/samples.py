"""Samples of adapters through the engine, which has the weights of one at a time."""

from __future__ import annotations

import hashlib
import itertools
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from semrl_jax import models
from semrl_jax.rollout.client.local import LocalReplica
from semrl_jax.rollout.wire import codec
from semrl_jax.tinker import weights
from semrl_jax.tinker.futures import Futures, Request
from semrl_jax.tinker.messages import encode_samples
from semrl_jax.tinker.requests import Sample
from semrl_jax.tinker.training import Trainer
from semrl_jax.types import HiddenStateParams, Rollout, SampleRequest, SamplingParams, WeightVersion


class Limits(NamedTuple):
    """What the model can do.

    Attributes:
      name: of the base, for clients.
      max_tokens: of a sequence.
    """

    name: str
    max_tokens: int
    vocab_size: int
    end_token_ids: tuple[int, ...]


class Samples:
    """Samples for requests. Used in one thread.

    Args:
      root: has a folder for each model.
    """

    def __init__(
        self,
        futures: Futures,
        trainer: Trainer,
        replica: LocalReplica,
        root: pathlib.Path,
        limits: Limits,
    ):
        self._futures, self._trainer, self._replica, self._root = futures, trainer, replica, root
        self.limits = limits
        self._served: pathlib.Path | str | None = ""  # weights of the replica; "": none
        self._versions = itertools.count()

    def key(self, content: Sample) -> tuple[object, ...]:
        """Requests of one key can be sampled together; raises ValueError or KeyError."""
        return self._weights(content), self._sampling(content)

    def forget(self, directory: pathlib.Path) -> None:
        """The weights in a directory have changed."""
        if directory == self._served:
            self._served = ""

    def sample(self, jobs: Sequence[Request]) -> list[bytes]:
        """The results of requests of one key; raises ValueError for what cannot be sampled."""
        directory, (sampling, wants_prompt) = self.key(jobs[0].content)
        if directory != self._served:
            self._serve(directory)
        requests = [
            SampleRequest(
                f"{index}-{sample}", index, sample, np.array(job.content.prompt_ids, np.int32), seed
            )
            for index, job in enumerate(jobs)
            for sample, seed in enumerate(_seeds(job))
        ]
        call = codec.GenerateCall(
            tuple(requests), sampling, HiddenStateParams(), None, prompt_logprobs=wants_prompt
        )
        codec.check_call(call, self._replica.describe())  # here: a ValueError is the client's
        found: list[list[Rollout]] = [[] for _ in jobs]
        for rollout in self._replica.generate(call, 0.0):
            found[rollout.group_id].append(rollout)
        encoded = []
        for job, rollouts in zip(jobs, found):
            rollouts.sort(key=lambda rollout: rollout.sample_index)
            encoded.append(encode_samples(rollouts, _of_prompt(job.content, rollouts[0])))
        return encoded

    def _weights(self, content: Sample) -> pathlib.Path | None:
        """The directory of the adapter that a request samples with; None: the base."""
        path = self._futures.get("sampler", content.sampling_session_id)["model_path"]
        return None if path is None else weights.find(self._root, path)

    def _sampling(self, content: Sample) -> tuple[SamplingParams, bool]:
        given, stop = content.sampling_params, content.sampling_params.stop
        stops = [stop] if isinstance(stop, str) else stop or []
        sampling = SamplingParams(
            max_tokens=given.max_tokens or self.limits.max_tokens - len(content.prompt_ids),
            temperature=given.temperature,
            top_p=given.top_p,
            top_k=max(given.top_k, 0),
            eos_token_ids=() if stop == [] else self.limits.end_token_ids,
            stop_token_ids=tuple(each for each in stops if isinstance(each, int)),
            stop_strings=tuple(each for each in stops if isinstance(each, str)),
        )
        return sampling, bool(content.prompt_logprobs)

    def _serve(self, directory: pathlib.Path | None) -> None:
        """Gives the replica the weights of an adapter."""
        config = self._trainer.policy.config
        tensors = models.iterate_hf_tensors(
            self._trainer.params(directory), config, "float32", on_host=False
        )
        version = WeightVersion("tinker", "0", next(self._versions), "")
        specs = models.tensor_specs(config, "float32")
        self._served = ""
        self._replica.take_weights(
            version, specs, ((spec.name, array) for spec, array in tensors), None
        )
        self._served = directory


def number_of(text: str) -> int:
    """A seed."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7])


def _of_prompt(content: Sample, rollout: Rollout) -> np.ndarray | None:
    """Log-probabilities of the prompt tokens that a request asks for; NaN: of no others."""
    if rollout.prompt_logprobs is None:
        return None
    values, last = rollout.prompt_logprobs.copy(), content.prompt_logprobs_last_n
    values[: 1 if last is None else max(1, len(values) - last)] = np.nan
    return values


def _seeds(request: Request) -> list[int]:
    """A seed for each sample; without one, the id of the request gives it."""
    seed = request.content.sampling_params.seed
    first = number_of(request.id) if seed is None else seed
    return [(first + index) % 2**64 for index in range(request.content.num_samples)]
