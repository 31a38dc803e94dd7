"""The measures of a study, their correlations, and the files of a study."""

import csv
import io
import math
import pathlib
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from semrl_jax.analysis import measures, study, study_sources
from semrl_jax.analysis.runs import read_responses, response_states
from semrl_jax.analysis.states import OPTIONAL, read_arrays
from semrl_jax.analysis.study_files import draw_panels, write_study
from semrl_jax.analysis.study_sources import StudiedResponse, of_file, of_generated
from semrl_jax.models.of_config import build_policy
from semrl_jax.support.errors import UserError
from semrl_jax.support.response_files import KEYS
from tests.cases import refused
from tests.oracles import metrics as oracle
from tests.oracles import observatory
from tests.tiny import tiny_config

ROOT = pathlib.Path(__file__).parents[2]
STRIDE = 8
WIDTH = 5


def made(prompt, sample, length, rng, text="a b c"):
    return StudiedResponse(
        prompt, sample, rng.normal(size=(length, WIDTH)).astype(np.float32),
        rng.integers(0, 9, length).astype(np.int32), text, 0.5 * (sample % 2),
        float(sample % 2), -rng.uniform(size=length), rng.uniform(size=length),
        rng.uniform(size=length),
    )  # fmt: skip


@pytest.fixture(scope="module")
def responses():
    """Prompts 7 with four responses of one and more tokens, and 3 with one."""
    rng = np.random.default_rng(0)
    found = [made(7, sample, length, rng) for sample, length in enumerate((26, 17, 4, 1))]
    return [*found[::-1], made(3, 0, 9, rng)]


@pytest.fixture(scope="module")
def measured(responses):
    return measures.measure(responses, stride=STRIDE, method="svd")


def test_tokens_of_another_model_are_refused():
    """Their embeddings would be those of other tokens."""
    policy, _ = build_policy(tiny_config())
    size = policy.config.vocab_size
    ids = [np.array([1, size], np.int32)], [np.array([3], np.int32)]
    refused(f"token {size} is beyond the policy's vocabulary", response_states, policy, {}, *ids)


def test_rows_without_a_group_are_named(tmp_path):
    ids = {"prompt_ids": [[1], [1]], "response_ids": [[2], [3]]}
    table = pa.table(ids | {"group_id": pa.array([1, None]), "sample_index": [0, 0]})
    pq.write_table(table, tmp_path / "step.parquet")
    with pytest.raises(UserError, match=r"step\.parquet is .*: row 1 has no 'group_id'"):
        read_responses(tmp_path / "step.parquet", KEYS)


def test_columns_of_another_type_are_named(tmp_path):
    """And those of a fitting type are converted: `correct` is bool in the files of a run."""
    ids = {"prompt_ids": [[1]], "response_ids": [[2, 3]], "group_id": [0], "sample_index": [0]}
    file = tmp_path / "step.parquet"
    pq.write_table(pa.table(ids | {"correct": [True], "score": [1]}), file)
    (row,) = read_responses(file, KEYS)
    assert study_sources._of_row(row, np.ones((2, 3), np.float32)).correct == 1.0
    for name, values, kind in (("score", ["high"], "string"), ("response_mask", [3], "int64")):
        pq.write_table(pa.table(ids | {name: values}), file)
        refused(f"column '{name}' is of {kind}, but must be of", read_responses, file, KEYS)


def test_the_release_has_ten_and_twenty_eight_measures(measured):
    assert set(measured.responses) == {"group_id", "sample_index", *measures.RESPONSE_MEASURES}
    assert set(measured.prompts) == {"group_id", "num_responses", *measures.PROMPT_MEASURES}
    counts = {f"count_{kind}" for kind in ("entropy", "confidence")}
    forms = {f"{name}_{form}" for name in counts for form in ("mean", "stacked")}
    own = {*counts, "elliptical_novelty"}, {*forms, "log_determinant", "lidar"}
    assert len(measures.RESPONSE_MEASURES.keys() - own[0]) == 10
    assert len(measures.PROMPT_MEASURES.keys() - own[1]) == 28


