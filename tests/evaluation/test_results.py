"""Results, tables and comparisons of policies."""

import io
import json
import math

import ml_collections
import numpy as np
import pytest
from rich.console import Console

from semrl_jax.evaluation import comparison, results
from semrl_jax.evaluation.samples import NOT_SAMPLED
from semrl_jax.evaluation.scores import best_of_k, lengths, mean_at_n, pass_at_k, types
from semrl_jax.support.errors import UserError
from semrl_jax.support.safe_files import write_json
from tests.evaluation.making import make_sample, results_of

OPTIONS = ml_collections.ConfigDict({"n": 2, "k": (1, 2)})
SCORES = (pass_at_k, mean_at_n, lengths, types, best_of_k)


def samples_of(table, benchmark="sums", **fields):
    return [
        make_sample(p, s, bool(correct), benchmark=benchmark, **fields)
        for p, row in enumerate(table)
        for s, correct in enumerate(row)
    ]


def text_of(table):
    out = io.StringIO()
    Console(file=out, width=240).print(table)
    return out.getvalue()


def simulated(accuracy, seed=0, num_problems=200, **fields):
    random = np.random.default_rng(seed)
    return samples_of(random.random((num_problems, 2)) < accuracy, **fields)


def test_results_have_figures_intervals_and_sizes(tmp_path):
    samples = samples_of([[1, 0], [0, 0]], mean_logprob=-0.5)
    samples += [make_sample(2, s, finish_reason=NOT_SAMPLED, num_tokens=0) for s in range(2)]
    found = results_of(samples, SCORES, OPTIONS)
    assert list(found) == ["sums"]
    row = found["sums"]
    assert (row["pass@1"], row["pass@2"]) == pytest.approx((1 / 6, 1 / 3))
    assert row["pass@2_stderr"] == pytest.approx(math.sqrt(2 / 9 / 3))
    assert row["pass@2_interval"] == [0.0, 1.0]  # at three problems anything is possible
    sizes = {name: row[name] for name in results.SIZES if name in row}
    assert sizes == {"num_problems": 3, "num_samples": 2, "num_not_sampled": 1}
    assert row["responses/mean_length"] == 3.0 and row["responses/mean_length_correct"] == 3.0
    write_json(tmp_path / "results.json", found)
    text = (tmp_path / "results.json").read_text()
    assert json.loads(text) == found and "NaN" not in text


def test_a_figure_without_a_response_is_null():
    row = results_of(samples_of([[0, 0]]), SCORES, OPTIONS)["sums"]
    assert row["responses/mean_length_correct"] is None
    assert row["responses/mean_length_correct_interval"] == [None, None]
    both = samples_of([[0, 0]]) + samples_of([[0, 0]], benchmark="b")
    average = results_of(both, SCORES, OPTIONS)["average"]
    assert "responses/mean_length_correct" not in results.names_of({"average": average})


def test_averages_are_over_benchmarks_and_groups():
    samples = (
        simulated(0.2, 0, num_problems=50)
        + simulated(0.6, 1, benchmark="b", problem_type="Algebra")
        + simulated(0.9, 2, benchmark="c")
    )
    found = results_of(
        samples, SCORES, OPTIONS, {"hard": ("sums", "b"), "part": ("sums", "b", "not evaluated")}
    )
    assert list(found) == ["sums", "b", "c", "average", "average/hard"]
    three = [found[name]["pass@1"] for name in ("sums", "b", "c")]
    assert found["average"]["pass@1"] == pytest.approx(np.mean(three))
    assert found["average/hard"]["pass@1"] == pytest.approx(np.mean(three[:2]))
    assert found["average/hard"]["num_problems"] == 250
    assert found["average/hard"]["num_benchmarks"] == 2
    assert "accuracy/Algebra" in found["b"] and "accuracy/Algebra" not in found["average"]
    # The benchmarks are independent: the error of their mean is as that of independent numbers.
    error = math.hypot(*(found[name]["pass@1_stderr"] for name in ("sums", "b", "c"))) / 3
    assert found["average"]["pass@1_stderr"] == pytest.approx(error)
    low, high = found["average"]["pass@1_interval"]
    np.testing.assert_allclose((high - low) / 2, 1.96 * error, rtol=0.1)  # 2000 draws: 3 %


def test_one_benchmark_has_no_average():
    found = results_of(samples_of([[1, 0]]), SCORES, OPTIONS, {"alone": ("sums",)})
    assert list(found) == ["sums"]


def test_benchmarks_may_have_options_of_their_own():
    samples = samples_of([[1, 0, 0, 1]]) + samples_of([[1]], "one")
    options = {
        "sums": ml_collections.ConfigDict({"n": 4, "k": (1, 4)}),
        "one": ml_collections.ConfigDict({"n": 1, "k": (1,)}),
    }
    found = results.as_results(results.evaluate(samples, SCORES, OPTIONS, own=options))
    assert found["sums"]["pass@4"] == found["one"]["pass@1"] == 1
    assert "pass@4" not in found["one"] and "pass@2" not in found["sums"]
    assert found["average"]["pass@1"] == 0.75


def test_wrong_samples_are_refused():
    with pytest.raises(UserError, match="problem 0: sample 1 is there twice"):
        results_of([*samples_of([[1, 0]]), make_sample(0, 1)], SCORES, OPTIONS)
    with pytest.raises(UserError, match="a benchmark has the name 'average'"):
        results_of(samples_of([[1, 0]], "average"), SCORES, OPTIONS)
    with pytest.raises(UserError, match=r"evaluation.k=2 must be from 1 to the 1 samples"):
        results_of(samples_of([[1]]), SCORES, OPTIONS)


