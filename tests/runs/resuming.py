"""A run that is killed and resumed, next to an uninterrupted one."""

import shutil

import jax
import numpy as np

from semrl_jax.runs import train
from tests.fixtures import read_rows, stable
from tests.launch.comparison import restore_on_host


def rows_of_equal_runs(config, whole, resumed, num_steps=2):
    """Trains for some steps, resumes a copy after the first, and returns the rows of both."""
    config.logging.replay_every, config.evaluation.every_steps = 1, 0
    config.training.num_steps = config.checkpoints.keep = num_steps
    assert train(config, str(whole)) == 0
    shutil.copytree(whole, resumed)
    for step in range(2, num_steps + 1):
        shutil.rmtree(resumed / "checkpoints" / str(step))
    assert train(config, str(resumed)) == 0
    rows = read_rows(whole)
    assert stable(rows) == stable(read_rows(resumed))
    last = f"checkpoints/{num_steps}/state"
    states = (restore_on_host(run / last) for run in (whole, resumed))
    jax.tree.map(np.testing.assert_array_equal, *states)
    return rows


def rows_of_parts(config, directory, first):
    """Trains to the end, and in another directory in two parts; returns the rows of both."""
    num_steps = config.training.num_steps
    for name, steps in (("whole", num_steps), ("parts", first), ("parts", num_steps)):
        config.training.num_steps = steps
        assert train(config, str(directory / name)) == 0
    return read_rows(directory / "whole"), read_rows(directory / "parts")