def test_the_page_explains_every_measure():
    explained = set(re.findall(r"`(\w+)`", (ROOT / "docs" / "study.md").read_text()))
    means = {f"{name}_mean" for name in measures.RESPONSE_MEASURES}
    orders = set(measures.RANKS[1:]) | {f"{name}_stacked" for name in measures.RANKS[1:]}
    names = {*measures.RESPONSE_MEASURES, *measures.PROMPT_MEASURES} - means - orders
    assert names <= explained


def test_responses_have_their_measures(responses, measured):
    table = measured.responses
    order = sorted(responses, key=lambda r: (-r.group_id, r.sample_index))  # 7 came first
    np.testing.assert_array_equal(table["sample_index"], [r.sample_index for r in order])
    for i, response in enumerate(order):
        rows = response.states
        velocity, acceleration = oracle.orders(
            oracle.series(oracle.effective_rank, rows, STRIDE, "exact")
        )
        expected = {
            "effective_rank": oracle.effective_rank(rows) if len(rows) > 1 else math.nan,
            "effective_rank_velocity": velocity if velocity is not None else math.nan,
            "effective_rank_acceleration": acceleration if acceleration is not None else math.nan,
            "score": response.score,
            "correct": response.correct,
            "mean_logprob": np.mean(response.logprobs),
            "token_entropy": np.mean(response.entropies),
            "confidence": np.mean(response.confidences),
            "length": len(rows),
            "count_entropy": oracle.count_entropy([response.token_ids]),
            "count_confidence": oracle.count_confidence([response.token_ids]),
        }
        for name, value in expected.items():
            # 1e-4: differences of ranks near 4.
            np.testing.assert_allclose(table[name][i], value, rtol=1e-4, atol=1e-5, err_msg=name)
    assert math.isnan(table["repetition"][3]) and math.isnan(table["elliptical_novelty"][4])


def test_prompts_have_their_measures(responses, measured):
    group = sorted((r for r in responses if r.group_id == 7), key=lambda r: r.sample_index)
    found = {name: values[0] for name, values in measured.prompts.items()}
    ranks = [oracle.effective_rank(r.states) for r in group[:3]]  # the last has one token
    means = np.stack([r.states.mean(axis=0) for r in group]).astype(float)
    pairs = [(i, j) for i in range(4) for j in range(i)]
    stacked = np.concatenate([r.states for r in group])
    velocity, acceleration = oracle.orders(
        oracle.series(oracle.effective_rank, stacked, STRIDE, "exact")
    )
    unit = means / np.linalg.norm(means, axis=1, keepdims=True)
    distances = [np.linalg.norm(means[i] - means[j]) for i, j in pairs]
    expected = {
        "num_responses": 4,
        "effective_rank_mean": np.mean(ranks),
        "effective_rank_stacked": oracle.effective_rank(stacked),
        "effective_rank_velocity_stacked": velocity,
        "effective_rank_acceleration_stacked": acceleration,
        "token_entropy_stacked": np.concatenate([r.entropies for r in group]).mean(),
        "count_entropy_mean": np.mean([oracle.count_entropy([r.token_ids]) for r in group]),
        "count_entropy_stacked": oracle.count_entropy([r.token_ids for r in group]),
        "count_confidence_stacked": oracle.count_confidence([r.token_ids for r in group]),
        "length_total": 48,
        "length_mean": 12.0,
        "correct_mean": 0.5,
        "euclidean_distance": np.mean(distances),
        "cosine_similarity": np.mean([unit[i] @ unit[j] for i, j in pairs]),
        "distance_to_centre": np.linalg.norm(means - means.mean(axis=0), axis=1).mean(),
        "rouge_l_words": 1.0,
        "rouge_2_words": 1.0,
        "lidar": observatory.lidar([r.states for r in group]),
        "log_determinant": observatory.log_determinant(unit, 1.0),
    }
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
    assert 0 < found["token_jsd"] < math.log(2) and found["rouge_1_ids"] < 1
    single = {name: values[1] for name, values in measured.prompts.items()}
    assert math.isnan(single["token_kl"]) and math.isnan(single["rouge_l_ids"])
    assert math.isnan(single["lidar"]) and single["num_responses"] == 1


