"""Conversations for supervised fine-tuning: token ids, and which of them the model learns.

The text of a conversation is tokenised as a whole. The spans of the text that the model must learn
come from the row's format; a token counts if its text begins inside such a span.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import pathlib
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Int

from semrl_jax.data.chat_templates import Rendered, TemplateError, render_chat
from semrl_jax.data.encoding import encode_spans, special_prefix
from semrl_jax.data.loading import FilePath, rows_of_files
from semrl_jax.data.prompt_rows import (
    MAX_TEXT_CHARS,
    BadRows,
    check_text,
    field_value,
    question_text,
)
from semrl_jax.data.row_files import RowError
from semrl_jax.data.templates import chat_template_text, chosen_template, prompt_renderer
from semrl_jax.data.tokenizer import Tokenizer
from semrl_jax.support.errors import UserError

ROLES = ("system", "user", "assistant")
# Fields of a message that change what it means. Ignoring them would train on something else.
UNSUPPORTED = ("tool_calls", "function_call", "reasoning_content", "weight")

_PROGRESS_S = 5.0
_MARKS_RESPONSES = re.compile(r"\{%-?\s*generation\s*-?%\}")
_EXAMPLE = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]

Message = dict[str, str]


@dataclasses.dataclass(frozen=True, eq=False)
class Conversation:
    """One training sequence; it ends with the last token to learn."""

    token_ids: Int[np.ndarray, " S"]  # int32
    # True on tokens to learn: those of assistant messages, end tokens included. False on the
    # first token, which nothing predicts
    loss_mask: Bool[np.ndarray, " S"]

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclasses.dataclass(frozen=True, eq=False)
class ConversationDataset:
    """Conversations in file order."""

    conversations: tuple[Conversation, ...]

    def __len__(self) -> int:
        return len(self.conversations)

    @property
    def hash(self) -> str:
        """Hex SHA-256 over the token ids and the mask of every conversation, in order."""
        digest = hashlib.sha256()
        for conversation in self.conversations:
            digest.update(len(conversation).to_bytes(8, "little"))  # keeps neighbours apart
            digest.update(np.ascontiguousarray(conversation.token_ids, "<i4").tobytes())
            digest.update(conversation.loss_mask.tobytes())
        return digest.hexdigest()


def load_conversations(
    paths: Sequence[FilePath],
    tokenizer: Tokenizer,
    reader: MessagesReader | CompletionReader,
    *,
    skip_bad_rows: bool = False,
    max_tokens: int = 2048,
    too_long: str = "drop",
    end_token_ids: Sequence[int] = (),
    files_field: str = "sft.files",
    report: Callable[[str], object] = lambda line: None,
) -> ConversationDataset:
    """Loads JSON Lines (.jsonl) and Parquet (.parquet) files, in the order given.

    Args:
      reader: see `conversation_reader`.
      skip_bad_rows: leave bad rows out and count them, instead of raising.
      max_tokens: the limit of a conversation, template included.
      too_long: "drop" leaves out and counts a conversation above the limit; "truncate" keeps its
        first tokens, and leaves it out if none of them is to be learned; "refuse" raises.
      end_token_ids: the model's end tokens; a conversation that ends otherwise is reported.
      files_field: the setting that names the files, for error messages.
      report: gets lines about rows left out, and every few seconds the progress.

    UserError names file, line (from 1) and field.
    """
    files = [pathlib.Path(path) for path in paths]
    names = ", ".join(map(str, files))
    bad_rows = BadRows(skip_bad_rows, report)
    kept: list[Conversation] = []
    long_lengths: list[int] = []
    num_truncated = num_unended = num_read = 0
    reported_s = time.monotonic()
    for found in rows_of_files(files, reader, bad_rows, files_field):
        num_read += 1
        if time.monotonic() - reported_s > _PROGRESS_S:
            report(f"{num_read} conversations read")
            reported_s = time.monotonic()
        if found is None:
            continue
        where, conversation = found
        if len(conversation) > max_tokens:
            if too_long == "refuse":
                raise UserError(
                    f"{where}: a conversation of {len(conversation)} tokens exceeds sft.max_tokens="
                    f"{max_tokens}; raise it, or set sft.too_long to 'drop' or 'truncate'."
                )
            long_lengths.append(len(conversation))
            if too_long == "drop" or not conversation.loss_mask[:max_tokens].any():
                continue
            num_truncated += 1
            conversation = conversation_of(
                conversation.token_ids[:max_tokens], conversation.loss_mask[:max_tokens]
            )
        elif conversation.token_ids[-1] not in end_token_ids:
            num_unended += 1
        kept.append(conversation)
    if bad_rows.count == num_read:
        raise UserError(f"{names}: all {num_read} rows are bad; the first: {bad_rows.first}")
    if not kept:
        raise UserError(
            f"{names}: none of the {len(long_lengths)} conversations can be used within "
            f"sft.max_tokens={max_tokens} tokens; the shortest has {min(long_lengths)}; raise it."
        )
    if bad_rows.count:
        report(f"{bad_rows.count} of {num_read} rows are bad and left out.")
    if long_lengths:
        report(
            f"{len(long_lengths)} of {num_read} conversations have more than sft.max_tokens="
            f"{max_tokens} tokens: {num_truncated} are truncated and "
            f"{len(long_lengths) - num_truncated} left out."
        )
    if end_token_ids and num_unended:
        ends = tokenizer.convert_ids_to_tokens(list(end_token_ids))
        report(
            f"{num_unended} of {num_read} conversations do not end with an end token of the model "
            f"({', '.join(map(str, ends))}), so the model does not learn to stop there; if the "
            "chat template ends a message with another token, name it in rollout.stop_token_ids "
            "when you sample."
        )
    return ConversationDataset(tuple(kept))


def conversation_of(
    token_ids: Int[np.ndarray, " N"], loss_mask: Bool[np.ndarray, " N"]
) -> Conversation:
    """Leaves out the tokens after the last one to learn; RowError if there is none."""
    loss_mask = loss_mask & (np.arange(len(loss_mask)) > 0)
    places = np.flatnonzero(loss_mask)
    if not len(places):
        raise RowError("the tokenizer has no token for the text that is to be learned.")
    return Conversation(token_ids[: places[-1] + 1], loss_mask[: places[-1] + 1])


def conversation_reader(
    tokenizer: Tokenizer,
    *,
    row_format: str = "messages",
    messages_field: str = "messages",
    prompt_fields: Sequence[str] = ("prompt",),
    completion_field: str = "completion",
    template: str = "plain",
    system_prompt: str = "",
    add_special_tokens: bool = True,
) -> MessagesReader | CompletionReader:
    """Makes the reader of a format; UserError for a tokenizer, field or template that does not fit.

    Args:
      tokenizer: a fast one, which knows the place of each token in the text.
      row_format: "messages": a list of messages with role and content, rendered by the chat
        template of the tokenizer. "prompt_completion": two texts; the prompt gets the template, and
        the end token follows the completion.
      messages_field: of "messages"; the other fields and options are of "prompt_completion", as in
        `load_prompts`. The completion is not changed.
    """
    if not getattr(tokenizer, "is_fast", False):
        raise UserError(
            "the tokenizer cannot tell where its tokens begin; give one with a tokenizer.json."
        )
    if row_format == "messages":
        return MessagesReader(tokenizer, messages_field)
    return CompletionReader(
        tokenizer, tuple(prompt_fields), completion_field, template, system_prompt,
        add_special_tokens,
    )  # fmt: skip


class _Reader:
    """Reads the columns of `fields`; see `loading.rows_of_files`."""

    optional_fields = ()
    keep_columns = False


@dataclasses.dataclass(frozen=True)
class CompletionReader(_Reader):
    """Reads rows with a prompt and a completion."""

    tokenizer: Tokenizer
    prompt_fields: tuple[str, ...]
    completion_field: str
    template: str
    system_prompt: str
    add_special_tokens: bool

    def __post_init__(self):
        if not self.prompt_fields or not all((*self.prompt_fields, self.completion_field)):
            raise UserError("sft.prompt_fields and sft.completion_field must each name a field.")
        self._render(["1"])  # a wrong template is named before any file is read

    @property
    def fields(self) -> tuple[str, ...]:
        return (*self.prompt_fields, self.completion_field)

    def read(self, row: dict[str, Any], default_source: str) -> Conversation:
        """Tokenises prompt and completion; RowError if the row is bad."""
        if self.completion_field not in row and "messages" in row:
            raise RowError(
                f"field {self.completion_field!r} is missing; rows of messages are read with "
                "sft.row_format='messages'."
            )
        completion = field_value(row, self.completion_field)
        if not isinstance(completion, str) or not completion.strip():
            raise RowError(
                f"field {self.completion_field!r} must be text, not {completion!r:.80}; lists of "
                "messages are read with sft.row_format='messages'."
            )
        check_text(self.completion_field, completion)
        (prompt,) = self._render([question_text(row, self.prompt_fields)])
        text = prompt + completion
        spans = [(len(prompt), len(text))]
        token_ids, mask = encode_spans(self.tokenizer, text, spans, self._prefix)
        end = self.tokenizer.eos_token_id
        if token_ids[-1:].tolist() != [end]:
            token_ids, mask = np.append(token_ids, np.int32(end)), np.append(mask, True)
        mask[-1] = True
        return conversation_of(token_ids, mask)

    @functools.cached_property
    def _prefix(self) -> list[int]:
        template = chosen_template(self.template, self.tokenizer)
        return special_prefix(self.tokenizer, template, self.add_special_tokens)

    @functools.cached_property
    def _render(self) -> Callable[[Sequence[str]], list[str]]:
        return prompt_renderer(
            self.template, self.tokenizer, system_prompt=self.system_prompt, field_prefix="sft."
        )


@dataclasses.dataclass(frozen=True)
class MessagesReader(_Reader):
    """Reads rows with a list of messages, and renders them by the tokenizer's chat template."""

    tokenizer: Tokenizer
    field: str

    def __post_init__(self):
        if not self.field:
            raise UserError("sft.messages_field='' must name a field.")
        if not getattr(self.tokenizer, "chat_template", None):
            raise UserError(
                "sft.row_format='messages' needs a chat template; name a file in sft.chat_template."
            )
        try:  # a template that fails is named before any file is read
            self.tokens(_EXAMPLE)
        except RowError as error:
            raise UserError(
                f"the chat template cannot be used for training: {error} See sft.chat_template."
            ) from None

    @property
    def fields(self) -> tuple[str, ...]:
        return (self.field,)

    def read(self, row: dict[str, Any], default_source: str) -> Conversation:
        """Tokenises the conversation; RowError if the row is bad."""
        if self.field not in row and {"prompt", "completion"} <= row.keys():
            raise RowError(
                f"field {self.field!r} is missing; rows with a prompt and a completion are read "
                "with sft.row_format='prompt_completion'."
            )
        return self.tokens(check_messages(field_value(row, self.field), self.field))

    def tokens(self, messages: Sequence[Message]) -> Conversation:
        """Token ids and mask of checked messages; RowError if the template does not fit them."""
        if _MARKS_RESPONSES.search(chat_template_text(self.tokenizer)):
            token_ids, mask = self._marked_tokens(messages)
        else:
            text, spans = self._assistant_spans(messages)
            token_ids, mask = encode_spans(self.tokenizer, text, spans)
            mask &= ~self._follows_end(token_ids, mask)
        return conversation_of(token_ids, mask)

    def _marked_tokens(self, messages: Sequence[Message]):
        """Token ids and mask, from the {% generation %} blocks of the template."""
        ((text, marks),) = self._render([(messages, False)], with_marks=True)
        token_ids, mask = encode_spans(self.tokenizer, text, marks)
        num_runs = np.count_nonzero(np.diff(mask.astype(np.int8), prepend=0) == 1)
        num_responses = sum(message["role"] == "assistant" for message in messages)
        if num_runs != num_responses:
            raise RowError(
                f"the chat template marks {num_runs} texts of {num_responses} assistant messages."
            )
        return token_ids, mask

    def _assistant_spans(self, messages: Sequence[Message]) -> tuple[str, list[tuple[int, int]]]:
        """The text, and begin and end of each assistant message, from shorter conversations."""
        places = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        shorter = [(messages[:index], True) for index in places]
        shorter += [(messages[: index + 1], False) for index in places]
        (text, _), *rendered = self._render([(messages, False), *shorter])
        spans = []
        for index, (before, _), (after, _) in zip(places, rendered, rendered[len(places) :]):
            if not (text.startswith(after) and after.startswith(before)) or before == after:
                raise RowError(
                    f"the chat template rewrites message {index + 1} or those before it when the "
                    "conversation goes on, so it cannot be told what the assistant generates; use "
                    "a template with {% generation %} marks, or rows that end with their first "
                    "assistant message."
                )
            spans.append((len(before), len(after)))
        return text, spans

    def _follows_end(
        self, token_ids: Int[np.ndarray, " S"], mask: Bool[np.ndarray, " S"]
    ) -> Bool[np.ndarray, " S"]:
        """Spaces that a template writes after an end token: a model that samples stops before."""
        found = np.zeros_like(mask)
        edges = np.flatnonzero(np.diff(mask.astype(np.int8), prepend=0, append=0))
        for begin, end in edges.reshape(-1, 2):
            ends = begin + np.flatnonzero(np.isin(token_ids[begin:end], self._special))
            if len(ends) and not self.tokenizer.decode(token_ids[ends[-1] + 1 : end]).strip():
                found[ends[-1] + 1 : end] = True
        return found

    @functools.cached_property
    def _special(self) -> list[int]:
        return [i for i, token in self.tokenizer.added_tokens_decoder.items() if token.special]

    def _render(
        self, conversations: Sequence[tuple[Sequence[Message], bool]], *, with_marks: bool = False
    ) -> list[Rendered]:
        template = chat_template_text(self.tokenizer)
        try:
            return render_chat(self.tokenizer, template, conversations, with_marks=with_marks)
        except TemplateError as error:
            roles = ", ".join(message["role"] for message in conversations[0][0])
            reason = " ".join(str(error).split())[:200].rstrip(".")
            raise RowError(
                f"the chat template refuses messages with the roles {roles:.80}: {reason}."
            ) from None


