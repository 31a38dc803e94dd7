"""Verdicts and metrics of responses that arrive in any order."""

import concurrent.futures
import dataclasses
import functools
import threading
import time
import types
import weakref

import numpy as np
import pytest

from semrl_jax import data
from semrl_jax.metrics import MetricKey
from semrl_jax.metrics.measurer import MAX_GROUP, Measured, Measurer
from semrl_jax.rewards import VerifierPool, VerifierSettings
from semrl_jax.rewards.verifiers import math
from semrl_jax.sampling import scoring
from semrl_jax.sampling.batch_scalars import batch_scalars
from semrl_jax.sampling.requests import Draw
from semrl_jax.sampling.scoring import UNGRADED, Scored, score_and_measure
from semrl_jax.sampling.weights import Weights
from semrl_jax.support.clock import Clock
from semrl_jax.types import TURN_METRICS, WeightVersion
from tests.cases import raised, slow_after
from tests.fixtures import make_scored
from tests.oracles import metrics as oracle
from tests.sampling.parts import sampler_of

RANK = MetricKey("effective_rank")
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


def score(rollouts, num_threads=2, layers=(-1,), **options):
    with Measurer(max_tokens=56, num_threads=num_threads, layers=layers, **OPTIONS) as measurer:
        return score_and_measure(
            rollouts,
            decode=lambda rollout: f"\\boxed{{{rollout.response_ids[0]}}}",
            references={group: str(4 * group) for group in range(3)},
            verifier=HereVerifier(),
            measurer=measurer,
            **options,
        )


def test_states_that_are_not_measured_yet_are_limited(monkeypatch):
    """A step of 512 responses of 32,768 tokens and width 8192 would hold 275 GB."""
    (one,) = make_rollouts(1)
    monkeypatch.setattr(scoring, "MAX_HELD_BYTES", 5 * one.num_state_bytes)
    held, most, pool = [0], [0], concurrent.futures.ThreadPoolExecutor(1)

    class Slow(Measurer):
        def __init__(self):
            self.layers, self.waiting = (-1,), []

        def submit(self, states):
            held[0] += 1
            most[0] = max(most[0], held[0])
            self.waiting.append(concurrent.futures.Future())
            return self.waiting[-1]

        def flush(self):
            waiting, self.waiting = self.waiting, []
            pool.submit(self.measure, waiting)

        def measure(self, waiting):
            for future in waiting:
                held[0] -= 1
                future.set_result(Measured({}, np.zeros((1, 16), np.float32)))

    rollouts = [dataclasses.replace(one, sample_index=index) for index in range(20)]
    with pool:
        found = score_and_measure(
            rollouts, decode=str, references={0: ""}, verifier=None, measurer=Slow()
        )
    assert len(found) == 20 and most[0] <= 6


def test_the_wait_for_verdicts_is_timed():
    class Slow:
        def submit(self, response, reference, row):
            verdict = concurrent.futures.Future()
            threading.Timer(0.1, verdict.set_result, [UNGRADED]).start()
            return verdict

    clock = Clock()
    score_and_measure(
        make_rollouts(3), decode=str, references={0: ""}, verifier=Slow(), measurer=None,
        clock=clock,
    )  # fmt: skip
    assert 0.05 < clock.seconds("verify") < 10


def test_steps_are_of_tokens_and_their_rewards_are_logged():
    """Steps that end in one token become one; a response in which none is found has no rewards."""

    class Judge:
        def submit(self, response, reference, row):
            steps = ((2, 0.5), (5, -1.0), (6, 0.25)) if response else ()
            verdict = concurrent.futures.Future()
            verdict.set_result(dataclasses.replace(UNGRADED, score=1.0, steps=steps))
            return verdict

    asked = []

    def step_ends(rollout, text, ends):
        asked.append((text, tuple(ends)))
        return np.array([0, 3, 3], np.int32)

    rollouts = make_rollouts(2)
    score = functools.partial(
        score_and_measure,
        decode=lambda rollout: "a text" * (rollout.sample_index == 0), references={0: ""},
        verifier=Judge(), measurer=None,
    )  # fmt: skip
    judged, plain = score(rollouts, step_ends=step_ends)
    assert asked == [("a text", (2, 5, 6))]
    assert judged.rollout.step_ends.tolist() == [0, 3]
    assert judged.rollout.step_rewards.tolist() == [0.5, -0.75]
    assert judged.rollout.step_rewards.dtype == np.float32
    assert judged.verdict == dataclasses.replace(UNGRADED, score=1.0)
    assert plain.rollout.step_ends.size == plain.rollout.step_rewards.size == 0
    scalars = batch_scalars(Scored.of([judged, plain]), np.ones((1, 2), np.float32))
    assert scalars["response/steps/mean"] == 1.0
    assert scalars["response/step_reward/mean"] == -0.125
    scalars = batch_scalars(Scored.of([plain]), np.ones((1, 1), np.float32))
    assert scalars["response/steps/mean"] == 0 and "response/step_reward/mean" not in scalars
    (judged, _) = score(rollouts)
    assert judged.rollout.step_ends is None and judged.verdict.steps is None


