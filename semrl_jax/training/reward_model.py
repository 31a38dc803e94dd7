"""A learned reward model: it reads prompt and response and scores the response by one number."""

from __future__ import annotations

import dataclasses
import threading
from typing import Any

import ml_collections
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Bool, Float

from semrl_jax.cluster.peers import Peers
from semrl_jax.models import Params, Policy, ValueModel, replicated
from semrl_jax.models.of_config import ModelFiles, find_value_model, value_params
from semrl_jax.models.pinned import fetched
from semrl_jax.rewards.verdict import with_model_score
from semrl_jax.sampling.scoring import Scored
from semrl_jax.settings.rewards import MAX_SCORE, RewardFunction, reward_functions, split_functions
from semrl_jax.support.errors import UserError
from semrl_jax.training.critic_update import row_values
from semrl_jax.training.offload import host_copies
from semrl_jax.training.packing import RowPlan, lay_out, row_plan, to_batch
from semrl_jax.types import RolloutBatch


def find_reward_model(
    field: str,
    path: str,
    config: ml_collections.ConfigDict,
    policy: Policy,
    tokenizer: Any,
    mesh: Mesh,
) -> ModelFiles | None:
    """The model of a path, "" for none, as `find_value_model`; UserError if it is no classifier."""
    if not path:
        return None
    found = find_value_model(field, path, config, policy, tokenizer, mesh)
    if not found.has_head:
        classifier = "sequence classifier with one label (AutoModelForSequenceClassification)"
        raise UserError(f"{field}={path!r} has no score.weight; name a {classifier}.")
    return found


@dataclasses.dataclass(frozen=True)
class RewardModel:
    """A loaded reward model on the mesh of the trainer."""

    model: ValueModel
    params: Params
    plan: RowPlan
    function: RewardFunction  # its entry of `rewards.functions`
    joins_verifiers: bool  # whether the scores of verifiers count too
    peers: Peers
    device_lock: threading.Lock  # shared with an embedded replica

    @classmethod
    def load(
        cls, files: ModelFiles, config: ml_collections.ConfigDict, mesh: Mesh, **shared: Any
    ) -> RewardModel:
        """Reads the weights onto the mesh; `shared` are peers and device_lock."""
        params = value_params(files.directory, files.model, mesh, config.rewards.model.dtype)
        if config.rollout.in_turns:
            params = host_copies(params)
        verifiers, function = split_functions(reward_functions(config.rewards.functions))
        plan = row_plan(mesh, config.training)
        return cls(files.model, params, plan, function, bool(verifiers), **shared)

    def judged(self, scored: Scored, batch: RolloutBatch) -> Scored:
        """The responses with the model's scores; RuntimeError if one is not within the bound."""
        with self.peers.phase("reward_model"), self.device_lock:
            params = fetched(self.params)
            scores = batch_scores(params, batch, model=self.model, plan=self.plan)
        good = np.abs(scores) <= MAX_SCORE  # NaN is not
        if not good.all():
            index = int(np.flatnonzero(~good)[0])
            raise RuntimeError(
                f"the score of rewards.model for response {scored[index].rollout.sample_id} is "
                f"{scores[index]}, but must be a number from {-MAX_SCORE:g} to {MAX_SCORE:g}; if "
                "model.compute_dtype is bfloat16, try float32."
            )
        settings = {"function": self.function, "joins": self.joins_verifiers}
        items = []
        for item, score in zip(scored, scores, strict=True):
            verdict = with_model_score(item.verdict, score=float(score), **settings)
            items.append(dataclasses.replace(item, verdict=verdict))
        return dataclasses.replace(scored, items=items)


def batch_scores(
    params: Params, batch: RolloutBatch, *, model: ValueModel, plan: RowPlan
) -> Float[np.ndarray, " B"]:
    """The model's value at the last token of each response, as transformers' classifiers pool.

    Returns float32 scores, the same in every process. The parameters are on the mesh of the plan;
    the batch has NumPy arrays, and each response has a token.
    """
    # One slot per sequence. Its source is the state before the token, and the score is of the
    # token's own state: in the column after the source, as no prompt is shared.
    layout = lay_out(batch._replace(response_mask=last_tokens(batch)), plan)
    rows = layout.rows._replace(sources=layout.rows.sources + 1)
    values = row_values(params, plan.put(rows), np.int32(layout.num_micro), model=model)
    scores = to_batch(values, layout.slots, sharding=replicated(plan.mesh))
    return np.asarray(scores).sum(axis=1)  # 0 but for one token


def last_tokens(batch: RolloutBatch) -> Bool[np.ndarray, "B T"]:
    """True at the last token of each response, which may be one of context."""
    num_columns = batch.response_mask.shape[1]
    lengths = np.sum(batch.segment_ids[:, -num_columns:] > 0, axis=1)
    return np.arange(num_columns) == lengths[:, None] - 1
