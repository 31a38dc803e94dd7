"""Directories of results: damaged records and files give one line with a way out."""

import contextlib
import functools
import json

import ml_collections
import numpy as np
import pyarrow.parquet as pq
import pytest

from semrl_jax.data import PromptExample
from semrl_jax.evaluation.evaluator import Benchmark
from semrl_jax.evaluation.protocols import Plan
from semrl_jax.evaluation.samples import not_sampled, sampled, table_of
from semrl_jax.evaluation.scores import pass_at_k
from semrl_jax.jobs import result_directory, view
from semrl_jax.jobs.evaluate import Call, _check_complete, _write_array
from semrl_jax.jobs.result_directory import RECORD, Part, open_results
from semrl_jax.sampling.scoring import Scored
from semrl_jax.support.errors import UserError
from tests.cases import refused
from tests.evaluation.making import make_sample, write_samples
from tests.fixtures import make_scored

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
    refused(r"evaluation\.json is no record of responses", open_results, tmp_path)


def test_the_samples_of_another_evaluation_are_refused(directory):
    write_samples(directory.path / "samples.parquet", SAMPLES)
    assert directory.finished() == {"sums": SAMPLES}
    write_samples(directory.path / "samples.parquet", [SAMPLES[0]._replace(benchmark="other")])
    refused(r"has 'other', which .*evaluation\.json does not know", directory.finished)


def part_of(*responses):
    """A part with responses to one problem, and a problem that was not sampled."""
    prompt = PromptExample("Q: 1", np.array([3], np.int32), "7", "sums", 0)
    scored = Scored([make_scored(i, response=text) for i, text in enumerate(responses)])
    samples = sampled(scored, {0: (0, prompt)}, 0, str)
    return Part(table_of([*samples, *not_sampled(prompt, 1, 1)]))


def test_token_ids_of_finished_parts_are_kept_and_read_by_the_viewer(directory):
    samples = directory.path / "samples.parquet"
    directory.write_part("first", part_of("a", "b"))
    directory.finish(["first"], {})
    found = view.read_responses(samples)
    assert list(found) == ["sums 0", "sums 0 sample 1"]
    assert found["sums 0"].prompt == "Q: 1"
    kept = [response.response_ids.tolist() for response in found.values()]
    assert kept == [make_scored(i).rollout.response_ids.tolist() for i in range(2)]
    # A file of an earlier release is continued. Its rows have no token ids.
    names = ["prompt_ids", "response_ids"]
    pq.write_table(pq.read_table(samples).drop_columns(names), samples)
    for part in ("second", "third"):
        directory.write_part(part, part_of(part))
        directory.finish([part], {})
    table = pq.read_table(samples)
    assert table["response"].to_pylist() == ["a", "b", "", "second", "", "third", ""]
    assert [ids is not None for ids in table["prompt_ids"].to_pylist()] == [False] * 3 + [True] * 4
    assert len(directory.finished()["sums"]) == 7
    refused("the column prompt_ids has a row without token ids", view.read_responses, samples)


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
        refused(r"p\.npy: .*; remove .*p\.parquet, and the same comm", directory.read_part, "p")
    directory.part("p", ".npy").write_bytes(content)
    directory.part("p").write_bytes(b"PAR1")
    refused(r"cannot be read as Parquet: .*; remove .*p\.parquet, and", directory.read_part, "p")


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
