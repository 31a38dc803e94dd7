"""What `report.html` holds: limits, events, differences, and hostile text."""

import base64
import contextlib
import hashlib
import itertools
import json
import os
import pathlib
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from semrl_jax.jobs import view
from semrl_jax.pages.html import data_element
from semrl_jax.pages.report import page, picture, reading, recorded_responses, write_report
from semrl_jax.pages.report.panels import OTHER, panels_of
from semrl_jax.runs.records import write_rollouts
from semrl_jax.sampling.scoring import Scored
from semrl_jax.support import parquet
from semrl_jax.support.errors import UserError
from semrl_jax.support.rows import read_rows
from tests.cases import refused
from tests.pages.report.making import add_row, make_run, scored, text_of

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(1)>&"


def data_of(file, name):
    """The JSON of a data element, as a browser reads it."""
    text = file.read_text()
    found = re.search(rf'<script type="application/json" id="{name}">(.*?)</script>', text)
    return json.loads(found[1])


@pytest.fixture(scope="module")
def config():
    from tests.tiny import tiny_config

    return tiny_config()


@pytest.fixture(scope="module")
def run(config, tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "run", config, starts=(0, 0, 6))


@pytest.fixture(scope="module")
def short_run(config, tmp_path_factory):
    """For many pages: a run with one file of each kind."""
    return make_run(tmp_path_factory.mktemp("runs") / "run", config, num_steps=1)


def test_the_page_has_the_curves_responses_and_settings(run):
    write_report(run)
    assert (run / "curves.png").read_bytes().startswith(b"\x89PNG")
    figures = data_of(run / "report.html", "figures")
    (shown,) = figures["runs"]
    rows = read_rows(run / "metrics.jsonl")
    assert shown["steps"] == list(range(12))
    assert shown["series"]["reward/mean"] == [round(row["reward/mean"], 6) for row in rows]
    assert shown["series"]["eval/sums/greedy_accuracy"][:5] == [0.2, None, None, None, 0.28]
    assert shown["series"][OTHER] == [0.5] * 12  # 3.5 s of a step, less 1 and 2
    titles = {panel["title"]: panel for panel in figures["panels"]}
    assert titles["Effective rank (ER)"]["keys"] == [
        ["metrics/effective_rank/correct", "correct"],
        ["metrics/effective_rank/incorrect", "incorrect"],
    ]
    assert titles["Greedy accuracy"]["keys"] == [["eval/sums/greedy_accuracy", "sums"]]
    assert figures["notes"] == ["0 at every step and not drawn: Staleness."]
    settings = {field: values for field, *values in figures["settings"]}
    assert settings["training.num_steps"] == ["160", "3"]


def test_a_sentence_says_what_a_step_waits_for(config, tmp_path):
    run = make_run(tmp_path / "slow", config)
    for row in range(12, 24):
        waits = {"time/sample_s": 2.0, "time/verify_s": 1.5, "time/environment_wait_s": 0.25}
        add_row(run, row, waits | {"time/step_s": 2.0})
    (log,) = reading.read_runs([run])
    of_last = {key: values[-1] for key, values in reading.series(log.rows).items()}
    assert of_last["time/sample_s"] == 0.25 and of_last["time/verify_s"] == 1.5
    (pace,) = page.figures([log])["pace"]
    assert re.fullmatch(r"slow: a step takes [\d.]+ s: (.+ \d+ %, )+.+ \d+ %\.", pace)
    assert "wait for verifiers" in pace and page.pace_text("a", {}) == ""


def test_a_last_evaluation_alone_is_no_step():
    times = {"time/step_s": 9.0, "time/update_s": 6.0, "time/evaluate_s": 2.0}
    last = {"step": 1, "time/step_s": 2.5, "time/evaluate_s": 2.0}
    found = reading.series([{"step": 0, **times}, last])
    assert found["time/step_s"] == [9.0, None] and found[OTHER] == [1.0, 0.5]
    assert reading.series([last])["time/step_s"] == [2.5]  # of a log without updates


def test_events_have_their_step_and_extent(run):
    found = reading.events(*reading.read_runs([run]))
    assert [tuple(event.values()) for event in found] == [
        (0, "resume", "a: 1 -> 2"),
        (3, "skipped update", "50 % of the mini-batches"),
        (5, "retry", "2 in this step"),
        (6, "resume", "a: 1 -> 2"),
    ]


