"""The sampler of evaluations and generations: a call that has a part is never sampled again."""

import contextlib
import threading
from typing import NamedTuple

import pytest

from configs import default
from semrl_jax.cluster.preemption import StopRequest
from semrl_jax.jobs import sample
from semrl_jax.jobs.result_directory import Part, open_results
from semrl_jax.support import response_files
from semrl_jax.support.console import Reporter
from semrl_jax.support.errors import Preempted, UserError

NAMES = ("a", "b", "c", "d")


class Call(NamedTuple):
    part: str
    num_responses: int = 3


@pytest.fixture
def directory(tmp_path):
    with contextlib.closing(open_results(tmp_path / "results")) as found:
        yield found


def sampled(directory, config, fails="", files=None, during=lambda: None):
    """Samples four calls; the one named `fails` is not finished. Returns those that were begun."""
    begun = []

    def one(call, arrived):
        begun.append(call.part)
        if call.part == fails:
            raise Preempted("SIGTERM")
        during()
        for _ in range(call.num_responses):
            arrived(None)
        return Part(response_files.table_of({"response": [call.part] * 3}), files or {})

    calls, stop = [Call(name) for name in NAMES], StopRequest(1.0, sample.EXIT_PREEMPTED)
    sample.sample_calls(calls, one, config, directory, Reporter(), stop, "mine")
    return begun


def test_only_calls_without_a_part_are_sampled(directory, capsys):
    config = default.get_config()
    with pytest.raises(Preempted):
        sampled(directory, config, fails="c")
    assert [directory.has_part(name) for name in NAMES] == [True, True, False, False]
    capsys.readouterr()
    assert sampled(directory, config) == ["c", "d"]
    out = capsys.readouterr().out
    assert "mine: 6 of 12 responses are there already" in out and "mine: 6 responses in" in out
    for name in NAMES:
        rows = response_files.read(directory.part(name)).to_pylist()
        assert rows == [{"response": name}] * 3
    assert sampled(directory, config) == []
    assert "responses in" not in capsys.readouterr().out


def test_replicas_sample_two_calls_at_once(directory):
    config = default.get_config()
    config.rollout.addresses = ("host:1",)
    together = threading.Barrier(sample.NUM_PARALLEL, timeout=30)
    assert sorted(sampled(directory, config, during=together.wait)) == list(NAMES)


def test_further_files_are_complete_before_the_part(directory):
    """A part marks its call as complete, so a failure before it leaves the call to be sampled."""

    def fail(out):
        raise UserError("the disk is full")

    config = default.get_config()
    with pytest.raises(UserError, match="the disk is full"):
        sampled(directory, config, files={directory.part("a", ".npy"): fail})
    assert not list((directory.path / "parts").iterdir())


def test_a_signal_ends_a_command_with_its_exit_code(capsys):
    def work(reporter, stop):
        raise Preempted("SIGTERM")

    assert sample.resumable(work, quiet=True) == sample.EXIT_PREEMPTED
    assert "SIGTERM: stopped; the same command continues" in capsys.readouterr().out
    assert sample.resumable(lambda reporter, stop: None, quiet=True) == 0


def test_a_request_with_other_settings_differs():
    config = default.get_config()
    request = sample.request_of(config, "evaluation.n")
    config.evaluation.n += 1
    config.rollout.vllm_quantization = "fp8_per_tensor"
    config.evaluation.metrics = True
    changed = sample.request_of(config, "evaluation.n")
    differing = {name for name in changed if request.get(name) != changed[name]}
    measuring = {"evaluation.metrics", "evaluation.metric_options", "evaluation.metric_series"}
    assert differing == {"evaluation.n", "rollout.vllm_quantization", *measuring}
