"""Groups of which some responses go on after the first tokens of others."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from types import MappingProxyType
from typing import Any

import ml_collections
import numpy as np

from semrl_jax import data
from semrl_jax.sampling.branching import Rule, Whole, find_rule
from semrl_jax.sampling.episodes import Ask
from semrl_jax.sampling.requests import Draw, stream_seed
from semrl_jax.sampling.splicing import as_context, cut, joined, stopped
from semrl_jax.support.clock import Clock
from semrl_jax.types import Rollout, SampleRequest

_ROOM = 128  # tokens; a limit of other sizes would compile other programs


@dataclasses.dataclass
class Branched:
    """Two calls of the policy: for the whole responses of all groups, then for the branches.

    The second begins when the first has ended. Its prompts end with the prefixes, and each branch
    has its own random numbers, those of its request. An example with groups of 4, `branches=1`, and
    prompts of 5 tokens:

        responses 0 and 1   asked with 5 tokens        tokens 0 to 7, and 0 to 9
        the rule            (response 0, position 3), (response 1, position 6)
        response 2          asked with 5 + 3 tokens    tokens 0 to 2 of response 0, then its own
        response 3          asked with 5 + 6 tokens    tokens 0 to 5 of response 1, then its own

    `rollout.max_response_tokens` limits prefix and branch together. Equal draws give equal
    responses, to the bit: the rule sees only the responses of a group, in their order, and the
    second call follows from its places.
    """

    rule: Rule
    group_size: int
    max_tokens: int
    tokenizer: Any
    stop_strings: tuple[str, ...] = ()

    is_divisible = False
    counters = MappingProxyType({})

    @classmethod
    def of(cls, config: ml_collections.ConfigDict, tokenizer: Any) -> Branched | None:
        """None without `rollout.branching`."""
        rollout = config.rollout
        rule = find_rule(rollout.branching)
        if rule is None:
            return None
        limit, texts = rollout.max_response_tokens, tuple(rollout.stop_strings)
        return cls(rule, rollout.group_size, limit, tokenizer, texts)

    def __post_init__(self):
        self._texts = dict.fromkeys(self.tokenizer.all_special_ids, "")

    @functools.cached_property
    def _bytes(self) -> data.TokenBytes:
        return data.TokenBytes(self.tokenizer)

    def play(self, draw: Draw, ask: Ask, clock: Clock) -> Iterator[Rollout]:
        num_whole = self.rule.num_whole(self.group_size)
        first = [each for each in draw.requests if each.sample_index < num_whole]
        branches = [each for each in draw.requests if each.sample_index >= num_whole]
        needs_entropies = self.rule.module.NEEDS_ENTROPIES
        whole: dict[int, dict[int, Rollout]] = {each.group_id: {} for each in first}
        with contextlib.closing(ask(first, entropies=needs_entropies)) as answers:
            for rollout in answers:
                kept = rollout
                if not self.rule.options.trains_prefix:  # else the memory of all states
                    kept = dataclasses.replace(rollout, hidden_states=None)
                whole[rollout.group_id][rollout.sample_index] = kept
                yield dataclasses.replace(rollout, entropies=None, parent=-1)
        if not branches:
            return
        prefixes: dict[str, Rollout] = {}
        for group, requests in itertools.groupby(branches, key=lambda each: each.group_id):
            in_order = [whole[group][index] for index in sorted(whole[group])]
            prefixes |= self._prefixes(list(requests), in_order)
        del whole
        asked = [
            dataclasses.replace(
                each,
                prompt_ids=np.concatenate(
                    [each.prompt_ids, prefixes[each.sample_id].response_ids], dtype=np.int32
                ),
            )
            for each in branches
        ]
        shortest = min(len(prefix.response_ids) for prefix in prefixes.values())
        room = self.max_tokens - shortest // _ROOM * _ROOM
        with contextlib.closing(ask(asked, max_tokens=room)) as answers:
            for rollout in answers:
                yield self._branch(prefixes.pop(rollout.sample_id), rollout)

    def _prefixes(
        self, requests: Sequence[SampleRequest], whole: Sequence[Rollout]
    ) -> dict[str, Rollout]:
        """The prefix of each branch of a group by its sample id, maybe without a token."""
        group = [
            Whole(each.response_ids, list(map(self._text, each.response_ids)), each.entropies)
            for each in whole
        ]
        places = self.rule.places(group, len(requests), stream_seed(requests[0].seed, 1))
        return {
            request.sample_id: dataclasses.replace(
                cut(whole[place.response], place.position, "length"),
                parent=whole[place.response].sample_index if place.position else -1,
                num_prefix=place.position,
            )
            for request, place in zip(requests, places, strict=True)
        }

    def _branch(self, prefix: Rollout, rollout: Rollout) -> Rollout:
        """The whole response, of which `rollout` is what follows the prefix."""
        if not self.rule.options.trains_prefix:
            prefix = as_context(prefix, rollout.hidden_states)
        found = dataclasses.replace(
            joined(prefix, rollout),
            parent=prefix.parent,
            num_prefix=prefix.num_prefix,
            entropies=None,
        )
        if self.stop_strings:  # one may span prefix and branch
            found = stopped(found, self._bytes, self.stop_strings)
        if len(found.response_ids) > self.max_tokens:
            found = cut(found, self.max_tokens, "length")
        return found

    def _text(self, token_id: int) -> str:
        token_id = int(token_id)
        if token_id not in self._texts:
            self._texts[token_id] = self.tokenizer.decode([token_id])
        return self._texts[token_id]