def test_responses_are_whole_groups_with_what_was_recorded(run):
    found = recorded_responses.samples(reading.read_runs([run]))
    rows = [dict(zip(found["columns"], row)) for row in found["rows"]]
    assert len(rows) == 3 * (16 + 8)
    assert [row["step"] for row in rows] == sorted((row["step"] for row in rows), reverse=True)
    row = next(row for row in rows if (row["step"], row["group"], row["sample"]) == (4, 1, 2))
    assert row["source"] == "training" and row["response"] == text_of(range(11))
    assert found["prompts"][row["prompt"]] == text_of([3, 4])
    assert (row["extracted"], row["reference"], row["correct"]) == ("6", "7", False)
    assert (row["tokens"], row["finish"], row["metrics"]) == (11, "eos", [6.5])
    assert row["logprobs"] == [-float(i) for i in range(1, 12)]
    assert row["ranks"] == [1.5, 2.25]
    invalid = next(row for row in rows if (row["group"], row["sample"]) == (0, 3))
    assert invalid["metrics"] == [None]
    assert "72 responses of 72" in found["note"]


def test_a_response_has_the_facts_of_its_method():
    facts = recorded_responses._facts
    assert facts({"num_prefix": 0, "parent": -1, "hint": 0.0, "step_rewards": []}) == []
    assert facts({"num_prefix": 7, "parent": 2}) == [("branch", "after the first 7 tokens of #2")]
    assert facts({"hint": 0.25, "step_rewards": [1.0, -0.5]}) == [
        ("hint", "25 % of a solution in the prompt"), ("steps", "1, -0.5")
    ]  # fmt: skip
    assert facts({"step_rewards": [0.0] * 21}) == [("steps", "0, " * 20 + "...")]


@pytest.mark.parametrize("length", [0, 1, 59, 60, 61, 200])
def test_a_line_has_the_means_of_neighbouring_tokens(length):
    values = [float(i) for i in range(length)]
    found = recorded_responses._line(values)
    assert len(found) == min(length, 60)
    bounds = [i * length // max(len(found), 1) for i in range(len(found) + 1)]
    expected = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(bounds)]
    assert found == pytest.approx(expected, rel=5e-3)  # half of the last of three digits


def test_a_large_file_is_limited_to_groups_from_all_benchmarks(run, monkeypatch):
    many = [scored(i, correct=False, group_size=2) for i in range(60)]
    names = ["large"] * 52 + ["small"] * 8
    write_rollouts(run / "rollouts", 100, Scored.of(many), lambda ids: "é" * 300, names)
    try:
        monkeypatch.setattr(recorded_responses, "MAX_CHARACTERS", 200)
        monkeypatch.setattr(recorded_responses, "MAX_BYTES", 7 * 6000)  # of 3 + 4 files
        found = recorded_responses.samples(reading.read_runs([run]))
        assert "Unreadable" not in found["note"]
        monkeypatch.setattr(parquet, "MAX_TABLE_BYTES", 20_000)  # its texts have more
        assert recorded_responses.samples(reading.read_runs([run])) == found
    finally:
        (run / "rollouts" / "eval_000100.parquet").unlink()
    rows = [dict(zip(found["columns"], row)) for row in found["rows"]]
    rows = [row for row in rows if row["step"] == 100]
    assert {row["source"] for row in rows} == {"large", "small"} and 10 < len(rows) < 60
    groups = {(row["source"], row["group"]) for row in rows}
    assert len(rows) == 2 * len(groups)
    assert sum(len(row["response"]) for row in rows) < 10_000
    assert f"{len(rows)} of them have more than 200 characters" in found["note"]


def test_an_unreadable_file_of_responses_is_named(run):
    """Also one with a response without a verdict, which is not called wrong."""
    file = run / "rollouts" / "step_000099.parquet"
    table = pq.read_table(run / "rollouts" / "step_000000.parquet")

    def check():
        found = recorded_responses.samples(reading.read_runs([run]))
        assert len(found["rows"]) == 72 and "Unreadable: step_000099.parquet" in found["note"]

    try:
        for content in (b"no parquet", b"", b"PAR1PAR1"):
            file.write_bytes(content)
            check()
        for name, value in (("correct", None), ("correct", "no"), ("group_id", None)):
            values = [*table[name].to_pylist()[:-1], value]
            values = list(map(str, values)) if isinstance(value, str) else values
            place = table.column_names.index(name)
            pq.write_table(table.set_column(place, name, pa.array(values)), file)
            check()
    finally:
        file.unlink()


def test_a_long_run_is_thinned_out_but_keeps_evaluations_and_events():
    rows = [{"step": step, "reward/mean": float(step)} for step in range(20_000)]
    for row in rows[::500]:
        row["eval/sums/greedy_accuracy"] = 0.5
    rows[1234]["rollout/retries"] = 1.0
    kept = reading.thinned(rows)
    steps = [row["step"] for row in kept]
    assert len(steps) < reading.MAX_ROWS + 50 and steps == sorted(set(steps))
    assert {*range(0, 20_000, 500), 1234, 19_999} <= set(steps)
    assert reading.thinned(rows[:10]) == rows[:10]


