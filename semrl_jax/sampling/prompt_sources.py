"""The prompts for training and for evaluation that a config names."""

from __future__ import annotations

import dataclasses
import math
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import ml_collections

from semrl_jax import data
from semrl_jax.data import arithmetic, procedural
from semrl_jax.environments.pool import EnvironmentPools
from semrl_jax.sampling.environment_tasks import held_out_tasks, training_tasks
from semrl_jax.settings.rules import split_entry
from semrl_jax.support.errors import UserError, prefixed
from semrl_jax.support.intervals import in_words, is_within
from semrl_jax.types import DISTRIBUTION

# Default settings of a file, see `data.load_prompts`.
ROW_DEFAULTS = {
    "row_format": "question_answer",
    "question_fields": ("question",),
    "answer_field": "answer",
    "answer_after": "",
    "template": "auto",
}
# Settings that an entry of evaluation.files may have. Those of evaluation.benchmarks have more.
FILE_SETTINGS = (*ROW_DEFAULTS, "num_problems", "name")

_WHOLE = ("num_problems", "n", "shots", "top_k", "min_tokens")
_RANGES = {
    "num_problems": "[1, 999999999]",
    "n": "[1, 999999999]",
    "shots": "[0, 999999999]",
    **DISTRIBUTION,
}


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
            with prefixed(field):
                data.check_file(path)


def training_prompts(
    config: ml_collections.ConfigDict,
    tokenizer: Any,
    report: Callable[[str], None],
    *,
    keep_columns: bool = False,
    environments: EnvironmentPools | None = None,
) -> data.PromptDataset:
    """Prompts of the generator or of `data.files`; `report` gets a line about skipped rows.

    With `keep_columns`, the examples keep the rows of the files. `environments` makes the tasks of
    an environment. Raises UserError for a file, row or template that cannot be used.
    """
    if config.data.task == "arithmetic":
        problems = arithmetic.training_problems(config.seed, config.data.num_prompts)
        prompts = data.arithmetic_prompts(tokenizer, problems, config.data.add_special_tokens)
        return _with_worked_responses(prompts, problems, tokenizer, config.rollout)
    if config.data.task == "environment":
        return training_tasks(config, tokenizer, environments[config.environment.name], report)
    if config.data.task == "reasoning_gym":
        entries = procedural.sources(config.data.reasoning_gym)
        count, held_out = config.data.num_prompts, config.evaluation.num_problems
        problems = procedural.training_problems(entries, config.seed, count, held_out)
        prompts = _prompts_of_problems(problems, config, tokenizer, config.data.template)
    else:
        prompts = prompts_of_files(config, tokenizer, report, keep_columns=keep_columns)
    report(f"{len(prompts)} training prompts")
    return prompts


def _with_worked_responses(
    prompts: data.PromptDataset,
    problems: Sequence[arithmetic.Problem],
    tokenizer: Any,
    rollout: ml_collections.ConfigDict,
) -> data.PromptDataset:
    """The prompts of arithmetic, with worked solutions as given responses, if a run has any."""
    if not (rollout.given_responses or rollout.hint_rounds):
        return prompts
    texts = [arithmetic.worked_response(problems[example.index]) for example in prompts.examples]
    given = data.encode_given(tokenizer, texts, _longest_given(rollout))
    pairs = zip(prompts.examples, given, strict=True)
    examples = tuple(dataclasses.replace(example, given=(ids,)) for example, ids in pairs)
    return dataclasses.replace(prompts, examples=examples)


def _longest_given(rollout: ml_collections.ConfigDict) -> int:
    """The most tokens of a given response; the solutions of hints have no limit."""
    return rollout.max_response_tokens if rollout.given_responses else sys.maxsize


