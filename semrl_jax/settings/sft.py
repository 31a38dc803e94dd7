"""Checks of `config.sft`."""

from __future__ import annotations

from semrl_jax.settings.rules import Section, above_zero, at_least_zero, items_are, one_of
from semrl_jax.support.errors import UserError

ROW_FORMATS = ("messages", "prompt_completion")
TOO_LONG = ("drop", "truncate", "refuse")
SCHEDULES = ("constant", "linear", "cosine")


def check(sft: Section) -> None:
    one_of("sft.row_format", sft["row_format"], ROW_FORMATS)
    one_of("sft.too_long", sft["too_long"], TOO_LONG)
    one_of("sft.schedule", sft["schedule"], SCHEDULES)
    items_are(str, "sft", sft, "files", "evaluation_files", "prompt_fields")
    above_zero(
        "sft", sft,
        "num_epochs", "batch_size", "micro_batch_size", "learning_rate", "max_grad_norm",
    )  # fmt: skip
    at_least_zero(
        "sft", sft,
        "num_steps", "batch_tokens", "micro_batch_tokens", "weight_decay", "evaluation_every_steps",
    )  # fmt: skip
    for field in ("adam_b1", "adam_b2"):
        if not 0 <= sft[field] < 1:
            raise UserError(f"sft.{field}={sft[field]} must be in [0, 1).")
    for field in ("warmup_fraction", "final_fraction"):
        if not 0 <= sft[field] <= 1:
            raise UserError(f"sft.{field}={sft[field]} must be in [0, 1].")
    _check_tokens(sft)


def _check_tokens(sft: Section) -> None:
    longest = sft["max_tokens"]
    if longest < 2:
        raise UserError(
            f"sft.max_tokens={longest} must be at least 2: the first token is not learned."
        )
    for field in ("batch_tokens", "micro_batch_tokens"):
        if 0 < sft[field] < longest:
            raise UserError(
                f"sft.{field}={sft[field]} must be at least sft.max_tokens={longest}, the longest "
                "conversation; raise it, lower sft.max_tokens, or set it to 0."
            )
    if sft["pack_sequences"] and not sft["micro_batch_tokens"]:
        raise UserError(
            "sft.pack_sequences=True packs rows of sft.micro_batch_tokens, which is 0; set it to "
            f"{longest} or more."
        )