@pytest.mark.slow
def test_results_do_not_depend_on_the_order_of_arrival():
    rollouts = make_rollouts()
    straight = score(rollouts)
    seen = []
    shuffled = score(
        [rollouts[i] for i in np.random.default_rng(1).permutation(12)],
        num_threads=1,
        arrived=lambda rollout: seen.append(rollout.sample_id),
    )
    assert sorted(seen, key=int) == [str(i) for i in range(12)]
    assert len(straight) == 12
    for index, (a, b) in enumerate(zip(straight, shuffled, strict=True)):
        assert a.rollout.sample_id == b.rollout.sample_id == str(index)
        assert a.rollout.metrics == b.rollout.metrics  # bit for bit
        assert a.verdict == b.verdict
        assert a.verdict.correct == (index % 4 == 0)
        assert a.rollout.hidden_states is None


def test_states_are_measured_and_released_while_others_are_sampled():
    futures = []
    rollouts = [
        dataclasses.replace(
            make_scored(index, response_ids=np.full(40, index, np.int32)).rollout,
            hidden_states=np.ones((40, 2, 16), np.float32),
            layers=(0, -1),
        )
        for index in range(MAX_GROUP + 1)
    ]
    states = [weakref.ref(rollout.hidden_states) for rollout in rollouts]

    class Watched(Measurer):
        def submit(self, hidden_states):
            futures.append(super().submit(hidden_states))
            return futures[-1]

    def sampled():
        for _ in range(MAX_GROUP):  # a full call
            yield rollouts.pop(0)
        for future in futures:
            future.result(timeout=120)
        deadline = time.monotonic() + 60
        while sum(ref() is not None for ref in states) > 2:  # the last one, and one to come
            assert time.monotonic() < deadline
            time.sleep(0.01)
        yield rollouts.pop(0)

    with Watched(max_tokens=56, num_threads=2, **OPTIONS) as measurer:
        scored = score_and_measure(
            sampled(), decode=lambda rollout: "", references=dict.fromkeys(range(MAX_GROUP), "1"),
            verifier=HereVerifier(), measurer=measurer,
        )  # fmt: skip
    assert [len(column.value) for column in scored.metrics.values()] == [MAX_GROUP + 1] * 3


@pytest.mark.parametrize("layers", [(-1, 0), *slow_after(0, [((-1,),), ((0, -1),)])])
def test_each_requested_layer_is_measured_at_any_index(layers):
    scored = score(make_rollouts(2), layers=layers, keep_states=True)
    assert {key.layer for key in scored.metrics} == set(layers)
    assert scored.mean_states.shape == (2, len(layers), 16)
    for index, item in enumerate(scored):
        states = item.rollout.hidden_states  # of layers 0 and -1
        for row, layer in enumerate(layers):
            plane = states[:, item.rollout.layers.index(layer)]
            means = scored.mean_states[index, row]
            np.testing.assert_allclose(means, plane.mean(axis=0), atol=1e-6)
            found = scored.metrics[RANK._replace(layer=layer)].value[index]
            # float32 products, whose rounding the square root of the Gram matrix's values enlarges.
            np.testing.assert_allclose(found, rank_series_f64(plane, 4)[0], rtol=1e-3)


@pytest.mark.slow
def test_only_policy_tokens_are_measured_in_each_layer():
    random = np.random.default_rng(1)
    with_context, without = [], []
    for rollout in make_rollouts(4):
        mask = random.random(len(rollout.response_ids)) < 0.6
        mask[0] = True
        states = np.where(mask[:, None, None], rollout.hidden_states, np.float32(np.nan))
        with_context.append(dataclasses.replace(rollout, hidden_states=states, response_mask=mask))
        without.append(
            dataclasses.replace(
                rollout,
                response_ids=rollout.response_ids[mask],
                rollout_logprobs=rollout.rollout_logprobs[mask],
                hidden_states=states[mask],
                response_mask=None,
            )
        )
    found, expected = (score(rollouts, layers=(-1, 0)) for rollouts in (with_context, without))
    np.testing.assert_equal(found.metrics, expected.metrics)  # bit for bit
    np.testing.assert_array_equal(found.mean_states, expected.mean_states)
    assert np.isfinite(found.mean_states).all()  # no row of context


