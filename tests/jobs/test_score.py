"""Grading of responses that are in a file."""

import io
import json
import pickle

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from semrl_jax.jobs.score import Fields, Tally, _batches, check_file, check_rows, score
from semrl_jax.rewards import Verdict, VerifierPool
from semrl_jax.support.errors import UserError
from tests.cases import refused

ROWS = [
    {"response": r"\boxed{4}", "reference": "4", "benchmark": "a", "score": 0.5, "n": 1},
    {"response": r"\boxed{4}<|im_end|> \boxed{5}", "reference": 4, "benchmark": "b", "score": 0.5},
    {"response": r"\boxed{5}", "reference": 4.0, "benchmark": "b", "score": 0.5, "n": None},
]


def write(path, rows):
    if path.suffix == ".parquet":
        rows = [row | {"reference": str(row.get("reference"))} for row in rows]
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def read(path):
    if path.suffix == ".parquet":
        return pq.read_table(path).to_pylist()
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def pool():
    with VerifierPool(num_workers=1, function="math") as pool:
        yield pool


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_rows_are_kept_and_get_verdicts(tmp_path, pool, suffix, monkeypatch, capsys):
    monkeypatch.setattr("semrl_jax.jobs.score._ROWS", 2)  # two batches
    rows = ROWS if suffix == ".jsonl" else [row | {"reference": "4"} for row in ROWS]
    file, output = write(tmp_path / f"in{suffix}", rows), tmp_path / "deep" / f"out{suffix}"
    tally = score(file, output, pool, Fields())
    found = read(output)
    assert [row["correct"] for row in found] == [True, True, False]
    assert [row["extracted"] for row in found] == ["4", "4", "5"]
    assert [row["score"] for row in found] == [1.0, 1.0, -0.5]  # replaced
    assert [row["verifier_error"] for row in found] == ["", "", ""]
    for old, new in zip(rows, found):
        kept = {name: value for name, value in old.items() if name != "score"}
        assert new.items() >= kept.items()
    cells = [list(column.cells) for column in tally.table().columns]
    assert list(zip(*cells)) == [
        ("a", "1", "1 (100.00%)", "1.0000", "none"),
        ("b", "2", "1 (50.00%)", "0.2500", "none"),
        ("all", "3", "2 (66.67%)", "0.5000", "none"),
    ]
    assert "has 3 graded responses" in capsys.readouterr().out
    prefixed = tmp_path / f"again{suffix}"
    score(file, prefixed, pool, Fields(prefix="math_", group="n"))
    assert [(r["score"], r["math_correct"]) for r in read(prefixed)] == [
        (0.5, True), (0.5, True), (0.5, False),
    ]  # fmt: skip


def test_a_tally_of_many_rows_is_small():
    tally = Tally()
    for number in range(10_000):
        tally.add("ab"[number % 2], Verdict(0.5 * (number % 4), number % 4 == 3, False, None))
    assert len(tally) == 10_000 and len(pickle.dumps(vars(tally))) < 1000
    cells = [list(column.cells) for column in tally.table().columns]
    assert list(zip(*cells)) == [
        ("a", "5000", "0 (0.00%)", "0.5000", "none"),
        ("b", "5000", "2500 (50.00%)", "1.0000", "none"),
        ("all", "10000", "2500 (25.00%)", "0.7500", "none"),
    ]


def test_a_group_may_have_any_name():
    tally, out = Tally(), io.StringIO()
    for group in ("[easy]", "[/hard]", ""):
        tally.add(group, Verdict(1.0, True, False, None))
    Console(file=out, width=100).print(tally.table())
    assert all(group in out.getvalue() for group in ("[easy]", "[/hard]"))


def test_a_reference_in_float32_has_its_own_digits(tmp_path):
    table = pa.table({"response": ["1"], "reference": pa.array([0.1], pa.float32())})
    pq.write_table(table, tmp_path / "in.parquet")
    (batch,) = _batches(tmp_path / "in.parquet", Fields(), False)
    assert batch.samples[0].reference == "0.1"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 2: not valid JSON"),
        ('{"response": "1"}', "line 2: field 'reference' is missing; the row has ['response']"),
        ('{"reference": "1"}', "line 2: field 'response' is missing"),
        ('{"response": 1, "reference": "1"}', "line 2: field 'response' must be text, not 1"),
        ('{"response": "1", "reference": [1]}', "line 2: field 'reference' must be text or a fin"),
        ('{"response": "1", "reference": null}', "line 2: field 'reference' must be text or a fi"),
    ],
)
def test_a_bad_row_is_named_and_nothing_is_written(tmp_path, pool, line, message):
    file = write(tmp_path / "in.jsonl", ROWS[:1])
    file.write_text(f"{file.read_text()}{line}\n")
    assert message in refused(".", score, file, tmp_path / "out.jsonl", pool, Fields())
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_a_bad_file_is_named(tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "bad.parquet").write_text("PAR1")
    for name, message in (
        ("missing.jsonl", "does not exist"),
        ("empty.jsonl", "has no rows"),
        ("bad.parquet", "cannot be read as Parquet"),
    ):
        with pytest.raises(UserError, match=message):
            check_file(tmp_path / name)
            check_rows(tmp_path / name, Fields(), takes_row=False)
    file = write(tmp_path / "in.parquet", ROWS)
    with pytest.raises(UserError, match=r"row 1: field 'text' is missing; the row has \['bench"):
        check_rows(file, Fields(response="text"), takes_row=False)


NO_OBJECT = "line 2: field 'row' must be a JSON object, not "


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("null", NO_OBJECT + "'null'; name another by --row"),
        ("[1]", NO_OBJECT),
        ("{", NO_OBJECT),
        ("[" * 100_000, NO_OBJECT),
        (7, NO_OBJECT + "'7'"),
        ([{"bonus": 1}], NO_OBJECT),
        ({"bonus": "x" * 1_000_000}, "line 2: the row of the prompt has more than 1000000 char"),
    ],
)
def test_a_row_that_is_no_object_is_named_before_grading(tmp_path, row, message):
    good = {"response": "1", "reference": "4", "row": json.dumps({"bonus": 1.0})}
    file = write(tmp_path / "in.jsonl", [good, good | {"row": row}])
    text = refused(".", check_rows, file, Fields(), takes_row=True)
    assert message in text and len(text) < 400
    check_rows(file, Fields(), takes_row=False)  # another verifier does not read it
    write(file, [good, good | {"row": None}, good | {"row": ""}, good | {"row": {"bonus": 1}}])
    check_rows(file, Fields(), takes_row=True)


@pytest.mark.parametrize("has_row", [True, False])
def test_a_verifier_gets_the_row_of_the_prompt(tmp_path, has_row):
    prompt = {"bonus": 10.0, "solvable": True}
    row = {"response": "123<|im_end|>", "reference": "4"}
    row |= {"row": json.dumps(prompt)} if has_row else prompt
    with VerifierPool(num_workers=1, function="tests.verifiers:by_row") as pool:
        score(write(tmp_path / "in.jsonl", [row]), tmp_path / "out.jsonl", pool, Fields())
    (found,) = read(tmp_path / "out.jsonl")
    assert (found["score"], found["correct"]) == (13.0, True)  # 3 characters