def test_the_page_says_how_much_of_a_long_run_it_draws(config, tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "MAX_ROWS", 20)
    run = make_run(tmp_path / "run", config, num_steps=1)
    for step in range(1, 200):
        add_row(run, step, {"reward/mean": 1 / 3})
    figures = page.figures(reading.read_runs([run]))
    assert len(figures["runs"][0]["steps"]) == 22  # of 199 every tenth, the first and the last
    assert figures["notes"][0].startswith("run has 200 rows; the plots have 22 of them")


def test_a_picture_of_a_long_run_is_thinned_out_and_its_log_read_once(
    config, tmp_path, monkeypatch
):
    """Formatting and drawing every value of 20,000 rows took half a minute, every few steps."""
    run = make_run(tmp_path / "run", config, num_steps=1)
    for step in range(1, 200):
        add_row(run, step, {"reward/mean": 7.25, "time/step_s": 2.0, "time/update_s": 0.5})
    monkeypatch.setattr(reading, "MAX_ROWS", 20)
    drawn, read, formatted = [], [], []
    for owner, name, calls in (
        (picture, "draw_curves", drawn),
        (reading, "read_log", read),
        (reading, "rounded", formatted),
    ):
        real = getattr(owner, name)

        def called(*values, real=real, calls=calls):
            calls.append(values[0])
            return real(*values)

        monkeypatch.setattr(owner, name, called)
    write_report(run)
    assert [len(rows) for rows in drawn] == [22] and len(read) == 1
    assert formatted.count(7.25) < 200  # not of every row
    assert data_of(run / "report.html", "figures")["runs"][0]["stage_means"][OTHER] == (
        pytest.approx(1.5, abs=0.05)
    )


def test_lines_after_a_damaged_one_are_counted(config, tmp_path):
    run = make_run(tmp_path / "run", config, num_steps=4)
    log = run / "metrics.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join([*lines, lines[0][:20]]))  # a write that was cut
    assert reading.read_runs([run])[0].damage() == []
    log.write_text("".join([lines[0], "\0" * 9 + "\n", *lines[2:]]))
    figures = page.figures(reading.read_runs([run]))
    assert figures["runs"][0]["steps"] == [0]
    assert figures["notes"][0] == (
        "run: line 2 of metrics.jsonl is damaged; it and the lines after it are left out "
        "(3 in all)."
    )
    log.write_text("\0\n")
    refused(r"metrics\.jsonl: line 1 is damaged", reading.read_runs, [run])


@pytest.mark.parametrize(
    ("owner", "call", "message"),
    [
        (pathlib.Path, "read_bytes", r"metrics\.jsonl cannot be read: Permission denied\."),
        (os, "listdir", "rollouts cannot be read: Permission denied"),
    ],
)
def test_files_that_may_not_be_read_are_named(run, monkeypatch, owner, call, message):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(owner, call, refuse)
    refused(message, lambda: recorded_responses.samples(reading.read_runs([run])))


def test_quantities_that_are_never_finite_are_not_called_zero(config, tmp_path):
    run = make_run(tmp_path / "run", config, num_steps=0)
    for step, value in enumerate((None, float("nan"), float("inf"), 10**400)):
        add_row(run, step, {"reward/mean": 1.0, "policy/loss": value, "rollout/staleness": 0.0})
    figures = page.figures(reading.read_runs([run]))
    assert figures["notes"] == [
        "run: not a finite number at any step: policy/loss.",
        "0 at every step and not drawn: Staleness.",
    ]


