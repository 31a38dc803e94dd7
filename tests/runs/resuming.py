"""A run that is killed and resumed, next to an uninterrupted one."""

import shutil

import jax
import numpy as np

from semrl_jax.runs import train
from tests.fixtures import read_rows, stable
from tests.launch.comparison import restore_on_host


def rows_of_equal_runs(config, whole, resumed):
    """Trains for two steps, resumes a copy after the first, and returns the rows of both."""
    config.logging.replay_every, config.training.num_steps = 1, 2
    config.evaluation.every_steps = 0
    assert train(config, str(whole)) == 0
    shutil.copytree(whole, resumed)
    shutil.rmtree(resumed / "checkpoints" / "2")
    assert train(config, str(resumed)) == 0
    rows = read_rows(whole)
    assert stable(rows) == stable(read_rows(resumed))
    states = (restore_on_host(run / "checkpoints" / "2" / "state") for run in (whole, resumed))
    jax.tree.map(np.testing.assert_array_equal, *states)
    return rows