def table_of(num_prompts=40, size=4):
    """x and y share a part of the prompt and the length."""
    rng = np.random.default_rng(0)
    prompt = np.repeat(np.arange(num_prompts), size)
    length = rng.integers(10, 100, len(prompt)).astype(float)
    shared = rng.normal(size=num_prompts)[prompt] + length / 30
    return {
        "group_id": prompt, "sample_index": np.tile(np.arange(size), num_prompts), "length": length,
        "x": shared + rng.normal(size=len(prompt)), "y": shared + rng.normal(size=len(prompt)),
        "correct": rng.integers(0, 2, len(prompt)).astype(float),
    }  # fmt: skip


def test_correlations_of_subsets_are_those_of_numpy():
    table = table_of()
    table["x"][3] = math.nan
    edges = np.quantile(table["length"], [1 / 3, 2 / 3])
    subsets = {
        "all": table["length"] > 0,
        "correct": table["correct"] == 1,
        "short": table["length"] <= edges[0],
        "long": table["length"] > edges[1],
    }
    for subset, kept in subsets.items():
        kept = kept & ~np.isnan(table["x"])
        found = study.correlation(table, "x", "y", subset)
        assert found.num_responses == kept.sum()
        expected = np.corrcoef(table["x"][kept], table["y"][kept])[0, 1]
        np.testing.assert_allclose(found.r, expected, rtol=1e-9)
        assert -1 <= found.low < found.r < found.high <= 1
    kept = ~np.isnan(table["x"])
    x, y, length = (table[name][kept] for name in ("x", "y", "length"))
    residuals = [v - np.polyval(np.polyfit(length, v, 3), length) for v in (x, y)]
    found = study.correlation(table, "x", "y", "equal length")
    np.testing.assert_allclose(found.r, np.corrcoef(*residuals)[0, 1], rtol=1e-9)


@pytest.mark.parametrize("lengths", [(20, 290), (31, 53), (40, 41)])
def test_equal_length_takes_out_a_relation_that_bends(lengths):
    """Two measures that share noise, of which one grows and one falls with a bend.

    What a line leaves of the two has r = -0.5 for the first lengths. Two different lengths have no
    square of their own.
    """
    rng = np.random.default_rng(0)
    length = rng.integers(*lengths, 2000).astype(float)
    if lengths == (40, 41):
        length += rng.integers(0, 2, 2000)
    noise = rng.normal(size=(3, 2000))
    table = {
        "group_id": np.arange(2000) // 8, "length": length,
        "x": 10 * np.log(length) + noise[0] + noise[1],
        "y": -10 * np.log(length) + noise[0] + noise[2],
    }  # fmt: skip
    found = study.correlation(table, "x", "y", "equal length")
    # 1/2, less a little where the cubic leaves some of the bend; the standard error is 0.02.
    assert found.r == pytest.approx(0.5, abs=0.1)
    assert found.low < found.r < found.high


def test_copies_of_responses_are_no_new_evidence():
    """Ten equal responses per prompt: the interval is that of one response per prompt."""
    once = table_of(num_prompts=60, size=1)
    copies = {name: np.repeat(values, 10) for name, values in once.items()}
    one, ten = (study.correlation(table, "x", "y") for table in (once, copies))
    np.testing.assert_allclose(one[-3:], ten[-3:], rtol=1e-9)
    alone = study.correlation(copies | {"group_id": np.arange(600)}, "x", "y")
    assert alone.high - alone.low < 0.5 * (ten.high - ten.low)


