"""PROF: GRPO without the responses whose steps contradict their outcome.

A = (r - mean) / (std + epsilon), mean and sample standard deviation over the kept responses of the
group; the others are not trained on

v = 2 y (mean of s - mean step) - step_penalty [fewer than min_steps or more than max_steps], s the
[rewards of its steps](verifiers.md#rewards-of-steps), mean step over the batch, y = 1 if r >
threshold (correct), else -1; without steps, the first term is 0. Each group loses num_removed
responses: n of the c correct and the others of the w wrong ones, n = (c - w + num_removed) / 2,
rounded half to even and from 0 to num_removed, so that as many of both are left. The responses with
the lowest v of each kind go.

Source: arXiv:2509.03403 (PROF) and its code (amazon-science/PROF-GRPO, prof_grpo_both), 8 responses
a group. A process reward model gives s there, from 0 to 1; here a reward function does.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from semrl_jax.algorithms.algorithm import Needs, Passes, check_options
from semrl_jax.algorithms.groups import broadcast_to_tokens, group_relative_advantages
from semrl_jax.algorithms.objective import WholeResponses, group_needs, loss, token_weights
from semrl_jax.support.fields import setting

__all__ = ["Options", "advantages", "loss", "needs", "selected", "token_weights"]


@dataclasses.dataclass(frozen=True)
class Options(WholeResponses):
    """Own options; see `Objective` for the others."""

    epsilon: float = setting(1e-6, "keeps a quotient finite", above=0)
    threshold: float = setting(0.0, "rewards above are positive")
    num_removed: int = setting(
        4, "of each group, which are not trained on", "responses", at_least=0
    )
    step_penalty: float = setting(10.0, "of a response with too few or too many steps", at_least=0)
    min_steps: int = setting(2, "fewest steps of a response without penalty", at_least=0)
    max_steps: int = setting(30, "most steps of a response without penalty", at_least=1)

    def __post_init__(self):
        super().__post_init__()
        is_fine = self.min_steps <= self.max_steps
        check_options(self, min_steps=(is_fine, f"be at most max_steps={self.max_steps}"))


def needs(options: Options) -> Needs:
    least = options.num_removed + 2
    return group_needs(options)._replace(spans=True, selects=True, least_group=least)


def selected(
    rewards: Float[Array, "P G"],
    passes: Passes,
    response_mask: Bool[Array, "B T"],
    options: Options,
) -> Bool[Array, "P G"]:
    correct = rewards > options.threshold
    sums = jnp.sum(passes.spans.rewards, axis=1).reshape(rewards.shape)
    counts = jnp.sum(passes.spans.ends, axis=1).reshape(rewards.shape)
    mean = jnp.sum(sums) / jnp.maximum(jnp.sum(counts), 1)
    consistency = 2 * (sums / jnp.maximum(counts, 1) - mean) * jnp.where(counts > 0, 1.0, 0.0)
    odd = (counts < options.min_steps) | (counts > options.max_steps)
    value = jnp.where(correct, consistency, -consistency) - options.step_penalty * odd
    num_correct = jnp.sum(correct, axis=1, keepdims=True)
    num_wrong = rewards.shape[1] - num_correct
    removed = options.num_removed
    of_correct = jnp.round((num_correct - num_wrong + removed) / 2).astype(int)
    of_correct = jnp.clip(of_correct, 0, removed)
    going = jnp.where(correct, of_correct, removed - of_correct)
    # Its place among those of its kind, of which the first ones of equal value go.
    places = [
        jnp.argsort(jnp.argsort(jnp.where(kind, value, jnp.inf))) for kind in (correct, ~correct)
    ]
    return jnp.where(correct, *places) >= going


def advantages(
    rewards: Float[Array, "P G"],
    passes: Passes,
    response_mask: Bool[Array, "B T"],
    options: Options,
) -> Float[Array, "B T"]:
    kept = passes.selected.astype(jnp.float32)
    found = group_relative_advantages(rewards, epsilon=options.epsilon, lengths=kept)
    return broadcast_to_tokens(found, response_mask)
