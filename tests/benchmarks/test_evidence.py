"""The studies of docs/evidence.md: controls and defects of the shaping, tasks, statistics."""

import collections
import importlib
import itertools
import json
import math
import re
import types

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from ml_collections import ConfigDict

from benchmarks.evidence import __main__ as evidence
from benchmarks.evidence import formats, gcd, results, studies
from benchmarks.evidence.controls import INDICATORS, OF_PAPER, probe
from benchmarks.evidence.defects import last_token, late, zero_start
from semrl_jax.algorithms import credit
from semrl_jax.data import procedural
from semrl_jax.data.tokenizer import CHARACTERS
from semrl_jax.metrics import Measurement, MetricKey
from semrl_jax.runs.config_checks import check_sections
from semrl_jax.runs.lifecycle import DONE
from semrl_jax.shaping import init_shaping_state
from semrl_jax.shaping.options import ShapingOptions
from tests.cases import refused
from tests.training.probes.test_probes import SEEN

VALID = np.array([True, True, True, False])


@pytest.fixture(scope="module")
def found():
    metrics = {
        MetricKey.parse(name): Measurement(np.arange(4.0) + 10 * i, VALID | (i == 2))
        for i, name in enumerate(OF_PAPER)
    }
    seen = SEEN.with_metrics(metrics)
    tools = types.SimpleNamespace(config=ConfigDict({"rollout": {"group_size": 2}}))
    steps = [probe(tools).before(seen._replace(step=step)).scored.metrics for step in range(20)]
    return {name: [step[MetricKey.parse(name)] for step in steps] for name in INDICATORS}


def test_shuffled_values_are_a_joint_permutation(found):
    orders = set()
    for of_step in zip(*(found[f"shuffled_{name}"] for name in OF_PAPER)):
        sources = [tuple(each.value - 10 * i) for i, each in enumerate(of_step)]
        assert len(set(sources)) == 1 and sorted(sources[0]) == [0, 1, 2, 3]
        assert sources[0][3] == 3  # it lacks two of the metrics, and keeps what it has
        assert [each.valid.tolist() for each in of_step] == [VALID.tolist()] * 2 + [[True] * 4]
        orders.add(sources[0])
    assert len(orders) == 6  # all permutations of three come


def test_drawn_values_are_of_the_step_and_independent(found):
    drawn = [np.array([each.value for each in found[f"drawn_{name}"]]) for name in OF_PAPER]
    assert all(set(np.unique(each[:, :3])) == {10 * i, 10 * i + 1, 10 * i + 2}
               for i, each in enumerate(drawn))  # fmt: skip
    assert any(len(set(row)) < 3 for row in drawn[0][:, :3])  # with replacement
    assert (drawn[0] != drawn[1] - 10).any() and (drawn[0][:, 3] == 3).all()


def test_the_length_is_that_of_sampled_tokens(found):
    assert [each.value.tolist() for each in found["length"]] == [[2.0] * 4] * 20


def test_rows_of_others_and_rounded_values(found):
    name = OF_PAPER[2]  # values 20, 21, 22, 23; two groups of two
    assert found[f"rows_{name}"][0].value.tolist() == [20, 21, 21, 22]
    assert found[f"bfloat16_{name}"][0].value.tolist() == [20, 21, 22, 23]
    assert found[f"bfloat16_{name}"][0].value.dtype == np.float32


@pytest.fixture
def patched(monkeypatch):
    """Runs the steps of a defect's shaping as training does; the functions come back after."""
    for name in ("shape_advantages", "update_shaping_state"):
        monkeypatch.setattr(credit, name, getattr(credit, name))

    def baselines(defect, means):
        defect.probe(None)
        state, seen = init_shaping_state(), []
        for mean in means:
            metrics = {
                MetricKey.parse(name): Measurement(np.full(2, mean), np.ones(2, bool))
                for name in OF_PAPER
            }
            options = vars(ShapingOptions(alpha=0.25))
            state = credit.update_shaping_state(state, metrics, **options)
            seen.append(float(state.baseline[0]))
        return seen

    return baselines


