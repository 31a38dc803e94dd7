"""Owns the models, their optimisers and the mesh: forward passes and updates."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from semrl_jax import data, models
from semrl_jax.algorithms.algorithm import Algorithm, Passes, State
from semrl_jax.algorithms.credit import Credit
from semrl_jax.cluster.peers import Peers
from semrl_jax.data.curricula import PromptHistory
from semrl_jax.models.hosts import from_host
from semrl_jax.models.peft import num_parameters
from semrl_jax.models.pinned import fetched
from semrl_jax.models.products import Products
from semrl_jax.sampling.scoring import Scored
from semrl_jax.settings.rollout import num_earlier, weight_dtype
from semrl_jax.shaping import ShapingState, init_shaping_state
from semrl_jax.support.clock import Clock
from semrl_jax.training import train_state
from semrl_jax.training.critic_update import CriticLoss, batch_values
from semrl_jax.training.offload import drop, host_copies, is_away
from semrl_jax.training.optimizer import Optimizer, rounded
from semrl_jax.training.packing import RowPlan, row_plan
from semrl_jax.training.passes import NOTHING, PASS, UPDATE, PassNeeds, PassPlan
from semrl_jax.training.policy_update import PolicyLoss, TokenPass, batch_logprobs
from semrl_jax.training.probability_reward import ProbabilityReward
from semrl_jax.training.references import Loaded, References, Remote, rows_of
from semrl_jax.training.reward_model import RewardModel
from semrl_jax.training.rollout_batch import pad_batch
from semrl_jax.training.teacher_prompts import TeacherPrompts
from semrl_jax.training.train_state import POLICY, Trained, TrainState
from semrl_jax.training.trainee import Frozen, MiniBatch, Trainee, update_all, update_number
from semrl_jax.training.work import batch_products
from semrl_jax.types import Rollout, RolloutBatch

MINIBATCHES = 0x3B47  # last in its seed: apart from every stream of fewer numbers


class ForwardPasses(NamedTuple):
    """The passes over one batch before the update; None where nothing needs one."""

    old: TokenPass | None
    ref_logprobs: Float[Array, "B T"] | None
    values: Float[Array, "B T"] | None = None
    reference_states: Mapping[int, Float[np.ndarray, "_ D"]] | None = None

    def arrays(self) -> Passes:
        """What credit is assigned by."""
        old_logprobs = None if self.old is None else self.old.logprobs
        return Passes(old_logprobs, self.ref_logprobs, self.values)


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
    num_seen: int = 0  # prompts of a curriculum
    reference_policy: models.Policy | None = None  # architecture of the reference; None: its own
    # Number of each prompt of the data, by its `prompt_key`; {} if nothing reads it.
    prompt_numbers: Mapping[bytes, int] = dataclasses.field(default_factory=dict)
    probability: ProbabilityReward | None = None  # in place of the verifier's scores
    teacher: TeacherPrompts | None = None  # prompts of the reference; None: the policy's
    references: References = References()  # noqa: RUF009

    @functools.cached_property
    def trainees(self) -> tuple[Trainee, ...]:
        """The models that an update trains, in this order."""
        config, plan, critic = self.config, self.plan, self.critic
        importance = plan.importance if plan.corrects == UPDATE else ()
        other, temperature = self.reference_policy, config.rollout.temperature
        dropout = 0.0 if self.lora is None else self.lora.dropout
        loss = PolicyLoss(self.policy, temperature, self.algorithm, importance, other, dropout)
        # With adapters, the base is the reference: it is one argument of the program, not two.
        is_base = self.base is not None and other is None
        takes_reference = plan.reference == UPDATE and not is_base
        frozen = Frozen(self.base, self.reference if takes_reference else None)
        policy = Trainee(POLICY, self.optimizer, loss, frozen, plan.warmup_steps)
        if critic is None:
            return (policy,)
        loss, frozen = CriticLoss(critic.model, self.algorithm, dropout), Frozen(critic.base)
        # In one program, which repeats the numbers of earlier versions.
        return policy, Trainee("critic", critic.optimizer, loss, frozen, in_parts=False)

    def sampling_weights(self, state: TrainState) -> tuple[models.Params, ...]:
        """The weights that batches in work are sampled with: of this step, the last, and earlier.

        Without earlier ones they are the parameters, which the update donates; else copies in
        `_kept_dtype`. Adapters are without their base; see `whole`.
        """
        if not num_earlier(self.config.rollout):
            return (state.params,)
        return (*state.earlier, train_state.copied(fetched(state.params), self._kept_dtype))

    def whole(self, params: models.Params) -> models.Params:
        """All parameters of the policy, from those in a train state; no copy of the base."""
        return models.adapted(params, self.base)

    @property
    def takes_turns(self) -> bool:
        """Whether the parameters leave the devices while responses are sampled."""
        return is_away(self.config, "parameters")

    def resting(self, state: TrainState) -> TrainState:
        """The state while responses are sampled, with what leaves the devices on the host."""
        whole = self.config.rollout.in_turns
        for name, trained in _trained(state) if self.takes_turns else ():
            optimizer = host_copies(trained.optimizer) if whole else trained.optimizer
            state = state.with_trained(name, Trained(host_copies(trained.params), optimizer))
        return state

    def at_work(self, state: TrainState, clock: Clock) -> tuple[Learner, TrainState]:
        """Learner and state with their arrays on the devices, as copies, until `at_rest`.

        What `training.offload` names comes later, to its own program.
        """
        if not self.takes_turns:
            return self, state
        names, own = zip(*_trained(state))
        later, optimizers, reference = self.config.training.offload, None, None
        if "optimizer" not in later:
            optimizers = [each.optimizer for each in own]
        if "reference" not in later:
            reference = self.reference
        with clock("to_device"):
            params, moved, base, critic_base, fetched_reference = fetched(
                ([each.params for each in own], optimizers, *self.frozen[:2], reference)
            )
            jax.block_until_ready((params, moved))
        moved = moved or [each.optimizer for each in own]
        for name, *trained in zip(names, params, moved):
            state = state.with_trained(name, Trained(*trained))
        here = dataclasses.replace(
            self,
            base=base,
            critic=self.critic and self.critic._replace(base=critic_base),
            reference=fetched_reference or self.reference,
        )
        return here, state

    def at_rest(
        self, state: TrainState, here: Learner, clock: Clock
    ) -> tuple[TrainState, dict[str, float]]:
        """`resting` of the state after an update by `here`; frees both, and says how many bytes."""
        if not self.takes_turns:
            return state, {}
        with clock("to_host"):
            resting = self.resting(state)
            num_bytes = drop(state, resting) + drop(here.frozen, self.frozen)
        return resting, {"policy/offloaded_bytes": float(num_bytes)}

    @property
    def frozen(self) -> tuple[models.Base | None, models.Base | None, models.Params | None]:
        """What no update changes: the bases of policy and critic, and the reference."""
        return self.base, self.critic and self.critic.base, self.reference

    @property
    def _kept_dtype(self) -> str:
        """The dtype of `TrainState.earlier`, as in weight sync; adapters merge before the cast."""
        return weight_dtype(self.config) if self.base is None else "float32"

    def batch(self, rollouts: Sequence[Rollout]) -> RolloutBatch:
        """The batch on the host, from where every pass lays its rows over the mesh."""
        rollout = self.config.rollout
        return pad_batch(
            rollouts,
            pad_token_id=self.pad_token_id,
            max_prompt_tokens=rollout.max_prompt_tokens,
            max_response_tokens=rollout.max_response_tokens,
            may_be_given=rollout.given_responses > 0,
            routed_experts=self.policy.config.routed_experts if rollout.router_replay else (),
        )

    def prompts_of(self, scored: Scored) -> Int[np.ndarray, " P"] | None:
        """The number of the prompt of each group, int32; None if nothing reads it."""
        if not self.prompt_numbers:
            return None
        firsts = range(0, len(scored), self.config.rollout.group_size)
        keys = [data.prompt_key(scored[i].rollout.prompt_ids) for i in firsts]
        return np.array([self.prompt_numbers[key] for key in keys], np.int32)

    def judged(
        self, state: TrainState, scored: Scored, batch: RolloutBatch, clock: Clock
    ) -> Scored:
        """The responses with the scores of a reward model or of the policy itself, if any."""
        if self.probability is not None:
            with clock("reward_model"):
                whole = self.whole(state.params)
                return self.probability.judged(
                    scored, lambda asked: self.logprobs(whole, asked).logprobs
                )
        if self.reward_model is None:
            return scored
        with clock("reward_model"):
            return self.reward_model.judged(scored, batch)

    def passes(
        self, state: TrainState, batch: RolloutBatch, clock: Clock, asked: PassNeeds = NOTHING
    ) -> ForwardPasses:
        """The forward passes before the update of `state` that the plan or a probe needs."""
        plan, step = self.plan, int(state.step)
        needs = plan.needs(step, asked)
        old = reference = values = None
        if needs.logprobs or needs.entropies or needs.states:
            with clock("old_logprobs"):
                also = {"with_states": needs.states, "with_entropies": needs.entropies}
                old = self.logprobs(self.whole(state.params), batch, replays=True, **also)
        if plan.reference == PASS or plan.own_teacher:
            with clock("ref_logprobs"):
                reference = self._ref_logprobs(state, batch)
        if plan.values:
            with clock("values"):
                values = self.values(state.critic.params, batch)
        states = None
        if needs.reference_states:
            with clock("drift"):
                states = self.logprobs(fetched(self.reference), batch, with_states=True).states
        return ForwardPasses(old, reference, values, states)

    def _ref_logprobs(self, state: TrainState, batch: RolloutBatch) -> Float[Array, "B T"]:
        """Log-probabilities under the references, or under the policy as its own teacher."""
        read = batch if self.teacher is None else self.teacher.batch(batch)
        if self.plan.own_teacher:
            return self.logprobs(self.whole(state.params), read).logprobs
        if self.references == References():
            own = self.reference_policy or self.policy
            return self.logprobs(fetched(self.reference), read, policy=own).logprobs
        found = np.zeros(batch.response_mask.shape, np.float32)
        for model, rows in self.references.parts(batch):
            part = rows_of(read, rows)
            if isinstance(model, Remote):
                temperature = self.config.rollout.temperature
                shared = {"peers": self.peers, "device_lock": self.device_lock}
                found[rows] = model.logprobs(part, temperature=temperature, **shared)
                continue
            model = model or Loaded(self.reference_policy or self.policy, self.reference)
            # Each number of rows is a program, so there are at most eight: rows are repeated.
            step = -(-len(found) // 8)
            padded = np.resize(np.arange(len(rows)), -(-len(rows) // step) * step)
            part = rows_of(part, padded)
            values = self.logprobs(fetched(model.params), part, policy=model.policy).logprobs
            found[rows] = np.asarray(values)[: len(rows)]
        return from_host(found, models.replicated(self.mesh))

    @property
    def _rows(self) -> RowPlan:
        return row_plan(self.mesh, self.config.training)

    def logprobs(self, params: models.Params, batch: RolloutBatch, **also: Any) -> TokenPass:
        """Log-probabilities of the responses under `params`, and what `batch_logprobs` can add."""
        settings = {"policy": self.policy, "temperature": self.config.rollout.temperature} | also
        with self.peers.phase("logprobs"), self.device_lock:
            # A replica in this process must not begin a program before this one has ended.
            found = batch_logprobs(params, batch, plan=self._rows, **settings)
            return jax.block_until_ready(found)

    def values(self, params: models.Params, batch: RolloutBatch) -> Float[Array, "B T"]:
        """The critic's values before the tokens of the responses."""
        with self.peers.phase("values"), self.device_lock:
            whole = models.adapted(params, self.critic.base)
            found = batch_values(whole, batch, model=self.critic.model, plan=self._rows)
            return jax.block_until_ready(found)

    def update(
        self, state: TrainState, batch: RolloutBatch, passes: ForwardPasses, credit: Credit
    ) -> tuple[TrainState, dict[str, float], Float[np.ndarray, "B T"] | None]:
        """One optimiser step of every trainee per mini-batch of prompts, `ppo_epochs` times.

        Scalars are means.

        The arrays of the trainees in `state` are donated. Also returns the log-probabilities of the
        tokens before the update, if one mini-batch gave those of all. NonFiniteUpdates: after
        `training.max_skipped_updates` non-finite updates in a row.
        """
        training = self.config.training
        size = training.prompts_per_minibatch * self.config.rollout.group_size
        trainees = [each for each in self.trainees if int(state.step) >= each.first_step]
        rates = {
            f"{each.name}/learning_rate": each.learning_rate(state.trained(each.name))
            for each in trainees
        }
        whole = self._all_rows(batch, passes, credit)
        history = []
        seed, step = self.config.seed, int(state.step)
        for number, rows in enumerate(self._minibatches(len(batch.token_ids), size, step)):
            minibatch = jax.tree.map(lambda leaf: leaf[rows], whole)  # noqa: B023
            if self.lora is not None and self.lora.dropout:
                minibatch = minibatch._replace(dropout=update_number(seed, step, number))
            with self.peers.phase("update"), self.device_lock:
                state, scalars, outputs = update_all(
                    trainees, state, minibatch, self._rows, training.max_skipped_updates
                )
            history.append(scalars)
        means = {name: float(np.mean([h[name] for h in history])) for name in history[0]}
        logprobs = None if self.plan.update_differs else outputs.get(POLICY)
        means["policy/flops"] = self.flops(whole.rows, passes, {each.name for each in trainees})
        return state, means | rates, None if logprobs is None else np.asarray(logprobs)

    def _all_rows(self, batch: RolloutBatch, passes: ForwardPasses, credit: Credit) -> MiniBatch:
        """What the losses take of all responses of a step."""
        if credit.response_mask is not None:
            batch = batch._replace(response_mask=np.asarray(credit.response_mask))
        given = self.plan.given(passes.arrays())
        of_passes = given.old_logprobs, given.ref_logprobs, given.values
        return MiniBatch(batch, *of_passes, credit.advantages, credit.returns)

    def gradients(
        self, state: TrainState, batch: RolloutBatch, passes: ForwardPasses, credit: Credit
    ) -> dict[str, Any]:
        """`trainee.gradient_sums` of each trainee over all responses as one mini-batch."""
        whole, step = self._all_rows(batch, passes, credit), int(state.step)
        if self.lora is not None and self.lora.dropout:
            whole = whole._replace(dropout=update_number(self.config.seed, step, 0))
        with self.peers.phase("update"), self.device_lock:
            found = {
                each.name: each.gradient_sums(state.trained(each.name).params, whole, self._rows)
                for each in self.trainees
            }
            return jax.block_until_ready(found)

    def flops(self, batch: RolloutBatch, passes: ForwardPasses, updated: Collection[str]) -> float:
        """Floating point operations of a step, of all devices: its passes, and the update.

        With N weights in kernels, D tokens (prompts included) and S = 2 D N + attention + head for
        a pass forward: the policy's pass before the update S, the reference S, and each of
        `ppo_epochs` passes of the update 3 S, plus S if it computes the reference. With adapters,
        the gradient of the base is left out, as in `Products.training`. A critic has no head: S for
        the values, and 3 S for its update. What is computed twice, such as with `model.remat`, does
        not count; nor do passes for the log and the reward model, whose times are apart.

        Source: PaLM, arXiv:2204.02311, appendix B, which counts attention over all pairs of tokens
        and the head for all tokens. Here only the past is attended to, and responses have logits.
        """
        plan, epochs = self.plan, self.config.training.ppo_epochs

        def forward(architecture: models.DecoderConfig, *, head: bool) -> Products:
            adapters = 0 if self.lora is None else num_parameters(architecture, self.lora)
            return batch_products(architecture, batch, num_adapters=adapters, head=head)

        own = forward(self.policy.config, head=True)
        in_update = plan.reference == UPDATE and POLICY in updated
        reference = (plan.reference == PASS or plan.own_teacher) + epochs * in_update
        of_reference = 0.0
        if reference:
            main = self.reference_policy or self.policy
            of_reference = self.references.operations(batch, main.config)
        found = (passes.old is not None) * own.forward + reference * of_reference
        if POLICY in updated:
            found += epochs * own.training
        if self.critic is not None:
            critic = forward(self.critic.model.config, head=False)
            found += (passes.values is not None) * critic.forward + epochs * critic.training
        return float(found)

    def _minibatches(self, num_rows: int, size: int, step: int) -> Iterator[Any]:
        """The rows of each mini-batch: in order, and in later passes with other whole groups."""
        yield from (slice(start, start + size) for start in range(0, num_rows, size))
        group = self.config.rollout.group_size
        rows = np.arange(num_rows).reshape(-1, group)
        for epoch in range(1, self.config.training.ppo_epochs):
            random = np.random.default_rng((self.config.seed, step, epoch, MINIBATCHES))
            order = rows[random.permutation(len(rows))].reshape(-1)
            yield from (order[start : start + size] for start in range(0, num_rows, size))

    def abstract_state(self) -> TrainState:
        """Shapes, dtypes and shardings of a state: what a checkpoint is restored into."""
        shapes = self._trained_shapes(self.policy)
        state = train_state.abstract_state(
            shapes, self.optimizer, self._first_baselines(), self.mesh
        )
        for trainee in self.trainees[1:]:
            own = self._trained_shapes(trainee.loss.model)
            trained = train_state.abstract_trained(own, trainee.optimizer, self.mesh)
            state = state.with_trained(trainee.name, trained)
        weights = train_state.abstract_copied(shapes, self._kept_dtype, self.mesh)
        return state._replace(
            algorithm=train_state.abstract_everywhere(self._first_memory, self.mesh),
            earlier=(weights,) * num_earlier(self.config.rollout),
            seen=train_state.abstract_everywhere(self._first_seen, self.mesh),
        )

    def first_state(
        self, params: models.Params | None, critic_params: models.Params | None = None
    ) -> TrainState:
        """The state before the first update.

        Float32 parameters are taken over; with LoRA, adapters and a critic's head. None: those of
        the reference, and for a critic, if there is one, the policy's with a head of zeros.
        """
        if params is None:  # a copy: an update donates its parameters
            params = jax.tree.map(jnp.copy, fetched(self.reference))
        state = train_state.init_state(params, self.optimizer, self._first_baselines(), self.mesh)
        if self.critic is not None:
            if critic_params is None:
                whole = rounded(jax.tree.map(jnp.copy, state.params), "float32")
                critic_params = models.with_head(whole)
            critic = train_state.init_trained(critic_params, self.critic.optimizer, self.mesh)
            state = state._replace(critic=critic)
        count, earlier = num_earlier(self.config.rollout), ()
        if count:
            earlier = (train_state.copied(state.params, self._kept_dtype),) * count
        first = train_state.everywhere(self._first_memory, self.mesh)
        seen = train_state.everywhere(self._first_seen, self.mesh)
        return state._replace(algorithm=first, earlier=earlier, seen=seen)

    @property
    def _first_memory(self) -> State:
        return self.algorithm.first_state(len(self.prompt_numbers))

    @property
    def _first_seen(self) -> dict[str, np.ndarray]:
        return PromptHistory.nothing(self.num_seen)._asdict() if self.num_seen else {}

    def _trained_shapes(self, model: models.Policy | models.ValueModel) -> models.Params:
        """Shapes of the parameters of a model that are in the train state."""
        return model.shapes() if self.lora is None else self.lora.trained_shapes(model.shapes())

    def _first_baselines(self) -> ShapingState:
        options = self.config.shaping
        return init_shaping_state(options.indicators, guidance=options.guidance)


def _trained(state: TrainState) -> list[tuple[str, Trained]]:
    """The models of a state, by name."""
    found = ((name, state.trained(name)) for name in (POLICY, "critic"))
    return [(name, trained) for name, trained in found if trained is not None]