def test_the_turns_of_an_episode_are_measured_alone():
    """Rank, velocity and acceleration of each: 14, 1 and 23 tokens of the policy; an only turn."""
    mask = np.repeat([True, False, True, False, True], [14, 3, 1, 4, 23])
    random = np.random.default_rng(2)
    rollouts = []
    for index, own in enumerate((mask, mask[:14], mask)):
        states = random.normal(size=(len(own), 1, 16)).astype(np.float32)
        made = make_scored(index, response_ids=np.full(len(own), index, np.int32)).rollout
        states[~own] = np.nan
        rollouts.append(
            dataclasses.replace(
                made,
                hidden_states=states,
                layers=(-1,),
                response_mask=own,
                turn_rewards=None if index == 2 else np.ones(3 if index == 0 else 1, np.float32),
            )
        )
    scored = score(rollouts)
    several, one, without = (item.rollout for item in scored)
    names = list(TURN_METRICS)
    assert all(getattr(without, name) is None for name in names)
    for name, key in TURN_METRICS.items():
        assert getattr(one, name).tolist() == [scored.metrics[key].value[1]]
    found = np.array([getattr(several, name) for name in names])
    for turn, own in ((0, slice(0, 14)), (2, slice(22, 45))):
        expected = rank_series_f64(rollouts[0].hidden_states[own, 0], 4)
        # float32 products, as above.
        np.testing.assert_allclose(found[:2, turn], expected, rtol=1e-3)
    assert np.isfinite(found[2, ::2]).all() and np.isnan(found[1:, 1]).all()  # one token
    scalars = batch_scalars(scored, np.zeros((1, 3), np.float32))
    for name, row in zip(names, found):
        values = np.append(row, getattr(one, name))
        label = TURN_METRICS[name].label
        mean = scalars[f"metrics/{label}/turn/mean"]
        np.testing.assert_allclose(mean, np.nanmean(values), rtol=1e-6)
    columns = scored.columns(names)
    np.testing.assert_array_equal(columns[names[0]][0], several.turn_effective_rank)


def test_a_batch_of_several_layers_is_measured_by_layer():
    options = OPTIONS | {"dataset_stride": 2}
    means = np.random.default_rng(0).normal(size=(9, 2, 16)).astype(np.float32)
    with Measurer(max_tokens=56, num_threads=1, layers=(-1, 3), **options) as measurer:
        found = measurer.submit_batch(means).result()
    for plane, prefix in enumerate(("", "layer_3/")):
        rank, velocity = rank_series_f64(means[:, plane], 2)[:2]
        np.testing.assert_allclose(found[f"{prefix}global/effective_rank"], rank, rtol=1e-3)
        key = f"{prefix}cumulative/effective_rank_velocity"
        np.testing.assert_allclose(found[key], velocity, rtol=1e-3)


def test_without_a_measurer_there_are_no_metrics():
    scored = score_and_measure(
        make_rollouts(2), decode=lambda rollout: "", references={0: "1"}, verifier=HereVerifier(),
        measurer=None,
    )  # fmt: skip
    assert len(scored) == 2 and scored.metrics == {} and scored.mean_states is None


def test_a_batch_is_measured_as_one_set_of_mean_states():
    options = OPTIONS | {"dataset_stride": 2}
    random = np.random.default_rng(3)
    states = [random.normal(size=(length, 16)).astype(np.float32) for length in range(3, 12)]
    with Measurer(max_tokens=56, num_threads=2, **options) as measurer:
        measured = [measurer.submit(rows) for rows in states]
        measurer.flush()
        measured = [future.result() for future in measured]
        scored = Scored([make_scored(i) for i in range(9)])
        means = scored.with_measured(measured).mean_states
        found = measurer.submit_batch(means).result()
        nothing = measured[4]._replace(mean_states=np.full((1, 16), np.nan, np.float32))
        spoilt = scored.with_measured([*measured[:4], nothing, *measured[5:]])
        without = measurer.submit_batch(spoilt.mean_states).result()
        few = measurer.submit_batch(spoilt[:3].mean_states).result()
    rows = np.stack([rows.astype(np.float64).mean(axis=0) for rows in states])
    for index, item in enumerate(measured):
        np.testing.assert_allclose(item.mean_states[0], rows[index], atol=1e-6)  # float32 sums
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
    series = oracle.series(oracle.effective_rank, rows, stride, "exact")
    return oracle.effective_rank(rows), oracle.orders(series)[0]


