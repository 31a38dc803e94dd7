"""Prompt datasets, templates, tokenizers, padding, and the arithmetic quickstart task."""

from semrl_jax.data.character_ends import tokens_of_ends
from semrl_jax.data.conversations import (
    Conversation,
    ConversationDataset,
    conversation_reader,
    load_conversations,
)
from semrl_jax.data.encoding import (
    check_ids,
    check_vocabulary,
    encode,
    encode_given,
    special_prefix,
    template_line,
)
from semrl_jax.data.loading import load_prompts, prompts_of_problems
from semrl_jax.data.padding import Demonstrations, demonstration_rows, pad_response_values, pad_rows
from semrl_jax.data.prompt_rows import BadRows, check_row_format, read_shots, row_reader
from semrl_jax.data.prompts import (
    Position,
    PromptDataset,
    PromptExample,
    advanced,
    arithmetic_prompts,
    build_dataset,
    columns_hash,
    dataset_hash,
    next_prompts,
    next_rows,
    prompt_key,
    prompt_order,
)
from semrl_jax.data.row_files import RowError, batch_rows, check_file, read_rows
from semrl_jax.data.stop_strings import StopMatcher, TokenBytes
from semrl_jax.data.stop_words import expand_stop_words, stop_word_ids
from semrl_jax.data.templates import chosen_template, is_chat, set_chat_template
from semrl_jax.data.tokenizer import (
    character_tokenizer,
    check_same_tokens,
    full_text,
    load_tokenizer,
    tokenizer_hash,
    train_tokenizer,
    verifier_text,
)

__all__ = [
    "BadRows", "Conversation", "ConversationDataset", "Demonstrations", "Position", "PromptDataset",
    "PromptExample", "RowError", "StopMatcher", "TokenBytes", "advanced", "arithmetic_prompts",
    "batch_rows",
    "build_dataset", "character_tokenizer", "check_file", "check_ids", "check_row_format",
    "check_same_tokens", "check_vocabulary", "chosen_template", "columns_hash",
    "conversation_reader", "dataset_hash", "demonstration_rows", "encode", "encode_given",
    "expand_stop_words", "full_text", "is_chat", "load_conversations", "load_prompts",
    "load_tokenizer", "next_prompts", "next_rows",
    "pad_response_values", "pad_rows", "prompt_key", "prompt_order", "prompts_of_problems",
    "read_rows",
    "read_shots", "row_reader", "set_chat_template", "special_prefix", "stop_word_ids",
    "template_line", "tokenizer_hash", "tokens_of_ends", "train_tokenizer", "verifier_text",
]  # fmt: skip
