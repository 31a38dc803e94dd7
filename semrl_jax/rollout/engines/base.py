"""The interface between the gRPC service and a sampling engine."""

from __future__ import annotations

import abc
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from semrl_jax.rollout.wire.codec import GenerateCall, NotOffered
from semrl_jax.types import (
    Adapter,
    ReplicaDescription,
    Rollout,
    TensorSpec,
    TensorSum,
    WeightVersion,
)

if TYPE_CHECKING:
    from jax import Array


class EngineDeadError(RuntimeError):
    """The engine cannot continue. The service reports NOT_SERVING and its process ends."""


class Engine(abc.ABC):
    """Samples responses from one model. The service has already checked every request.

    It calls the engine from one event loop, and commits weights only while no `generate` runs.
    """

    async def start(self) -> None:
        """Called once on the event loop, before all methods except `describe`."""

    @abc.abstractmethod
    def describe(self) -> ReplicaDescription:
        """What the engine is and can do; the service fills in `replica_id` and `version`."""

    @abc.abstractmethod
    def generate(self, call: GenerateCall) -> AsyncIterator[Rollout]:
        """Yields each response when it ends. An async generator; `aclose` ends the other responses.

        The samples depend only on the weights and on the call. `call.metrics` is not used.
        """

    @abc.abstractmethod
    def expected_tensors(self) -> Sequence[TensorSpec]:
        """Names and shapes of the tensors of a weight update; the sender chooses the dtype."""

    def adapter_modules(self) -> Sequence[str]:
        """The modules of a layer that may have adapters, up to `max_adapter_rank`."""
        return ()

    @abc.abstractmethod
    def begin_weight_update(
        self, specs: Sequence[TensorSpec], adapter: Adapter | None = None
    ) -> Mapping[str, np.ndarray]:
        """Returns a writable uint8 staging buffer of `num_bytes` for each tensor, by name.

        The service asks for each buffer once, in the order of `specs`, before it fills it.

        Args:
          adapter: `specs` end with its tensors, or have no others: the base then stays in use. None
            ends the use of an earlier one.
        """

    def lend_tensors(self, tensors: Mapping[str, np.ndarray]) -> bool:
        """Offers the bytes of all tensors in the memory of the sender, read-only, by name.

        They are complete when `load_tensors` names them, and unchanged until it returns. An engine
        that takes them returns True; no staging buffer is asked for then.
        """
        return False

    def load_tensors(self, names: Sequence[str]) -> None:
        """The buffers of these tensors are full and will not change; loading may begin.

        Called in threads, several at a time, while responses are sampled with the weights in
        use, which stay until the commit. The memory of these buffers may be used again, for tensors
        whose buffer was not asked for yet.
        """

    def load_arrays(self, arrays: Iterable[tuple[str, np.ndarray | Array]]) -> list[str]:
        """Loads all tensors, by name, from arrays of this process; no buffer is asked for.

        The arrays may be on devices, also on others than the engine's; the iterator is read in the
        caller's thread. Only an embedded engine needs this. Returns the names of the tensors with
        values that are not finite.
        """
        raise NotImplementedError

    @abc.abstractmethod
    async def commit_weight_update(self, version: WeightVersion) -> None:
        """Samples with the staged weights from now on. If it raises, the old weights stay."""

    @abc.abstractmethod
    def abort_weight_update(self) -> None:
        """Drops the staged weights; the engine continues with the previous ones."""

    async def tensor_sums(self) -> Sequence[TensorSum]:
        """Sums of the tensors as it holds them, without those that it holds in another form.

        NotOffered if it cannot say. Weights are not committed meanwhile.
        """
        raise NotOffered("this engine gives no checksums of its weights.")

    async def abort(self) -> None:
        """Ends the running `generate` calls, which yield unfinished responses as "aborted"."""

    def release(self, weights: bool = False) -> None:
        """Frees what was kept for later calls, see `GenerateCall.keep`; it need not keep any.

        Args:
          weights: free these too; no call follows before the next update. An engine may keep them.
        """

    async def sleep(self) -> str:
        """Frees weights and caches for another user of the devices, until the next update.

        Called while no `generate` runs. Returns why nothing was freed, or "". NotOffered if it
        cannot.
        """
        raise NotOffered("this engine does not sleep.")

    def check(self) -> None:
        """Raises EngineDeadError if the engine has died. Called every second; must be quick."""

    def close(self) -> None:
        """Frees the engine's resources. No other call follows."""