def prompts_of_files(
    config: ml_collections.ConfigDict,
    tokenizer: Any,
    report: Callable[[str], None],
    *,
    keep_columns: bool = False,
    num_rows: int = 0,
    needs_answer: bool = True,
) -> data.PromptDataset:
    """Prompts of `data.files`; raises as `training_prompts`.

    Args:
      keep_columns: whether prompts keep the rows of the files.
      num_rows: at most, over all files; 0 reads all.
      needs_answer: whether a row without an answer is bad.
    """
    found = _row_settings(config.data)
    template = found.pop("template")
    has_given = config.rollout.given_responses or config.rollout.hint_rounds
    given = {"given_field": config.data.given_field} if has_given else {}
    reader = data.row_reader(**found, keep_columns=keep_columns, needs_answer=needs_answer, **given)
    prompts = data.load_prompts(
        config.data.files,
        tokenizer,
        reader,
        template=template,
        system_prompt=config.data.system_prompt,
        add_special_tokens=config.data.add_special_tokens,
        max_prompt_tokens=config.rollout.max_prompt_tokens,
        max_response_tokens=_longest_given(config.rollout),
        keep_questions=config.rewards.model.tokenizer == "own"
        or bool(config.data.teacher_input or config.rollout.hint_rounds),
        skip_bad_rows=config.data.skip_bad_rows,
        report=report,
        num_rows=num_rows,
    )
    if given and not any(example.given for example in prompts.examples):
        raise UserError(
            f"data.given_field={config.data.given_field!r}: no row has a given response; name the "
            "field that has them, or set rollout.given_responses and hint_rounds to 0."
        )
    return prompts


def _prompts_of_problems(
    problems: Sequence[procedural.Problem],
    config: ml_collections.ConfigDict,
    tokenizer: Any,
    template: str,
    keep_long: bool = False,
) -> data.PromptDataset:
    return data.prompts_of_problems(
        problems,
        tokenizer,
        template=template,
        system_prompt=config.data.system_prompt,
        add_special_tokens=config.data.add_special_tokens,
        max_prompt_tokens=config.rollout.max_prompt_tokens,
        keep_long=keep_long,
    )


def held_out_problems(
    config: ml_collections.ConfigDict,
    tokenizer: Any,
    report: Callable[[str], None],
    *,
    keep_columns: bool = False,
    environments: EnvironmentPools | None = None,
) -> Sequence[data.PromptExample]:
    """Problems of the task or of `evaluation.files`; those of one data source are one benchmark.

    Problems above the token limit are included: they count as wrong without a response. The other
    arguments are those of `training_prompts`, which raises the same errors; also for two files with
    one data source.
    """
    options = config.evaluation
    if not options.held_out:
        return []
    if config.data.task == "arithmetic":
        found = arithmetic.held_out_problems()[: options.num_problems]
        return data.arithmetic_prompts(tokenizer, found, config.data.add_special_tokens).examples
    if config.data.task == "environment":
        own = environments[config.environment.name]
        return held_out_tasks(own, options.num_problems, tokenizer, report)
    if config.data.task == "reasoning_gym":
        entries = procedural.sources(config.data.reasoning_gym)
        held_out = procedural.held_out_problems(entries, options.num_problems)
        return _prompts_of_problems(held_out, config, tokenizer, options.template, True).examples
    problems: list[data.PromptExample] = []
    for file in evaluation_files(options.files):
        found = load_file(
            config,
            tokenizer,
            file.path,
            file.settings,
            keep_columns=keep_columns,
            field_prefix=f"evaluation.files={file.entry!r}: ",
            report=report,
        )
        seen = {problem.data_source for problem in problems}
        for example in found:
            if example.data_source in seen:
                raise UserError(
                    f"evaluation.files={tuple(options.files)}: two files have the data source "
                    f"{example.data_source!r}; rename one: {file.path}:name=NAME."
                )
        problems += found
    return problems


