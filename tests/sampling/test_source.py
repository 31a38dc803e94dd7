"""What every source does."""

import itertools

from semrl_jax.sampling.source import Counted, Sample
from semrl_jax.support.clock import Clock


class Numbered:
    """A source of empty batches; events happen where a test says so."""

    def offer(self, weights, step):
        pass

    def next(self, step, position, clock):
        return Sample([], (0, step + 1), {"rollout/groups_dropped": 2.0})


def test_counts_begin_with_the_first_step():
    """Events of the setup belong to no row, and every other event belongs to one row."""
    first, second = itertools.count(), itertools.count(100)
    counts = (lambda: {"events": float(next(first))}, lambda: {"others": float(next(second))})
    source, position, rows = Counted(Numbered(), counts), (0, 0), []
    for step in range(2):
        source.offer((), step)
        sample = source.next(step, position, Clock())
        position = sample.position
        rows.append(sample.scalars)
    assert rows == [
        {"rollout/groups_dropped": 2.0, "events": float(n), "others": float(100 + n)}
        for n in (1, 2)
    ]
    assert position == (0, 2)
