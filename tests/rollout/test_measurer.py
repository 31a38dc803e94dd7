"""Metrics measured on a replica: results, waiting, and failures."""

import asyncio
import dataclasses
import gc
import subprocess
import sys
import time
import weakref

import numpy as np
import pytest

from semrl_jax import metrics
from semrl_jax.metrics import measurer
from semrl_jax.metrics.measurements import encode
from semrl_jax.types import HiddenStateParams, MetricParams, WeightVersion
from tests.rollout.client.test_client import sync
from tests.rollout.conftest import FAKE, assert_complete, assert_sampled, make_requests
from tests.rollout.fake_engine import FakeScript, fake_rollout
from tests.running import wait_until

PARAMS = MetricParams(
    names=("effective_rank", "curvature"), stride=3, window="exact", method="svd", num_threads=2
)
NAMES = [
    f"effective_rank{order}{suffix}"
    for order in ("", "_velocity", "_acceleration")
    for suffix in ("", "_valid")
]


def states_of(rollout, request, sampling, dtype="bfloat16"):
    """The final states the fake engine has for a response, float32 [T, D]."""
    states = HiddenStateParams((-1,), dtype)
    known = fake_rollout(
        request, sampling, states, rollout.versions[0].version, vocab_size=101, hidden_size=8
    )
    return known.hidden_states[:, 0].astype(np.float32)


def expected_metrics(states, params=PARAMS):
    """The metrics of one response, computed directly with another padding than the replica's."""
    return expected(states, params)[0]


def expected(states, params=PARAMS):
    """The same, and the effective ranks of the prefixes."""
    padded = np.full((1, 20, 8), np.nan, np.float32)
    padded[0, : len(states)] = states
    found = metrics.hidden_state_metrics(
        padded, np.arange(20)[None] < len(states), names=params.names, stride=params.stride,
        window=params.window, method=params.method,
        series=("effective_rank",),
    )  # fmt: skip
    ranks, valid = found.pop(measurer.SERIES)
    of_response = {name: float(value[0]) for name, value in metrics.flatten(found).items()}
    return of_response, np.asarray(ranks[0])[np.asarray(valid[0])]


def test_series_are_the_values_of_every_prefix_alone():
    """Their velocity is the mean of m_j - mean of the earlier ones."""
    names, stride = ("effective_rank", "curvature"), 4
    options = {"max_tokens": 32, "num_threads": 1, "names": names, "stride": stride}
    random = np.random.default_rng(0)
    responses = [random.normal(size=(n, 8)).astype(np.float32) for n in (23, 3, 8)]
    responses[2][5] = np.nan
    with measurer.Measurer(**options, series=True) as own, measurer.Measurer(**options) as plain:
        measured = [own.submit(states) for states in responses]
        prefixes = [plain.submit(responses[0][:n]) for n in range(stride, 24, stride)]
        without = plain.submit(responses[0])
        own.flush()
        plain.flush()
        found, short, broken = (future.result() for future in measured)
        alone = [future.result().metrics for future in prefixes]
        assert not without.result().series
    assert list(found.series) == sorted(names)
    for name, series in found.series.items():
        assert series.dtype == np.float32
        expected = [values[metrics.MetricKey(name)].value for values in alone]
        np.testing.assert_allclose(series, expected, rtol=1e-5)
        means = [series[:j].mean() for j in range(1, len(series))]
        velocity = found.metrics[metrics.MetricKey(name, "velocity")].value
        np.testing.assert_allclose(np.mean(series[1:] - means), velocity, rtol=1e-4)
    np.testing.assert_array_equal(found.series["effective_rank"], found.effective_ranks)
    for empty in (short, broken):
        assert [len(series) for series in empty.series.values()] == [0, 0]
        assert empty.effective_ranks is None


def test_a_replica_says_what_it_measures(world):
    able, without = world.replica(), world.replica(layers=(0,))
    kinds = [d.metric_kinds for d in world.client(able, without, connect=False).connect(**FAKE)]
    assert kinds == [metrics.METRICS, ()]


@pytest.mark.slow
@pytest.mark.parametrize("backwards", [False, True])
def test_metrics_come_in_place_of_states(world, sampling, backwards):
    client = world.client(world.replica(FakeScript(backwards=backwards)))
    version, requests = sync(client), make_requests(10, 3)
    rollouts = list(client.generate(requests, sampling, version=version, metrics=PARAMS))
    assert_complete(rollouts, requests, sampling, version=version)  # and without states
    by_id = {request.sample_id: request for request in requests}
    sizes = []
    for rollout in rollouts:
        states = states_of(rollout, by_id[rollout.sample_id], sampling)
        expected_values, ranks = expected(states)
        found = encode(rollout.metrics)
        assert list(found) == sorted(expected_values) and set(NAMES) < set(found)
        for name, value in expected_values.items():
            # The same function on a longer, padded array: sums in another order.
            assert found[name] == pytest.approx(value, rel=1e-5, abs=1e-5), name
        np.testing.assert_allclose(rollout.mean_state, states.mean(axis=0), rtol=1e-6)
        assert rollout.mean_state.dtype == np.float32
        if len(ranks):
            np.testing.assert_allclose(rollout.effective_ranks, ranks, rtol=1e-5)
        else:
            assert rollout.effective_ranks is None
        sizes.append(4 * (8 + len(ranks)) + sum(len(name) + 4 for name in found))
    key = metrics.MetricKey("effective_rank", "acceleration")
    assert {rollout.metrics[key].valid for rollout in rollouts} == {False, True}
    counters = client.counters
    assert (counters["state_bytes"], counters["metric_bytes"]) == (0, sum(sizes))


