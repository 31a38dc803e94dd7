"""A user's score or benchmark that is wrong is refused in one line."""

import types

import ml_collections
import numpy as np
import pytest

from semrl_jax.evaluation import evaluator
from semrl_jax.evaluation.protocols import PerProblem, Plan
from semrl_jax.support.errors import UserError


def fails(*args):
    raise KeyError("two\nlines")


def score(plan=lambda options: Plan(), per_problem=lambda *args: {}):
    module = types.ModuleType("users.score")
    module.plan, module.per_problem = plan, per_problem
    return module


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (fails, "KeyError"),
        (lambda options: None, "must return a Plan"),
        (lambda options: Plan(num_samples=0), "num_samples=0 must"),
        (lambda options: Plan(temperature=-1.0), "temperature=-1.0 must"),
        (lambda options: Plan(top_p=0.0), "top_p=0.0 must"),
        (lambda options: Plan(top_k=-1), "top_k=-1 must"),
        (lambda options: Plan(num_samples=[]), r"num_samples=\[\] must"),
    ],
)
def test_a_wrong_plan_is_refused(plan, message):
    with pytest.raises(UserError, match=f"evaluation.scores: plan of users.score .*{message}") as e:
        evaluator.plans_of([score(plan)], ml_collections.ConfigDict())
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (None, "NoneType"),
        ({"x": 0.5}, "'x' must be a PerProblem"),
        ({"x": PerProblem(np.ones(1))}, "a value for each of 2 problems"),
        ({"x": PerProblem(np.ones(2), np.ones(1))}, "a value for each of 2 problems"),
        ({"x": PerProblem(np.array([1, np.nan]))}, "values must be finite"),
        ({"x": PerProblem(np.ones(2), np.array([1, -1]))}, "weights must be finite"),
        ({"x": PerProblem(np.array(["a", "b"]))}, "could not convert"),
    ],
)
def test_wrong_figures_are_refused(found, message):
    users = score(per_problem=lambda *args: found)
    with pytest.raises(UserError, match=f"per_problem of users.score failed .*{message}"):
        evaluator.figures_of([users], [[], []], ml_collections.ConfigDict())


def test_two_scores_with_one_name_are_refused():
    one, two = (score(per_problem=lambda *args: {"x": PerProblem(np.ones(0))}) for _ in range(2))
    with pytest.raises(UserError, match="two scores have the key 'x'; rename one"):
        evaluator.figures_of([one, two], [], ml_collections.ConfigDict())
