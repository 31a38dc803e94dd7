"""Branch at a random token: the comparison with which CURE shows what entropy adds.

As `cure`, with all tokens as candidates in place of those of highest entropy. It needs no
entropies, so any replica will do.

Source: as `cure`; `critical_token_type=random` of its code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from semrl_jax.sampling.branching import BranchOptions, Place, Whole, spread
from semrl_jax.sampling.branching.cure import candidates
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
    found = []
    for i, whole in enumerate(group):
        tokens = candidates(whole, range(len(whole.token_ids)), options.min_characters)
        found.append(Place(i, int(random.choice(tokens)) if tokens else 0))
    return spread(found, num_branches)
