"""The interface between the gRPC service and a sampling engine."""

from __future__ import annotations

import abc
from collections.abc import AsyncIterator, Mapping, Sequence

import numpy as np

from semrl_jax.types import (
    HiddenStateParams,
    ReplicaDescription,
    Rollout,
    SampleRequest,
    SamplingParams,
    TensorSpec,
    WeightVersion,
)


class EngineDeadError(RuntimeError):
    """The engine cannot go on. The service reports itself as not serving and its process ends."""


class Engine(abc.ABC):
    """One model that samples. The service checks requests; an engine may rely on them.

    The service calls the coroutines from one event loop. It serialises weight updates against
    generation: `commit_weight_update` runs while no `generate` does, unless the engine says that it
    keeps responses over one.

    Attributes:
      keeps_in_flight: running responses may go on over a commit, each token under one version.
    """

    keeps_in_flight = False

    async def start(self) -> None:
        """Called once, on the event loop, before anything but `describe`."""

    @abc.abstractmethod
    def describe(self) -> ReplicaDescription:
        """Says what the engine is and can do; `replica_id` and `version` are the service's."""

    @abc.abstractmethod
    def generate(
        self,
        requests: Sequence[SampleRequest],
        sampling: SamplingParams,
        hidden_states: HiddenStateParams,
        version: WeightVersion,
    ) -> AsyncIterator[Rollout]:
        """Yields each response as it finishes; an async generator, whose `aclose` ends the rest.

        Randomness follows from the requests' seeds and the contents of this call alone.
        """

    @abc.abstractmethod
    def expected_tensors(self) -> Sequence[TensorSpec]:
        """Names and shapes a weight update must carry; the dtype is the sender's choice."""

    @abc.abstractmethod
    def begin_weight_update(self, specs: Sequence[TensorSpec]) -> Mapping[str, np.ndarray]:
        """Returns one writable uint8 staging buffer of `num_bytes` a tensor, still unused."""

    @abc.abstractmethod
    async def commit_weight_update(self, version: WeightVersion) -> None:
        """Makes the staged weights the ones sampled with. All or nothing."""

    @abc.abstractmethod
    def abort_weight_update(self) -> None:
        """Forgets the staged weights; the engine keeps serving the previous ones."""

    async def abort(self) -> None:
        """Ends running `generate` calls; each yields its unfinished responses as "aborted"."""

    def close(self) -> None:
        """Frees what the engine holds. No other call follows."""