def test_a_damaged_record_does_not_prevent_a_page(config, tmp_path):
    run = make_run(tmp_path / "run", config, num_steps=2, starts=())
    rows = [{"step": 0, "time": 5, "changed": None}, {"step": 1, "cores": float("nan")}]
    (run / "starts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    record = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps(record | {"versions": {"jax": float("nan")}}))
    page.write_page(tmp_path / "page.html", [run])
    (shown,) = data_of(tmp_path / "page.html", "figures")["runs"]
    assert shown["versions"] == {"jax": "nan"}
    assert shown["starts"] == [
        {"step": 0, "time": "5", "changed": []}, {"step": 1, "cores": "nan", "changed": []}
    ]  # fmt: skip


OTHER_TYPES = {
    "bytes": pa.array([b"a"] * 16),
    "bytes that are no text": pa.array([b"\xff"] * 16),
    "a number": pa.array(range(16)),
    "not a number": pa.array([float("nan")] * 16),
    "nothing": pa.nulls(16),
    "lists": pa.array([["a"]] * 16),
    "numbers in lists": pa.array([[2**62]] * 16),
    "objects": pa.array([{"a": 1}] * 16),
    "times": pa.array([2**40] * 16, pa.timestamp("s")),
}


@pytest.mark.parametrize("kind", OTHER_TYPES)
def test_columns_of_another_type_are_shown_or_the_file_is_named(short_run, kind):
    run = short_run
    file = run / "rollouts" / "step_000099.parquet"
    table = pq.read_table(run / "rollouts" / "step_000000.parquet")
    try:
        for place, name in enumerate(table.column_names):
            pq.write_table(table.set_column(place, name, OTHER_TYPES[kind]), file)
            found = recorded_responses.samples(reading.read_runs([run]))
            data_element("samples", found)
            if kind == "a number" and name == "extracted":
                shown = [row[8] for row in found["rows"] if row[2] == 0 and row[1] == "training"]
                assert set(map(str, range(16))) <= set(shown)
            else:
                is_read = "Unreadable" not in found["note"]
                assert is_read or "Unreadable: step_000099.parquet" in found["note"]
            with contextlib.suppress(UserError):
                view.read_responses(file)
    finally:
        file.unlink()


def test_hostile_text_is_only_data(config, tmp_path):
    run = make_run(tmp_path / f"run{HOSTILE[:9].replace('/', '')}", config, text=lambda _: HOSTILE)
    add_row(run, 12, {f"eval/{HOSTILE}/greedy_accuracy": 0.5})
    page.write_page(tmp_path / "page.html", [run])
    text = (tmp_path / "page.html").read_text()
    assert "<img" not in text and text.count("alert(1)") > 10
    elements = re.findall(r"<script([^>]*)>(.*?)</script>", text, re.DOTALL)
    assert [attributes.strip()[:31] for attributes, _ in elements] == [
        'type="application/json" id="fig', 'type="application/json" id="sam', "", "", "",
    ]  # fmt: skip
    # Only the three scripts of the package run.
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1]
    digests = [
        base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        for _, script in elements[2:]
    ]
    assert policy == (
        "default-src 'none'; style-src 'unsafe-inline'; script-src "
        + " ".join(f"'sha256-{digest}'" for digest in digests)
        + "; img-src data: blob:"
    )
    assert data_of(tmp_path / "page.html", "figures")["runs"][0]["name"] == run.name


def test_panels_are_made_for_metrics_and_figures_that_have_none():
    keys = {"metrics/mean_norm/correct", "metrics/mean_norm/incorrect", "eval/a/b/pass@8",
            "eval/a/b/pass@8_stderr", "eval/a/b/num_problems", "eval/a/metrics/x/mean"}  # fmt: skip
    found = {panel.title: panel for panel in panels_of(keys)}
    assert found["mean_norm"].keys == {
        "metrics/mean_norm/correct": "correct", "metrics/mean_norm/incorrect": "incorrect"
    }  # fmt: skip
    assert found["pass@8"].keys == {"eval/a/b/pass@8": "a/b"}
    assert len(found) == 2


def test_a_directory_without_a_log_is_refused(config, tmp_path):
    refused(r"nowhere is no run; name --workdir", reading.read_runs, [tmp_path / "nowhere"])
    run = make_run(tmp_path / "run", config, num_steps=0)
    refused(r"has no log yet; .*--serve", reading.read_runs, [run])
    assert reading.read_runs([run], may_be_empty=True)[0].rows == []
    other = make_run(tmp_path / "other" / "run", config, num_steps=0)
    named = reading.read_runs([run, other], may_be_empty=True)
    assert [log.name for log in named] == [f"{tmp_path.name}/run", "other/run"]
    refused("named twice", reading.read_runs, [run, run], may_be_empty=True)


def test_a_long_episode_is_cut_in_each_turn_and_its_context_has_no_logprob(config, tmp_path):
    run = make_run(tmp_path / "run", config, num_steps=1)
    mask = np.array([True, True, False, False, True])
    item = scored(
        0, correct=True, response_mask=mask, turn_rewards=np.array([0.0, 1.0], np.float32)
    )
    write_rollouts(run / "rollouts", 1, Scored.of([item]), lambda ids: "é" * 3000 * len(ids))
    found = recorded_responses.samples(reading.read_runs([run]))
    rows = [dict(zip(found["columns"], row)) for row in found["rows"]]
    (row,) = [row for row in rows if row["step"] == 1]
    assert all(row["turns"] == [len(row["response"])] and not row["rewards"] for row in rows[1:])
    assert len(row["turns"]) == 3 and sum(row["turns"]) == len(row["response"]) < 4200
    assert (row["tokens"], row["logprobs"]) == (3, [-1.0, -2.0, -5.0])
    assert row["rewards"] == [0, 1] and "1 of them have more than" in found["note"]
