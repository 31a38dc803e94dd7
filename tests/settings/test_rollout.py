"""Sizes that follow from the settings of rollouts."""

import pytest

from semrl_jax.settings.rollout import rows_of_slots


@pytest.mark.parametrize(
    ("responses", "group_size", "num_shards", "rows"),
    [
        (64, 8, 1, (8, 8)),
        (64, 8, 4, (8, 8)),
        (64, 32, 4, (4, 16)),  # 2 groups: each is on two shards
        (48, 16, 4, (8, 8)),  # 3 groups of 2 rows, and 2 rows for an equal number a shard
        (65, 13, 1, (64, 1)),  # a response waits
        (128, 8, 4, (64, 1)),
        (6, 3, 8, (8, 1)),
    ],
)
def test_every_shard_has_as_many_rows(responses, group_size, num_shards, rows):
    rollout = {"jax_max_batch": 64, "group_size": group_size}
    assert rows_of_slots(rollout, responses, num_shards) == rows