def test_tables_have_percent_intervals_and_sizes():
    samples = simulated(0.5, benchmark="[red]b", mean_logprob=-0.5)
    found = results_of(samples, SCORES, OPTIONS)
    row = found["[red]b"]
    text = text_of(results.results_table(found))
    low, high = row["pass@1_interval"]
    assert f"{100 * row['pass@1']:.1f} ±{50 * (high - low):.1f}" in text
    assert "[red]b" in text and "200 x 2" in text and "mean length" in text
    order = ("pass@1", "pass@2", "mean length", "truncated")
    assert "any@2" not in text and "mean@2" not in text  # equal to pass@2 and pass@1
    places = [text.index(f" {name} ") for name in order]
    assert places == sorted(places)
    assert "rule of three" not in text
    alike = text_of(
        results.results_table(results_of(samples_of([[0, 0], [0, 0]]), SCORES, OPTIONS))
    )
    assert "0.0 ±0.0" in alike and "rule of three" in alike
    # Equal log-probabilities choose as chance does.
    found = results_of(samples, SCORES, OPTIONS)
    chosen = text_of(results.selection_table(found))
    assert "mean_logprob" in chosen and "(+0.0 ±0.0)" in chosen
    assert results.selection_table(results_of(samples, [pass_at_k], OPTIONS)) is None


def evaluated(*samples):
    return results.evaluate([s for part in samples for s in part], [pass_at_k, mean_at_n], OPTIONS)


def test_comparison_with_the_first_policy():
    one = evaluated(simulated(0.3), simulated(0.5, 1, benchmark="b"))
    other = evaluated(simulated(0.6, 7), simulated(0.5, 1, benchmark="b"))
    found = comparison.compare({"base": one, "trained": other})
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["first"] == "base" and list(found["differences"]) == ["trained"]
    differences = found["differences"]["trained"]
    row = differences["sums"]["pass@1"]
    assert row["difference"] == pytest.approx(
        found["results"]["trained"]["sums"]["pass@1"] - found["results"]["base"]["sums"]["pass@1"]
    )
    assert row["interval"][0] > 0.15 and row["share_above"] == 1.0
    # The same samples: paired draws do not differ.
    assert differences["b"]["pass@1"] == {
        "difference": 0.0, "interval": [0.0, 0.0], "share_above": 0.0
    }  # fmt: skip
    assert differences["average"]["pass@1"]["difference"] == pytest.approx(row["difference"] / 2)
    text = text_of(comparison.comparison_table(found))
    half = 50 * (row["interval"][1] - row["interval"][0])
    assert f"({100 * row['difference']:+.1f} ±{half:.1f})" in text and "200 x 2" in text


def test_supports_count_the_problems_that_policies_solve():
    first = samples_of([[1, 0], [1, 1], [0, 0], [0, 0], [0, 1]])
    other = samples_of([[1, 1], [0, 0], [0, 1], [0, 0], [0, 1]])
    greedy = samples_of([[1], [0]], benchmark="greedy")
    given = {"a": [*first, *greedy], "b": [*other, *greedy], "c": first}
    found = comparison.supports(given)
    b = found["b"].pop("sums")
    assert b[:4] == (2, 1, 1, 1)
    assert b[4:9] == pytest.approx((2 / 3, 1 / 3, 0.0, (1 - 2 + 0) / 10, 1 / 10))
    assert (b.gained, b.lost) == ((2,), (1,))
    assert "-10.0 points" in b.sentence and "+10.0 from the others" in b.sentence
    c = found["c"].pop("sums")
    assert c[:4] == (3, 0, 0, 2) and c[4:] == (1.0, 0.0, 0.0, 0.0, 0.0, (), ())
    assert found == {"b": {}, "c": {}}
    unsolved = comparison.supports({"a": samples_of([[0, 0]]), "b": samples_of([[0, 0]])})
    assert unsolved["b"]["sums"][:7] == (0, 0, 0, 1, None, None, None)
    more = {"a": first, "b": samples_of([[1, 0, 1]] * 5)}
    assert comparison.supports(more) == {"b": {}}  # 2 and 3 responses


def test_other_problems_are_not_compared():
    one, other = evaluated(simulated(0.5)), evaluated(simulated(0.5, num_problems=199))
    with pytest.raises(UserError, match="'b' and 'a' were evaluated on different problems"):
        comparison.compare({"a": one, "b": other})
    # Benchmarks that only one policy has, and averages over different benchmarks, are left out.
    more = evaluated(simulated(0.5), simulated(0.5, benchmark="b"))
    assert list(comparison.compare({"a": one, "b": more})["differences"]["b"]) == ["sums"]
    with pytest.raises(UserError, match="at least one policy"):
        comparison.compare({})


def test_curves_are_a_panel_per_benchmark_with_bands(tmp_path):
    steps = {
        step: results_of(
            simulated(0.3 + step / 100, step)
            + simulated(0.5, step, benchmark="a$b", num_problems=30),
            [pass_at_k],
            OPTIONS,
        )
        for step in (20, 0, 40)
    }
    figure = comparison.draw_curves({"run": steps})
    panels = figure.axes
    assert len(panels) == 3 and "(200 x 2)" in panels[0].get_title(loc="left")
    lines = panels[0].get_lines()
    assert [line.get_label() for line in lines] == ["pass@1", "pass@2"]
    assert lines[0].get_xdata().tolist() == [0, 20, 40]
    np.testing.assert_allclose(
        lines[0].get_ydata(), [100 * steps[step]["sums"]["pass@1"] for step in (0, 20, 40)]
    )
    assert len(panels[0].collections) == 2  # bands
    several = comparison.draw_curves({"grpo": steps, "verl": steps})
    assert [line.get_label() for line in several.axes[0].get_lines()] == ["grpo", "verl"]
    comparison.write_curves(tmp_path / "curves.png", {"run": steps})
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
