"""An algorithm with options of its own is one file, in the package or a user's."""

import importlib
import shutil
import subprocess
import sys

import pytest

from configs import quickstart
from semrl_jax.runs import validate
from semrl_jax.runs.workdir import open_workdir
from semrl_jax.settings import declared
from semrl_jax.support.errors import UserError
from tests.launch.conftest import ROOT, environment

SCALED = '''"""GRPO with advantages times a factor."""

import dataclasses

from semrl_jax.algorithms import grpo
from semrl_jax.algorithms.grpo import loss, needs, token_weights
from semrl_jax.support.fields import setting


@dataclasses.dataclass(frozen=True)
class Options(grpo.Options):
    scale: float = setting(1.0, "factor of the advantages", above=0)


def advantages(rewards, passes, response_mask, options):
    return options.scale * grpo.advantages(rewards, passes, response_mask, options)
'''


def launch(directory, *flags):
    """Runs launch.train there, with the packages that lie there before those of this repository."""
    command = [sys.executable, "-m", "launch.train", f"--config={ROOT}/configs/quickstart.py"]
    return subprocess.run(
        [*command, *flags],
        cwd=directory, env=environment() | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("place", "name", "field", "shown"),
    [
        ("semrl_jax/algorithms", "scaled", "advantage.scale", "scaled: factor of the advantages"),
        ("own_package", "own_package.scaled", "options.scale", "factor of the advantages"),
    ],
)
def test_options_are_explained_set_and_checked(place, name, field, shown, tmp_path):
    if place.startswith("semrl_jax"):
        shutil.copytree(ROOT / "semrl_jax", tmp_path / "semrl_jax")
    (tmp_path / place).mkdir(exist_ok=True)
    (tmp_path / place / "scaled.py").write_text(SCALED)  # and nothing else
    chosen, flag = f"--config.algorithms.name={name}", f"--config.algorithms.{field}"
    explained = launch(tmp_path, f"{flag}=0.5", chosen, "--explain").stdout
    assert f"algorithms.{field} = 0.5  [{flag}; default 1.0]\n    {shown}\n" in explained
    assert "not yet valid" not in explained
    for value, message in (
        ("0", f"algorithms.{field}=0.0 must be above 0."),
        ("half", f"{flag}=half must be a number."),
    ):
        wrong = launch(tmp_path, chosen, f"{flag}={value}", "--workdir=run")
        assert wrong.returncode == 2
        assert wrong.stderr == f"python -m launch.train: {message}\n"


def test_a_resume_compares_options_that_the_config_does_not_set(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_package").mkdir()
    (tmp_path / "own_package" / "scaled.py").write_text(SCALED)
    importlib.invalidate_caches()
    config = quickstart.get_config()
    config.algorithms.name = "own_package.scaled"
    validate(config.lock())
    open_workdir(str(tmp_path / "run"), config).close()
    config.algorithms.options.scale = 0.5
    with pytest.raises(UserError, match=r"config \(algorithms.options.scale: 1.0 -> 0.5\); restor"):
        open_workdir(str(tmp_path / "run"), config)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ('epsilon: float = setting(1e-3, "keeps a quotient finite", above=0)', "grpo, new, prof"),
        ('surrogate: str = setting("clip", "mine")', "new, Objective"),
    ],
)
def test_two_meanings_of_one_option_are_refused(option, message, tmp_path, monkeypatch):
    files = tmp_path / "algorithms"
    shutil.copytree(declared.FILES, files)
    monkeypatch.setattr(declared, "FILES", files)
    assert "threshold" in declared.declared_options()["advantage"].__dataclass_fields__
    (files / "new.py").write_text(f"class Options:\n    {option}\n")
    with pytest.raises(ValueError, match=f"{message}.* declare the option '.*give it another name"):
        declared.declared_options()
