"""Supervised fine-tuning on conversations: batches, one step, held-out loss.

The policy is a trainee as in reinforcement learning, with the likelihood as its loss. A
conversation is a row with a prompt of one token. The response mask marks which of the other tokens
are learned.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Int

from semrl_jax import data
from semrl_jax.algorithms.algorithm import Algorithm
from semrl_jax.cluster.peers import Peers
from semrl_jax.models import Base, Params, Policy, adapted
from semrl_jax.training import likelihood
from semrl_jax.training.optimizer import Optimizer
from semrl_jax.training.packing import RowPlan
from semrl_jax.training.policy_update import PolicyLoss, batch_logprobs
from semrl_jax.training.rollout_batch import bucket
from semrl_jax.training.train_state import POLICY, TrainState
from semrl_jax.training.trainee import Frozen, MiniBatch, Trainee, update_all, update_number
from semrl_jax.types import RolloutBatch

LIKELIHOOD = Algorithm(likelihood, None)


def batch_order(
    lengths: Sequence[int],
    *,
    seed: int,
    num_epochs: int,
    num_steps: int,
    batch_size: int,
    batch_tokens: int,
) -> list[Int[np.ndarray, " _"]]:
    """The conversations of each step, by index.

    Every epoch has its own order, a function of (seed, epoch). A batch may reach into the next
    epoch; the last one may be smaller.

    Args:
      lengths: of the conversations, in tokens.
      num_steps: above 0, replaces `num_epochs`.
      batch_size: conversations of a batch. `batch_tokens` above 0 replaces it: a batch takes
        conversations up to this number of tokens. The longest one must fit.
    """
    found: list[Int[np.ndarray, " _"]] = []
    batch: list[int] = []
    num_tokens = 0
    for epoch in itertools.count() if num_steps else range(num_epochs):
        for index in data.prompt_order(len(lengths), seed, epoch).tolist():
            is_full = len(batch) == batch_size
            if batch_tokens:
                is_full = num_tokens + lengths[index] > batch_tokens
            if batch and is_full:
                found.append(np.array(batch))
                batch, num_tokens = [], 0
                if num_steps and len(found) == num_steps:
                    return found
            batch.append(index)
            num_tokens += lengths[index]
    return [*found, np.array(batch)]


def conversation_batch(conversations: Sequence[data.Conversation], max_tokens: int) -> RolloutBatch:
    """Conversations as NumPy rows [first token | the rest]; `response_mask` is the loss mask.

    Each has 2 to `max_tokens` tokens. The number of columns is rounded up to one of a few.
    """
    longest = max(map(len, conversations))
    num_columns = bucket(longest - 1, max_tokens - 1)
    rows = data.pad_rows(
        [conversation.token_ids[:1] for conversation in conversations],
        [conversation.token_ids[1:] for conversation in conversations],
        prompt_length=1,
        response_length=num_columns,
        pad_id=0,
    )
    mask = data.pad_response_values(
        [conversation.loss_mask[1:] for conversation in conversations], num_columns, bool
    )
    zeros = np.zeros(mask.shape, np.float32)
    return RolloutBatch(**vars(rows), response_mask=mask, rollout_logprobs=zeros)


@dataclasses.dataclass(frozen=True)
class FineTuner:
    """Updates and measures a policy on conversations."""

    policy: Policy  # on the mesh of the plan
    optimizer: Optimizer  # from `make_optimizer`
    plan: RowPlan  # how batches are laid out; no choice changes a number beyond rounding
    max_tokens: int  # of a conversation
    max_skipped_updates: int  # non-finite updates in a row that end the training
    peers: Peers  # the processes that hold the policy; all call a method together
    base: Base | None = None  # with LoRA, what the parameters of a train state are adapters of
    dropout: float = 0.0  # of the inputs of adapters, in updates
    seed: int = 0  # of the dropout

    @functools.cached_property
    def trainee(self) -> Trainee:
        loss = PolicyLoss(self.policy, 1.0, LIKELIHOOD, dropout=self.dropout)
        return Trainee(POLICY, self.optimizer, loss, Frozen(self.base))

    def update(
        self, state: TrainState, conversations: Sequence[data.Conversation]
    ) -> tuple[TrainState, dict[str, float]]:
        """One optimiser step on the mean loss over all tokens to learn of a batch.

        The parameters and optimiser state of `state` are donated. The result has the same `step`
        and `position`. Among the scalars `sft/loss` is that before the update, with its dropout, in
        nats per token. Raises NonFiniteUpdates after `max_skipped_updates` non-finite updates in a
        row.
        """
        rows = conversation_batch(conversations, self.max_tokens)
        batch = MiniBatch(
            rows,
            advantages=np.ones(rows.response_mask.shape, np.float32),
            dropout=update_number(self.seed, int(state.step)) if self.dropout else None,
        )
        with self.peers.phase("update"):
            state, scalars, _ = update_all(
                (self.trainee,), state, batch, self.plan, self.max_skipped_updates
            )
        scalars["sft/loss"] = scalars.pop(f"{POLICY}/loss")
        return state, scalars

    def loss(
        self,
        params: Params,
        conversations: Sequence[data.Conversation],
        batch_size: int,
        check: Callable[[], None] = lambda: None,
    ) -> float:
        """Mean negative log-probability over all tokens to learn, in nats; changes nothing.

        `batch_size` changes the result only by rounding. `check` is called before every batch; it
        may raise, then in all processes.
        """
        params = adapted(params, self.base)
        total, num_tokens = 0.0, 0
        for start in range(0, len(conversations), batch_size):
            check()
            batch = conversation_batch(conversations[start : start + batch_size], self.max_tokens)
            mask = batch.response_mask
            with self.peers.phase("evaluate"):
                found = batch_logprobs(
                    params, batch, policy=self.policy, temperature=1.0, plan=self.plan
                )
                logprobs = np.asarray(found.logprobs)[mask]
            total -= float(np.sum(logprobs, dtype=np.float64))
            num_tokens += int(mask.sum())
        return total / num_tokens
