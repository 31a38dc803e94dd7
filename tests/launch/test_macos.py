"""Runs without what Linux alone has. They stand in for a Mac, on which nothing was ever run."""

import os
import pathlib

import pytest

from tests.fixtures import read_rows
from tests.launch.conftest import TINY, succeed
from tests.launch.test_environment import flags  # noqa: F401, a fixture

HIDDEN = pathlib.Path(__file__).with_name("macos")


@pytest.mark.slow
@pytest.mark.parametrize("with_environment", [False, True])
def test_a_run_is_trained_and_evaluated_as_on_macos(tmp_path, with_environment, request):
    """With verifiers and the episodes of an environment, which have processes of their own."""
    path = os.pathsep.join([str(HIDDEN), os.environ.get("PYTHONPATH", "")])
    env = {"PYTHONPATH": path.rstrip(os.pathsep)}
    more = request.getfixturevalue("flags") if with_environment else ()
    run = tmp_path / "run"
    steps = ("--config.training.num_steps=1", "--config.warm_start.num_steps=0")
    done = succeed(
        "launch.train", f"--config={TINY}", f"--workdir={run}", *more, *steps, env=env, timeout=600
    )
    assert "Traceback" not in done.stderr and read_rows(run)[-1]["step"] == 1
    output = tmp_path / "evaluation"
    succeed(
        "launch.evaluate", f"--policy={run}", f"--output={output}", "--num_problems=2", "--quiet",
        env=env, timeout=600,
    )  # fmt: skip
    assert (output / "results.json").is_file()
