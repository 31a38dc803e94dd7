"""The held-out problems that a config names: of files, benchmarks and the user's modules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import ml_collections
import numpy as np

from semrl_jax import data
from semrl_jax.environments.pool import EnvironmentPools
from semrl_jax.evaluation import catalogue
from semrl_jax.evaluation.benchmark_spec import BenchmarkReader
from semrl_jax.evaluation.entries import EVALUATOR_SETTINGS, FIELD, Entry, benchmark_entries
from semrl_jax.sampling.environment_tasks import held_out_tasks
from semrl_jax.sampling.prompt_sources import held_out_problems, load_file
from semrl_jax.settings.evaluation import ALL_PROBLEMS
from semrl_jax.support.errors import UserError
from semrl_jax.support.modules import load_module, running
from semrl_jax.support.safe_files import parse_json

Report = Callable[[str], None]
MAX_TASKS = 512  # of an environment, which may have no last one, unless more are asked for


def load_problems(
    config: ml_collections.ConfigDict,
    tokenizer: Any,
    report: Report,
    *,
    keep_columns: bool = False,
    environments: EnvironmentPools | None = None,
) -> Sequence[data.PromptExample]:
    """The held-out problems of the task or of `evaluation.files`, and of `evaluation.benchmarks`.

    A prompt above the limit is kept, because it counts as wrong, and reported. `columns` of a
    problem of a named set tell the grader the kind of the answer; with `keep_columns`, they also
    hold the rows of the files. UserError for a file, row, template or module that cannot be used.
    """
    shared = {"keep_columns": keep_columns, "environments": environments}
    problems = list(held_out_problems(config, tokenizer, report, **shared))
    for entry in benchmark_entries(config.evaluation):
        if entry.kind == "module":
            found = _of_module(entry.target, config, tokenizer)
        elif entry.kind == "environment":
            found = held_out_tasks(
                environments[entry.target],
                entry.settings.get("num_problems", _num_tasks(config)),
                tokenizer,
                report,
                entry.name,
            )
        else:
            found = _of_file(entry, config, tokenizer, report, keep_columns)
        taken = {problem.data_source for problem in problems}
        if twice := sorted({problem.data_source for problem in found} & taken):
            raise UserError(
                f"{FIELD} has {entry.entry!r} with data_source {twice[0]!r} of another; rename one."
            )
        problems += found
    return problems


def _num_tasks(config: ml_collections.ConfigDict) -> int:
    limit = config.evaluation.num_problems
    return MAX_TASKS if limit == ALL_PROBLEMS else limit


def _of_file(
    entry: Entry,
    config: ml_collections.ConfigDict,
    tokenizer: Any,
    report: Report,
    keep_columns: bool,
) -> Sequence[data.PromptExample]:
    """The problems of a named set or of a user's file."""
    settings = {
        name: value for name, value in entry.settings.items() if name not in EVALUATOR_SETTINGS
    } | {"name": entry.name}
    field = f"{FIELD}={entry.entry!r}: "
    options = {"field_prefix": field, "report": report}
    if entry.kind == "file":
        return load_file(
            config, tokenizer, entry.target, settings, keep_columns=keep_columns, **options
        )
    benchmark = catalogue.find(entry.target)
    path = catalogue.file_of(entry.target, config.evaluation.data_dir)
    if path is None:
        catalogue.check_files_of(FIELD, (entry.target,), config.evaluation.data_dir)
    reader = BenchmarkReader(benchmark, keep_row=keep_columns)
    problems = load_file(config, tokenizer, str(path), settings, reader=reader, **options)
    limit = settings.get("num_problems", config.evaluation.num_problems)
    if len(problems) != min(limit, benchmark.size):
        note = f"; {benchmark.note}" if benchmark.note else ""
        report(
            f"benchmark {entry.name}: {path} has {len(problems)} problems; published are "
            f"{benchmark.size}{note}."
        )
    elif limit < benchmark.size:
        is_random = config.evaluation.subset_seed >= 0
        chosen = f"{limit} random" if is_random else f"its first {limit}"
        report(f"benchmark {entry.name}: {chosen} problems; published are {benchmark.size}.")
    return problems


def _of_module(
    name: str, config: ml_collections.ConfigDict, tokenizer: Any
) -> list[data.PromptExample]:
    module = load_module(FIELD, name, "", ("problems",))
    with running(FIELD, module, "problems"):
        found = list(module.problems(config, tokenizer))
        _check_problems(found)
    return found


def _check_problems(problems: Sequence[Any]) -> None:
    if not problems:
        raise ValueError("it must return at least one problem")
    for problem in problems:
        if not isinstance(problem, data.PromptExample):
            raise TypeError(f"it must return data.PromptExample, not {problem!r:.100}")
        ids = problem.prompt_ids
        if not (isinstance(ids, np.ndarray) and ids.dtype == np.int32 and ids.ndim == 1):
            raise TypeError("prompt_ids of a problem must be an int32 array [P]")
        if not (isinstance(problem.answer, str) and isinstance(problem.data_source, str)):
            raise TypeError("answer and data_source of a problem must be texts")
        if not isinstance(problem.columns, str) or not _is_object(problem.columns or "{}"):
            raise TypeError("columns of a problem must be the text of a JSON object, or empty")


def _is_object(text: str) -> bool:
    try:
        return isinstance(parse_json(text.encode()), dict)
    except ValueError:
        return False
