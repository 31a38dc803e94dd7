"""The probability of the reference answer as the reward of what was written before it.

r = clip(p(reference | prompt, response up to the mark) - p(reference | prompt, mark), 0, 1), p the
mean probability of the tokens of the reference, of the policy before the update at
`rollout.temperature`

The mark, such as <answer>, announces an answer; the last one of a response counts. A response
without it has the reward 0. Correctness, the box and the answer still come from the verifier.

Source: arXiv:2506.18254 (RLPR) and its code. There the mark is <answer>, a format reward of weight
0.1 joins, and groups with a small deviation are left out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import ml_collections
import numpy as np
from jaxtyping import Float, Int

from semrl_jax import data
from semrl_jax.models import DecoderConfig
from semrl_jax.sampling.scoring import Scored, ScoredRollout
from semrl_jax.support.rounding import next_power_of_two
from semrl_jax.training.rollout_batch import pad_batch
from semrl_jax.types import Rollout, RolloutBatch

# Log-probabilities, nats, of the response tokens of a batch, before the update.
Logprobs = Callable[[RolloutBatch], Float[np.ndarray, "B T"]]


@dataclasses.dataclass(frozen=True)
class ProbabilityReward:
    """How the probability of a reference answer is asked for."""

    mark: str  # text that announces an answer
    tokenizer: Any
    limit: int  # tokens of a prompt with a response; a longer one has the reward 0

    @classmethod
    def of(
        cls, config: ml_collections.ConfigDict, tokenizer: Any, architecture: DecoderConfig
    ) -> ProbabilityReward | None:
        """The reward of `rewards.probability_after`, None without it."""
        if not (mark := config.rewards.probability_after):
            return None
        limit = architecture.max_position_embeddings
        return cls(mark, tokenizer, min(config.training.micro_batch_tokens or limit, limit))

    def judged(self, scored: Scored, logprobs: Logprobs) -> Scored:
        """The responses with this reward as their score."""
        mark = np.array(self._encoded(self.mark), np.int32)
        asked: list[Rollout] = []
        places = np.full((len(scored), 2), -1)  # of each response: with it, and with the mark alone
        alone: dict[tuple[int, str], int] = {}
        for row, item in enumerate(scored):
            rollout, answer = item.rollout, np.array(self._encoded(item.reference), np.int32)
            before = self._before_answer(rollout.response_ids)
            if before is None or not len(answer):
                continue
            if len(rollout.prompt_ids) + len(before) + len(answer) > self.limit:
                continue
            places[row, 0] = len(asked)
            asked.append(_asking(item, before, answer))
            key = rollout.group_id, item.reference
            if key not in alone:
                alone[key] = len(asked)
                asked.append(_asking(item, mark, answer))
            places[row, 1] = alone[key]
        # The number of rows is the same in every step, so that one program computes them.
        most = len(scored) + len({item.rollout.group_id for item in scored})
        probabilities = self._means(asked, most, logprobs)
        gains = probabilities[places[:, 0]] - probabilities[places[:, 1]]
        scores = np.where(places[:, 0] >= 0, np.clip(gains, 0.0, 1.0), 0.0)
        items = [
            dataclasses.replace(item, verdict=dataclasses.replace(item.verdict, score=float(score)))
            for item, score in zip(scored, scores, strict=True)
        ]
        return dataclasses.replace(scored, items=items)

    def _means(
        self, asked: Sequence[Rollout], count: int, logprobs: Logprobs
    ) -> Float[np.ndarray, " _"]:
        """The mean probability of the answer of each; one more row, which nothing asked for."""
        if not asked:
            return np.zeros(1)
        rows = [*asked, *asked[:1] * (count - len(asked))]
        batch = pad_batch(
            rows,
            pad_token_id=self.tokenizer.pad_token_id,
            max_prompt_tokens=next_power_of_two(max(len(r.prompt_ids) for r in rows)),
            max_response_tokens=next_power_of_two(max(len(r.response_ids) for r in rows)),
        )
        mask = batch.response_mask
        found = np.where(mask, np.exp(np.asarray(logprobs(batch), np.float64)), 0.0)
        return np.append(found.sum(axis=1) / mask.sum(axis=1), 0.0)

    def _before_answer(self, ids: Int[np.ndarray, " T"]) -> Int[np.ndarray, " t"] | None:
        """The tokens up to the end of the last mark; None without a mark."""

        def marks(count: int) -> int:
            return data.full_text(self.tokenizer, ids[:count]).count(self.mark)

        if not (total := marks(len(ids))):
            return None
        low, high = 1, len(ids)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if marks(middle) == total else (middle + 1, high)
        return ids[:low]

    def _encoded(self, text: str) -> list[int]:
        return data.encode(self.tokenizer, [text], ())[0]


def _asking(
    item: ScoredRollout, before: Int[np.ndarray, " b"], answer: Int[np.ndarray, " a"]
) -> Rollout:
    """The prompt, a text before the answer as context, and the answer as what counts."""
    ids = np.concatenate([before, answer]).astype(np.int32)
    return dataclasses.replace(
        item.rollout,
        response_ids=ids,
        rollout_logprobs=np.zeros(len(ids), np.float32),
        response_mask=np.arange(len(ids)) >= len(before),
    )
