"""Responses as a reward model with a tokenizer and chat template of its own reads them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ml_collections
import numpy as np

from semrl_jax import data
from semrl_jax.data.chat_templates import TemplateError
from semrl_jax.data.turns import ChatTurns
from semrl_jax.models.of_config import ModelFiles
from semrl_jax.sampling.scoring import Scored, ScoredRollout
from semrl_jax.support.errors import UserError, prefixed
from semrl_jax.training.rollout_batch import bucket
from semrl_jax.types import RolloutBatch, config_hash


@dataclasses.dataclass(frozen=True)
class RewardTexts:
    """Puts question and response through a chat template and a tokenizer.

    The user's message is the question as the data have it, without the policy's template, system
    prompt and examples; where only the prompt is known, it is the prompt's text. The assistant's
    message is the text of the response as verifiers get it. The template writes all special tokens,
    and control tokens that are written out in a message become the tokens of their characters.

    Source: verl, `_switch_chat_template` of its reward model worker, which takes the messages of
    the prompt in place of the question.
    """

    tokenizer: Any  # the reward model's
    turns: ChatTurns
    limit: int  # tokens of a sequence, at least 2
    keeps_start: bool  # of a longer sequence; else its end is kept
    policy_tokenizer: Any
    questions: Mapping[bytes, str]  # by the bytes of the token ids of prompts

    @classmethod
    def of(
        cls,
        field: str,
        files: ModelFiles,
        config: ml_collections.ConfigDict,
        policy_tokenizer: Any,
        prompts: Iterable[data.PromptExample],
    ) -> RewardTexts:
        """Loads the tokenizer; UserError if model, template or limit do not fit each other."""
        options, architecture = config.rewards.model, files.model.config
        place = f"{field}={str(files.directory)!r}"
        with prefixed(place):
            tokenizer = data.load_tokenizer(files.directory)
        data.check_vocabulary(tokenizer, architecture.vocab_size, place)
        if path := options.chat_template:
            data.set_chat_template(tokenizer, path, "rewards.model.chat_template")
        if not getattr(tokenizer, "chat_template", None):
            raise UserError(
                f"{place} has no chat template; name a Jinja file in rewards.model.chat_template."
            )
        context = architecture.max_position_embeddings
        limit = options.max_tokens or context
        if limit > context:
            raise UserError(
                f"rewards.model.max_tokens={limit} is more than the context of {context} tokens of "
                f"{place}; lower it."
            )
        most = config.training.micro_batch_tokens
        if 0 < most < limit:
            raise UserError(
                f"rewards.model.max_tokens={options.max_tokens} lets the reward model read "
                f"{limit} tokens, more than training.micro_batch_tokens={most}; set it to {most} "
                "or less."
            )
        turns = ChatTurns(tokenizer, (tokenizer.eos_token_id,))
        questions: dict[bytes, str] = {}
        for example in prompts:
            if example.question:
                questions.setdefault(data.prompt_key(example.prompt_ids), example.question)
        texts = cls(
            tokenizer, turns, limit, options.truncation == "right", policy_tokenizer, questions
        )
        texts._check(place)
        return texts

    def _check(self, place: str) -> None:
        """UserError if the template does not write question and response."""
        probes = [("1", "2"), ("3", "2"), ("1", "4"), ("1", "")]
        way_out = "name another Jinja file in rewards.model.chat_template"
        try:
            found = self.turns.ended([_messages(*probe) for probe in probes])
        except TemplateError as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(
                f"{place}: the chat template refuses a question and its response ({reason}); "
                f"{way_out}."
            ) from None
        if len(set(map(tuple, found))) < len(found) or min(map(len, found)) < 2:
            raise UserError(
                f"{place}: the chat template does not write both the question and the response, "
                f"or the tokenizer has no tokens for them; {way_out}."
            )

    @functools.cached_property
    def identity(self) -> str:
        """What tells it from another tokenizer, template or limit."""
        parts = self.limit, self.keeps_start, self.tokenizer.chat_template
        return f"{data.tokenizer_hash(self.tokenizer)} {config_hash(dict(enumerate(parts)))}"

    def token_ids(self, scored: Sequence[ScoredRollout]) -> list[list[int]]:
        """The sequence that the model reads for each response, truncated to the limit.

        RuntimeError if the template fails, or leaves fewer than two tokens.
        """
        asked = [_messages(self._question(item), item.response) for item in scored]
        try:
            found = self.turns.ended(asked)
        except TemplateError as error:
            raise RuntimeError(f"the chat template of the reward model fails: {error}") from error
        if short := [i for i, ids in enumerate(found) if len(ids) < 2]:
            raise RuntimeError(
                "the chat template of the reward model writes fewer than 2 tokens for response "
                f"{scored[short[0]].rollout.sample_id}."
            )
        cut = slice(self.limit) if self.keeps_start else slice(-self.limit, None)
        return [ids[cut] for ids in found]

    def _question(self, item: ScoredRollout) -> str:
        ids = item.rollout.prompt_ids
        if (known := self.questions.get(data.prompt_key(ids))) is not None:
            return known
        return self.policy_tokenizer.decode(ids, skip_special_tokens=True)

    def batch(self, scored: Scored) -> RolloutBatch:
        """The sequences, each with its last token as the response: the score is read there."""
        sequences = [np.array(ids, np.int32) for ids in self.token_ids(scored)]
        longest = max(map(len, sequences)) - 1
        rows = data.pad_rows(
            [ids[:-1] for ids in sequences],
            [ids[-1:] for ids in sequences],
            prompt_length=bucket(longest, self.limit - 1),
            response_length=1,
            pad_id=self.tokenizer.pad_token_id,
        )
        shape = len(sequences), 1
        return RolloutBatch(
            **vars(rows),
            response_mask=np.ones(shape, bool),
            rollout_logprobs=np.zeros(shape, np.float32),
        )


def _messages(question: str, response: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": response}]
