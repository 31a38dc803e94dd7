"""Interfaces of scores and benchmarks, which are modules that a config names.

A score is a module with two functions:

- `plan(options) -> Plan`: how responses are sampled; `options` is `config.evaluation`.
- `per_problem(problems, options)`: `PerProblem` by name of the figure, such as "pass@8". Each item
  of `problems` is the list of `Sample` of one problem. A problem whose prompt is too long has
  samples too, which are wrong.

The name of a figure in the log is `eval/<benchmark>/<name>`.

A benchmark is a module with `problems(config, tokenizer)`: one or more `data.PromptExample`. Their
`data_source` is the name of the benchmark in log keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import ml_collections
import numpy as np
from jaxtyping import Float

from semrl_jax import data
from semrl_jax.errors import UserError
from semrl_jax.files import parse_json
from semrl_jax.modules import load_module, running
from semrl_jax.sampling.prompt_sources import held_out_problems


class Plan(NamedTuple):
    """How the responses to each problem are sampled; scores with equal plans share responses."""

    num_samples: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0


class PerProblem(NamedTuple):
    """One figure of a benchmark, as a value per problem; the figure is their weighted mean.

    Attributes:
      values: [P], finite where the weight is above 0.
      weights: [P], at least 0; None: all are 1. With the number of responses as weight of a mean
        over responses, the figure is the mean over all responses.
      with_error: whether the log of a training run has its standard error, too.
    """

    values: Float[np.ndarray, " P"]
    weights: Float[np.ndarray, " P"] | None = None
    with_error: bool = False


def load_scores(names: Sequence[str]) -> list[ModuleType]:
    """The modules of `evaluation.scores`; UserError if one, or a function of it, is missing."""
    field, package = "evaluation.scores", "semrl_jax.evaluation.scores"
    return [load_module(field, name, package, ("plan", "per_problem")) for name in names]


def load_problems(
    config: ml_collections.ConfigDict,
    tokenizer: Any,
    report: Callable[[str], None],
    *,
    keep_columns: bool = False,
) -> Sequence[data.PromptExample]:
    """The held-out problems of the task or of `evaluation.files`, and of `evaluation.benchmarks`.

    With `keep_columns`, those of files keep their rows.

    Raises:
      UserError: for a file, row, template or module that cannot be used, or equal names.
    """
    problems = list(held_out_problems(config, tokenizer, report, keep_columns=keep_columns))
    for name in config.evaluation.benchmarks:
        module = load_module("evaluation.benchmarks", name, "", ("problems",))
        with running("evaluation.benchmarks", module, "problems"):
            found = list(module.problems(config, tokenizer))
            _check_problems(found)
        taken = {problem.data_source for problem in problems}
        if twice := sorted({problem.data_source for problem in found} & taken):
            raise UserError(
                f"evaluation.benchmarks has {name!r} with data_source {twice[0]!r}, which another "
                "benchmark has too; it names the results, so rename one."
            )
        problems += found
    return problems


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
