"""Verdicts and metrics of a stream: by sample, not by arrival."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from semrl_jax.metrics import hidden_state_metrics
from semrl_jax.rewards import VerifierPool
from semrl_jax.training.scoring import Measurer, score_and_measure
from tests.training.conftest import make_scored

OPTIONS = {"stride": 4, "window": "exact", "method": "gram", "names": ("effective_rank",)}


def make_rollouts(num=12):
    random = np.random.default_rng(0)
    rollouts = []
    for index in range(num):
        length = int(random.integers(1, 50))
        rollouts.append(
            dataclasses.replace(
                make_scored(index, response_ids=np.full(length, index, np.int32)).rollout,
                hidden_states=random.normal(size=(length, 2, 16)).astype(np.float32),
                layers=(0, -1),
            )
        )
    return rollouts


def score(rollouts, num_threads=2, **options):
    with (
        VerifierPool(num_workers=1) as verifier,
        Measurer(max_tokens=56, num_threads=num_threads, **OPTIONS) as measurer,
    ):
        return score_and_measure(
            rollouts,
            decode=lambda ids: f"\\boxed{{{ids[0]}}}",
            references={group: str(4 * group) for group in range(3)},
            verifier=verifier,
            measurer=measurer,
            **options,
        )


def test_results_follow_the_sample_not_the_arrival():
    rollouts = make_rollouts()
    straight = score(rollouts)
    seen = []
    shuffled = score(
        [rollouts[i] for i in np.random.default_rng(1).permutation(12)],
        num_threads=1,
        arrived=lambda rollout: seen.append(rollout.sample_id),
    )
    assert sorted(seen, key=int) == [str(i) for i in range(12)]
    for index, (a, b) in enumerate(zip(straight, shuffled)):
        assert a.rollout.sample_id == b.rollout.sample_id == str(index)
        assert a.rollout.metrics == b.rollout.metrics  # bit for bit
        assert a.verdict == b.verdict
        assert a.verdict.correct == (index % 4 == 0)
        assert a.rollout.hidden_states is None


def test_the_asked_layer_is_measured_whatever_its_place():
    rollouts = make_rollouts(2)
    for layer, plane in ((-1, 1), (0, 0)):
        scored = score(rollouts, layer=layer, keep_states=True)
        for item in scored:
            states = item.rollout.hidden_states[None, :, plane]
            expected = hidden_state_metrics(
                jnp.asarray(states), jnp.ones(states.shape[:2], bool), **OPTIONS
            )
            # Padding to a bucket changes the order of float32 sums.
            np.testing.assert_allclose(
                item.rollout.metrics["effective_rank"], expected["effective_rank"][0], rtol=1e-4
            )


def test_without_a_measurer_there_are_no_metrics():
    with VerifierPool(num_workers=1) as verifier:
        scored = score_and_measure(
            make_rollouts(2), decode=lambda ids: "", references={0: "1"}, verifier=verifier,
            measurer=None,
        )  # fmt: skip
    assert [item.rollout.metrics for item in scored] == [{}, {}]
