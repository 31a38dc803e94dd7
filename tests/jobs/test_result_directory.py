"""Directories of results: damaged records and files give one line with a way out."""

import contextlib
import functools
import json

import ml_collections
import numpy as np
import pytest

from semrl_jax.evaluation.evaluator import Benchmark
from semrl_jax.evaluation.protocols import Plan
from semrl_jax.evaluation.samples import table_of, write_samples
from semrl_jax.evaluation.scores import pass_at_k
from semrl_jax.jobs import result_directory
from semrl_jax.jobs.evaluate import Call, _check_complete, _write_array
from semrl_jax.jobs.result_directory import RECORD, Part, open_results
from semrl_jax.support.errors import UserError
from tests.evaluation.making import make_sample

SAMPLES = [make_sample(0, 0, True, benchmark="sums", mean_logprob=-1.0)]


@pytest.fixture
def directory(tmp_path):
    with contextlib.closing(open_results(tmp_path / "results")) as found:
        found.check({}, {"sums": {"num_samples": 1}})
        yield found


@pytest.mark.parametrize(
    "record",
    [
        {"run_id": "a", "benchmarks": {"sums": 3}},
        {"run_id": "a", "benchmarks": {"sums": {"over_set": []}}},
        {"run_id": "a", "benchmarks": {}, "settings": [1]},
        {"run_id": "a", "benchmarks": []},
        {},
    ],
)
def test_a_wrong_record_is_refused(tmp_path, record):
    (tmp_path / RECORD).write_text(json.dumps(record))
    with pytest.raises(UserError, match=r"evaluation\.json is no record of responses"):
        open_results(tmp_path)


def test_the_samples_of_another_evaluation_are_refused(directory):
    write_samples(directory.path / "samples.parquet", SAMPLES)
    assert directory.finished() == {"sums": SAMPLES}
    write_samples(directory.path / "samples.parquet", [SAMPLES[0]._replace(benchmark="other")])
    with pytest.raises(UserError, match=r"has 'other', which .*evaluation\.json does not know"):
        directory.finished()


def test_a_damaged_part_names_the_file_to_remove(directory):
    states = np.ones((1, 2, 3), np.float32)
    write = functools.partial(_write_array, array=states)
    directory.write_part("p", Part(table_of(SAMPLES), {directory.part("p", ".npy"): write}))
    samples, found = directory.read_part("p")
    assert samples == SAMPLES
    np.testing.assert_array_equal(found, states)
    content = directory.part("p", ".npy").read_bytes()
    for damaged in (b"", content[:-4], content[:20], b"x" * 100):
        directory.part("p", ".npy").write_bytes(damaged)
        with pytest.raises(UserError, match=r"p\.npy: .*; remove .*p\.parquet, and the same comm"):
            directory.read_part("p")
    directory.part("p", ".npy").write_bytes(content)
    directory.part("p").write_bytes(b"PAR1")
    with pytest.raises(UserError, match=r"cannot be read as Parquet: .*; remove .*p\.parquet, and"):
        directory.read_part("p")


def test_a_file_without_all_responses_of_its_call_is_refused(tmp_path):
    options = ml_collections.ConfigDict()
    benchmark = Benchmark("sums", (0, 1, 2), options, {Plan(num_samples=2): [pass_at_k]})
    samples = [make_sample(problem, sample) for problem in (1, 2) for sample in (0, 1)]
    _check_complete(tmp_path, samples, Call(benchmark, 1, 3))
    for wrong in (samples[:3], samples[::-1], [*samples, samples[0]], []):
        with pytest.raises(UserError, match="lacks responses to 'sums'; remove it"):
            _check_complete(tmp_path, wrong, Call(benchmark, 1, 3))


def test_a_message_has_the_beginning_of_a_digest():
    assert result_directory._shown("7394bc65" + 56 * "0") == "digest 7394bc65"
    assert result_directory._shown("greedy") == "'greedy'" and result_directory._shown(0) == "0"