@pytest.mark.slow
@pytest.mark.parametrize("kinds", [("decode",), ("prefill",)])
def test_states_may_come_with_metrics(world, sampling, kinds):
    """The replica measures the response, never the prompt."""
    client = world.client(world.replica())
    version, requests = sync(client), make_requests()
    states = HiddenStateParams((1, -1), "float32", kinds)
    params = dataclasses.replace(PARAMS, dtype="float32")
    rollouts = assert_sampled(client, requests, sampling, states, version=version, metrics=params)
    by_id = {request.sample_id: request for request in requests}
    for rollout in rollouts:
        rows = states_of(rollout, by_id[rollout.sample_id], sampling)
        assert encode(rollout.metrics) == pytest.approx(expected_metrics(rows), rel=1e-5, abs=1e-5)
        np.testing.assert_allclose(rollout.mean_state, rows.mean(axis=0), rtol=1e-6)
    sent = [found for r in rollouts for found in (r.hidden_states, r.prompt_states)]
    assert client.counters["state_bytes"] == sum(x.nbytes for x in sent if x is not None)


@pytest.mark.slow
def test_options_reach_the_measuring(world, sampling, monkeypatch):
    seen = {}

    class Spy(measurer.Measurer):
        def __init__(self, **settings):
            seen.update(settings)
            super().__init__(**settings)

    monkeypatch.setattr(measurer, "Measurer", Spy)
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    client = world.client(world.replica())
    version, requests = sync(client), make_requests()
    params = MetricParams(("effective_rank",), 2, "later", "svd", num_threads=99)
    by_id = {request.sample_id: request for request in requests}
    for rollout in client.generate(requests, sampling, version=version, metrics=params):
        states = states_of(rollout, by_id[rollout.sample_id], sampling)
        expected = expected_metrics(states, params)
        assert encode(rollout.metrics) == pytest.approx(expected, rel=1e-5, abs=1e-5)
    assert seen == {
        "names": ("effective_rank",), "stride": 2, "window": "later", "method": "svd",
        "max_tokens": 16, "num_threads": 3,
    }  # fmt: skip


def test_the_tokens_of_the_policy_are_measured(sampling):
    version = WeightVersion("run", "attempt", 0, "0" * 64)
    masks = {}

    async def engine():
        for request in make_requests(4, 3):
            states = HiddenStateParams((-1,), "float32")
            rollout = fake_rollout(
                request, sampling, states, version, vocab_size=101, hidden_size=8
            )
            mask = np.arange(len(rollout.response_ids)) % 3 != 1
            masks[request.sample_id] = mask
            yield dataclasses.replace(rollout, response_mask=mask)

    async def run():
        each = measurer.measure_each(
            engine(), dataclasses.replace(PARAMS, dtype="float32"), max_tokens=16, keep_states=True
        )
        return [rollout async for rollout in each]

    rollouts = asyncio.run(run())
    assert len(rollouts) == len(masks)
    for rollout in rollouts:
        rows = rollout.hidden_states[masks[rollout.sample_id], 0]
        assert encode(rollout.metrics) == pytest.approx(expected_metrics(rows), rel=1e-5, abs=1e-5)
        np.testing.assert_allclose(rollout.mean_state, rows.mean(axis=0), rtol=1e-6)


def test_calls_that_are_not_full_start_before_a_caller_gives_up(world, sampling, monkeypatch):
    """Small responses share a call, which the hanging engine never fills."""
    monkeypatch.setattr(measurer, "FLUSH_AFTER_S", 0.05)
    client = world.client(world.replica(FakeScript(hang_after=3)), stall_timeout_s=60.0)
    rollouts = client.generate(make_requests(), sampling, version=sync(client), metrics=PARAMS)
    assert {next(rollouts).sample_id for _ in range(3)} == {"0/0", "0/1", "1/0"}
    rollouts.close()


