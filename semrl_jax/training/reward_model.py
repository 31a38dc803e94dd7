"""A learned reward model: it reads prompt and response and scores the response by one number."""

from __future__ import annotations

import dataclasses
import pathlib
import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import ml_collections
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Bool, Float

from semrl_jax.cluster.peers import Peers
from semrl_jax.data import PromptExample
from semrl_jax.models import Params, Policy, ValueModel, replicated
from semrl_jax.models.of_config import find_value_model, value_params
from semrl_jax.models.pinned import fetched
from semrl_jax.rewards.verdict import with_model_score
from semrl_jax.sampling.scoring import Scored
from semrl_jax.settings.rewards import MAX_SCORE, RewardFunction, reward_functions, split_functions
from semrl_jax.support.errors import UserError
from semrl_jax.training.critic_update import row_values
from semrl_jax.training.offload import host_copies
from semrl_jax.training.packing import RowPlan, lay_out, row_plan, to_batch
from semrl_jax.training.reward_texts import RewardTexts
from semrl_jax.types import RolloutBatch


class RewardModelFiles(NamedTuple):
    """A checked directory of a reward model."""

    model: ValueModel  # its architecture, on the mesh
    directory: pathlib.Path  # where its weights are
    texts: RewardTexts | None  # None: it reads the policy's token ids


def find_reward_model(
    field: str,
    path: str,
    config: ml_collections.ConfigDict,
    policy: Policy,
    tokenizer: Any,
    mesh: Mesh,
    prompts: Iterable[PromptExample] = (),
) -> RewardModelFiles | None:
    """The model of a path, "" for none, as `find_value_model`; UserError if it is no classifier.

    A model with its own tokenizer needs the questions of `prompts`, which the responses answer.
    """
    if not path:
        return None
    is_own = config.rewards.model.tokenizer == "own"
    shared = None if is_own else tokenizer
    found = find_value_model(field, path, config, policy, shared, mesh)
    if not found.has_head:
        classifier = "sequence classifier with one label (AutoModelForSequenceClassification)"
        raise UserError(f"{field}={path!r} has no score.weight; name a {classifier}.")
    texts = RewardTexts.of(field, found, config, tokenizer, prompts) if is_own else None
    return RewardModelFiles(found.model, found.directory, texts)


@dataclasses.dataclass(frozen=True)
class Scorer:
    """The weights of a reward model on a mesh, and how it reads responses."""

    model: ValueModel
    params: Params
    plan: RowPlan
    texts: RewardTexts | None = None

    @classmethod
    def load(cls, files: RewardModelFiles, config: ml_collections.ConfigDict, mesh: Mesh) -> Scorer:
        """Reads the weights."""
        params = value_params(files.directory, files.model, mesh, config.rewards.model.dtype)
        if config.rollout.in_turns:
            params = host_copies(params)
        return cls(files.model, params, row_plan(mesh, config.training), files.texts)

    def scores(self, scored: Scored, batch: Callable[[], RolloutBatch]) -> Float[np.ndarray, " B"]:
        """The result of `batch_scores`; `batch` makes the rows for a model that reads token ids."""
        rows = batch() if self.texts is None else self.texts.batch(scored)
        return batch_scores(fetched(self.params), rows, model=self.model, plan=self.plan)


@dataclasses.dataclass(frozen=True)
class RewardModel:
    """A loaded reward model on the mesh of the trainer."""

    scorer: Scorer
    function: RewardFunction  # its entry of `rewards.functions`
    joins_verifiers: bool  # whether the scores of verifiers count too
    peers: Peers
    device_lock: threading.Lock  # shared with an embedded replica

    @classmethod
    def load(
        cls, files: RewardModelFiles, config: ml_collections.ConfigDict, mesh: Mesh, **shared: Any
    ) -> RewardModel:
        """Reads the weights onto the mesh; `shared` are peers and device_lock."""
        verifiers, function = split_functions(reward_functions(config.rewards.functions))
        return cls(Scorer.load(files, config, mesh), function, bool(verifiers), **shared)

    def judged(self, scored: Scored, batch: RolloutBatch) -> Scored:
        """The responses with the model's scores; RuntimeError if one is not within the bound."""
        with self.peers.phase("reward_model"), self.device_lock:
            scores = self.scorer.scores(scored, lambda: batch)
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
