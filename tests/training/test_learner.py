"""The mini-batches of a step."""

import types

import numpy as np

from configs.default import get_config
from semrl_jax.training.learner import Learner


def rows_of(step, ppo_epochs):
    """Rows of the mini-batches of 12 groups of 3 responses, 6 groups each."""
    config = get_config()
    config.rollout.group_size, config.training.ppo_epochs = 3, ppo_epochs
    holder = types.SimpleNamespace(config=config)
    found = Learner._minibatches(holder, num_rows=36, size=18, step=step)
    return [np.arange(36)[rows].tolist() for rows in found]


def test_later_passes_have_other_whole_groups():
    in_order = [list(range(18)), list(range(18, 36))]
    assert rows_of(0, ppo_epochs=1) == in_order
    passes = [rows_of(step, ppo_epochs=3) for step in range(4)]
    assert [found[:2] for found in passes] == [in_order] * 4
    later = [found[start] + found[start + 1] for found in passes for start in (2, 4)]
    for rows in later:
        assert sorted(rows) == list(range(36))
        for start in range(0, 36, 3):
            assert rows[start : start + 3] == list(range(rows[start], rows[start] + 3))
    assert len(set(map(tuple, later))) == 8  # each pass of each step has an order of its own
    assert rows_of(3, ppo_epochs=3) == passes[3]
