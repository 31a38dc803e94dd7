"""Hints: a group without a correct response answers again, with a part of a solution in its prompt.

With `rollout.hint_rounds=n`, the prompt of such a group in round k = 1, ..., n is that of
`data.hint_input`, with the first round(k / (n + 1) * N) of the N characters of its first given
response as the hint. All G responses are sampled again. The rounds end when one is correct, and
the last responses are trained on, after the prompt that they were sampled from. A prompt without a
solution has no hints, and a hint that makes a prompt longer than `rollout.max_prompt_tokens` is
left out.

Source: arXiv:2507.10628 (GHPO), and its code (github.com/hkgc-1/GHPO, src/ghpo/ghpo_trainer.py):
n = 3, with the shares 0.25, 0.5 and 0.75, and the text of `data.hint_input`. Departures: the code
cuts prompts that are too long at their beginning; and it samples without hints before
`start_hint_step`, whose default is 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ml_collections
import numpy as np
from jaxtyping import Int

from semrl_jax import data
from semrl_jax.data.rewording import reworded
from semrl_jax.sampling.requests import Draw, stream_seed
from semrl_jax.sampling.scoring import Scored, num_sampled_tokens
from semrl_jax.support.errors import UserError
from semrl_jax.types import SampleRequest

_HINTS = 0x417  # second number of their seeds
NUM_TRIED = 256  # prompts, before a run begins


@dataclasses.dataclass(frozen=True, eq=False)
class Hints:
    """Makes the prompts of a run with hints."""

    config: ml_collections.ConfigDict
    tokenizer: Any

    def check(self, examples: Sequence[data.PromptExample]) -> None:
        """UserError if no prompt of some has room for its first hint."""
        rollout = self.config.rollout
        tried = dict(enumerate(examples[:NUM_TRIED]))
        lengths = list(map(len, self._of_any_length(tried, 1 / (rollout.hint_rounds + 1)).values()))
        if lengths and min(lengths) > rollout.max_prompt_tokens:
            raise UserError(
                f"rollout.hint_rounds={rollout.hint_rounds}: the first {len(lengths)} prompts have "
                f"{min(lengths)} to {max(lengths)} tokens with their first hint, more than "
                f"rollout.max_prompt_tokens={rollout.max_prompt_tokens}; raise it."
            )

    def prompts(
        self, examples: Mapping[int, data.PromptExample], share: float
    ) -> dict[int, Int[np.ndarray, " _"]]:
        """The prompts with this share of their solutions, by group.

        A group without a solution has none, nor has one whose prompt would be too long.
        """
        limit, found = self.config.rollout.max_prompt_tokens, self._of_any_length(examples, share)
        return {group: ids for group, ids in found.items() if len(ids) <= limit}

    def _of_any_length(
        self, examples: Mapping[int, data.PromptExample], share: float
    ) -> dict[int, Int[np.ndarray, " _"]]:
        known = {group: example for group, example in examples.items() if example.given}
        if not known:
            return {}
        values = []
        for example in known.values():
            solution = self.tokenizer.decode(example.given[0], skip_special_tokens=True)
            values.append({"hint": solution[: round(share * len(solution))]})
        settings, of = self.config.data, list(known.values())
        return dict(zip(known, reworded(settings.hint_input, of, values, self.tokenizer, settings)))

    def answered(
        self,
        scored: Scored,
        draw: Draw,
        examples: Mapping[int, data.PromptExample],
        sample: Callable[[Sequence[SampleRequest]], Scored],
    ) -> Scored:
        """The responses of a draw, those of failed groups with hints; all processes call it.

        Args:
          scored: all responses to the draw, in (group, sample) order.
          examples: prompts by group.
          sample: samples requests of whole groups, and scores the responses.
        """
        num_rounds, num_dropped = self.config.rollout.hint_rounds, 0
        scored = _with_share(scored, 0.0)
        for number in range(1, num_rounds + 1):
            solved = {item.rollout.group_id for item in scored if item.verdict.correct}
            share = number / (num_rounds + 1)
            failed = {group: each for group, each in examples.items() if group not in solved}
            prompts = self.prompts(failed, share)
            requests = [
                dataclasses.replace(
                    request,
                    prompt_ids=prompts[request.group_id],
                    seed=stream_seed(request.seed, _HINTS, number),
                )
                for request in draw.requests
                if request.group_id in prompts
            ]
            if requests:
                found = _with_share(sample(requests), share)
                is_kept = np.array([item.rollout.group_id not in prompts for item in scored])
                num_dropped += num_sampled_tokens(scored.take(np.flatnonzero(~is_kept)))
                kept = scored.take(np.flatnonzero(is_kept))
                scored = Scored.joined([kept, found]).in_order()
        return dataclasses.replace(scored, num_dropped=num_dropped)


def _with_share(scored: Scored, share: float) -> Scored:
    items = [
        dataclasses.replace(item, rollout=dataclasses.replace(item.rollout, hint=share))
        for item in scored
    ]
    return dataclasses.replace(scored, items=items)
