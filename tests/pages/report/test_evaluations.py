"""Finished results of evaluations, collected without a policy."""

import csv

import ml_collections
import pytest

from semrl_jax.evaluation.scores import lengths, majority, pass_at_k, reflection, repetition
from semrl_jax.pages.report import evaluations, page, reading, several_runs
from semrl_jax.support.errors import UserError
from semrl_jax.support.safe_files import write_json
from tests.cases import refused
from tests.evaluation.making import make_sample, results_of
from tests.pages.report.making import make_run

SCORES = [pass_at_k, majority, lengths, repetition, reflection]
OPTIONS = ml_collections.ConfigDict({"k": (1, 2), "n": 2})


def make_results(directory, policy, right, benchmarks=("math", "sums")):
    """Results on benchmarks of two problems, of which the first `right` are solved."""
    samples = [
        make_sample(p, s, p < right, benchmark=name, num_tokens=10 + 10 * p, extracted="1",
                    response="Wait, no." if s else "Yes.", boxed=p == 0)
        for name in benchmarks for p in range(2) for s in range(2)
    ]  # fmt: skip
    directory.mkdir(parents=True)
    write_json(directory / "results.json", results_of(samples, SCORES, OPTIONS))
    write_json(directory / "evaluation.json", {"policy": policy} if policy else {})


@pytest.fixture
def results(tmp_path):
    """Two steps of a run in one evaluation, a later step in another, and a model."""
    for step in (0, 20):
        make_results(tmp_path / "all/early" / f"a-step{step}", f"a-step{step}", step // 20)
    make_results(tmp_path / "all/late", "a-step40", 2)
    make_results(tmp_path / "all/early/model", "", 1, ["math"])  # of an earlier release
    return tmp_path / "all"


def test_the_table_has_a_row_per_policy_and_benchmark(results):
    several_runs.write_csv(results / "found.csv", reading.read_runs([results]))
    with open(results / "found.csv") as file:
        rows = list(csv.DictReader(file))
    benchmarks = ["math", "sums", "average"]
    places = [("a", str(step), name) for step in (0, 20, 40) for name in benchmarks]
    expected = [*places, ("early/model", "0", "math")]
    assert [(row["run"], row["step"], row["benchmark"]) for row in rows] == expected
    row = rows[3]  # one of two problems is solved
    figures = {
        "num_problems": "2", "num_samples": "2", "pass@1": "0.5", "pass@2": "0.5", "maj@2": "0.5",
        "responses/mean_length": "15.0", "responses/mean_length_correct": "10.0",
        "responses/mean_length_wrong": "20.0", "responses/mean_length_finished": "15.0",
        "responses/boxed_fraction": "0.5", "responses/truncated_fraction": "0.0",
        "responses/repeated_ngrams": "0.0", "responses/reflection_fraction": "0.5",
        "responses/reflection_words": "0.5",
    }  # fmt: skip
    assert figures.items() <= row.items()
    assert float(row["pass@1_stderr"]) == pytest.approx(0.5 / 2**0.5)
    assert rows[0]["responses/mean_length_correct"] == ""  # no response is correct
    assert rows[-1]["num_benchmarks"] == ""


def test_the_page_has_the_figures_over_steps(results, config, tmp_path):
    logs = reading.read_runs([results])
    assert [log.name for log in logs] == ["a", "model"]
    found = page.figures(logs)
    of_run, _ = found["runs"]
    assert of_run["steps"] == [0, 20, 40]
    assert of_run["series"]["eval/math/pass@1"] == [0.0, 0.5, 1.0]
    assert of_run["series"]["eval/math/responses/mean_length_correct"] == [None, 10.0, 15.0]
    titles = {panel["title"]: dict(panel["keys"]) for panel in found["panels"]}
    length = {f"eval/{name}/responses/mean_length_correct": name for name in ("math", "sums")}
    of_average = {"eval/average/responses/mean_length_wrong": "average"}
    assert length.items() <= titles["Mean length of correct responses"].items()
    assert of_average.items() <= titles["Mean length of wrong responses"].items()
    assert {"Accuracy", "Mean length", "Mean length of responses that end", "Boxed responses",
            "Words of reflection"} <= titles.keys()  # fmt: skip
    assert found["settings"] == [["policy", None, '"a"', '"early/model"']]
    assert found["variants"] == ["policy=a", "policy=early/model"]
    # With a run, all settings are shown; one table cannot hold both.
    run = make_run(tmp_path / "run", config)
    logs = reading.read_runs([run, results])
    assert len(page.figures(logs)["settings"]) > 100
    with pytest.raises(UserError, match="--csv takes runs or results, not both; leave out run"):
        several_runs.write_csv(tmp_path / "rows.csv", logs)


def test_results_that_are_there_twice_or_damaged_are_named(results):
    make_results(results / "again", "a-step20", 2, ["sums"])
    with pytest.raises(UserError, match=r"have results of 'a', step 20, on 'sums'; name a directo"):
        evaluations.find_evaluated(results)
    write_json(results / "again/results.json", {"other": [1]})
    refused(r"again/results\.json has no results of 'other'", evaluations.find_evaluated, results)
    (results / "again/evaluation.json").unlink()  # the file is of another program
    assert len(evaluations.find_evaluated(results)) == 4