@pytest.mark.slow
def test_other_responses_in_a_call_change_no_bit():
    # Groups have 16 places, so the second group of 21 responses is not full.
    random = np.random.default_rng(5)
    states = [random.normal(size=(length, 16)).astype(np.float32) for length in range(20, 41)]
    with Measurer(max_tokens=56, num_threads=2, **OPTIONS) as measurer:
        found = []
        for order in (range(21), reversed(range(21)), range(3)):
            futures = {i: measurer.submit(states[i]) for i in order}
            measurer.flush()
            found.append({i: future.result() for i, future in futures.items()})
    for measured in found[1:]:
        for i, own in measured.items():
            assert own.metrics == found[0][i].metrics
            np.testing.assert_array_equal(own.mean_states, found[0][i].mean_states)
            np.testing.assert_array_equal(own.effective_ranks, found[0][i].effective_ranks)


@pytest.mark.slow
def test_a_full_group_starts_and_a_large_response_has_its_own_call():
    states = np.random.default_rng(0).normal(size=(32, 16)).astype(np.float32)
    with Measurer(max_tokens=56, num_threads=1, **OPTIONS) as measurer:
        pending = [measurer.submit(states) for _ in range(MAX_GROUP + 1)]
        first = pending[0].result(timeout=60)
        assert all(future.result(timeout=60).metrics == first.metrics for future in pending[:-1])
        assert not pending[-1].done()
        measurer.flush()
        assert pending[-1].result(timeout=60).metrics == first.metrics
        wide = np.random.default_rng(0).normal(size=(56, 8192)).astype(np.float32)
        assert measurer.submit(wide).result(timeout=60).metrics[RANK].value > 50


def test_an_error_reaches_every_future_of_the_call():
    with Measurer(max_tokens=64, num_threads=1, **OPTIONS | {"window": "none"}) as measurer:
        pending = [measurer.submit(np.ones((4, 16), np.float32)) for _ in range(2)]
        measurer.flush()
        for future in pending:
            raised(ValueError, "window='none'", future.result, timeout=60)


def test_a_response_that_cannot_be_measured_does_not_affect_others():
    good = np.random.default_rng(0).normal(size=(10, 16)).astype(np.float32)
    with Measurer(max_tokens=20, num_threads=1, dataset_stride=2, **OPTIONS) as measurer:
        half = measurer.submit(good.astype(np.float16))  # in another call, before the others
        first = measurer.submit(good)
        with pytest.raises(ValueError, match="has 21 tokens; at most max_tokens=20"):
            measurer.submit(np.ones((21, 16), np.float32))
        with pytest.raises(ValueError, match=r"shape \(10, 0\); its width"):
            measurer.submit(np.ones((10, 0), np.float32))
        cancelled = measurer.submit(good)
        assert cancelled.cancel()
        second = measurer.submit(good)
        measurer.flush()
        assert first.result(timeout=60).metrics == second.result(timeout=60).metrics
        for future, rows in ((first, good), (half, good.astype(np.float16).astype(np.float32))):
            mean = future.result(timeout=60).mean_states[0]
            np.testing.assert_allclose(mean, rows.mean(axis=0), atol=1e-6)  # float32 sums
        assert cancelled.cancelled()
        assert measurer.submit_batch(None).result(timeout=60) == {}


def test_closing_leaves_no_future_pending(monkeypatch):
    started, go_on = threading.Event(), threading.Event()

    def measured(self, group, kind):
        started.set()
        go_on.wait(timeout=60)
        return [Measured({}, np.zeros((1, kind.width), np.float32)) for _ in group]

    monkeypatch.setattr(Measurer, "_measured", measured)
    measurer = Measurer(max_tokens=64, num_threads=1, **OPTIONS)
    states = np.ones((4, 16), np.float32)
    running = measurer.submit(states)
    measurer.flush()
    assert started.wait(timeout=60)
    queued = [measurer.submit(states)]
    measurer.flush()
    queued.append(measurer.submit_batch(states[None, :1]))
    waiting = [measurer.submit(states), measurer.submit(states)]
    assert waiting[1].cancel()
    closing = threading.Thread(target=measurer.close)
    closing.start()
    go_on.set()
    closing.join(timeout=60)
    assert running.result(timeout=0).metrics == {}
    done, pending = concurrent.futures.wait([queued[0], *waiting], timeout=10)
    assert not pending and all(future.cancelled() for future in done)
    assert queued[1].cancelled()
    for submit, argument in ((measurer.submit, states), (measurer.submit_batch, states[None, :1])):
        raised(RuntimeError, "this Measurer is closed", submit, argument)
    measurer.flush()
    measurer.close()


