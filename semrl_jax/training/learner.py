"""Owns the policy, the reference, the optimiser and the mesh: forward passes and updates."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
import optax
from jax.sharding import Mesh
from jaxtyping import Array, Float

from semrl_jax import models
from semrl_jax.algorithms.algorithm import Algorithm, Passes
from semrl_jax.clock import Clock
from semrl_jax.cluster.peers import Peers
from semrl_jax.shaping import ShapingState, init_shaping_state
from semrl_jax.training.packing import row_plan
from semrl_jax.training.reward_model import RewardModel
from semrl_jax.training.rollout_batch import pad_batch
from semrl_jax.training.state import (
    TrainState,
    abstract_state,
    init_state,
    learning_rate_at,
    num_optimizer_updates,
)
from semrl_jax.training.update import TokenPass, batch_logprobs, update_policy
from semrl_jax.types import Rollout, RolloutBatch


class NonFiniteUpdates(RuntimeError):
    """Too many updates in a row were not finite.

    Attributes:
      minibatch: the arrays of the last one.
    """

    def __init__(self, num_updates: int, minibatch: Any):
        super().__init__(f"the loss or gradient of {num_updates} updates in a row was not finite")
        self.minibatch = minibatch


class ForwardPasses(NamedTuple):
    """The passes over one batch; None where nothing needs one."""

    old: TokenPass | None
    ref_logprobs: Float[Array, "B T"] | None

    def arrays(self) -> Passes:
        """What an algorithm may take for its advantages."""
        return Passes(None if self.old is None else self.old.logprobs, self.ref_logprobs)


@dataclasses.dataclass
class Learner:
    """Computes the passes and updates; it never sees text, addresses or files."""

    config: ml_collections.ConfigDict
    algorithm: Algorithm
    policy: models.Policy
    mesh: Mesh
    reference: models.Params | None  # the anchor of the KL; None if the algorithm needs none
    optimizer: optax.GradientTransformation
    pad_token_id: int
    peers: Peers
    device_lock: threading.Lock  # shared with an embedded replica
    reward_model: RewardModel | None = None

    def batch(self, rollouts: Sequence[Rollout]) -> RolloutBatch:
        """The batch on the host, from where every pass lays its rows over the mesh."""
        return pad_batch(
            rollouts,
            pad_token_id=self.pad_token_id,
            max_prompt_tokens=self.config.rollout.max_prompt_tokens,
            max_response_tokens=self.config.rollout.max_response_tokens,
        )

    def passes(
        self,
        params: models.Params,
        batch: RolloutBatch,
        clock: Clock,
        *,
        with_states: bool = False,
        with_entropies: bool = False,
    ) -> ForwardPasses:
        """The forward passes that the algorithm needs, before the update.

        Args:
          params: of the policy.
          batch: from `batch`.
          with_states, with_entropies: what the policy's own pass keeps, which makes it needed.
        """
        needs = self.algorithm.needs
        needs_old = needs.old_logprobs or self.config.algorithms.importance.level != "none"
        old = reference = None
        if needs_old or with_states or with_entropies:
            with clock("old_logprobs"):
                old = self.logprobs(
                    params, batch, with_states=with_states, with_entropies=with_entropies
                )
        if needs.reference:
            with clock("ref_logprobs"):
                reference = self.logprobs(self.reference, batch).logprobs
        return ForwardPasses(old, reference)

    def logprobs(self, params: models.Params, batch: RolloutBatch, **with_also: bool) -> TokenPass:
        """Log-probabilities of the responses under `params`, and what `batch_logprobs` can add."""
        with self.peers.phase("logprobs"), self.device_lock:
            # A replica in this process must not begin a program before this one has ended.
            return jax.block_until_ready(
                batch_logprobs(
                    params,
                    batch,
                    policy=self.policy,
                    temperature=self.config.rollout.temperature,
                    plan=row_plan(self.mesh, self.config.training),
                    **with_also,
                )
            )

    def update(
        self,
        state: TrainState,
        batch: RolloutBatch,
        passes: ForwardPasses,
        advantages: Float[Array, "B T"],
    ) -> tuple[TrainState, dict[str, float]]:
        """One optimiser step per mini-batch of prompts; scalars are means over them.

        The parameters and optimiser state of `state` are donated.

        Raises:
          NonFiniteUpdates: after `training.max_skipped_updates` non-finite updates in a row.
        """
        config, training = self.config, self.config.training
        size = training.prompts_per_minibatch * config.rollout.group_size
        params, opt_state, skipped = state.params, state.optimizer, int(state.skipped_in_row)
        num_updates = num_optimizer_updates(opt_state)
        history = []
        arrays = (batch, *passes.arrays(), advantages)
        for start in range(0, len(batch.token_ids), size):
            minibatch = jax.tree.map(lambda leaf: leaf[start : start + size], arrays)  # noqa: B023
            with self.peers.phase("update"), self.device_lock:
                params, opt_state, scalars = jax.block_until_ready(
                    update_policy(
                        params,
                        opt_state,
                        *minibatch,
                        policy=self.policy,
                        optimizer=self.optimizer,
                        temperature=config.rollout.temperature,
                        plan=row_plan(self.mesh, training),
                        algorithm=self.algorithm,
                    )
                )
            history.append({name: float(value) for name, value in scalars.items()})
            skipped = skipped + 1 if history[-1]["policy/update_skipped"] else 0
            if skipped >= training.max_skipped_updates:
                raise NonFiniteUpdates(skipped, minibatch)
        means = {name: float(np.mean([h[name] for h in history])) for name in history[0]}
        means["policy/learning_rate"] = float(
            learning_rate_at(
                num_updates,
                learning_rate=training.learning_rate,
                learning_rate_warmup_steps=training.learning_rate_warmup_steps,
            )
        )
        return (
            state._replace(
                params=params,
                optimizer=opt_state,
                skipped_in_row=models.from_host(np.int32(skipped), models.replicated(self.mesh)),
            ),
            means,
        )

    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of a state: what a checkpoint is restored into."""
        return abstract_state(
            self.policy.shapes(), self.optimizer, self._first_baselines(), self.mesh
        )

    def first_state(self, params: models.Params | None) -> TrainState:
        """The state before the first update.

        Args:
          params: float32, taken over; None: the reference's.
        """
        if params is None:
            params = jax.tree.map(jnp.copy, self.reference)  # an update donates its parameters
        return init_state(params, self.optimizer, self._first_baselines(), self.mesh)

    def _first_baselines(self) -> ShapingState:
        options = self.config.shaping
        return init_shaping_state(options.indicators, guidance=options.guidance)
