"""Branching: where responses of a group leave other responses of the group.

With `rollout.branching`, the first G / (1 + N) responses of a group are sampled from the prompt,
N = `branches` for each. The others go on after the first tokens of one of these. A rule says of
which, and after how many tokens. It is a module with these names:

- `Options`: a subclass of `BranchOptions`, whose settings an entry sets:
  `NAME:option=value:option=value`.
- `NEEDS_ENTROPIES`: whether it looks at `Whole.entropies`.
- `places(group, num_branches, options, random)`: one `Place` per branch, from the whole responses
  of one group and a generator of random numbers of its own; pure.

`sampling.branched` samples by it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from semrl_jax.support.errors import UserError
from semrl_jax.support.fields import setting
from semrl_jax.support.modules import module_with_options, running

FIELD = "rollout.branching"
PARTS = ("Options", "NEEDS_ENTROPIES", "places")


@dataclasses.dataclass(frozen=True)
class BranchOptions:
    """Settings of every rule.

    `trains_prefix` is a choice of ours. With 0, the prefix of a branch is context, as if it were a
    part of the prompt: its tokens are trained on once, in the response that sampled them, and the
    branch's length, metrics and loss are of its own tokens. With 1, a branch is like any other
    response; its prefix has the log-probabilities and states of the response that sampled it.
    """

    branches: int = setting(3, "branches of each response from the prompt", "responses", at_least=1)
    trains_prefix: int = setting(
        0, "1: a branch's prefix is trained on as its own tokens are; 0: it is context",
        within="[0, 1]",
    )  # fmt: skip


class Whole(NamedTuple):
    """A response that was sampled from the prompt, T tokens."""

    token_ids: Int[np.ndarray, " T"]
    texts: Sequence[str]  # of each token alone; "" of special ones
    entropies: Float[np.ndarray, " T"] | None  # nats, see `Rollout.entropies`; if asked for


class Place(NamedTuple):
    """Where a branch begins."""

    response: int  # its number in the group
    position: int  # tokens of it that the branch has, below T; 0: the branch has none


@dataclasses.dataclass(frozen=True)
class Rule:
    """A module and its options."""

    module: ModuleType
    options: BranchOptions

    def num_whole(self, group_size: int) -> int:
        """Responses of a group that are sampled from the prompt."""
        return group_size // (1 + self.options.branches)

    def places(self, group: Sequence[Whole], num_branches: int, seed: int) -> list[Place]:
        """The places of the branches of a group; UserError if the user's rule breaks its own."""
        random = np.random.default_rng(seed)
        with running(FIELD, self.module, "places"):
            found = [
                Place(int(response), int(position))
                for response, position in self.module.places(
                    group, num_branches, self.options, random
                )
            ]
            if len(found) != num_branches or not all(
                0 <= place.response < len(group)
                and 0 <= place.position < len(group[place.response].token_ids)
                for place in found
            ):
                raise ValueError(
                    f"{num_branches} places must be within the responses, and not at their ends"
                )
        return found


def find_rule(entry: str) -> Rule | None:
    """The rule that `rollout.branching` names; None for "". UserError for a wrong entry."""
    if not entry:
        return None
    module, options = module_with_options(FIELD, entry, __name__, PARTS)
    if not isinstance(options, BranchOptions):
        raise UserError(f"{FIELD}={entry!r}: Options must be a subclass of BranchOptions.")
    return Rule(module, options)


def drawn(
    group: Sequence[Whole],
    candidates: Callable[[Whole], Sequence[int]],
    num_branches: int,
    random: np.random.Generator,
) -> list[Place]:
    """One of the candidates of each response, or 0 without any; all its branches begin there."""
    tokens = [candidates(whole) for whole in group]
    places = [Place(i, int(random.choice(own)) if len(own) else 0) for i, own in enumerate(tokens)]
    # A response has as many of the branches as the others, up to one.
    return [places[i * len(places) // num_branches] for i in range(num_branches)]