@pytest.mark.parametrize("num_prompts, has_one", [(2, False), (4, False), (5, True)])
def test_few_prompts_have_no_interval(num_prompts, has_one):
    found = study.correlation(table_of(num_prompts=num_prompts, size=8), "x", "y")
    assert found.num_prompts == num_prompts and not math.isnan(found.r)
    assert [math.isnan(found.low), math.isnan(found.high)] == [not has_one] * 2
    assert ("[" in study.with_interval(found, empty="")) is has_one


def test_the_interval_covers_the_true_correlation(monkeypatch):
    monkeypatch.setattr(study, "NUM_DRAWS", 300)
    rng = np.random.default_rng(1)
    inside = 0
    for _ in range(100):
        x, noise = rng.normal(size=(2, 80))
        table = {"group_id": np.arange(80), "x": x, "y": 0.6 * x + 0.8 * noise}
        found = study.correlation(table, "x", "y")
        inside += found.low <= 0.6 <= found.high
    assert 86 <= inside <= 99  # 95 % of 100, three standard errors either way


def test_a_draw_in_which_a_measure_is_constant_has_no_correlation():
    """One prompt has the correct responses: a third of the draws has none. They are not zeros."""
    rng = np.random.default_rng(9)
    group = np.repeat(np.arange(20), rng.integers(3, 9, 20))
    correct = (np.arange(len(group)) < 2).astype(float)
    table = {"group_id": group, "correct": correct, "x": rng.normal(size=len(group)) + 3 * correct}
    found = study.correlation(table, "x", "correct")
    assert found.r > 0.2 and found.low > 0.2


def test_what_has_no_correlation_is_nan():
    table = table_of()
    constant = study.correlation(table | {"y": np.full(160, 0.1)}, "x", "y")
    few = study.correlation({name: values[:2] for name, values in table.items()}, "x", "y")
    ungraded = study.correlation(table | {"correct": np.full(160, math.nan)}, "x", "y", "wrong")
    for found in (constant, few, ungraded):
        assert math.isnan(found.r) and math.isnan(found.low)


def test_the_summary_fits_on_one_screen(measured):
    text = io.StringIO()
    found = study.correlations(measured)
    Console(file=text, width=80).print(study.summary(measured, found, "here"))
    lines = text.getvalue().splitlines()
    assert "5 responses to 2 prompts, 40.0% correct" in lines[0] and len(lines) <= 24
    with_correct = {(each.x, each.subset) for each in found if each.y == "correct"}
    assert {
        (name, subset) for name in measures.RANKS for subset in ("all", "equal length")
    } <= with_correct
    assert ("length", "all") in with_correct and ("length", "equal length") not in with_correct
    assert "…" not in text.getvalue() and "not known" not in text.getvalue()


@pytest.mark.slow
def test_files_of_a_study(measured, tmp_path):
    names = write_study(tmp_path, measured, study.correlations(measured))
    assert set(names) == {file.name for file in tmp_path.iterdir()}
    table = pq.read_table(tmp_path / "responses.parquet").to_pydict()
    for name, values in measured.responses.items():
        np.testing.assert_array_equal(table[name], values)
    rows = list(csv.DictReader((tmp_path / "prompts.csv").read_text().splitlines()))
    assert float(rows[0]["token_jsd"]) == measured.prompts["token_jsd"][0]
    assert rows[1]["token_jsd"] == "" and rows[1]["num_responses"] == "1"
    rows = list(csv.DictReader((tmp_path / "correlations.csv").read_text().splitlines()))
    assert {row["subset"] for row in rows} == set(study.SUBSETS)


def test_the_stride_is_that_of_the_run_of_a_policy(tmp_path):
    (tmp_path / "config.json").write_text('{"run_id": "x", "config": {"metrics": {"stride": 8}}}')
    assert study_sources.stride_of(str(tmp_path)) == 8
    assert study_sources.stride_of("Qwen/Qwen2.5-0.5B") is None
    assert study_sources.stride_of(None) is None


