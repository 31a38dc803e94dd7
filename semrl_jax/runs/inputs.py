"""What a run reads before it loads weights."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

from semrl_jax import data, models
from semrl_jax.algorithms.algorithm import Algorithm
from semrl_jax.models.of_config import ReferenceFiles
from semrl_jax.sampling.episodes import Episodes
from semrl_jax.training.passes import PassPlan
from semrl_jax.training.reward_model import RewardModelFiles
from semrl_jax.training.teacher_prompts import TeacherPrompts


class Inputs(NamedTuple):
    """Inputs of a run, after all checks."""

    algorithm: Algorithm
    plan: PassPlan
    policy: models.Policy
    reference: ReferenceFiles | None  # None: the weights that training starts from, or none at all
    critic: models.ValueModel | None
    critic_directory: pathlib.Path | None  # None: the policy's weights
    tokenizer: Any
    end_token_ids: tuple[int, ...]
    prompts: data.PromptDataset
    problems: Sequence[data.PromptExample]
    episodes: Episodes
    scores: Sequence[ModuleType]
    reward_model: RewardModelFiles | None
    lora: models.Lora | None
    adapter: models.Params | None  # that training starts from; None: a new one
    prefix: list[int]  # special tokens before a training prompt
    teacher: TeacherPrompts | None  # prompts of the reference; None: the policy's

    def hashes(self) -> dict[str, str]:
        """Hash by name of the input."""
        columns, files = data.columns_hash(self.prompts), self.reward_model
        critic, reference = self.critic_directory, self.reference
        texts = files and files.texts
        return {
            # Only if a verifier takes the rows: columns that nothing reads may change.
            **({"columns of the data": columns} if columns else {}),
            # A sample is enough to tell two models apart, and reading all would take long.
            **({"reward model": models.weights_sample(files.directory)} if files else {}),
            **({"texts of the reward model": texts.identity} if texts else {}),
            **({"reference": models.weights_sample(reference.directory)} if reference else {}),
            **({"critic": models.weights_sample(critic)} if critic else {}),
            **({"adapter": models.peft.adapter_hash(self.adapter)} if self.adapter else {}),
            "special tokens before a prompt": " ".join(map(str, self.prefix)),
            "data": data.dataset_hash(self.prompts),
            "tokenizer": data.tokenizer_hash(self.tokenizer),
            "architecture": self.policy.config.hash,
            "end tokens": " ".join(map(str, self.end_token_ids)),
        }
