"""--explain names the value, unit, origin and meaning of every setting."""

import subprocess
import sys

import pytest
from absl import flags
from ml_collections import config_flags

from configs.default import get_config
from launch import cli
from launch.fields import short_flags
from semrl_jax.settings.rules import flatten
from semrl_jax.support.errors import UserError
from tests.launch.conftest import ROOT, environment


@pytest.fixture
def explained(monkeypatch, capsys):
    """What a command prints with --explain and these arguments: the text of each field."""

    def run(*arguments, check=lambda config: None, short=None):
        values = flags.FlagValues()
        monkeypatch.setattr(flags, "FLAGS", values)
        config = config_flags.DEFINE_config_file("config", None, "", flag_values=values)
        monkeypatch.setattr(sys, "argv", ["program", *arguments, "--explain"])
        cli._parse("")
        with pytest.raises(SystemExit) as ended:
            cli.checked_config(config, check, short or {})
        assert not ended.value.code
        out = capsys.readouterr().out
        return {line.partition(" = ")[0]: line for line in out.splitlines() if " = " in line}, out

    monkeypatch.chdir(ROOT)
    return run


def test_every_field_has_a_line_with_its_origin(explained):
    def check(config):
        config.evaluation.n = 3
        config.data.task = "files"

    lines, out = explained(
        "--config=configs/quickstart.py", "--config.seed=1", "--config.rollout.group_size=4",
        check=check, short={"evaluation.n": "n"},
    )  # fmt: skip
    assert lines.keys() == flatten(get_config()).keys()
    assert lines["seed"] == "seed = 1  [--config.seed; default 0]"
    assert lines["rollout.max_response_tokens"] == (
        "rollout.max_response_tokens = 56 tokens  [configs/quickstart.py; default 1536]"
    )
    assert lines["training.responses_per_step"] == (  # 32 prompts of the file, 4 of the flag
        "training.responses_per_step = 128 responses  [follows another field; default 384]"
    )
    assert lines["evaluation.n"] == "evaluation.n = 3 responses  [--n; default 1]"
    assert lines["data.task"] == "data.task = files  [set by the command; default arithmetic]"
    assert lines["model.path"] == "model.path = ''  [default]"
    assert "    Seed of all random numbers\n" in out


def test_a_wrong_config_is_explained_too(explained):
    def check(config):
        raise UserError("seed=1 is\nwrong.")

    lines, out = explained("--config=configs/default.py", check=check)
    assert len(lines) > 200 and out.endswith("not yet valid: seed=1 is wrong.\n")


def test_short_flags_name_the_fields_that_they_set():
    fields = {"n": ("evaluation.n", "integer", ""), "seed": ("seed", "integer", "")}
    assert short_flags(fields, {"n": 0, "seed": None}) == {"evaluation.n": "n"}


@pytest.mark.slow
def test_no_error_if_the_reader_ends_early():
    command = f"{sys.executable} -m launch.train --config=configs/default.py --explain | head -n 1"
    result = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        cwd=ROOT, env=environment(), capture_output=True, text=True,
    )  # fmt: skip
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout == "seed = 0  [default]\n"
