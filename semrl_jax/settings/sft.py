"""Settings of `config.sft`."""

from __future__ import annotations

import dataclasses

from semrl_jax.settings.rules import Section
from semrl_jax.support.choices import SCHEDULES
from semrl_jax.support.errors import UserError
from semrl_jax.support.fields import follows, setting

ROW_FORMATS = ("messages", "prompt_completion")
TOO_LONG = ("drop", "truncate", "refuse")


@dataclasses.dataclass(frozen=True)
class Sft:
    files: tuple[str, ...] = setting(
        (),
        "conversations, .jsonl or .parquet, repeat the flag; empty: launch.sft warm-starts",
        items=str,
        may_change=True,
    )
    evaluation_files: tuple[str, ...] = setting(
        (), "held-out conversations; each file has its own loss", items=str, may_change=True
    )
    evaluation_every_steps: int = setting(
        50,
        "between evaluations, also before the first and after the last step; 0: never",
        at_least=0,
        may_change=True,
    )
    row_format: str = setting(
        "messages", "rows of the files: messages or prompt_completion", choices=ROW_FORMATS
    )
    messages_field: str = setting("messages", "field with the list of messages")
    prompt_fields: tuple[str, ...] = setting(
        ("prompt",), "prompt_completion: fields of the prompt, joined by a space", items=str
    )
    completion_field: str = setting("completion", "prompt_completion: field with the completion")
    template: str = setting("auto", "as data.template", may_change=True)
    system_prompt: str = setting("", "system prompt for the template chat")
    add_special_tokens: bool = setting(True, "as data.add_special_tokens", may_change=True)
    chat_template: str = setting("", "Jinja file in place of the tokenizer's template")
    skip_bad_rows: bool = setting(False, "as data.skip_bad_rows")
    max_tokens: int = setting(2048, "limit of a conversation, template included")
    too_long: str = setting(
        "drop", "conversations above max_tokens: drop, truncate or refuse", choices=TOO_LONG
    )
    num_epochs: int = setting(1, "passes over the conversations", "epochs", above=0)
    num_steps: int = setting(0, "optimiser steps; above 0, replaces num_epochs", at_least=0)
    batch_size: int = setting(64, "per optimiser step", "conversations", above=0)
    batch_tokens: int = setting(
        0, "most per optimiser step; above 0, replaces batch_size", at_least=0
    )
    micro_batch_size: int = setting(
        8, "as training.micro_batch_size", "conversations", above=0, may_change=True
    )
    micro_batch_tokens: int = follows(
        "sft.max_tokens",
        "as training.micro_batch_tokens; follows sft.max_tokens unless set",
        at_least=0,
        may_change=True,
    )
    pack_sequences: bool = setting(True, "as training.pack_sequences", may_change=True)
    balance_lengths: bool = setting(True, "as training.balance_lengths", may_change=True)
    learning_rate: float = setting(1e-5, "highest rate of the schedule", above=0)
    schedule: str = setting(
        "cosine", "rate after the warm-up: cosine, linear or constant", choices=SCHEDULES
    )
    warmup_fraction: float = setting(
        0.03, "share of steps in which the rate rises", within="[0, 1]"
    )
    final_fraction: float = setting(
        0.0, "linear, cosine: share of the rate that is left", within="[0, 1]"
    )
    adam_b1: float = setting(0.9, "adamw: decay of the mean of gradients", within="[0, 1)")
    adam_b2: float = setting(0.95, "adamw: decay of the mean of squared gradients", within="[0, 1)")
    weight_decay: float = setting(0.01, "times the learning rate, per step", at_least=0)
    max_grad_norm: float = setting(1.0, "larger gradients are scaled down to it", above=0)


def check(sft: Section) -> None:
    longest = sft["max_tokens"]
    if longest < 2:
        raise UserError(
            f"sft.max_tokens={longest} must be at least 2: the first token is not learned."
        )
    for field in ("batch_tokens", "micro_batch_tokens"):
        if 0 < sft[field] < longest:
            raise UserError(
                f"sft.{field}={sft[field]} must be at least sft.max_tokens={longest}, or 0."
            )
    if sft["pack_sequences"] and not sft["micro_batch_tokens"]:
        raise UserError(
            f"sft.pack_sequences=True needs sft.micro_batch_tokens; set it to {longest} or more."
        )
