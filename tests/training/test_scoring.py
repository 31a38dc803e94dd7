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


def test_a_batch_is_measured_as_one_set_of_mean_states():
    options = OPTIONS | {"dataset_stride": 2}
    random = np.random.default_rng(3)
    states = [random.normal(size=(length, 16)).astype(np.float32) for length in range(3, 12)]
    with Measurer(max_tokens=56, num_threads=2, **options) as measurer:
        measured = [measurer.submit(rows).result() for rows in states]
        scored = [make_scored(i).with_measured(m) for i, m in enumerate(measured)]
        found = measurer.submit_batch(scored).result()
        spoilt = measured[4]._replace(mean_state=np.full(16, np.nan, np.float32))
        scored[4] = scored[4].with_measured(spoilt)
        without = measurer.submit_batch(scored).result()
        few = measurer.submit_batch(scored[:3]).result()
    rows = np.stack([rows.astype(np.float64).mean(axis=0) for rows in states])
    for index, item in enumerate(measured):
        np.testing.assert_allclose(item.mean_state, rows[index], atol=1e-6)  # float32 sums
    expected = rank_series_f64(rows, 2)
    np.testing.assert_allclose(found["global/effective_rank"], expected[0], rtol=1e-3)
    np.testing.assert_allclose(found["cumulative/effective_rank_velocity"], expected[1], rtol=1e-3)
    assert without["global/effective_rank"] != found["global/effective_rank"]
    np.testing.assert_allclose(
        without["global/effective_rank"], rank_series_f64(np.delete(rows, 4, 0), 2)[0], rtol=1e-3
    )
    assert "cumulative/effective_rank_velocity" not in few  # one window: not valid, not logged


def rank_series_f64(rows, stride):
    """ER of all rows, and its velocity over prefixes."""

    def rank(z):
        sigma = np.linalg.svd(z - z.mean(axis=0), compute_uv=False)
        p = sigma / sigma.sum()
        return np.exp(-np.sum(p[p > 0] * np.log(p[p > 0])))

    series = [rank(rows[:size]) for size in range(stride, len(rows) + 1, stride)]
    deltas = [series[j] - np.mean(series[:j]) for j in range(1, len(series))]
    return rank(rows), np.mean(deltas)
