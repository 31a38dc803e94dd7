"""Drift of the policy's states in a batch."""

import numpy as np
import pytest

from semrl_jax.cluster.peers import Peers
from semrl_jax.training.probes.drift import reference_drift


@pytest.fixture
def states():
    random = np.random.default_rng(0)
    return {i: random.normal(size=(length, 4)).astype(np.float32) for i, length in ((0, 5), (3, 9))}


def test_a_policy_that_did_not_move_has_no_drift(states):
    found = reference_drift(states, states, Peers(0, 1))
    assert found == pytest.approx(
        {"drift/distance": 0.0, "drift/angle": 0.0, "drift/cka": 1.0}, abs=1e-6
    )


def test_drift_is_the_mean_over_responses(states):
    """A longer state has a distance and no angle; a turned one has both; CKA sees neither."""
    turn = np.eye(4, dtype=np.float32)[[1, 0, 3, 2]]
    moved = {0: 1.5 * states[0], 3: states[3] @ turn}
    lengths = np.linalg.norm(states[3], axis=1)
    relative = np.linalg.norm(moved[3] - states[3], axis=1) / lengths
    angles = np.arccos(np.sum(moved[3] * states[3], axis=1) / lengths**2)
    found = reference_drift(moved, states, Peers(0, 1))
    # Float32; arccos loses half of its digits near 0 only.
    assert found["drift/distance"] == pytest.approx((0.5 + relative.mean()) / 2, rel=1e-5)
    assert found["drift/angle"] == pytest.approx(angles.mean() / 2, rel=1e-4)
    assert found["drift/cka"] == pytest.approx(1.0, abs=1e-6)


def test_a_state_that_is_not_finite_leaves_out_its_response(states):
    broken = states | {3: np.full((9, 4), np.nan, np.float32)}
    assert reference_drift(broken, states, Peers(0, 1))["drift/cka"] == pytest.approx(1.0)
    assert reference_drift({3: broken[3]}, states, Peers(0, 1)) == {}
