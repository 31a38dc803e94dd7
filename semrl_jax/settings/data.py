"""Checks of `config.data`."""

from __future__ import annotations

from semrl_jax.data.procedural import sources
from semrl_jax.data.rows import check_row_format
from semrl_jax.settings.rules import Section, above_zero, items_are, one_of
from semrl_jax.support.errors import UserError

TASKS = ("arithmetic", "files", "reasoning_gym")


def check(data: Section) -> None:
    above_zero("data", data, "prompts_per_step", "num_prompts")
    one_of("data.task", data["task"], TASKS)
    check_row_format(data["row_format"])
    items_are(str, "data", data, "files", "question_fields", "reasoning_gym")
    sources(data["reasoning_gym"])


def check_training(data: Section) -> None:
    """Rules of the prompts of a training run; other commands have prompts of their own."""
    if data["task"] == "files" and not data["files"]:
        raise UserError("data.task='files' needs data.files; name a .jsonl or .parquet file.")
    if (data["task"] == "reasoning_gym") != bool(data["reasoning_gym"]):
        raise UserError(
            f"data.task={data['task']!r} and data.reasoning_gym={tuple(data['reasoning_gym'])}: "
            "the task 'reasoning_gym' needs data sets, such as "
            "--config.data.reasoning_gym=chain_sum, and no other task reads them."
        )
    if data["task"] != "files" and data["num_prompts"] < data["prompts_per_step"]:
        raise UserError(
            f"data.num_prompts={data['num_prompts']} must be at least data.prompts_per_step="
            f"{data['prompts_per_step']}, the prompts of one step; change one of them."
        )