def load_file(
    config: ml_collections.ConfigDict,
    tokenizer: Any,
    path: str,
    settings: Mapping[str, Any],
    *,
    reader: Any = None,
    keep_columns: bool = False,
    field_prefix: str,
    report: Callable[[str], None],
) -> Sequence[data.PromptExample]:
    """The held-out problems of one file; those above the token limit are kept.

    Args:
      settings: `FILE_SETTINGS` and `shots`; what is missing is as in `config.evaluation`.
      reader: of the rows, see `data.load_prompts`; None: by the settings and `keep_columns`.
      field_prefix, report: see `data.load_prompts`.
    """
    defaults = config.evaluation
    same_format = settings.get("row_format", defaults.row_format) == defaults.row_format
    found = _row_settings(defaults) if same_format else dict(ROW_DEFAULTS)
    if reader is not None:
        found["template"] = defaults.template
    others = {"num_problems": defaults.num_problems, "name": "", "shots": defaults.shots}
    found = {**found, **others, **settings}
    num_rows, name, num_shots, template = (found.pop(key) for key in (*others, "template"))
    if reader is None:
        reader = data.row_reader(**found, keep_columns=keep_columns, field_prefix=field_prefix)
    is_chat = data.is_chat(data.chosen_template(template, tokenizer))
    return data.load_prompts(
        path,
        tokenizer,
        reader,
        template=template,
        # Only chat templates use a system prompt.
        system_prompt=config.data.system_prompt if is_chat else "",
        shots=data.read_shots(defaults.shots_file, num_shots) if num_shots else (),
        add_special_tokens=config.data.add_special_tokens,
        max_prompt_tokens=config.rollout.max_prompt_tokens,
        keep_long=True,
        num_rows=num_rows,
        rows_seed=None if defaults.subset_seed < 0 else defaults.subset_seed,
        data_source=name,
        field_prefix=field_prefix,
        report=report,
    ).examples


def check_prompts(
    of: str,
    examples: Sequence[data.PromptExample],
    config: ml_collections.ConfigDict,
    tokenizer: Any,
    vocab_size: int,
    report: Callable[[str], None],
) -> None:
    """Reports the templates of prompts `of` a purpose; UserError for a token that is unknown."""
    section = "evaluation" if of == "evaluation" else "data"
    fields = f"{section}.template", "data.add_special_tokens"
    for template in dict.fromkeys(example.template for example in examples):
        if template:
            added = config.data.add_special_tokens
            report(data.template_line(f"{of} prompts", template, tokenizer, added, fields))
    data.check_ids(
        tokenizer,
        vocab_size,
        (
            (f"{of} prompt {e.index} of {e.data_source!r:.100}", ids)
            for e in examples
            for ids in (e.prompt_ids, *e.given)
        ),
    )


def evaluation_files(entries: Sequence[str]) -> list[EvaluationFile]:
    """Splits entries of `evaluation.files` into path and settings; UserError for wrong ones."""
    files = []
    for entry in entries:
        path, found = split_entry(
            "evaluation.files", entry, "file", FILE_SETTINGS, repeatable=("question_fields",)
        )
        files.append(EvaluationFile(entry, path, setting_values("evaluation.files", entry, found)))
    return files


def setting_values(field: str, entry: str, found: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """The values of the settings of an entry; UserError if one is out of range."""
    return {
        name: tuple(values)
        if name == "question_fields"
        else _setting_value(f"{field}={entry!r}: ", name, *values)
        for name, values in found.items()
    }


def _setting_value(field: str, name: str, value: str) -> str | int | float:
    if name == "row_format":
        data.check_row_format(value, field)
    elif name in _RANGES:
        is_whole, interval = name in _WHOLE, _RANGES[name]
        pattern = r"\d{1,9}" if is_whole else r"-?\d*\.?\d+(?:[eE]-?\d{1,3})?"
        number = float(value) if re.fullmatch(pattern, value) else math.nan
        if not is_within(number, interval):
            kind = "whole number" if is_whole else "number"
            raise UserError(f"{field}{name}={value!r} must be a {kind}, {in_words(interval)}.")
        return int(value) if is_whole else number
    elif name == "name" and not value.strip():
        raise UserError(f"{field}{name}={value!r} must not be empty.")
    return value


def _row_settings(rows: ml_collections.ConfigDict) -> dict[str, Any]:
    return {name: rows[name] for name in ROW_DEFAULTS} | {
        "question_fields": tuple(rows.question_fields)
    }
