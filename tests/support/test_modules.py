"""Modules that a config names: found, or refused in one line."""

import re

import pytest

from semrl_jax.support.errors import UserError
from semrl_jax.support.modules import load_module, module_names
from tests.cases import refused

SCORES = "semrl_jax.evaluation.scores"
ALGORITHMS = "semrl_jax.algorithms"


def test_modules_are_found_by_name_and_by_path(tmp_path, monkeypatch):
    (tmp_path / "users_score.py").write_text("plan = per_problem = print")
    monkeypatch.syspath_prepend(tmp_path)
    assert "greedy" in module_names(SCORES)
    assert load_module("a.field", "greedy", SCORES, ("plan",)).__name__ == f"{SCORES}.greedy"
    assert load_module("a.field", f"{SCORES}.greedy", "", ()).__name__ == f"{SCORES}.greedy"
    assert load_module("a.field", "users_score", "", ("plan",)).plan is print


def test_a_helper_beside_the_modules_of_a_kind_is_not_one_of_them():
    parts = ("Options", "needs", "advantages", "token_weights", "loss")
    assert {"kl", "groups", "grpo"} <= set(module_names(ALGORITHMS))
    found = module_names(ALGORITHMS, parts)
    assert "grpo" in found and not {"kl", "groups", "objective", "surrogates"} & set(found)
    for name, near in (("gropo", "grpo"), ("groupss", None), ("losse", None), ("kl", None)):
        with pytest.raises(UserError, match=f"{name!r} is unknown") as error:
            load_module("algorithms.name", name, ALGORITHMS, parts)
        suggestions = re.findall("did you mean '(.*?)'", str(error.value))
        assert suggestions == ([near] if near else [])


@pytest.mark.parametrize(
    ("name", "package", "message"),
    [
        ("gredy", SCORES, "a.field='gredy' is unknown; did you mean 'greedy'"),
        ("x", SCORES, "'x' is unknown; choose one of .*greedy, .*, or a module of yours"),
        ("users.nowhere", SCORES, r"cannot be imported .ModuleNotFoundError: .*PYTHONPATH"),
        ("nowhere", "", r"cannot be imported .ModuleNotFoundError: .*PYTHONPATH"),
        ("odd_import", "", r"cannot be imported .OSError: two lines"),
        ("ends_python", "", r"cannot be imported .SystemExit: 0"),
        ("tests.tiny", SCORES, "tests.tiny has no 'plan'; it has to define plan, per_problem"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(name, package, message, tmp_path, monkeypatch):
    (tmp_path / "odd_import.py").write_text("raise OSError('two\\nlines')")
    (tmp_path / "ends_python.py").write_text("raise SystemExit(0)")
    monkeypatch.syspath_prepend(tmp_path)
    refused(message, load_module, "a.field", name, package, ("plan", "per_problem"))