def check_messages(messages: Any, field: str) -> list[Message]:
    """The messages of a row with role and content only; RowError names message and rule.

    At most one system message comes first. Then user and assistant alternate. The first message is
    not the assistant's: a response needs a prompt. At least one is.
    """
    if not isinstance(messages, list) or not messages:
        raise RowError(f"field {field!r} must be a list of messages, not {messages!r:.80}.")
    checked: list[Message] = []
    num_chars = 0
    for number, message in enumerate(messages, 1):
        where = f"message {number} of {field!r}"
        if not isinstance(message, dict):
            raise RowError(f"{where} must have a role and a content, not {message!r:.80}.")
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise RowError(f"{where} has role={role!r:.80}, which must be one of {ROLES}.")
        if not isinstance(content, str) or not (content.strip() or role == "system"):
            raise RowError(
                f"{where}, of the {role}, must have text as content, not {content!r:.80}."
            )
        for name in UNSUPPORTED:  # Parquet gives every message all fields
            if message.get(name) not in (None, [], ""):
                raise RowError(f"{where} has {name!r}, which is not supported; leave it out.")
        if role == "system" and checked:
            raise RowError(f"{where} is the system's, which must be the first one.")
        if role == "assistant" and not checked:
            raise RowError(
                f"{where} is the assistant's; put the system's or the user's message before it."
            )
        if checked and checked[-1]["role"] == role:
            raise RowError(f"{where} is the {role}'s, as the one before; join the two.")
        check_text(f"{field}.{number - 1}.content", content)
        checked.append({"role": role, "content": content})
        num_chars += len(content)
        if num_chars > MAX_TEXT_CHARS:
            raise RowError(f"{field!r} has more than {MAX_TEXT_CHARS} characters; shorten it.")
    if not any(message["role"] == "assistant" for message in checked):
        raise RowError(f"field {field!r} has no assistant message, so nothing can be learned.")
    return checked
