"""Runs that sample ahead of the update."""

import os
import random
import shutil
import signal
import threading
import time

import jax
import numpy as np
import pytest

from semrl_jax.rollout.client import RolloutClient
from semrl_jax.rollout.engines.decoding import DecodingCall
from semrl_jax.runs import train
from semrl_jax.runs.lifecycle import EXIT_PREEMPTED
from semrl_jax.support.errors import UserError
from semrl_jax.training.learner import Learner
from tests.cases import refused
from tests.fixtures import read_rows, scores_by_length, stable
from tests.launch.comparison import restore_on_host
from tests.tiny import tiny_config

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("reports_where_looked_at", "rewarded")]
STEPS = 5


def ahead_config():
    config = tiny_config()
    config.rollout.max_staleness = 2
    config.training.num_steps = STEPS
    config.checkpoints.keep = STEPS
    return config


@pytest.fixture
def config():
    return ahead_config()


def in_parts():
    """`ahead_config`, but tokens from 28 on are sampled with weights that are one step newer."""
    config = ahead_config()
    config.rollout.in_flight = "keep"
    return config


@pytest.fixture(scope="module")
def straight_in_parts(tmp_path_factory):
    return undisturbed(tmp_path_factory, in_parts())


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """The directory of an undisturbed run with `config`."""
    return undisturbed(tmp_path_factory, ahead_config())


def undisturbed(tmp_path_factory, config):
    workdir = tmp_path_factory.mktemp("runs") / "straight"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("semrl_jax.runs.run.write_report", lambda workdir: None)
        patch.setattr("semrl_jax.training.loop.group_rewards", scores_by_length)

        assert train(config, str(workdir)) == 0
    return workdir


def state_of(workdir, step=STEPS):
    return restore_on_host(workdir / "checkpoints" / str(step) / "state")


def assert_same_run(actual, expected):
    assert stable(read_rows(actual)) == stable(read_rows(expected))
    jax.tree.map(np.testing.assert_array_equal, state_of(actual), state_of(expected))


@pytest.mark.parametrize("lag", [1, pytest.param(3, marks=pytest.mark.soak)])
def test_each_batch_is_sampled_with_the_weights_of_the_lag(tmp_path, config, monkeypatch, lag):
    """The engine's log-probabilities agree with the weights of `lag` steps before."""
    config.rollout.max_staleness, params, batches = lag, {}, {}
    update = Learner.update

    def noted(self, state, batch, *rest):
        step = int(state.step)
        params[step], batches[step] = jax.device_get(state.params), batch
        for earlier in (max(step - lag, 0), step):
            found = np.asarray(self.logprobs(params[earlier], batch).logprobs)
            error = np.abs(found - batch.rollout_logprobs)[batch.response_mask].max()
            # Engine and policy are float32; a step of this learning rate changes more.
            assert (error < 1e-4) == (earlier == max(step - lag, 0)), (step, earlier, error)
        return update(self, state, batch, *rest)

    monkeypatch.setattr(Learner, "update", noted)
    assert train(config, str(tmp_path / "run")) == 0
    rows = read_rows(tmp_path / "run")[:STEPS]
    lags = [min(step, lag) for step in range(STEPS)]
    assert [row["rollout/staleness"] for row in rows] == lags
    assert [row["rollout/staleness/max"] for row in rows] == lags


def delay(monkeypatch):
    """Updates, sampling and the sync of weights take longer, by random times."""
    draw = random.Random(0).random

    def delayed(function):
        def wrapper(*args, **options):
            time.sleep(0.1 * draw())
            return function(*args, **options)

        return wrapper

    for of, name in ((Learner, "update"), (DecodingCall, "step"), (RolloutClient, "sync_weights")):
        monkeypatch.setattr(of, name, delayed(getattr(of, name)))


def test_the_run_does_not_depend_on_what_takes_how_long(tmp_path, config, straight, monkeypatch):
    delay(monkeypatch)
    assert train(config, str(tmp_path / "run")) == 0
    assert_same_run(tmp_path / "run", straight)


def test_each_part_of_a_response_has_the_weights_of_its_step(tmp_path, monkeypatch):
    """The log-probabilities of the engine are those of these weights, token by token."""
    config, params, length = in_parts(), {}, 28
    assert config.rollout.max_response_tokens == 2 * length
    update, num_second = Learner.update, []

    def noted(self, state, batch, *rest):
        step = int(state.step)
        params[step] = jax.device_get(state.params)
        first = np.arange(batch.response_mask.shape[1]) < length
        for part, columns in enumerate((first, ~first)):
            mask = batch.response_mask & columns
            num_second.append(mask.sum() * part)
            for earlier in {max(step - lag, 0) for lag in (2, 1, 0)} if mask.any() else ():
                found = np.asarray(self.logprobs(params[earlier], batch).logprobs)
                error = np.abs(found - batch.rollout_logprobs)[mask].max()
                # Engine and policy are float32; a step of this learning rate changes more.
                assert (error < 1e-4) == (earlier == max(step - 2 + part, 0)), (step, part, earlier)
        return update(self, state, batch, *rest)

    monkeypatch.setattr(Learner, "update", noted)
    assert train(config, str(tmp_path / "run")) == 0
    assert sum(num_second) > 0
    rows = read_rows(tmp_path / "run")[:STEPS]
    assert [row["rollout/staleness/max"] for row in rows] == [0, 1, 2, 2, 2]


