"""Branch at a random token: the comparison with which CURE shows what entropy adds.

As `cure`, with all tokens as candidates in place of those of highest entropy. It needs no
entropies, so any replica will do.

Source: as `cure`; `critical_token_type=random` of its code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from semrl_jax.sampling.branching import BranchOptions, Place, Whole, drawn
from semrl_jax.support.fields import setting

NEEDS_ENTROPIES = False


@dataclasses.dataclass(frozen=True)
class Options(BranchOptions):
    min_characters: int = setting(
        2, "least characters of a candidate; 1 for a tokenizer of characters", at_least=0
    )


def places(
    group: Sequence[Whole], num_branches: int, options: Options, random: np.random.Generator
) -> list[Place]:
    def all_tokens(whole: Whole) -> list[int]:
        return candidates(whole, range(len(whole.token_ids)), options.min_characters)

    return drawn(group, all_tokens, num_branches, random)


def candidates(whole: Whole, order: Sequence[int], min_characters: int) -> list[int]:
    """The tokens at which a response may branch, in this order."""
    return [
        t
        for t in order
        if t > 0 and whole.texts[t] and len(whole.texts[t].strip()) >= min_characters
    ]
