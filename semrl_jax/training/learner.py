"""Owns the policy, the reference, the optimiser and the mesh: forward passes and updates."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float

from semrl_jax import models
from semrl_jax.algorithms import low_confidence
from semrl_jax.algorithms.algorithm import Algorithm, Passes
from semrl_jax.algorithms.credit import Credit
from semrl_jax.clock import Clock
from semrl_jax.cluster.peers import Peers
from semrl_jax.sampling.scoring import Scored
from semrl_jax.settings.rollout import num_earlier, weight_dtype
from semrl_jax.shaping import ShapingState, init_shaping_state
from semrl_jax.training.critic import batch_values, update_critic
from semrl_jax.training.offload import fetched
from semrl_jax.training.optimizer import Optimizer, rounded
from semrl_jax.training.packing import row_plan
from semrl_jax.training.plan import NOTHING, PASS, UPDATE, PassNeeds, PassPlan
from semrl_jax.training.reward_model import RewardModel
from semrl_jax.training.rollout_batch import pad_batch, prompts_alone
from semrl_jax.training.state import (
    Trained,
    TrainState,
    abstract_copied,
    abstract_everywhere,
    abstract_state,
    abstract_trained,
    copied,
    everywhere,
    init_state,
    init_trained,
    learning_rate_at,
    num_optimizer_updates,
)
from semrl_jax.training.update import TokenPass, batch_logprobs, update_policy
from semrl_jax.types import Rollout, RolloutBatch

_low_confidence = jax.jit(low_confidence, static_argnames="fraction")


class NonFiniteUpdates(RuntimeError):
    """Too many updates in a row were not finite.

    Attributes:
      minibatch: the arrays of the last one.
      models: "policy", "critic" or both: whose last update it was.
    """

    def __init__(self, num_updates: int, minibatch: Any, models: Sequence[str] = ("policy",)):
        super().__init__(f"the loss or gradient of {num_updates} updates in a row was not finite")
        self.minibatch, self.models = minibatch, tuple(models)


class ForwardPasses(NamedTuple):
    """The passes over one batch before the update; None where nothing needs one."""

    old: TokenPass | None
    ref_logprobs: Float[Array, "B T"] | None
    values: Float[Array, "B T"] | None = None
    prompt_confidence: Float[Array, " P"] | None = None  # see `algorithms.low_confidence`
    reference_states: Mapping[int, Float[np.ndarray, "_ D"]] | None = None

    def arrays(self) -> Passes:
        """What credit is assigned by."""
        old_logprobs = None if self.old is None else self.old.logprobs
        return Passes(old_logprobs, self.ref_logprobs, self.values, self.prompt_confidence)


class Critic(NamedTuple):
    """What trains the critic; its parameters, or its adapters and head, are in the train state."""

    model: models.ValueModel
    optimizer: Optimizer
    base: models.Base | None = None  # what its parameters are adapters of


@dataclasses.dataclass
class Learner:
    """Computes the passes and updates; it never sees text, addresses or files."""

    config: ml_collections.ConfigDict
    algorithm: Algorithm
    plan: PassPlan
    policy: models.Policy
    mesh: Mesh
    # The anchor of the KL, perhaps in the memory of the host; None if the algorithm needs none.
    reference: models.Params | None
    optimizer: Optimizer
    pad_token_id: int
    peers: Peers
    device_lock: threading.Lock  # shared with an embedded replica
    reward_model: RewardModel | None = None  # None: verifiers alone
    critic: Critic | None = None  # None if the algorithm has none
    lora: models.Lora | None = None  # None: all parameters are trained
    base: models.Base | None = None  # of the adapters, which are then `state.params`

    def sampling_weights(self, state: TrainState) -> tuple[models.Params, ...]:
        """The weights that batches in work are sampled with: of this step, the last, and earlier.

        Without earlier ones they are the parameters, which the update donates; else copies in
        `_kept_dtype`. Adapters are without their base; see `whole`.
        """
        if not num_earlier(self.config.rollout):
            return (state.params,)
        return (*state.earlier, copied(state.params, self._kept_dtype))

    def whole(self, params: models.Params) -> models.Params:
        """All parameters of the policy, from those in a train state; no copy of the base."""
        return models.adapted(params, self.base)

    @property
    def _kept_dtype(self) -> str:
        """Of `TrainState.earlier`: that of weight sync; adapters are merged before the cast."""
        return weight_dtype(self.config) if self.base is None else "float32"

    def batch(self, rollouts: Sequence[Rollout]) -> RolloutBatch:
        """The batch on the host, from where every pass lays its rows over the mesh."""
        return pad_batch(
            rollouts,
            pad_token_id=self.pad_token_id,
            max_prompt_tokens=self.config.rollout.max_prompt_tokens,
            max_response_tokens=self.config.rollout.max_response_tokens,
        )

    def judged(self, scored: Scored, batch: RolloutBatch, clock: Clock) -> Scored:
        """The responses with the scores of a reward model, if there is one."""
        if self.reward_model is None:
            return scored
        with clock("reward_model"):
            return self.reward_model.judged(scored, batch)

    def passes(
        self,
        state: TrainState,
        batch: RolloutBatch,
        clock: Clock,
        asked: PassNeeds = NOTHING,
    ) -> ForwardPasses:
        """The forward passes before the update: those of the plan, and what else is asked for.

        Args:
          state: before the update.
          batch: from `batch`.
        """
        plan, step = self.plan, int(state.step)
        needs = plan.needs(step, asked)
        old = reference = values = confidence = None
        if needs.logprobs or needs.entropies or needs.states:
            with clock("old_logprobs"):
                also = {"with_states": needs.states, "with_entropies": needs.entropies}
                old = self.logprobs(self.whole(state.params), batch, **also)
        if plan.reference == PASS:
            with clock("ref_logprobs"):
                reference = self.logprobs(fetched(self.reference), batch).logprobs
        if plan.values:
            with clock("values"):
                values = self.values(state.critic.params, batch)
        if plan.prompts:
            with clock("prompt_logprobs"):
                confidence = self.prompt_confidence(self.whole(state.params), batch)
        states = None
        if needs.reference_states:
            with clock("drift"):
                states = self.logprobs(fetched(self.reference), batch, with_states=True).states
        return ForwardPasses(old, reference, values, confidence, states)

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

    def prompt_confidence(self, params: models.Params, batch: RolloutBatch) -> Float[Array, " P"]:
        """`low_confidence` of the prompts, for `batch_rules.arm_alpha`."""
        prompts = prompts_alone(batch, self.config.rollout.group_size)
        return _low_confidence(
            self.logprobs(params, prompts).logprobs,
            prompts.response_mask,
            fraction=self.config.algorithms.batch_rules.arm_low_fraction,
        )

    def values(self, params: models.Params, batch: RolloutBatch) -> Float[Array, "B T"]:
        """The critic's values before the tokens of the responses."""
        plan = row_plan(self.mesh, self.config.training)
        with self.peers.phase("values"), self.device_lock:
            whole = models.adapted(params, self.critic.base)
            return jax.block_until_ready(
                batch_values(whole, batch, model=self.critic.model, plan=plan)
            )

    def update(
        self,
        state: TrainState,
        batch: RolloutBatch,
        passes: ForwardPasses,
        credit: Credit,
    ) -> tuple[TrainState, dict[str, float], Float[np.ndarray, "B T"] | None]:
        """One optimiser step per mini-batch of prompts; scalars are means over them.

        With a critic, it learns the returns from the same mini-batches, and the policy is left
        unchanged in the first `critic.warmup_steps` steps. The parameters and optimiser states of
        `state` are donated.

        Returns:
          The state; the scalars; and the log-probabilities of the tokens before the update, if one
          mini-batch gave those of all.

        Raises:
          NonFiniteUpdates: after `training.max_skipped_updates` non-finite updates in a row.
        """
        config, training = self.config, self.config.training
        size = training.prompts_per_minibatch * config.rollout.group_size
        rows_of = row_plan(self.mesh, training)
        trains_policy = self.plan.trains_policy(int(state.step))
        policy, critic = Trained(state.params, state.optimizer), state.critic
        rates = {}
        if trains_policy:
            rates["policy/learning_rate"] = _learning_rate(policy, training)
        if critic is not None:
            rates["critic/learning_rate"] = _learning_rate(critic, config.critic)
        skipped = int(state.skipped_in_row)
        history = []
        # With adapters, the base is the reference: it is one argument of the program, not two.
        takes_reference = self.plan.reference == UPDATE and self.base is None
        reference = self.reference if takes_reference else None
        importance = self.plan.importance if self.plan.corrects == UPDATE else ()
        logprobs = None
        if credit.response_mask is not None:
            batch = batch._replace(response_mask=np.asarray(credit.response_mask))
        arrays = (batch, self.plan.given(passes.arrays()), credit.advantages, credit.returns)
        for start in range(0, len(batch.token_ids), size):
            minibatch = jax.tree.map(lambda leaf: leaf[start : start + size], arrays)  # noqa: B023
            rows, (old_logprobs, ref_logprobs, values, _), advantages, returns = minibatch
            scalars: dict[str, Array | float] = {}
            with self.peers.phase("update"), self.device_lock:
                if trains_policy:
                    params, opt_state, found, logprobs = update_policy(
                        *policy,
                        rows,
                        old_logprobs,
                        ref_logprobs,
                        advantages,
                        reference,
                        self.base,
                        policy=self.policy,
                        optimizer=self.optimizer,
                        temperature=config.rollout.temperature,
                        plan=rows_of,
                        algorithm=self.algorithm,
                        importance=importance,
                    )
                    policy = Trained(params, opt_state)
                    scalars |= found
                if critic is not None:
                    critic, found = update_critic(
                        critic,
                        rows,
                        values,
                        returns,
                        **self.critic._asdict(),
                        plan=rows_of,
                        algorithm=self.algorithm,
                    )
                    scalars |= found
                jax.block_until_ready((policy, critic))
            history.append({name: float(value) for name, value in scalars.items()})
            of = [m for m in ("policy", "critic") if history[-1].get(f"{m}/update_skipped")]
            skipped = skipped + 1 if of else 0
            if skipped >= training.max_skipped_updates:
                raise NonFiniteUpdates(skipped, minibatch, of)
        means = {name: float(np.mean([h[name] for h in history])) for name in history[0]}
        return (
            state._replace(
                params=policy.params,
                optimizer=policy.optimizer,
                critic=critic,
                skipped_in_row=everywhere(np.int32(skipped), self.mesh),
            ),
            means | rates,
            None if logprobs is None or len(history) > 1 else np.asarray(logprobs),
        )

    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of a state: what a checkpoint is restored into."""
        shapes = self._trained_shapes(self.policy)
        state = abstract_state(shapes, self.optimizer, self._first_baselines(), self.mesh)
        if self.critic is not None:
            own = self._trained_shapes(self.critic.model)
            critic = abstract_trained(own, self.critic.optimizer, self.mesh)
            state = state._replace(critic=critic)
        weights = abstract_copied(shapes, self._kept_dtype, self.mesh)
        return state._replace(
            algorithm=abstract_everywhere(self.algorithm.first_state(), self.mesh),
            earlier=(weights,) * num_earlier(self.config.rollout),
        )

    def first_state(
        self, params: models.Params | None, critic_params: models.Params | None = None
    ) -> TrainState:
        """The state before the first update.

        Args:
          params: float32, taken over; None: the reference's. With LoRA, adapters.
          critic_params: float32, taken over; None: the policy's with a head of zeros, if the
            algorithm has a critic. With LoRA, adapters and a head.
        """
        if params is None:
            # An update donates its parameters.
            params = jax.tree.map(jnp.copy, fetched(self.reference))
        state = init_state(params, self.optimizer, self._first_baselines(), self.mesh)
        if self.critic is not None:
            if critic_params is None:
                whole = rounded(jax.tree.map(jnp.copy, state.params), "float32")
                critic_params = models.with_head(whole)
            critic = init_trained(critic_params, self.critic.optimizer, self.mesh)
            state = state._replace(critic=critic)
        count, earlier = num_earlier(self.config.rollout), ()
        if count:
            earlier = (copied(state.params, self._kept_dtype),) * count
        return state._replace(
            algorithm=everywhere(self.algorithm.first_state(), self.mesh), earlier=earlier
        )

    def _trained_shapes(self, model: models.Policy | models.ValueModel) -> models.Params:
        """Of the parameters of a model that are in the train state."""
        return model.shapes() if self.lora is None else self.lora.trained_shapes(model.shapes())

    def _first_baselines(self) -> ShapingState:
        options = self.config.shaping
        return init_shaping_state(options.indicators, guidance=options.guidance)


def _learning_rate(trained: Trained, section: ml_collections.ConfigDict) -> float:
    """Of the next optimiser step of a model; `section` has its settings."""
    return float(
        learning_rate_at(
            num_optimizer_updates(trained.optimizer),
            learning_rate=section.learning_rate,
            learning_rate_warmup_steps=section.learning_rate_warmup_steps,
        )
    )
