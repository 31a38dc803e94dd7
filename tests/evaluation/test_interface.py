"""A user's score or benchmark that is wrong is refused in one line."""

import sys
import types

import ml_collections
import numpy as np
import pytest

from semrl_jax import data
from semrl_jax.errors import UserError
from semrl_jax.evaluation import evaluator, interface
from semrl_jax.evaluation.interface import Plan


def fails(*args):
    raise KeyError("two\nlines")


def score(plan=lambda options: Plan(), scalars=lambda *args: {}):
    module = types.ModuleType("users.score")
    module.plan, module.scalars = plan, scalars
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
        ({"eval/b/x": "high"}, "could not convert"),
        ({"reward/mean": 1.0}, "must begin with 'eval/b/'"),
    ],
)
def test_wrong_scalars_are_refused(found, message):
    with pytest.raises(UserError, match=f"scalars of users.score failed .*{message}"):
        evaluator._numbers(score(scalars=lambda *args: found), "b", [], 1)


def test_two_scores_with_one_key_are_refused():
    with pytest.raises(UserError, match="two scores have the key 'eval/b/x'; rename one"):
        evaluator._joined({"eval/b/x": 1.0}, {"eval/b/x": 2.0})


def problem(**wrong):
    found = data.PromptExample("Q", np.asarray([1, 2], np.int32), "2", "b", 0)
    for name, value in wrong.items():
        object.__setattr__(found, name, value)
    return found


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ([], "at least one problem"),
        (None, "NoneType"),
        (["1+1"], "must return data.PromptExample"),
        ([problem(answer=2)], "must be texts"),
        ([problem(prompt_ids=[1, 2])], "int32"),
        ([problem(columns="[1]")], "columns of a problem must be the text of a JSON object"),
    ],
)
def test_wrong_problems_are_refused(found, message, monkeypatch):
    module = types.ModuleType("users_benchmark")
    module.problems = lambda config, tokenizer: found
    monkeypatch.setitem(sys.modules, "users_benchmark", module)
    monkeypatch.setattr(interface, "held_out_problems", lambda *args, **options: [])
    config = ml_collections.ConfigDict({"evaluation": {"benchmarks": ("users_benchmark",)}})
    with pytest.raises(UserError, match=f"problems of users_benchmark failed .*{message}"):
        interface.load_problems(config, None, print)
