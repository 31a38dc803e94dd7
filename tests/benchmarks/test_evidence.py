"""The controls of the shaping keep what they say that they keep."""

import numpy as np
import pytest

from benchmarks.evidence.controls import INDICATORS, OF_PAPER, probe
from semrl_jax.metrics import Measurement, MetricKey
from tests.training.probes.test_probes import SEEN

VALID = np.array([True, True, True, False])


@pytest.fixture(scope="module")
def found():
    metrics = {
        MetricKey.parse(name): Measurement(np.arange(4.0) + 10 * i, VALID | (i == 2))
        for i, name in enumerate(OF_PAPER)
    }
    seen = SEEN.with_metrics(metrics)
    steps = [probe(None).before(seen._replace(step=step)).scored.metrics for step in range(20)]
    return {name: [step[MetricKey.parse(name)] for step in steps] for name in INDICATORS}


def test_shuffled_values_are_a_joint_permutation(found):
    orders = set()
    for of_step in zip(*(found[f"shuffled_{name}"] for name in OF_PAPER)):
        sources = [tuple(each.value - 10 * i) for i, each in enumerate(of_step)]
        assert len(set(sources)) == 1 and sorted(sources[0]) == [0, 1, 2, 3]
        assert sources[0][3] == 3  # it lacks two of the metrics, and keeps what it has
        assert [each.valid.tolist() for each in of_step] == [VALID.tolist()] * 2 + [[True] * 4]
        orders.add(sources[0])
    assert len(orders) == 6  # all permutations of three come


def test_drawn_values_are_of_the_step_and_independent(found):
    drawn = [np.array([each.value for each in found[f"drawn_{name}"]]) for name in OF_PAPER]
    assert all(set(np.unique(each[:, :3])) == {10 * i, 10 * i + 1, 10 * i + 2}
               for i, each in enumerate(drawn))  # fmt: skip
    assert any(len(set(row)) < 3 for row in drawn[0][:, :3])  # with replacement
    assert (drawn[0] != drawn[1] - 10).any() and (drawn[0][:, 3] == 3).all()


def test_the_length_is_that_of_sampled_tokens(found):
    assert [each.value.tolist() for each in found["length"]] == [[2.0] * 4] * 20
