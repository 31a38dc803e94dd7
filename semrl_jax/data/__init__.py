"""Prompt datasets, templates, tokenizers, padding, and the arithmetic quickstart task."""

from semrl_jax.data.arithmetic import (
    Problem,
    demonstration_texts,
    held_out_problems,
    training_problems,
    worked_response,
)
from semrl_jax.data.demonstrations import (
    Demonstrations,
    arithmetic_demonstrations,
    demonstration_rows,
)
from semrl_jax.data.files import RowError, check_file, read_rows
from semrl_jax.data.loading import load_prompts
from semrl_jax.data.padding import (
    PaddedTokens,
    pad_prompts,
    pad_response_values,
    pad_responses,
    pad_rows,
)
from semrl_jax.data.prompts import (
    Position,
    PromptDataset,
    PromptExample,
    arithmetic_held_out_prompts,
    arithmetic_prompts,
    build_dataset,
    dataset_hash,
    next_prompts,
    prompt_order,
)
from semrl_jax.data.rows import (
    BadRows,
    QuestionAnswer,
    RowReader,
    check_row_format,
    row_reader,
)
from semrl_jax.data.templates import TEMPLATES, is_chat, prompt_renderer
from semrl_jax.data.tokenizer import (
    character_tokenizer,
    full_text,
    load_tokenizer,
    tokenizer_hash,
    verifier_text,
)
from semrl_jax.data.trained_tokenizer import train_tokenizer

__all__ = [
    "TEMPLATES",
    "BadRows",
    "Demonstrations",
    "PaddedTokens",
    "Position",
    "Problem",
    "PromptDataset",
    "PromptExample",
    "QuestionAnswer",
    "RowError",
    "RowReader",
    "arithmetic_demonstrations",
    "arithmetic_held_out_prompts",
    "arithmetic_prompts",
    "build_dataset",
    "check_file",
    "check_row_format",
    "character_tokenizer",
    "dataset_hash",
    "demonstration_rows",
    "demonstration_texts",
    "full_text",
    "held_out_problems",
    "is_chat",
    "load_prompts",
    "load_tokenizer",
    "next_prompts",
    "pad_prompts",
    "pad_response_values",
    "pad_responses",
    "pad_rows",
    "prompt_order",
    "prompt_renderer",
    "read_rows",
    "row_reader",
    "tokenizer_hash",
    "train_tokenizer",
    "training_problems",
    "verifier_text",
    "worked_response",
]
