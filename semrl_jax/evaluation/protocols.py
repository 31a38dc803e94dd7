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

from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from semrl_jax.support.modules import load_module


class Plan(NamedTuple):
    """How the responses to each problem are sampled; scores with equal plans share responses."""

    num_samples: int = 1
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0


class PerProblem(NamedTuple):
    """One figure of a benchmark, as a value per problem; the figure is their weighted mean."""

    values: Float[np.ndarray, " P"]  # [P], finite where the weight is above 0
    # [P], at least 0; None: all are 1. With the number of responses as weight of a mean over
    # responses, the figure is the mean over all responses
    weights: Float[np.ndarray, " P"] | None = None
    with_error: bool = False  # whether the log of a training run has its standard error, too


def load_scores(names: Sequence[str]) -> list[ModuleType]:
    """The modules of `evaluation.scores`; UserError if one, or a function of it, is missing."""
    field, package = "evaluation.scores", "semrl_jax.evaluation.scores"
    return [load_module(field, name, package, ("plan", "per_problem")) for name in names]