def test_names_of_measures_leave_room_for_the_columns_of_the_summary():
    names = [study._NARROW.get(name, study.short(name)) for name in measures.RESPONSE_MEASURES]
    assert max(map(len, names)) <= 10 and len(set(names)) == len(names)


def test_what_is_not_known_is_named_and_left_out():
    rng = np.random.default_rng(0)
    plain = [StudiedResponse(i, 0, made(0, 0, 18, rng).states) for i in range(4)]
    only = {"token_entropy", "effective_rank", "effective_rank_velocity", "token_jsd", "length"}
    measured = measures.measure(plain, stride=STRIDE, method="svd", wanted=only.__contains__)
    assert set(measured.responses) == {"group_id", "sample_index", *only} - {"token_jsd"}
    assert set(measured.prompts) == {"group_id", "num_responses", "token_jsd"}
    found = study.correlations(measured)
    text = io.StringIO()
    Console(file=text, width=80).print(study.summary(measured, found, "here"))
    assert "not known here: token_entropy, token_jsd" in text.getvalue()
    (panel,) = draw_panels(measured, found).axes
    title = panel.get_title("left")
    assert title.startswith("(b) r = ") and "nan" not in title  # four prompts have no interval


def test_mistakes_are_named(responses):
    with pytest.raises(UserError, match="2 of 3 responses have two tokens"):
        measures.measure(responses[:3], stride=STRIDE, method="svd")
    refused("0 of 0 responses", measures.measure, [], stride=STRIDE)
    refused("token_jds is unknown; did you mean token_jsd", study.check_measures, ["token_jds"])
    assert study.check_measures(["token_jsd", "rankme", "length"]) == ("rankme",)


def test_a_file_may_say_more_about_its_responses(tmp_path):
    rng = np.random.default_rng(0)
    states = rng.normal(size=(3, 6, 4)).astype(np.float32)
    mask = np.arange(6) < np.array([6, 4, 2])[:, None]
    arrays = {
        "group_id": np.array([5, 5, 1]), "response_ids": np.arange(18).reshape(3, 6),
        "score": np.array([1.0, 0, 0.5]), "correct": np.array([True, False, False]),
    }  # fmt: skip
    file = tmp_path / "states.npz"
    np.savez(file, hidden_states=states, response_mask=mask, **arrays)
    found = list(of_file(file, None)[0])
    assert [r.group_id for r in found] == [1, 5, 5] and [r.correct for r in found] == [0, 1, 0]
    np.testing.assert_array_equal(found[2].token_ids, [6, 7, 8, 9])
    np.testing.assert_array_equal(found[0].states, states[2, :2])
    np.savez(file, hidden_states=states)
    assert [r.group_id for r in of_file(file, None)[0]] == [0, 1, 2]
    for wrong in ({"group_id": np.zeros(2, int)}, {"correct": np.ones(3)}, {"logprobs": mask}):
        np.savez(file, hidden_states=states, **wrong)
        refused(f"{next(iter(wrong))} has shape", read_arrays, file, OPTIONAL)


def test_a_directory_without_states_is_refused(tmp_path):
    refused("generate again with --hidden_states=-1", of_generated, tmp_path, None)
    index = tmp_path / "states.index.json"
    for text, message in (
        (
            '{"metadata": {"layers": [3], "kinds": ["decode"]}, "weight_map": {}}',
            "--hidden_states=-1",
        ),
        (
            '{"metadata": {"layers": [-1], "kinds": ["prefill"]}, "weight_map": {}}',
            "--hidden_states=-1",
        ),
        ('{"weight_map": {}}', "is no index"),
        ('{"metadata": {"layers": [-1], "kinds": ["decode"]}, "weight_map": {}}', "cannot be read"),
    ):
        index.write_text(text)
        refused(message, of_generated, tmp_path, None)
