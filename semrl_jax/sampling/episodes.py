"""How one response comes about: by a single turn of the policy, or by several.

A response is an episode. Its tokens are those that the policy wrote and, between them, those that
others wrote: an environment, a tool, a user. An example, with a prompt of 5 tokens, at most 16
response tokens, and an environment that replies once:

    turn 1, policy  asked with 5 tokens, seed s, at most 16 tokens   tokens 0 to 3, mask True
    environment     asked with these 4 tokens                        tokens 4 to 6, mask False
    turn 2, policy  asked with 5 + 4 + 3 tokens, seed                tokens 7 to 11, mask True
                    stream_seed(s, 1), at most 16 - 7 tokens
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol, runtime_checkable

from semrl_jax.sampling.requests import Draw
from semrl_jax.support.clock import Clock
from semrl_jax.types import Rollout, SampleRequest


@runtime_checkable
class Ask(Protocol):
    """Asks the policy once; `Sampler.generate` with the options of the draw."""

    def __call__(
        self,
        requests: Sequence[SampleRequest],
        *,
        max_tokens: int = 0,
        keep: bool = False,
        entropies: bool = False,
    ) -> Iterator[Rollout]:
        """A generator of what the policy writes after each prompt, as it arrives.

        Args:
          max_tokens: of each answer; 0: `rollout.max_response_tokens`.
          keep: whether the same responses are asked to go on, so that engines keep their caches.
          entropies: whether the rollouts have the entropy at each token.
        """


@runtime_checkable
class Episodes(Protocol):
    """Plays the responses of a draw.

    What it returns follows from the draw and the answers of the policy, and not from time. Nothing
    is kept from one call of `play` to the next, except answers of environments: a run that was
    killed plays all episodes of its batch again, from their prompts.
    """

    # Whether the tokens of a response may be asked for in parts of any length, each continued from
    # the tokens before. `in_parts.InParts` does this in place of `play`.
    is_divisible: bool

    @property
    def counters(self) -> Mapping[str, int]:
        """Events so far, by the name that follows `episode/` in the log."""

    def play(self, draw: Draw, ask: Ask, clock: Clock) -> Iterator[Rollout]:
        """A generator of one rollout per request of the draw, as each ends.

        A rollout has the ids, the prompt and the group of its request, and at most
        `rollout.max_response_tokens` tokens. `response_mask` is True on the policy's tokens and
        False on all others, where log-probabilities are 0 and hidden states may hold anything.
        `versions` spans all tokens. At least one token is the policy's.

        Args:
          draw: requests of whole groups, all of this process's share; with the reference answer
            and the row of each group's prompt.
          ask: may be called several times. The last token of an answer is the one that ended it.
            The iterator that it returns must be closed, or read to the end.
          clock: times the waits for environments.
        """


class SingleTurn:
    """The policy writes the whole response."""

    is_divisible = True
    counters: Mapping[str, int] = MappingProxyType({})

    def play(self, draw: Draw, ask: Ask, clock: Clock) -> Iterator[Rollout]:
        return ask(draw.requests)
