"""Benchmarks with numbers of responses of their own."""

import ml_collections
import numpy as np
import pytest

from semrl_jax import data
from semrl_jax.evaluation.evaluator import benchmarks_of
from semrl_jax.evaluation.protocols import Plan
from semrl_jax.evaluation.scores import pass_at_k
from semrl_jax.settings.evaluation import check_sampling, most_responses
from semrl_jax.support.errors import UserError
from semrl_jax.types import distribution_of

OPTIONS = ml_collections.ConfigDict(
    {"n": 2, "k": (1, 2, 4), "stop_strings": (), **distribution_of(Plan()), "temperature": 0.6}
)


def problem(name):
    return data.PromptExample("", np.zeros(1, np.int32), "2", name, 0)


def test_every_benchmark_has_each_k_that_its_n_allows():
    problems = [problem(name) for name in ("own", "one", "shared")]
    found = benchmarks_of(problems, [pass_at_k], OPTIONS, {"own": {"n": 4}, "one": {"n": 1}})
    assert {name: b.options.k for name, b in found.items()} == {
        "own": (1, 2, 4),
        "one": (1,),
        "shared": (1, 2),
    }
    assert OPTIONS.k == (1, 2, 4)


def test_k_may_be_the_largest_n_of_an_entry():
    options = {**OPTIONS.to_dict(), "benchmarks": ("gsm8k:n=4:temperature=0.7", "math500:n=1")}
    assert most_responses(options) == 4
    check_sampling(options, most=4)
    with pytest.raises(UserError, match=r"evaluation.k has 4, which must be from 1 to"):
        check_sampling(options)
    with pytest.raises(UserError, match=r"evaluation.k has 4, which must be from 1 to"):
        check_sampling(options, most=most_responses({**options, "benchmarks": ("math500:n=3",)}))
