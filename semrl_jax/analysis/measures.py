"""The measures of responses and of the groups of a prompt that the reference implementation has.

They are 10 per response and 28 per prompt, and a few of this package. A value that does not exist
is NaN: without score, without probabilities, below the tokens or responses that it needs. Where a
measure of the release is wrong, it is replaced by what its name says:

- Token entropy and confidence come from the policy's distributions. The release takes the
  relative frequencies of the tokens of one response, or of all responses to a prompt. These are
  `count_entropy` and `count_confidence`, their means and their stacked forms.
- Divergences take probabilities as probabilities; equal responses have 0.
  1/2 is added to the counts of the KL divergence, where the release adds 1e-20 to frequencies.
- Velocity and acceleration have the stride of the setting, not 1.
- Repetition counts no n-gram that begins in one response and ends in the next.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from semrl_jax import metrics
from semrl_jax.analysis import similarity
from semrl_jax.analysis.responses import MIN_BUCKET, RANKS, measure_response
from semrl_jax.metrics.names import metric_name
from semrl_jax.support.errors import UserError
from semrl_jax.support.response_files import KEYS
from semrl_jax.support.rounding import next_power_of_two

MIN_RESPONSES = 3  # two points always lie on a line


@dataclasses.dataclass(frozen=True, eq=False)
class StudiedResponse:
    """One response; arrays are of the tokens that the policy sampled, NaN or None: unknown."""

    group_id: int  # the prompt's number
    sample_index: int
    states: Float[np.ndarray, "T D"]  # final states; row t produced token t
    token_ids: Int[np.ndarray, " T"] | None = None  # int32
    text: str | None = None  # decoded
    score: float = math.nan  # of the verifier; correct is 1.0 or 0.0
    correct: float = math.nan
    # Log-probabilities under the unmodified distribution of the policy, nats
    logprobs: Float[np.ndarray, " T"] | None = None
    entropies: Float[np.ndarray, " T"] | None = None  # of that distribution, nats
    # Minus the mean log-probability of its 20 likeliest tokens (arXiv:2508.15260). Higher is
    # more confident: the other 19 are then unlikely
    confidences: Float[np.ndarray, " T"] | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Item:
    """One response with what was measured of it; `ranks` are floats by label, NaN if invalid."""

    response: StudiedResponse
    ranks: dict[str, float]
    novelty: float


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
    """The responses to one prompt."""

    items: Sequence[Item]  # in the order of their samples
    rows: Sequence[dict[str, float]]  # the measures of each
    # Effective rank and orders of the states of all responses, one after the other
    stacked: dict[str, float]
    features: Float[np.ndarray, "G D"]  # mean states, [G, D]

    def mean(self, name: str) -> float:
        return mean(row[name] for row in self.rows)

    def pooled(self, array: str) -> float:
        """Mean over the tokens of all responses."""
        parts = [getattr(item.response, array) for item in self.items]
        known = all(part is not None for part in parts)
        return token_mean(np.concatenate(parts) if known else None)

    def pairs(self, function: Callable[..., float], sequences: Sequence[Any]) -> float:
        """Mean of a function over all pairs of responses."""
        return mean(function(*pair) for pair in itertools.combinations(sequences, 2))

    @functools.cached_property
    def ids(self) -> list[list[Hashable]]:
        """Token ids of the responses that are known."""
        known = (item.response.token_ids for item in self.items)
        return [ids.tolist() for ids in known if ids is not None]

    @functools.cached_property
    def words(self) -> list[list[str]]:
        known = (item.response.text for item in self.items)
        return [similarity.words(text) for text in known if text is not None]

    @functools.cached_property
    def counts(self) -> list[Counter]:
        return [Counter(ids) for ids in self.ids]

    @functools.cached_property
    def distances(self) -> list[tuple[float, float]]:
        """Euclidean distance and cosine of the mean states of each pair."""
        found = []
        for a, b in itertools.combinations(self.features.astype(np.float64), 2):
            size = np.linalg.norm(a) * np.linalg.norm(b)
            found.append((np.linalg.norm(a - b), a @ b / size if size > 0 else math.nan))
        return found


def mean(values) -> float:
    """Mean of the numbers among the values; NaN if there is none."""
    found = [value for value in values if not math.isnan(value)]
    return float(np.mean(found)) if found else math.nan


def token_mean(values: Float[np.ndarray, " T"] | None) -> float:
    return math.nan if values is None or not len(values) else float(np.mean(values, dtype=float))


def _kl(group: Group) -> float:
    items = list(sum(group.counts, Counter()))
    return group.pairs(lambda a, b: similarity.symmetric_kl(a, b, items), group.counts)


def _to_centre(group: Group) -> float:
    rows = group.features.astype(np.float64)
    return float(np.mean(np.linalg.norm(rows - rows.mean(axis=0), axis=1)))


def _unit(features: Float[np.ndarray, "G D"]) -> Float[np.ndarray, "G D"]:
    lengths = np.linalg.norm(features, axis=1, keepdims=True)
    return features / np.where(lengths > 0, lengths, 1.0)


def _diversity(group: Group) -> float:
    rows = _unit(group.features)
    # Above 0, unless a state is not finite.
    return float(metrics.log_determinant(rows, np.ones(len(rows), bool))) or math.nan


def _lidar(group: Group) -> float:
    """The responses are the classes, their tokens the members."""
    states = [item.response.states for item in group.items if len(item.response.states)]
    if len(states) < 2:
        return math.nan
    longest = max(next_power_of_two(max(map(len, states))), MIN_BUCKET)
    padded = np.stack([np.pad(rows, ((0, longest - len(rows)), (0, 0))) for rows in states])
    mask = np.arange(longest) < np.array([len(rows) for rows in states])[:, None]
    return float(metrics.lidar(padded, mask)) or math.nan  # at least 1 where it exists


OF_COUNTS = {
    "count_entropy": similarity.count_entropy,
    "count_confidence": similarity.count_confidence,
}
RESPONSE_MEASURES: dict[str, Callable[[Item], float]] = {
    **{name: lambda item, name=name: item.ranks[name] for name in RANKS},
    "score": lambda item: item.response.score,
    "correct": lambda item: item.response.correct,
    "mean_logprob": lambda item: token_mean(item.response.logprobs),
    "token_entropy": lambda item: token_mean(item.response.entropies),
    "confidence": lambda item: token_mean(item.response.confidences),
    "repetition": lambda item: similarity.repetition(_known(item.response.token_ids)),
    "length": lambda item: float(len(item.response.states)),
}
PROMPT_MEASURES: dict[str, Callable[[Group], float]] = {
    **{f"{name}_mean": lambda group, name=name: group.mean(name) for name in RESPONSE_MEASURES},
    **{f"{name}_stacked": lambda group, name=name: group.stacked[name] for name in RANKS},
    "token_entropy_stacked": lambda group: group.pooled("entropies"),
    "confidence_stacked": lambda group: group.pooled("confidences"),
    "repetition_stacked": lambda group: similarity.repetition(group.ids),
    "length_total": lambda group: float(sum(len(item.response.states) for item in group.items)),
    "token_jsd": lambda group: group.pairs(similarity.jensen_shannon, group.counts),
    "token_kl": _kl,
    "euclidean_distance": lambda group: mean(distance for distance, _ in group.distances),
    "cosine_similarity": lambda group: mean(cosine for _, cosine in group.distances),
    "distance_to_centre": _to_centre,
    **{
        f"rouge_{size}_{kind}": lambda group, size=size, kind=kind: group.pairs(
            functools.partial(similarity.rouge_n, size=size), getattr(group, kind)
        )
        for size in (1, 2)
        for kind in ("ids", "words")
    },
    **{
        f"rouge_l_{kind}": lambda group, kind=kind: group.pairs(
            similarity.rouge_l, getattr(group, kind)
        )
        for kind in ("ids", "words")
    },
}
# The measures so far are the 10 and 28 of the release.
RESPONSE_MEASURES |= {
    **{
        name: lambda item, f=f: f(Counter(*_known(item.response.token_ids)))
        for name, f in OF_COUNTS.items()
    },
    "elliptical_novelty": lambda item: item.novelty,
}
PROMPT_MEASURES |= {
    **{f"{name}_mean": lambda group, name=name: group.mean(name) for name in OF_COUNTS},
    **{
        f"{name}_stacked": lambda group, f=f: f(sum(group.counts, Counter()))
        for name, f in OF_COUNTS.items()
    },
    "log_determinant": _diversity,
    "lidar": _lidar,
}


@dataclasses.dataclass(frozen=True, eq=False)
class Measured:
    """Two tables, as dicts of columns; the first columns are integers, the others floats."""

    # `group_id`, `sample_index`, and the measures of each response
    responses: dict[str, np.ndarray]
    prompts: dict[str, np.ndarray]  # `group_id`, `num_responses`, and the measures of each prompt


def measure(
    responses: Iterable[StudiedResponse],
    *,
    stride: int,
    window: str = "exact",
    method: str = "gram",
    names: Sequence[str] = (),
    wanted: Callable[[str], bool] = lambda name: True,
) -> Measured:
    """Computes the measures of all responses and of all prompts.

    Args:
      responses: those of a prompt one after the other.
      stride, window, method: as in `metrics.hidden_state_metrics`.
      names: further metrics of the states; values only.
      wanted: which measures to compute; the others are left out.

    Raises:
      UserError: if fewer than three responses have two tokens, which an effective rank needs.
    """
    measured_names = tuple(dict.fromkeys(("effective_rank", *names)))
    of_states = functools.partial(
        measure_response, stride=stride, window=window, method=method, orders=RANKS[:1]
    )
    rows, prompt_rows = [], []
    of_response = {name: f for name, f in RESPONSE_MEASURES.items() if wanted(name)}
    of_prompt = {name: f for name, f in PROMPT_MEASURES.items() if wanted(name)}
    needs_stack = any(f"{name}_stacked" in of_prompt for name in RANKS)
    lengths: list[int] = []
    for group_id, group in itertools.groupby(responses, key=lambda response: response.group_id):
        group = sorted(group, key=lambda response: response.sample_index)
        lengths += [len(response.states) for response in group]
        features = np.stack([_mean_state(response.states) for response in group])
        novelties = np.full(len(group), math.nan)
        if len(group) > 1:
            everyone = np.ones(len(group), bool)
            novelties = np.asarray(metrics.elliptical_novelty(_unit(features), everyone))
        items = [
            Item(response, of_states(response.states, names=measured_names), float(novelty))
            for response, novelty in zip(group, novelties)
        ]
        found = [{name: f(item) for name, f in RESPONSE_MEASURES.items()} for item in items]
        rows += [
            {name: getattr(item.response, name) for name in KEYS}
            | {name: row[name] for name in of_response}
            | {name: item.ranks[metric_name(name)] for name in names}
            for item, row in zip(items, found)
        ]
        stacked = dict.fromkeys(RANKS, math.nan)
        if needs_stack:
            states = np.concatenate([response.states for response in group])
            stacked = of_states(states, names=RANKS[:1])
        whole = Group(items, found, stacked, features)
        prompt_rows.append(
            {"group_id": group_id, "num_responses": len(group)}
            | {name: f(whole) for name, f in of_prompt.items()}
        )
    enough = sum(length >= 2 for length in lengths)
    if enough < MIN_RESPONSES:
        raise UserError(
            f"{enough} of {len(lengths)} responses have two tokens; a study needs {MIN_RESPONSES}."
        )
    return Measured(_columns(rows), _columns(prompt_rows))


def _columns(rows: Sequence[dict[str, Any]]) -> dict[str, np.ndarray]:
    return {name: np.array([row[name] for row in rows]) for name in rows[0]}


def _known(token_ids: np.ndarray | None) -> list[list[int]]:
    return [] if token_ids is None else [token_ids.tolist()]


def _mean_state(states: Float[np.ndarray, "T D"]) -> Float[np.ndarray, " D"]:
    return states.mean(axis=0) if len(states) else np.zeros(states.shape[1], np.float32)
