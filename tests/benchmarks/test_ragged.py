"""The benchmark of ragged lengths counts tokens and row-steps."""

import numpy as np

from benchmarks import ragged


def test_a_response_ends_at_its_length():
    ends = ragged.EndsAt(20)
    assert [ends.feed([0] * 16), ends.feed([0] * 16)] == [None, 4]
    assert ragged.EndsAt(16).feed([0] * 16) == 16


def test_finished_rows_count_as_row_steps(monkeypatch):
    """Slots as `decode_chunk` returns them: 3 rows, the longest of which got 5 new tokens."""

    class Slots:
        def __init__(self, *num_generated):
            self.num_generated = np.array(num_generated)
            self.cache = self
            self.positions = np.zeros((3, 80))

    after = Slots(12, 21, 9)
    monkeypatch.setattr(ragged.decoding, "decode_chunk", lambda params, slots: (after, None))
    counted = ragged.RowSteps()
    assert counted(None, Slots(10, 16, 9)) == (after, None)
    assert (counted.total, counted.sizes) == (15, {(3, 80)})
    side = ragged.Side(np.array([4, 2, 3]), None, num_row_steps=counted.total, seconds=[3.0, 9.0])
    assert side.useful_share == 0.6
    assert side.rate == 1.5