def test_a_zero_start_counts_the_first_mean_by_alpha(patched):
    assert patched(zero_start, [8.0, 8.0]) == [2.0, 3.5]


def test_late_baselines_miss_the_newest_mean(patched):
    assert patched(late, [8.0, 4.0, 0.0]) == [0.0, 8.0, 7.0]


def test_a_bonus_on_the_last_token_alone(patched):
    last_token.probe(None)
    metrics = {
        MetricKey.parse(name): Measurement(np.array([9.0, 9.0]), np.ones(2, bool))
        for name in OF_PAPER
    }
    state = init_shaping_state()._replace(
        baseline=np.full(3, 4.0, np.float32), baseline_set=np.ones(3, bool), num_updates=np.int32(1)
    )
    mask = np.array([[True, True, True], [True, True, False]])
    shaped, _ = credit.shape_advantages(
        np.ones((2, 3)), metrics, mask, state, **vars(ShapingOptions())
    )
    assert (np.asarray(shaped) > 1).tolist() == [[False, False, True], [False, True, False]]


@pytest.mark.parametrize("way", formats.WAYS)
def test_each_way_is_right_if_no_carry_is_forgotten(way):
    rng = np.random.default_rng(1)
    wrong = 0
    for _ in range(200):
        numbers = formats.problem(rng)
        worked, result = way(numbers, lambda: False)
        assert result == sum(numbers) and set(worked) <= set(CHARACTERS)
        assert formats.way_of(worked) == way.__name__
        wrong += way(numbers, lambda: True)[1] != result
    assert wrong > 100  # and forgetting makes most sums wrong


@pytest.mark.parametrize("way", gcd.WAYS)
def test_each_way_finds_the_greatest_common_divisor(way):
    numbers = range(2, 61)
    for a, b in itertools.product(numbers, numbers):
        worked, result = way(a, b)
        assert result == math.gcd(a, b)
        assert gcd.way_of(worked) == gcd.way_of(worked.replace("=", " =", 1)) == way.__name__
        for step in worked.rstrip(";").split(";"):
            if way is gcd.divisors:
                number, found = step.split(":")
                assert all(int(number) % int(each) == 0 for each in found.split(","))
            else:
                left, right = step.split("=")
                assert eval(left) == (eval(right) if right else result), step


