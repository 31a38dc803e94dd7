"""What a step began with, trained on and ended with: the numbers that replays compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from semrl_jax.algorithms.credit import Credit
from semrl_jax.models import array_sums
from semrl_jax.training.learner import ForwardPasses, Learner
from semrl_jax.training.probes import is_due
from semrl_jax.training.train_state import POLICY, TrainState
from semrl_jax.types import RolloutBatch

# Checksum and norm of an array by its name. Only checksums are compared.
Sums = dict[str, tuple[int, float]]


class Trace(NamedTuple):
    """The trained arrays of one step; all but the sums are NumPy arrays in (group, sample) order.

    `arrays` has [B, T] values of tokens by column of `support.response_files`.
    """

    before: Sums  # parameters before the update
    # Gradients of the loss over the whole batch at these parameters. Mini-batches are updated one
    # after the other, so their own gradients have other parameters from the second on.
    gradients: Sums
    arrays: Mapping[str, np.ndarray]
    rewards: Float[np.ndarray, "P G"] = ()
    sampled: Sequence[str] = ()  # names of the scalars of the sampling
    after: Sums = {}  # noqa: RUF012 - never changed

    def completed(
        self,
        state: TrainState,
        rewards: Float[np.ndarray, "P G"],
        logprobs: Float[np.ndarray, "B T"] | None,
        sampled: Sequence[str],
    ) -> Trace:
        """With what is known after the update; `logprobs` are those that `Learner.update` gives."""
        arrays = dict(self.arrays)
        if logprobs is not None:
            arrays.setdefault("old_logprobs", logprobs)
        return self._replace(
            arrays=arrays, rewards=rewards, sampled=tuple(sampled), after=parameter_sums(state)
        )


def traced(
    learner: Learner, state: TrainState, batch: RolloutBatch, passes: ForwardPasses, credit: Credit
) -> Trace | None:
    """The trace of a step before its update; None unless `logging.replay_every` asks for it.

    It costs one more pass of the update over the batch, without a change of any parameter. All
    processes call it together.
    """
    if not is_due(learner.config.logging.replay_every, int(state.step)):
        return None
    arrays = {**passes.arrays()._asdict(), "advantages": credit.advantages}
    arrays |= {"returns": credit.returns, "trained": credit.response_mask}
    return Trace(
        before=parameter_sums(state),
        gradients=on_host(learner.gradients(state, batch, passes, credit)),
        arrays={name: np.asarray(x) for name, x in arrays.items() if x is not None},
    )


def parameter_sums(state: TrainState) -> Sums:
    """Checksum and norm of each trained parameter, by names such as policy/final_norm/scale."""
    found = {POLICY: state.params}
    if state.critic is not None:
        found["critic"] = state.critic.params
    return on_host(array_sums(found))


def on_host(tree: Any) -> Sums:
    """Sums by the path of their array; a tree of pairs of `array_sums`."""
    leaves = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: isinstance(x, tuple))[0]
    pairs = jax.device_get([pair for _, pair in leaves])
    names = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
    return {name: (int(sum_), float(norm)) for name, (sum_, norm) in zip(names, pairs)}
