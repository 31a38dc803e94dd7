"""The comparison of algorithms: its runs, its statistics and its page."""

import importlib
import itertools

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from benchmarks import algorithm_report as report
from benchmarks import algorithms
from benchmarks.pass_at_k import pass_at_k
from semrl_jax.runs import validate
from semrl_jax.support.errors import UserError
from semrl_jax.support.safe_files import write_json

PROBLEMS = 6


@pytest.mark.parametrize("correct", [0, 1, 3, 8])
@pytest.mark.parametrize("k", [1, 2, 8])
def test_pass_at_k_is_the_mean_over_all_choices_of_k_samples(correct, k):
    samples = np.arange(8) < correct
    found = [samples[list(chosen)].any() for chosen in itertools.combinations(range(8), k)]
    assert pass_at_k(8, correct, k) == pytest.approx(np.mean(found))


def write_run(output, variant, seed, correct):
    """A finished run in which `correct` is bool [problems, 1 + 8], greedy first."""
    run = output / f"seed{seed}" / variant
    (run / "rollouts").mkdir(parents=True)
    problem, sample = np.indices(correct.shape)
    # Responses of the greedy score come first, as in a run.
    order = np.argsort(sample.ravel() > 0, kind="stable")
    columns = {"group_id": problem, "sample_index": sample, "correct": correct}
    table = pa.table({name: values.ravel()[order] for name, values in columns.items()})
    pq.write_table(table, run / "rollouts" / "eval_000040.parquet")
    # Earlier evaluations have only greedy responses; the first is before any step.
    for step, value in ((0, True), (5, False)):
        greedy = table.slice(0, len(correct)).set_column(2, "correct", [[value] * len(correct)])
        pq.write_table(greedy, run / "rollouts" / f"eval_{step:06d}.parquet")
    rows = [f'{{"step": {step}, "{report.ACCURACY}": {step / 100}}}\n' for step in (0, 5, 40)]
    (run / "metrics.jsonl").write_text("".join(rows) + '{"step": 39, "policy/loss": 1.0}\n')
    record = {"title": variant.upper(), "seed": seed, "machine": "a machine"}
    write_json(run / report.RESULT, record)


def test_scores_of_a_run_are_read_by_problem(tmp_path):
    correct = np.zeros((PROBLEMS, 9), bool)
    correct[0, 0] = correct[1, 1] = True
    correct[2, 1:] = True
    write_run(tmp_path, "grpo", 3, correct)
    found = report.read_results(tmp_path, "grpo")
    assert found.seeds == (3,) and found.curves == [{0: 0.0, 5: 0.05, 40: 0.4}]
    np.testing.assert_array_equal(found.scores["greedy"], [[1, 0, 0, 0, 0, 0]])
    np.testing.assert_array_equal(found.scores["steps"], [[0.5, 0, 0, 0, 0, 0]])
    np.testing.assert_array_equal(found.scores[1], [[0, 1 / 8, 1, 0, 0, 0]])
    np.testing.assert_array_equal(found.scores[8], [[0, 1, 1, 0, 0, 0]])
    assert report.read_results(tmp_path, "ppo") is None


def test_the_interval_has_the_spread_of_a_mean_over_seeds_and_problems():
    random = np.random.default_rng(0)
    mean, low, high = report.interval(np.full((3, 4), 0.25))
    assert (mean, low, high) == (0.25, 0.25, 0.25)
    # The variance of the crossed bootstrap is that of both factors: here seeds only, then problems.
    for values in (np.repeat(random.normal(size=(40, 1)), 2, 1), random.normal(size=(1, 100))):
        mean, low, high = report.interval(values)
        deviation = values.std() / np.sqrt(np.unique(values).size)
        # 3 %: the noise of a quantile of 10,000 draws; below 40 values, 1.96 is not exact either.
        np.testing.assert_allclose(
            (low, high), mean + np.array([-1.96, 1.96]) * deviation, atol=0.03
        )


def test_differences_are_paired_by_seed_and_problem(tmp_path):
    random = np.random.default_rng(0)
    for seed in range(4):
        base = random.random((PROBLEMS, 9)) < 0.5
        base[:, 0] = np.arange(PROBLEMS) == seed
        write_run(tmp_path, "grpo", seed, base)
        if seed:  # the variant has no run of seed 0
            write_run(tmp_path, "rloo", seed, base | (np.arange(9) == 0))
    results = {name: report.read_results(tmp_path, name) for name in ("grpo", "rloo")}
    found = report.differences(results["rloo"], results["grpo"], "greedy")
    np.testing.assert_array_equal(found, 1 - results["grpo"].scores["greedy"][1:])
    assert not report.differences(results["rloo"], results["grpo"], 8).any()
    text = report.conclusion(results)
    assert "- greedy accuracy: RLOO above." in text and "- pass@8: no variant." in text
    two = {name: one._replace(seeds=one.seeds[:2]) for name, one in results.items()}
    assert "RLOO" not in report.conclusion(two)  # they share the seed 1 alone


def test_the_page_has_a_row_per_variant_with_runs(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "DOCS", tmp_path / "docs")
    (tmp_path / "docs" / "figures").mkdir(parents=True)
    with pytest.raises(UserError, match="no finished run of GRPO"):
        report.write(tmp_path, ["grpo"])
    for variant in (report.START, "grpo"):
        write_run(tmp_path, variant, 0, np.ones((PROBLEMS, 9), bool))
    report.write(tmp_path, ["grpo", "rloo"])
    page = (tmp_path / "docs" / "algorithm_study.md").read_text()
    assert "| GRPO | 1 | 50.0 (50.0 to 50.0) |  | 100.0 (100.0 to 100.0) |" in page
    assert "| START | 1 |" in page
    assert "RLOO" not in page and "- a machine" in page
    assert (tmp_path / "docs" / report.FIGURE).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", algorithms.VARIANTS)
def test_the_settings_of_every_variant_are_valid(name):
    variant = algorithms.VARIANTS[name]
    algorithms.check_config(variant)
    config = importlib.import_module(f"configs.{variant.config}").get_config()
    config.update_from_flattened_dict(algorithms.COMMON | variant.settings)
    validate(config)
    if name == "dr_grpo":
        assert config.algorithms.constant_length == config.rollout.max_response_tokens


def test_a_finished_run_is_not_repeated_and_a_failed_one_names_its_log(tmp_path, capsys):
    run = tmp_path / "seed0" / "grpo"
    run.mkdir(parents=True)
    touch, fail = ["touch", str(run / "made")], ["false"]
    with pytest.raises(SystemExit, match=r"false ended with status 1; see .*grpo.log"):
        algorithms.finish([touch, fail], run, {})
    assert (run / "made").exists() and not (run / report.RESULT).exists()
    algorithms.finish([touch], run, {"seed": 0})
    algorithms.finish([fail], run, {})  # not run: the result exists
    assert capsys.readouterr().out.count(str(run)) == 2


def test_a_missing_config_is_a_users_mistake():
    with pytest.raises(UserError, match=r"configs/none\.py, for X, is missing"):
        algorithms.check_config(algorithms.Variant("X", {}, "none"))
    with pytest.raises(UserError, match=r"samples 384 responses per step; all .* sample 256"):
        algorithms.check_config(algorithms.Variant("X", {}, "default"))
