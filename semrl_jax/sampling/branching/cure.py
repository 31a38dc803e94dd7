"""CURE: branch at a random one of the tokens of highest entropy, which is then sampled again.

Of the tokens t >= 1 of a response that are no special token and whose text, without spaces around
it, has at least `min_characters` characters, the `top_tokens` of highest entropy are candidates.
One is drawn uniformly. All N branches of the response have the tokens before it as their prefix. A
response without a candidate is sampled again from the prompt.

Source: arXiv:2508.11016 (CURE), first stage, and its code (github.com/bytedance/CURE, c904b38,
recipe/CURE_First_Stage): G = 16 of n1 = 4 responses with n2 = 3 branches each, critical_top_k = 20,
texts of more than one character, the prefix not trained on in a branch. Its second stage is a run
without branching that starts from the first.

Departures. The entropy is the engine's, of the distribution that it samples from, not the
trainer's; vLLM's is from the 20 likeliest tokens, see `Rollout.entropies`. The limit of a response
counts its prefix; in the code it is of the branch alone, and the prompt with the prefix is cut to
`max_prompt_length`. The verifier reads prefix and branch; in the code it reads the branch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from semrl_jax.sampling.branching import Place, Whole, drawn, random_token
from semrl_jax.sampling.branching.random_token import candidates
from semrl_jax.support.fields import setting

NEEDS_ENTROPIES = True


@dataclasses.dataclass(frozen=True)
class Options(random_token.Options):
    top_tokens: int = setting(20, "candidates of highest entropy", "tokens", at_least=1)


def places(
    group: Sequence[Whole], num_branches: int, options: Options, random: np.random.Generator
) -> list[Place]:
    def highest(whole: Whole) -> list[int]:
        by_entropy = np.argsort(-whole.entropies, kind="stable")
        return candidates(whole, by_entropy, options.min_characters)[: options.top_tokens]

    return drawn(group, highest, num_branches, random)
