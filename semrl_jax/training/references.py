"""Log-probabilities under references that are models of their own, of which a data source may have
its own, and which replicas may hold.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from semrl_jax import data, models
from semrl_jax.cluster.agreement import run_phase
from semrl_jax.cluster.connecting import gather_bytes
from semrl_jax.cluster.peers import Peers
from semrl_jax.models.policy import logits_at_once
from semrl_jax.models.token_logprobs import Tiles, token_logprobs
from semrl_jax.support.rounding import next_power_of_two
from semrl_jax.training.rollout_batch import MIN_BUCKET, prompts_of
from semrl_jax.training.work import batch_products
from semrl_jax.types import RolloutBatch

# The states after the final norm of all tokens of sequences, each with its number, in any order.
FinalStates = Callable[
    [Sequence[Int[np.ndarray, " _"]]], Iterator[tuple[int, Float[np.ndarray, "_ D"]]]
]


class Loaded(NamedTuple):
    """A reference on the mesh of the trainer, or in the memory of its host."""

    policy: models.Policy
    params: models.Params


@dataclasses.dataclass(frozen=True, eq=False)
class Remote:
    """A reference on replicas; the trainer has its output matrix, in the memory of the host."""

    policy: models.Policy  # its architecture
    matrix: Float[np.ndarray, "V D"]
    final_states: FinalStates

    def logprobs(
        self,
        batch: RolloutBatch,
        *,
        temperature: float,
        peers: Peers,
        device_lock: contextlib.AbstractContextManager,
    ) -> Float[np.ndarray, "B T"]:
        """Log-probabilities of the policy's tokens, float32 nats; 0 elsewhere.

        Each of several processes asks for a part of the sequences, and all get the result. Each
        sequence is a program of its own, so that no number depends on the order of arrival.
        """
        sequences = list(_asked(batch))
        own = sequences[peers.index :: peers.count]
        tiles = Tiles(
            vocabulary_axis=0,
            temperature=temperature,
            max_logits=logits_at_once(jax.local_devices()[0].platform),
            softcap=self.policy.config.final_logit_softcap,
        )
        dtype = jnp.dtype(self.policy.compute_dtype)

        def compute() -> Float[np.ndarray, " N"]:
            """The values of the own sequences, one after the other."""
            found = [np.zeros(0, np.float32)] * (len(own) + 1)
            matrix = jax.device_put(self.matrix, jax.local_devices()[0]).astype(dtype)
            asked = [sequence.token_ids[:-1] for sequence in own]
            for number, states in self.final_states(asked) if own else ():
                _, _, ids, places = own[number]
                size = max(next_power_of_two(len(places)), MIN_BUCKET)
                wanted = np.zeros((size, states.shape[1]), states.dtype)
                wanted[: len(places)] = states[places - 1]
                of_tokens = np.zeros(size, np.int32)
                of_tokens[: len(places)] = ids[places]
                with device_lock:
                    states = jnp.asarray(wanted, dtype)
                    logprobs = np.asarray(_of_states(states, of_tokens, matrix, tiles=tiles))
                found[number] = logprobs[: len(places)]
            return np.concatenate(found)

        computed = run_phase(peers, "ref_logprobs", compute)
        found = np.zeros(batch.response_mask.shape, np.float32)
        for first, part in enumerate(gather_bytes(peers, "ref_logprobs", computed.tobytes())):
            values = np.frombuffer(part, np.float32)
            for row, columns, *_ in sequences[first :: peers.count]:
                found[row, columns], values = np.split(values, [len(columns)])
        return found


class _Asked(NamedTuple):
    """Tokens of a row that attend to each other, up to the last one of the policy."""

    row: int
    columns: Int[np.ndarray, " N"]  # of the response, with tokens of the policy
    token_ids: Int[np.ndarray, " S"]  # int32
    places: Int[np.ndarray, " N"]  # of the same tokens in the sequence, each at least 1


def _asked(batch: RolloutBatch) -> Iterator[_Asked]:
    """The conversations of each row with tokens of the policy."""
    num_prompt = batch.token_ids.shape[1] - batch.response_mask.shape[1]
    for row, (ids, segments, mask) in enumerate(
        zip(batch.token_ids, batch.segment_ids, batch.response_mask, strict=True)
    ):
        counted = np.concatenate([np.zeros(num_prompt, bool), mask])
        for number in np.unique(segments[counted]):
            columns = np.flatnonzero(segments == number)
            places = np.flatnonzero(counted[columns])
            own = ids[columns[: places[-1] + 1]]
            yield _Asked(row, columns[places] - num_prompt, np.array(own, np.int32), places)


@functools.partial(jax.jit, static_argnames="tiles")
def _of_states(
    states: Float[Array, "U D"],
    token_ids: Int[Array, " U"],
    matrix: Float[Array, "V D"],
    *,
    tiles: Tiles,
) -> Float[Array, " U"]:
    return token_logprobs(states, token_ids, matrix, tiles)[0]


class References(NamedTuple):
    """Which reference a prompt has."""

    # None: the reference of the learner. The first is of all prompts that `numbers` lacks.
    models: tuple[Loaded | Remote | None, ...] = (None,)
    numbers: Mapping[bytes, int] = {}  # of the model of a prompt, by its `prompt_key`

    def parts(
        self, batch: RolloutBatch
    ) -> Iterator[tuple[Loaded | Remote | None, Int[np.ndarray, " _"]]]:
        """Each model with the rows whose reference it is, if there are any."""
        keys = map(data.prompt_key, prompts_of(batch))
        number_of = np.array([self.numbers.get(key, 0) for key in keys])
        for number, model in enumerate(self.models):
            if len(rows := np.flatnonzero(number_of == number)):
                yield model, rows

    def operations(self, batch: RolloutBatch, main: models.DecoderConfig) -> float:
        """Floating point operations here of a pass over a batch; replicas' do not count.

        `main` is the architecture of the learner's reference.
        """
        found = 0.0
        for model, rows in self.parts(batch):
            own = main if model is None else model.policy.config
            needed = batch_products(own, rows_of(batch, rows), head=True)
            found += needed.head if isinstance(model, Remote) else needed.forward
        return found


def rows_of(batch: RolloutBatch, rows: Int[np.ndarray, " _"]) -> RolloutBatch:
    """Some rows of a batch of NumPy arrays."""
    return jax.tree.map(lambda leaf: leaf[rows], batch)
