"""The prompts for training and for evaluation that a config names."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import ml_collections

from semrl_jax import data
from semrl_jax.errors import UserError
from semrl_jax.settings.rules import split_entry

# Default settings of a file, see `data.load_prompts`.
ROW_DEFAULTS = {
    "row_format": "question_answer",
    "question_fields": ("question",),
    "answer_field": "answer",
    "answer_after": "",
    "template": "plain",
}
# Settings that an entry of evaluation.files may have.
FILE_SETTINGS = (*ROW_DEFAULTS, "num_problems", "name")


class EvaluationFile(NamedTuple):
    """An entry of `evaluation.files`: `FILE`, or `FILE:setting=value:setting=value`."""

    entry: str
    path: str
    settings: dict[str, Any]  # only for this file


def check_files(config: ml_collections.ConfigDict) -> None:
    """Raises UserError if a prompt file does not exist; called before anything slow."""
    if config.data.task != "files":
        return
    evaluated = [file.path for file in evaluation_files(config.evaluation.files)]
    for field, paths in (("data.files", config.data.files), ("evaluation.files", evaluated)):
        for path in paths:
            try:
                data.check_file(path)
            except UserError as error:
                raise UserError(f"{field}: {error}") from None


def training_prompts(
    config: ml_collections.ConfigDict,
    tokenizer: Any,
    report: Callable[[str], None],
    *,
    keep_columns: bool = False,
) -> data.PromptDataset:
    """Prompts of the generator or of `data.files`; `report` gets a line about skipped rows.

    With `keep_columns`, the examples keep the rows of the files.

    Raises:
      UserError: for a file, row or template that cannot be used.
    """
    if config.data.task == "arithmetic":
        return data.arithmetic_prompts(tokenizer, config.seed, config.data.num_prompts)
    prompts = data.load_prompts(
        config.data.files,
        tokenizer,
        **_row_settings(config.data),
        system_prompt=config.data.system_prompt,
        add_special_tokens=config.data.add_special_tokens,
        max_prompt_tokens=config.rollout.max_prompt_tokens,
        skip_bad_rows=config.data.skip_bad_rows,
        keep_columns=keep_columns,
        report=report,
    )
    report(f"{len(prompts)} training prompts")
    return prompts


def held_out_problems(
    config: ml_collections.ConfigDict,
    tokenizer: Any,
    report: Callable[[str], None],
    *,
    keep_columns: bool = False,
) -> Sequence[data.PromptExample]:
    """Problems of the task or of `evaluation.files`; those of one data source are one benchmark.

    Problems above the token limit are included, because they count as wrong, see
    `sampled_problems`. `report` gets a line about them. With `keep_columns`, they keep the rows of
    the files.

    Raises:
      UserError: for a file, row or template that cannot be used, or two files with one data source.
    """
    options = config.evaluation
    if not options.held_out:
        return []
    if config.data.task == "arithmetic":
        return data.arithmetic_held_out_prompts(tokenizer, options.num_problems).examples
    problems: list[data.PromptExample] = []
    for file in evaluation_files(options.files):
        same_format = file.settings.get("row_format", options.row_format) == options.row_format
        settings = _row_settings(options) if same_format else ROW_DEFAULTS
        settings = {**settings, "num_problems": options.num_problems, "name": "", **file.settings}
        num_rows, name = settings.pop("num_problems"), settings.pop("name")
        is_chat = data.is_chat(settings["template"])
        loaded = data.load_prompts(
            (file.path,),
            tokenizer,
            **settings,
            # Only chat templates use a system prompt, and they add the special tokens themselves.
            system_prompt=config.data.system_prompt if is_chat else "",
            add_special_tokens=config.data.add_special_tokens and not is_chat,
            max_prompt_tokens=config.rollout.max_prompt_tokens,
            too_long="keep",
            num_rows=num_rows,
            data_source=name,
            keep_columns=keep_columns,
            field_prefix=f"evaluation.files={file.entry!r}: ",
            report=report,
        )
        seen = {problem.data_source for problem in problems}
        for example in loaded.examples:
            if example.data_source in seen:
                raise UserError(
                    f"evaluation.files={tuple(options.files)}: two files have the data source "
                    f"{example.data_source!r}, which names their results; rename one: "
                    f"{file.path}:name=NAME."
                )
        problems += loaded.examples
    return problems


def sampled_problems(
    problems: Sequence[data.PromptExample], max_prompt_tokens: int
) -> dict[int, data.PromptExample]:
    """The problems within the limit, by index; the others count as wrong without a response."""
    return {
        place: problem
        for place, problem in enumerate(problems)
        if len(problem.prompt_ids) <= max_prompt_tokens
    }


def evaluation_files(entries: Sequence[str]) -> list[EvaluationFile]:
    """Splits entries of `evaluation.files` into path and settings.

    Only `question_fields` may occur several times.

    Raises:
      UserError: for a setting that is unknown, occurs twice or has a value out of range.
    """
    files = []
    for entry in entries:
        path, found = split_entry(
            "evaluation.files", entry, "file", FILE_SETTINGS, repeatable=("question_fields",)
        )
        settings: dict[str, Any] = {
            name: tuple(values) if name == "question_fields" else _checked(entry, name, *values)
            for name, values in found.items()
        }
        files.append(EvaluationFile(entry, path, settings))
    return files


def _checked(entry: str, name: str, value: str) -> str | int:
    """The value of a setting; UserError if it is out of range."""
    field, rule = f"evaluation.files={entry!r}: ", ""
    if name == "row_format":
        data.check_row_format(value, field)
    elif name == "num_problems":
        if re.fullmatch("0*[1-9][0-9]{0,8}", value):
            return int(value)
        rule = "be a whole number from 1 to 999999999"
    elif name == "name" and not value.strip():
        rule = "not be empty"
    if rule:
        raise UserError(f"{field}{name}={value!r} must {rule}.")
    return value


def _row_settings(rows: ml_collections.ConfigDict) -> dict[str, Any]:
    return {name: rows[name] for name in ROW_DEFAULTS} | {
        "question_fields": tuple(rows.question_fields)
    }
