"""Prompts of a teacher that reads more than the policy, such as the reference answer."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import ml_collections
import numpy as np
from jaxtyping import Int

from semrl_jax import data
from semrl_jax.data.rewording import reworded
from semrl_jax.data.tokenizer import Tokenizer
from semrl_jax.models import DecoderConfig
from semrl_jax.support.errors import UserError
from semrl_jax.training.rollout_batch import bucket, prompts_of
from semrl_jax.types import RolloutBatch


@dataclasses.dataclass(frozen=True)
class TeacherPrompts:
    """Replaces the prompts of a batch, so that a pass reads the same responses after others."""

    prompts: Mapping[bytes, Int[np.ndarray, " _"]]  # by the bytes of the policy's prompt ids
    longest: int  # tokens of the longest
    pad_token_id: int

    @classmethod
    def of(
        cls,
        config: ml_collections.ConfigDict,
        tokenizer: Tokenizer,
        prompts: data.PromptDataset,
        architecture: DecoderConfig,
    ) -> TeacherPrompts | None:
        """The prompts under `data.teacher_input`, None without it; UserError if one is too long.

        The text replaces the question in the prompt's template; where only the prompt is known, it
        replaces the prompt. Of equal prompts with different answers, the first counts.
        """
        text, settings = config.data.teacher_input, config.data
        if not text:
            return None
        found: dict[bytes, Int[np.ndarray, " _"]] = {}
        values = [{"answer": example.answer} for example in prompts.examples]
        all_ids = reworded(text, prompts.examples, values, tokenizer, settings)
        for example, ids in zip(prompts.examples, all_ids, strict=True):
            found.setdefault(data.prompt_key(example.prompt_ids), ids)
        longest = max(map(len, found.values()))
        most = longest + config.rollout.max_response_tokens
        limits = {"the model's context": architecture.max_position_embeddings}
        if config.training.micro_batch_tokens:
            limits["training.micro_batch_tokens"] = config.training.micro_batch_tokens
        for name, limit in limits.items():
            if most > limit:
                raise UserError(
                    f"data.teacher_input makes a prompt of {longest} tokens, {most} with "
                    f"rollout.max_response_tokens, more than {limit} of {name}; shorten it."
                )
        return cls(found, longest, tokenizer.pad_token_id)

    def batch(self, batch: RolloutBatch) -> RolloutBatch:
        """The batch, of NumPy arrays, with the prompts replaced."""
        num_response = batch.response_mask.shape[1]
        own = prompts_of(batch)
        prompts = [self.prompts[data.prompt_key(ids)] for ids in own]
        padded = data.pad_rows(
            prompts,
            [np.zeros(0, np.int32)] * len(prompts),
            prompt_length=bucket(max(map(len, prompts)), self.longest),
            response_length=0,
            pad_id=self.pad_token_id,
        )
        more = np.array([len(prompt) for prompt in prompts]) - np.array(list(map(len, own)))
        segments = batch.segment_ids[:, -num_response:]
        positions = batch.positions[:, -num_response:] + np.where(segments == 1, more[:, None], 0)
        after = {
            "token_ids": batch.token_ids[:, -num_response:],
            "segment_ids": segments,
            "positions": positions.astype(np.int32),
        }
        joined = {
            name: np.concatenate([getattr(padded, name), values], axis=1)
            for name, values in after.items()
        }
        return batch._replace(**joined, routed_experts=None)  # they are of other prompts
