"""What an engine gave for some responses: states by layer, and log-probabilities."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import ml_dtypes
import numpy as np
from jaxtyping import Bool, Float, Int

from semrl_jax.support.errors import UserError
from semrl_jax.types import Rollout

DTYPES = ("bfloat16", "float16", "float32")  # from coarse to fine


@dataclasses.dataclass(frozen=True)
class Observed:
    """One response.

    Attributes:
      prompt_ids, response_ids: int32.
      logprobs: nats, of each response token, of the model's own distribution at temperature 1.
      states: by layer, rows of the tokens of prompt and response but the last one. Row i is at
        token i; NaN where the engine gave none, infinite where what it gave is no number, see
        `as_given`. Layer l is the input of layer l, and the number of layers stands for the state
        after the final norm.
    """

    prompt_ids: Int[np.ndarray, " P"]
    response_ids: Int[np.ndarray, " T"]
    logprobs: Float[np.ndarray, " T"]
    states: Mapping[int, Float[np.ndarray, "N D"]]


@dataclasses.dataclass(frozen=True)
class Observation:
    """Responses as padded arrays.

    Attributes:
      ids: int32, prompt and response without its last token; 0 at padding.
      targets: int32, the token that follows each one.
      num_prompt, num_tokens: of each row.
      logprobs: float32, of the targets; NaN where the engine gave none.
      states: float32 by layer; NaN where the engine gave none, infinite as in `Observed`.
      dtype: the coarsest of DTYPES that holds all states of inner layers; "" without states.
    """

    ids: Int[np.ndarray, "B N"]
    targets: Int[np.ndarray, "B N"]
    num_prompt: Int[np.ndarray, " B"]
    num_tokens: Int[np.ndarray, " B"]
    logprobs: Float[np.ndarray, "B N"]
    states: Mapping[int, Float[np.ndarray, "B N D"]]
    dtype: str

    @property
    def is_token(self) -> Bool[np.ndarray, "B N"]:
        """False at padding."""
        return np.arange(self.ids.shape[1])[None] < self.num_tokens[:, None]

    @classmethod
    def of(cls, responses: Sequence[Observed]) -> Observation:
        """UserError if there is nothing to compare."""
        responses = [each for each in responses if len(each.response_ids)]
        if not responses:
            raise UserError("there is no response with a token; give others by --samples.")
        whole = [np.concatenate([each.prompt_ids, each.response_ids]) for each in responses]
        lengths = np.array([len(ids) - 1 for ids in whole])
        shape = len(whole), int(lengths.max())

        def padded(rows, fill, dtype, *more):
            found = np.full((*shape, *more), fill, dtype)
            for place, row in zip(found, rows):
                place[: len(row)] = row
            return found

        def logprobs(each):
            none = np.full(len(each.prompt_ids) - 1, np.nan, np.float32)
            return np.concatenate([none, each.logprobs])

        layers = sorted(set.intersection(*(set(each.states) for each in responses)))
        states = {}
        for layer in layers:
            rows = [np.asarray(each.states[layer]).astype(np.float32) for each in responses]
            states[layer] = padded(rows, np.nan, np.float32, rows[0].shape[1])
        given = padded([logprobs(each) for each in responses], np.nan, np.float32)
        if all(np.isnan(each).all() for each in (given, *states.values())):
            raise UserError(
                "the responses have neither log-probabilities nor hidden states, so there is "
                "nothing to compare; give others by --samples, as launch.generate --logprobs "
                "writes, or name an --engine."
            )
        return cls(
            padded([ids[:-1] for ids in whole], 0, np.int32),
            padded([ids[1:] for ids in whole], 0, np.int32),
            np.array([len(each.prompt_ids) for each in responses]),
            lengths,
            given,
            states,
            _coarsest(states),
        )


def _coarsest(states: Mapping[int, np.ndarray]) -> str:
    """The dtype that the states were computed in, as far as their bits tell."""
    known = [x[np.isfinite(x)] for x in states.values()]
    known = [x for x in known if x.size]
    if not known:
        return ""
    for dtype in DTYPES[:2]:
        kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else np.float16
        with np.errstate(over="ignore"):
            same = [(x.astype(kind).astype(np.float32) == x).all() for x in known]
        # A reduction of the final norm may end in a finer dtype.
        if np.mean(same) > 0.5:
            return dtype
    return DTYPES[2]


def as_given(values: Float[np.ndarray, ...]) -> Float[np.ndarray, ...]:
    """What an engine gave, in float32; its NaN is infinite here, where NaN means not given."""
    values = np.asarray(values).astype(np.float32)
    return np.where(np.isnan(values), np.float32(np.inf), values)


def observe_rollouts(rollouts: Sequence[Rollout], num_layers: int) -> Observation:
    """What rollouts with hidden states have; raises as `Observation.of`."""
    return Observation.of([observed(rollout, num_layers) for rollout in rollouts])


def observed(rollout: Rollout, num_layers: int) -> Observed:
    """What a rollout has."""
    raw = rollout.rollout_raw_logprobs
    num_prompt = len(rollout.prompt_ids)
    num_tokens = num_prompt + len(rollout.response_ids) - 1
    states = {}
    for plane, layer in enumerate(rollout.layers if rollout.hidden_states is not None else ()):
        rows = as_given(rollout.hidden_states[:, plane])
        found = np.full((num_tokens, rows.shape[1]), np.nan, np.float32)
        if rollout.prompt_states is not None:
            found[:num_prompt] = as_given(rollout.prompt_states[:, plane])
        found[num_prompt - 1 :] = rows
        states[num_layers if layer == -1 else layer] = found
    return Observed(
        rollout.prompt_ids,
        rollout.response_ids,
        rollout.rollout_logprobs if raw is None else raw,
        states,
    )
