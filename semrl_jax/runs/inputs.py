"""What a run reads before it loads weights."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import ml_collections

from semrl_jax import data, models
from semrl_jax.algorithms.algorithm import Algorithm
from semrl_jax.models.of_config import ReferenceFiles
from semrl_jax.sampling.episodes import Episodes
from semrl_jax.training.passes import NONE, PassPlan
from semrl_jax.training.reward_model import RewardModelFiles
from semrl_jax.training.teacher_prompts import TeacherPrompts


class Inputs(NamedTuple):
    """Inputs of a run, after all checks."""

    algorithm: Algorithm
    plan: PassPlan
    policy: models.Policy
    # References that are models of their own, by data source; "": of all other prompts.
    references: Mapping[str, ReferenceFiles]
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

    @property
    def reference(self) -> ReferenceFiles | None:
        """The reference of prompts whose source has none; None: the starting weights, or none."""
        return self.references.get("")

    @property
    def loads_reference(self) -> bool:
        """Whether `reference` is needed, and is not on replicas."""
        if self.plan.reference == NONE or (self.reference and self.reference.named.addresses):
            return False
        own = self.references.keys() - {""}
        return not own or not own >= set(self.prompts.sources)

    @property
    def held_references(self) -> list[models.Policy]:
        """The references whose parameters the trainer has, next to the base of adapters."""
        own = {
            files.named._replace(field=""): files.model
            for source, files in self.references.items()
            if source and not files.named.addresses
        }
        main = self.policy if self.reference is None else self.reference.model
        is_held = self.loads_reference and (self.lora is None or self.reference is not None)
        return [main] * is_held + list(own.values())

    def longest_prompt(self, config: ml_collections.ConfigDict) -> int:
        """Tokens of the longest prompt that a reference reads."""
        own = config.rollout.max_prompt_tokens
        return own if self.teacher is None else max(own, self.teacher.longest)

    def hashes(self) -> dict[str, str]:
        """Hash by name of the input."""
        columns, files = data.columns_hash(self.prompts), self.reward_model
        critic = self.critic_directory
        texts = files and files.texts
        return {
            # Only if a verifier takes the rows: columns that nothing reads may change.
            **({"columns of the data": columns} if columns else {}),
            # A sample is enough to tell two models apart, and reading all would take long.
            **({"reward model": models.weights_sample(files.directory)} if files else {}),
            **({"texts of the reward model": texts.identity} if texts else {}),
            **{
                f"reference of {source}" if source else "reference": models.weights_sample(
                    files.directory
                )
                for source, files in self.references.items()
            },
            **({"critic": models.weights_sample(critic)} if critic else {}),
            **({"adapter": models.peft.adapter_hash(self.adapter)} if self.adapter else {}),
            "special tokens before a prompt": " ".join(map(str, self.prefix)),
            "data": data.dataset_hash(self.prompts),
            "tokenizer": data.tokenizer_hash(self.tokenizer),
            "architecture": self.policy.config.hash,
            "end tokens": " ".join(map(str, self.end_token_ids)),
        }
