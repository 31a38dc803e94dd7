"""Samples are the same after they were written and read."""

import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from semrl_jax.data import PromptExample
from semrl_jax.evaluation.samples import COLUMNS, read_samples, sampled
from semrl_jax.sampling.scoring import Scored
from semrl_jax.support.errors import UserError
from semrl_jax.support.response_files import kind_of
from tests.evaluation.making import make_sample, write_samples
from tests.fixtures import make_scored


def same(one, other):
    """Equality in which NaN equals NaN."""
    return repr(one) == repr(other)


SAMPLES = [
    make_sample(0, 0, True, extracted="0", score=0.1, mean_logprob=-1 / 3, response="a\n\u2028<b>"),
    make_sample(0, 1, metrics={"effective_rank": 1 / 3, "effective_rank_velocity": math.nan}),
    make_sample(7, 0, metrics={"effective_rank": math.inf}, extracted="", question="求和 😀"),
]


def test_samples_survive_a_file(tmp_path):
    file = tmp_path / "samples.parquet"
    write_samples(file, SAMPLES)
    assert same(read_samples(file), SAMPLES)
    assert [path.name for path in tmp_path.iterdir()] == ["samples.parquet"]


def test_turns_of_an_episode_survive_a_file(tmp_path):
    ids, mask = np.array([10, 11, 9], np.int32), np.array([True, False, True])
    episode = make_scored(
        response_ids=ids, response_mask=mask, turn_rewards=np.array([0.0, 0.5], np.float32),
        conversations=np.array([0, 0, 1], np.int32),
    )  # fmt: skip
    problem = PromptExample("prompt", np.zeros(1, np.int32), "7", "games", 0)
    (sample,) = sampled(Scored([episode]), {0: (0, problem)}, 0, lambda ids: "".join(map(str, ids)))
    file = tmp_path / "samples.parquet"
    write_samples(file, [sample, make_sample(1)])
    read = read_samples(file)
    assert [list(sample.turn_characters) for sample in read] == [[2, 2, 1], []]
    assert [list(sample.turn_rewards) for sample in read] == [[0.0, 0.5], []]
    # Without it, nobody can compute the response again.
    assert pq.read_table(file)["conversations"].to_pylist() == [[0, 0, 1], None]


def test_columns_are_the_fields_of_a_sample_and_typed_also_without_values(tmp_path):
    file = tmp_path / "samples.parquet"
    types = {name: kind_of(name) for name in COLUMNS}
    for samples in ([make_sample()], []):
        write_samples(file, samples)
        schema = pq.read_schema(file)
        assert dict(zip(schema.names, schema.types)) == types
        assert same(read_samples(file), samples)


def test_unpaired_surrogates_become_question_marks(tmp_path):
    file = tmp_path / "samples.parquet"
    write_samples(file, [make_sample(response="a\ud800b", question="\udfff")])
    (found,) = read_samples(file)
    assert (found.response, found.question) == ("a?b", "?")


def changed(name, values):
    def change(table):
        table = table.drop_columns(name)
        return table if values is None else table.append_column(name, values)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed("response", None), "no column 'response'"),
        (changed("correct", pa.array(["yes", "no", "no"])), "'correct' is of string, but must be"),
        (changed("score", pa.array([None, 0.5, 1.0])), "row 0 has no 'score'"),
        (changed("benchmark", pa.array(["a", "b", None])), "row 2 has no 'benchmark'"),
        (
            lambda table: table.append_column("metrics/x", pa.array(["1", "2", "high"])),
            "'metrics/x' is of string, but must be of double",
        ),
        (
            lambda table: table.append_column("score", pa.array([1.0, 2.0, 3.0])),
            "more than one column 'score'",
        ),
    ],
)
def test_a_file_with_other_columns_is_refused(tmp_path, change, message):
    file = tmp_path / "samples.parquet"
    write_samples(file, SAMPLES)
    pq.write_table(change(pq.read_table(file)), file)
    with pytest.raises(UserError, match=f"samples.parquet.*{message}"):
        read_samples(file)