@pytest.mark.parametrize(
    ("limit", "value", "kinds"),
    [
        ("MAX_HELD_RESPONSES", 3, ("decode",)),
        ("MAX_HELD_BYTES", 3 * 8 * 2, ("decode",)),
        # Prompts of five tokens: six states per response.
        ("MAX_HELD_BYTES", 3 * 6 * 8 * 2, ("decode", "prefill")),
    ],
)
def test_an_engine_that_is_faster_than_the_measuring_waits(
    sampling, monkeypatch, limit, value, kinds
):
    """At most one response above the limit is sampled before the measurements catch up."""
    monkeypatch.setattr(measurer, limit, value)
    submit, ahead = measurer.Measurer.submit, []

    def slowly(measurer, states):
        time.sleep(0.002)
        return submit(measurer, states)

    monkeypatch.setattr(measurer.Measurer, "submit", slowly)
    prompt = np.arange(5, dtype=np.int32)
    requests = [dataclasses.replace(r, prompt_ids=prompt) for r in make_requests(20, 1)]
    sampling = dataclasses.replace(sampling, max_tokens=1)
    states = HiddenStateParams((-1,), kinds=kinds)
    version, sampled = WeightVersion("run", "attempt", 0, "0" * 64), 0

    async def engine():
        nonlocal sampled
        for request in requests:
            sampled += 1
            yield fake_rollout(request, sampling, states, version, vocab_size=101, hidden_size=8)

    async def run():
        received = 0
        each = measurer.measure_each(engine(), PARAMS, max_tokens=1, keep_states=False)
        async for _ in each:
            ahead.append(sampled - received)
            received += 1
        return received

    # Only a rollout that is held back could wake it.
    monkeypatch.setattr(measurer, "FLUSH_AFTER_S", None)
    assert asyncio.run(asyncio.wait_for(run(), 60)) == 20
    assert max(ahead) <= 4


def test_a_caller_that_goes_away_ends_the_engines_call(world, sampling, monkeypatch):
    """Even if the engine sends no other response."""
    monkeypatch.setattr(measurer, "FLUSH_AFTER_S", 0.05)
    replica = world.replica(FakeScript(hang_after=2))
    client = world.client(replica)
    rollouts = client.generate(make_requests(), sampling, version=sync(client), metrics=PARAMS)
    assert next(rollouts).metrics
    assert replica.engine.num_closed == 0
    rollouts.close()
    wait_until(lambda: replica.engine.num_closed == 1)


def test_aborted_responses_come_too(world, sampling):
    replica = world.replica(FakeScript(hang_after=2))
    client = world.client(replica)
    caller = world.caller(replica)
    rollouts = caller.generate(make_requests(), sampling, version=sync(client), metrics=PARAMS)
    first = next(rollouts)
    assert caller.abort() >= 6
    rest = list(rollouts)
    assert {r.finish_reason for r in (first, *rest)} >= {"aborted"} and len(rest) == 7
    for rollout in rest:
        if rollout.finish_reason == "aborted":
            assert not rollout.metrics[metrics.MetricKey("effective_rank")].valid
            np.testing.assert_array_equal(rollout.mean_state, np.zeros(8))


def test_an_engine_failure_reaches_the_caller(world, sampling):
    client = world.client(world.replica(FakeScript(fail_after=2)))
    with pytest.raises(RuntimeError, match="the script says so"):
        list(client.generate(make_requests(), sampling, version=sync(client), metrics=PARAMS))


@pytest.mark.slow
def test_jax_is_loaded_when_metrics_are_asked_for_and_not_before():
    code = """
import sys
import numpy as np
from semrl_jax.rollout.client import RolloutClient
from tests.rollout.embedded import EmbeddedReplica
from tests.rollout.fake_engine import FAKE_SPECS, FakeEngine
from semrl_jax.types import MetricParams, SampleRequest, SamplingParams

with EmbeddedReplica(FakeEngine()) as replica:
    with RolloutClient([replica.address], replica.token, run_id="r", attempt_id="a") as client:
        client.connect(model_hash="fake-model", tokenizer_hash="fake-tokenizer", vocab_size=101)
        arrays = [np.ones(spec.shape, np.float32) for spec in FAKE_SPECS]
        version = client.sync_weights(FAKE_SPECS, lambda: arrays, step=0)
        for metrics in (None, MetricParams(("effective_rank",), 3)):
            request = SampleRequest("s", 0, 0, np.array([1], np.int32), 7)
            (rollout,) = client.generate(
                [request], SamplingParams(8), version=version, metrics=metrics
            )
            print("jax" in sys.modules, bool(rollout.metrics))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.stdout.split() == ["False", "False", "True", "True"], result.stderr


def test_functions_of_options_not_used_for_long_are_dropped():
    """A client chooses the options; without a limit it could fill the memory with programs."""

    def function(**options):
        return options

    first = weakref.ref(measurer._compiled(function, stride=0))
    kept = measurer._compiled(function, stride=1)
    for stride in range(2, measurer.MAX_COMPILED + 1):
        measurer._compiled(function, stride=stride)
    gc.collect()
    assert first() is None and measurer._compiled(function, stride=1) is kept


@pytest.mark.slow
def test_what_is_prepared_is_not_compiled_again():
    options = {"stride": 3, "window": "exact", "method": "svd", "names": ("curvature",)}
    with measurer.Measurer(max_tokens=40, num_threads=1, dataset_stride=2, **options) as own:
        own.prepare(8, np.dtype(np.float32), num_responses=4)
        own.submit_batch(None).result()  # the only thread has done all before
        programs = own._measure, own._measure_dataset
        assert [program._cache_size() for program in programs] == [1, 1]
        pending = own.submit(np.ones((40, 8), np.float32))
        own.flush()
        means = np.stack([pending.result().mean_states] * 4)
        assert own.submit_batch(means).result()
        assert [program._cache_size() for program in programs] == [1, 1]