def test_a_run_in_parts_does_not_depend_on_time_and_resumes(
    tmp_path, straight_in_parts, monkeypatch
):
    delay(monkeypatch)
    assert train(in_parts(), str(tmp_path / "run")) == 0
    assert_same_run(tmp_path / "run", straight_in_parts)
    for first in (4, 1):
        for step in range(first + 1, STEPS + 1):
            shutil.rmtree(tmp_path / "run" / "checkpoints" / str(step))
        assert train(in_parts(), str(tmp_path / "run")) == 0
        assert_same_run(tmp_path / "run", straight_in_parts)


# The test of a signal resumes a run that has no step left without earlier weights.
@pytest.mark.parametrize("first", [1, 2])
def test_a_resumed_run_samples_again_what_was_not_trained_on(tmp_path, config, straight, first):
    workdir = tmp_path / "run"
    shutil.copytree(straight, workdir)
    for step in range(first + 1, STEPS + 1):
        shutil.rmtree(workdir / "checkpoints" / str(step))
    assert train(config, str(workdir)) == 0
    assert_same_run(workdir, straight)


def test_a_signal_while_others_are_sampled_ends_at_once_and_loses_nothing(
    tmp_path, config, straight, monkeypatch
):
    step, sampled = DecodingCall.step, threading.Event()

    def endless(self):
        time.sleep(0.05)
        if sampled.is_set():
            time.sleep(0.5)
        return step(self)

    def signalled(self, *args, _update=Learner.update):
        found = _update(self, *args)
        if int(args[0].step) == 2 and not sampled.is_set():
            sampled.set()
            os.kill(os.getpid(), signal.SIGTERM)
        return found

    monkeypatch.setattr(DecodingCall, "step", endless)
    monkeypatch.setattr(Learner, "update", signalled)
    started = time.monotonic()
    assert train(config, str(tmp_path / "run")) == EXIT_PREEMPTED
    assert sampled.is_set()
    assert "sampling" not in {thread.name for thread in threading.enumerate()}
    monkeypatch.setattr(DecodingCall, "step", step)
    assert train(config, str(tmp_path / "run")) == 0
    assert_same_run(tmp_path / "run", straight)
    assert time.monotonic() - started < 120


def test_a_failure_in_the_other_thread_ends_the_run_with_its_reason(tmp_path, config, monkeypatch):
    """The steps whose batches were sampled are kept; the same command continues."""
    config.evaluation.every_steps = 0  # one would wait for the batch that fails
    generate = RolloutClient.generate

    def refusing(self, requests, *args, **options):
        if requests[0].sample_id.startswith("train/3/"):
            raise UserError("the replica refuses the token")
        return generate(self, requests, *args, **options)

    monkeypatch.setattr(RolloutClient, "generate", refusing)
    refused("refuses the token", train, config, str(tmp_path / "run"))
    assert "sampling" not in {thread.name for thread in threading.enumerate()}
    assert [row["step"] for row in read_rows(tmp_path / "run")] == [0, 1, 2]
    monkeypatch.setattr(RolloutClient, "generate", generate)
    assert train(config, str(tmp_path / "run")) == 0
    assert [row["step"] for row in read_rows(tmp_path / "run")] == [*range(STEPS)]


def test_each_batch_begins_after_the_last_prompt_that_the_one_before_kept(
    tmp_path, config, monkeypatch
):
    config.algorithms.batch_rules.max_sampling_rounds = 10

    def by_first_token(scored, config):
        first = np.array([item.rollout.response_ids[0] > 12 for item in scored], np.float32)
        return first.reshape(-1, config.rollout.group_size)

    monkeypatch.setattr("semrl_jax.sampling.choosing_source.unshuffled_rewards", by_first_token)
    for name, num_steps in (("straight", STEPS), ("resumed", 3), ("resumed", STEPS)):
        config.training.num_steps = num_steps
        assert train(config, str(tmp_path / name)) == 0
    assert_same_run(tmp_path / "resumed", tmp_path / "straight")
    assert any(row["rollout/groups_dropped"] for row in read_rows(tmp_path / "straight")[:STEPS])


def test_replicas_in_processes_of_their_own_sample_the_same(tmp_path, config, straight):
    """The groups are divided; on the trainer's 8 devices and on one, the engine is the same."""
    config.rollout.jax_processes = 1
    assert train(config, str(tmp_path / "run")) == 0
    assert [row["rollout/staleness"] for row in read_rows(tmp_path / "run")[:STEPS]] == [
        0, 1, 2, 2, 2,
    ]  # fmt: skip
    rewards = [
        [row["reward/mean"] for row in read_rows(workdir)[:STEPS]]
        for workdir in (tmp_path / "run", straight)
    ]
    assert rewards[0] == rewards[1]
    log = (tmp_path / "run" / "replica0_0" / "log.txt").read_text()
    assert "listens" in log or "serves" in log