def test_demonstrations_of_gcd_are_right_and_not_held_out(tmp_path):
    gcd.write(tmp_path)
    lines = (tmp_path / "demonstrations.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert len(rows) == gcd.NUM_DEMONSTRATIONS
    for row in rows[:64]:
        a, b = map(int, re.findall(r"\d+", row["prompt"]))
        assert row["completion"].endswith(f"\\boxed{{{math.gcd(a, b)}}}")
    entries = procedural.sources(studies.STUDIES["gcd"].settings["data.reasoning_gym"])
    held_out = procedural.held_out_problems(entries, gcd.NUM_TEST)
    assert not {problem.question for problem in held_out} & {row["prompt"] for row in rows}
    ways = collections.Counter(gcd.way_of(row["completion"]) for row in rows)
    # A third of 640, and three binomial deviations of 12; the seed is fixed.
    assert all(177 < ways[way.__name__] < 250 for way in gcd.WAYS)


@pytest.mark.parametrize("name", studies.STUDIES)
def test_every_variant_is_a_valid_config(name):
    study = studies.STUDIES[name]
    for settings in study.variants.values():
        config = importlib.import_module(f"configs.{study.config}").get_config()
        fields = study.settings | settings | {"training.num_steps": study.num_steps}
        config.update_from_flattened_dict(fields)
        check_sections(config)
        others = {field for field in fields if field not in config.to_dict()}
        assert others  # the fields are dotted names
    names = [studies.variant(each, {}).directory for each in study.variants]
    assert len(set(names)) == len(names)


def test_holm_corrects_and_keeps_the_order():
    # Holm's step down: 3 * .01; the larger of it and 2 * .02; the larger of it and .2.
    assert results.holm([0.2, 0.01, 0.02]) == pytest.approx([0.2, 0.03, 0.04])
    assert results.holm([0.5, 0.4]) == pytest.approx([0.8, 0.8])


def outcome(*correct, seeds=(0, 1)):
    zeros, nothing = np.zeros(len(seeds)), [{}] * len(seeds)
    curves = [{0: 0.1, 4: 0.5}] * len(seeds)
    return results.Outcome(seeds, np.array(correct), curves, nothing, zeros, zeros)


def test_a_gain_is_paired_by_seed():
    base = outcome([0, 2, 4], [0, 0, 4])
    own = outcome([4, 4, 4], [0, 1, 4], [0, 1, 4], seeds=(3, 0, 1))
    first = results.passed(1, 4)
    gain = results.Gain.of(own, base, first)
    assert gain.mean == pytest.approx(100 * np.mean([0, -0.25, 0, 0, 0.25, 0]))
    assert gain.low <= gain.mean <= gain.high and gain.p == pytest.approx(1.0)
    assert results.Gain.of(outcome([1, 1, 1], seeds=(5,)), base, first) is None
    # pass@4 of four samples is whether one is correct.
    gain = results.Gain.of(own, base, results.passed(4, 4))
    assert gain.mean == pytest.approx(100 * np.mean([0, 0, 0, 0, 1, 0]))
    assert base.over_steps().tolist() == [[0.5], [0.5]]  # without step 0


def test_a_single_value_has_no_interval():
    base, own = (outcome([correct], seeds=(0,)) for correct in (1, 3))
    assert str(results.Gain.of(own, base, results.passed(1, 4))) == "+50.0"
    two = [outcome([correct, correct], seeds=(0,)) for correct in (1, 3)]
    assert str(results.Gain.of(two[1], two[0], results.passed(1, 4))) == "+50.0 (+50.0, +50.0)"


def test_learning_is_compared_at_equal_tokens():
    curve = {0: 0.0, 1: 0.2, 2: 0.6, 3: 0.8}
    base = outcome([0], [0])._replace(
        curves=[curve] * 2, sampled=[{0: 0, 1: 100, 2: 200, 3: 300}] * 2
    )
    # Seed 1 learns as much with each token, though twice as fast with each step.
    curves = [curve, {0: 0.0, 1: 0.6, 2: 0.8}, curve]
    tokens = [{0: 0, 1: 200, 2: 300, 3: 400}, {0: 0, 1: 200, 2: 300}, {}]
    own = outcome([0], [0], [0], seeds=(0, 1, 5))._replace(curves=curves, sampled=tokens)
    found = own.at_tokens_of(base)
    assert found == pytest.approx({0: np.mean([-0.1, -0.4, -0.2]), 1: np.mean([0.1, 0.0, 0.0])})
    few = base._replace(sampled=[{0: 0, 1: 50, 2: 100, 3: 180}] * 2)  # after 180, base has 0.52
    assert few.at_tokens_of(base)[0] == pytest.approx(np.mean([0.4, 0.28, 0.28]))
    assert outcome([0]).at_tokens_of(base) == {}  # a record without tokens
    rows = {"none": base, "verl": own._replace(tokens=np.full(3, 1e6))}
    assert "| at equal tokens |" in results.table(rows, ("none",), 4)[0]
    few = {
        name: one._replace(tokens=np.full(2, 4e4 + one.tokens[0] / 500))
        for name, one in rows.items()
    }
    assert "| 42 k |" in results.table(few, ("none",), 4)[-1]


def test_three_seeds_have_the_interval_of_student():
    """All problems of a seed gain as much, so the seeds are all that varies."""
    rng, covered, count = np.random.default_rng(0), 0, 200
    base = outcome(*np.full((3, 2), 50), seeds=range(3))
    for _ in range(count):
        of_seeds = np.rint(50 + 10 * rng.normal(size=(3, 1))).astype(int)
        own = outcome(*np.repeat(of_seeds, 2, axis=1), seeds=range(3))
        gain = results.Gain.of(own, base, results.passed(1, 100))
        covered += gain.low <= 0 <= gain.high
    # 92 % is two standard errors below 95 %. The bootstrap alone has 75 %.
    assert covered / count > 0.92


def run_of(correct):
    return {"correct": correct, "greedy": {"0": 0.5, "1": 0.5}, "tokens": 70_000, "bonus": 0.0}


def test_a_variant_without_a_seed_of_the_base_has_no_difference():
    """Another machine may have made other seeds so far."""
    outcomes = {"none": outcome([0, 2], [0, 4]), "verl": outcome([1, 1], seeds=(5,))}
    more = outcomes | {"length": outcome([1, 2], [0, 4])}
    curves, with_length = (results.draw(each, "none", 4).axes[2].lines for each in (outcomes, more))
    assert [line.get_label() for line in curves] == ["none"]  # not over other seeds
    assert [with_length[0].get_label(), with_length[-1].get_label()] == ["none", "the others"]
    assert len(with_length) == 3  # the last one is the entry of the legend
    row = results.table(more, ("none",), 4)[3]
    assert row == "| verl | 1 |  |  |  |  |"


def test_p_values_are_corrected_for_all_tables_of_a_task(tmp_path, monkeypatch):
    runs = {
        "none": {str(seed): run_of("000") for seed in range(4)},
        "verl": {str(seed): run_of("00g" if seed else "000") for seed in range(4)},
        "length": {str(seed): run_of("00g" if seed else "002") for seed in range(4)},
        "clip-higher": {str(seed): run_of("000") for seed in range(4)},
        "all": {str(seed): run_of("000") for seed in range(4)},
    }
    monkeypatch.setattr(results, "DOCS", tmp_path)
    (tmp_path / "figures").mkdir()
    part = results.PARTS[0]
    record = {"num_samples": 16, "runs": runs, "machine": "a machine"}
    of_task = [results.p_values(results.outcomes_of(each, record), each.bases[0], 16)
               for each in results.PARTS if each.study == part.study]  # fmt: skip
    assert [list(each) for each in of_task] == [["verl", "length", "clip-higher"], ["none", "all"]]
    assert of_task[0]["clip-higher"] == 1.0  # equal to the base
    # The p value of "length" is the least of four: "none" and "verl" are compared once.
    least = 4 * of_task[0]["length"]
    assert f" | {least:.2g} | " in results.section(part, record)


def test_the_interval_has_the_spread_of_a_mean_over_seeds_and_problems():
    random = np.random.default_rng(0)
    assert results.interval(np.full((3, 4), 0.25)) == (0.25, 0.25, 0.25)
    # The variance of the crossed bootstrap is that of both factors: here seeds only, then problems.
    for values in (np.repeat(random.normal(size=(40, 1)), 2, 1), random.normal(size=(1, 100))):
        mean, low, high = results.interval(values)
        deviation = values.std() / np.sqrt(np.unique(values).size)
        # 3 %: the noise of a quantile of 10,000 draws; below 40 values, 1.96 is not exact either.
        np.testing.assert_allclose(
            (low, high), mean + np.array([-1.96, 1.96]) * deviation, atol=0.03
        )


def test_shares_of_ways_are_over_the_responses_of_all_seeds(tmp_path):
    file = tmp_path / "samples.parquet"
    responses = ["012+039:2+9+0=11", "12+39=51;", "2+9=11;1+1+3=5", "012+"]
    pq.write_table(pa.table({"response": responses, "correct": [True, True, False, False]}), file)
    ways = studies.STUDIES["formats"].ways
    own = results._ways(ways, file)
    assert own == {"ways": {"digits": [0.25, 0.0], "running": [0.5, 0.5], "columns": [0.25, 1.0]}}
    other = {"ways": {name: [0.0, 1.0] for name in ways.names}}
    runs = {"none": {"0": own, "1": other, "2": {"correct": ""}}, "verl": {"0": {}}}
    assert results.table_of_ways(runs, ways.names)[2:] == [
        "| none | 2 | 12 % (0 % right) | 25 % (50 % right) | 12 % (100 % right) |"
    ]


def test_the_figure_by_k_has_the_gain_at_each_k():
    correct = {"none": "00", "verl": "24", "length": "00", "shuffled": "40"}
    others = {"greedy": {}, "tokens": 0, "bonus": 0.0}
    runs = {name: {"0": {"correct": text} | others} for name, text in correct.items()}
    (panel,) = results.draw_by_k({"a task": {"num_samples": 4, "runs": runs}}).axes
    drawn = [bars.lines[0].get_ydata() for bars in panel.containers]
    # Two samples drawn of 4 miss the 2 right ones in 1 case of 6.
    expected = [[75.0, 100 * (5 / 6 + 1) / 2, 100.0], [0.0] * 3, [50.0] * 3]
    np.testing.assert_allclose(drawn, expected, rtol=1e-12)  # of a few float64 operations
    runs["verl"] = {"5": runs["verl"]["0"]}
    (panel,) = results.draw_by_k({"a task": {"num_samples": 4, "runs": runs}}).axes
    assert np.isnan(panel.containers[0].lines[0].get_ydata()).all()  # no seed of the base


def test_runs_become_a_file_and_a_part_of_the_page(tmp_path, monkeypatch):
    study = studies.STUDIES["tiny"]._replace(seeds=range(2))
    n = study.evaluation["n"]
    for seed in study.seeds:
        for name in ("none", "verl"):
            run = tmp_path / "runs" / name / f"seed{seed}"
            place = results.evaluation_of(tmp_path / "runs", seed) / name / f"{run.name}-step40"
            run.mkdir(parents=True), place.mkdir(parents=True)
            rows = [{"step": 0, "eval/x/greedy_accuracy": 0.5, "response/num_tokens": 3e4},
                    {"step": 40, "eval/x/greedy_accuracy": 0.5 + seed / 4 * (name == "verl"),
                     "response/num_tokens": 4e4, results.BONUS: 0.25}]  # fmt: skip
            (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            problem, sample = np.divmod(np.arange(3 * n), n)
            correct = sample < problem * (2 if name == "verl" else 1)
            table = pa.table({"group_id": problem, "correct": correct})
            pq.write_table(table, place / "samples.parquet")
    other = run_of("248")
    known = {"runs": {"none": {"1": {}, "7": other}, "length": {"0": other}}}
    study = study._replace(seeds=(0, 1, 7))
    record = results.collect(study, tmp_path / "runs", known)
    # What another machine has made stays, and what is here replaces it.
    assert record["runs"]["length"] == {"0": other} and record["runs"]["none"]["7"] == other
    assert record["runs"]["none"]["1"]["correct"] == "012"
    record = results.collect(study, tmp_path / "runs", {})
    assert record["runs"]["verl"]["1"] == {
        "correct": "024", "greedy": {0: 0.5, 40: 0.75}, "sampled": {0: 0, 40: 30_000},
        "tokens": 70_000, "bonus": 0.25,
    }  # fmt: skip
    log = tmp_path / "runs" / "verl" / "seed1" / "metrics.jsonl"
    (first, *_), text = log.read_text().splitlines(), log.read_text()
    for left in ("", first):
        log.write_text(left)
        assert "lacks its log of 40 steps" in refused(
            str(log.parent), results.collect, study, tmp_path / "runs", {}
        )
        kept = results.collect(study, tmp_path / "runs", record)
        assert kept["runs"]["verl"]["1"] == record["runs"]["verl"]["1"]
    log.write_text(text)
    monkeypatch.setattr(results, "DOCS", tmp_path)
    (tmp_path / "figures").mkdir()
    part = results.section(results.PARTS[0], json.loads(json.dumps(record)))
    assert (
        "not finished: 4 of" in part
        and "| none | 2 | 50.0 | 6.2 |  | -6.2 (" in part
        # Student's t of two seeds: 12.7 times the standard error, 12.5.
        and "| verl | 2 | +12.5 (-146.3, +171.3) | +6.2 (" in part
    )
    assert (tmp_path / "figures" / "evidence_tiny.png").stat().st_size > 10_000


def test_a_variant_alone_is_evaluated_with_all_that_are_finished(tmp_path, monkeypatch):
    """Alone it would get another name, so its results would not be found."""
    for name, steps in (("none", 40), ("verl", 40), ("length", 20)):
        seed = tmp_path / name / "seed1"
        (seed / "checkpoints" / str(steps)).mkdir(parents=True)
        seed.with_suffix(".log").write_text(DONE.format(steps))
    evaluated = []
    monkeypatch.setattr(evidence, "evaluate", lambda _, policies, *__: evaluated.extend(policies))
    monkeypatch.setattr(evidence.Sweep, "check", lambda *_: None)  # these runs have no settings
    evidence.run(studies.STUDIES["tiny"]._replace(start=()), tmp_path, [1], ["verl"])
    assert evaluated == [tmp_path / "none" / "seed1", tmp_path / "verl" / "seed1"]


def test_variants_may_have_seeds_of_their_own(tmp_path, monkeypatch):
    variants = {name: {} for name in ("none", "verl", "length")}
    own = studies.STUDIES["tiny"]._replace(
        start=(), variants=variants, seeds=(0, 1), own_seeds={"length": (1, 2, 3)}
    )
    assert [list(own.seeds_of(name)) for name in variants] == [[0, 1, 2, 3], [0, 1], [1, 2, 3]]
    checked, begun = [], []

    def begin(_, runs):
        begun.extend((run.variant.name, run.seed) for run in runs)
        return 0

    monkeypatch.setattr(evidence.Sweep, "check", lambda _, runs: checked.extend(runs))
    monkeypatch.setattr(evidence.Sweep, "run", begin)
    monkeypatch.setattr(evidence, "evaluate", lambda *_: None)
    evidence.run(own, tmp_path, own.all_seeds, ["verl", "length"])
    assert begun == [("verl", 0), ("verl", 1), ("length", 1), ("length", 2), ("length", 3)]
    # One seed of each: a dry run takes seconds.
    assert [(run.variant.name, run.seed) for run in checked] == [("verl", 0), ("length", 1)]

    runs = {
        "none": {str(seed): run_of("00" if seed < 2 else "gg") for seed in range(4)},
        "verl": {str(seed): run_of("88") for seed in range(2)},
        "length": {str(seed): run_of("88") for seed in (1, 2, 3)},
    }
    record = {"num_samples": 16, "machine": "", "runs": runs}
    monkeypatch.setattr(results, "DOCS", tmp_path)
    monkeypatch.setitem(results.STUDIES, "tiny", own)
    (tmp_path / "figures").mkdir()
    part = results.section(results.Part("tiny", "tiny", tuple(variants), ("none",)), record)
    assert ": all. 40 steps" in part
    rows = [line.split(" | ") for line in part.splitlines() if line.startswith("| ")]
    none, verl, length = rows[1:4]  # the first is the head
    # Seeds 0 and 1 give the level, and all that both have give a difference.
    assert none[1] == "4" and none[3] == "0.0"
    assert verl[3].startswith("+50.0") and length[3].startswith("-16.7 (")


def test_of_several_benchmarks_the_first_by_name_is_the_curve(tmp_path):
    row = {"step": 0} | {f"eval/{name}/greedy_accuracy": ord(name) for name in "hgfedcba"}
    pq.write_table(pa.table({"group_id": [0], "correct": [True]}), tmp_path / "samples.parquet")
    assert results._of_run([row], tmp_path / "samples.parquet")["greedy"] == {0: ord("a")}


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["all", "--variants", "drawn"], "--variants: methods has no 'drawn', but 'GRPO', "),
        (["sums", "--seeds", "1", "9"], "--seeds: sums has no 9, but 0, 1, 2."),
        (["formats", "--seeds", "6", "--variants", "novelty"], "'novelty' has 0, 1, 2, 3, 4"),
    ],
)
def test_all_studies_are_checked_before_the_first_one(tmp_path, monkeypatch, arguments, message):
    monkeypatch.setattr(evidence, "make", lambda *_: pytest.fail("it began"))
    monkeypatch.setattr("sys.argv", ["evidence", *arguments, f"--output={tmp_path}"])
    with pytest.raises(SystemExit, match=re.escape(message)):
        evidence.main()
