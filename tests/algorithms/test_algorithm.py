"""A user's algorithm is accepted, or refused in one line before training."""

import dataclasses
import sys
import types

import jax.numpy as jnp
import pytest

from configs import default
from semrl_jax.algorithms import grpo
from semrl_jax.algorithms.algorithm import Needs, check_functions, load_algorithm
from tests.cases import refused


@dataclasses.dataclass
class NotFrozen:
    aggregation: str = "token_mean"


@dataclasses.dataclass(frozen=True)
class Required:
    beta: float


def fails(*args, **kwargs):
    raise KeyError("two\nlines")


def returns(value):
    return lambda *args, **kwargs: value


def check(monkeypatch, **parts):
    module = types.ModuleType("users.algorithm")
    vars(module).update({name: getattr(grpo, name) for name in PARTS} | parts)
    monkeypatch.setitem(sys.modules, "users", types.ModuleType("users"))
    monkeypatch.setitem(sys.modules, "users.algorithm", module)
    section = default.get_config().algorithms.to_dict() | {"name": "users.algorithm"}
    check_functions(load_algorithm(section), group_size=4)


PARTS = ("Options", "needs", "advantages", "token_weights", "loss")
LOSS = jnp.float32(0)
CLASH = ("policy/loss", "policy/grad_norm")


@pytest.mark.parametrize(
    ("part", "value", "message"),
    [
        ("Options", print, "Options must be a frozen dataclass"),
        ("Options", NotFrozen, "Options of users.algorithm failed .TypeError: unhashable"),
        ("Options", Required, "Options of users.algorithm failed .TypeError: .*'beta'"),
        ("needs", returns(None), "needs of .* must return Needs"),
        ("needs", fails, "needs of users.algorithm failed .KeyError"),
        ("needs", returns(Needs(groups=True)), "loss of users.algorithm failed"),
        ("advantages", returns(jnp.zeros((12, 1))), r"not float32 of shape \(12, 1\)"),
        ("advantages", returns(jnp.zeros((12, 5), int)), "advantages of .* not int32 of shape"),
        ("advantages", fails, "advantages of users.algorithm failed .KeyError"),
        ("token_weights", returns(LOSS), r"token_weights of .* not float32 of shape \(\)"),
        ("loss", returns(LOSS), "loss of users.algorithm failed"),
        ("loss", returns((LOSS, dict.fromkeys(CLASH, LOSS))), "'policy/grad_norm', which the"),
        ("loss", returns((LOSS, {})), "lack 'policy/loss'"),
        ("loss", returns((jnp.zeros(7), {"policy/loss": LOSS})), "the loss of .* not float32"),
        ("loss", returns((LOSS, {"policy/loss": LOSS, "x": jnp.zeros(7)})), "the scalar 'x'"),
    ],
)
def test_a_wrong_part_of_a_users_algorithm_is_refused_in_one_line(
    part, value, message, monkeypatch
):
    assert "algorithms.name" in refused(message, check, monkeypatch, **{part: value})


def test_a_right_algorithm_is_accepted(monkeypatch):
    check(monkeypatch)