@pytest.mark.slow
def test_the_device_gives_the_metrics_of_the_host():
    random = np.random.default_rng(5)
    states = [random.normal(size=(length, 16)).astype(np.float32) for length in (20, 31, 32)]
    found = []
    for options in ({}, {"device_batch": 4}):
        with Measurer(max_tokens=56, num_threads=1, **OPTIONS | options) as measurer:
            pending = [measurer.submit(rows) for rows in states]
            measurer.flush()
            found.append([future.result(timeout=60) for future in pending])
    for host, device in zip(*found):
        for key, value in host.metrics.items():
            # Batched matrix products are rounded differently.
            np.testing.assert_allclose(device.metrics[key], value, rtol=1e-5, atol=1e-5)


@functools.cache
def turn_tokenizer():
    """A tokenizer with <|im_start|>, <|im_end|> and <|endoftext|> as special tokens."""
    return data.train_tokenizer(["so \\boxed{7}."], 262)


class HereVerifier(VerifierPool):
    """The grader in this process."""

    def __init__(self):
        self.seen = []

    def submit(self, response, reference, columns=""):
        self.seen.append(response)
        verdict = concurrent.futures.Future()
        verdict.set_result(math.verify(response, reference, VerifierSettings()))
        return verdict


def sample_here(config, tokenizer, rollouts, verifier, references, asked=None, **options):
    """The scored responses of a run whose replicas send these rollouts; `asked`: the sampling."""

    def generate(requests, sampling, *_, **__):
        if asked is not None:
            asked.append(sampling)
        return (rollout for rollout in rollouts)  # a generator: the sampler closes it

    sampler = sampler_of(
        weights=Weights(
            0, lambda: iter(()), False, version=WeightVersion("run", "attempt", 0, "digest")
        ),
        config=config,
        tokenizer=tokenizer,
        end_token_ids=(tokenizer.eos_token_id,),
        client=types.SimpleNamespace(generate=generate, release=lambda: None),
        verifier=verifier,
    )
    draw = Draw([], references, {})
    return sampler.sample_here(draw, temperature=1.0, arrived=lambda rollout: None, **options)


@pytest.mark.parametrize(
    ("response", "text"),
    [
        # These markers are special tokens of the tokenizer, which decoding leaves out.
        ("so \\boxed{7}.<|im_end|>\n<|im_start|>user\nso \\boxed{9}", "so \\boxed{7}."),
        ("so \\boxed{7}.<|endoftext|>so \\boxed{9}", "so \\boxed{7}."),
        # This marker consists of ordinary tokens.
        ("so \\boxed{7}.</s>so \\boxed{9}", "so \\boxed{7}."),
        ("<|im_start|>so \\boxed{7}.<|im_end|>", "so \\boxed{7}."),
        ("so \\boxed{9}. No: \\boxed{7}", "so \\boxed{9}. No: \\boxed{7}"),
    ],
)
def test_the_verifier_gets_the_response_up_to_its_first_end_marker(config, response, text):
    tokenizer = turn_tokenizer()
    rollout = make_scored(response_ids=np.array(tokenizer(response)["input_ids"])).rollout
    verifier = HereVerifier()
    (scored,) = sample_here(config, tokenizer, [rollout], verifier, {0: "7"})
    assert verifier.seen == [scored.response] == [text]
    assert scored.verdict.correct
    assert data.full_text(tokenizer, rollout.response_ids) == response


def test_the_verifier_gets_the_row_of_each_prompt():
    class Rows(HereVerifier):
        def submit(self, response, reference, columns=""):
            self.seen.append((reference, columns))
            return super().submit(response, reference)

    verifier = Rows()
    score_and_measure(
        [item.rollout for item in map(make_scored, range(12))],
        decode=lambda rollout: "",
        references={group: str(group) for group in range(3)},
        columns={0: '{"a": 0}', 2: '{"a": 2}'},
        verifier=verifier,
        measurer=None,
    )
    pairs = [item for item in verifier.seen if isinstance(item, tuple)]
    assert pairs == 4 * [("0", '{"a": 0}')] + 4 * [("1", "")] + 4 * [("2", '{"a": 2}')]
