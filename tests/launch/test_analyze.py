"""launch.analyze: its studies, run as commands."""

import csv
import json

import numpy as np
import pytest

from tests.launch.conftest import run, succeed
from tests.launch.test_bad_input import assert_each_is_one_line, assert_one_line

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def states(tmp_path):
    file = tmp_path / "states.npz"
    rows = np.random.default_rng(0).normal(size=(3, 40, 8)).astype(np.float32)
    rows[2, 3] = np.nan
    mask = np.arange(40) < np.array([40, 25, 40])[:, None]
    np.savez(file, hidden_states=rows, response_mask=mask)
    return file


@pytest.mark.slow
def test_metrics_prints_a_table_and_writes_its_files(states, tmp_path):
    output = tmp_path / "deep" / "study"
    result = succeed(
        "launch.analyze", "metrics", f"--input={states}", "--stride=8", f"--output={output}"
    )
    assert "curvature" in result.stdout and "2/3" in result.stdout
    rows = list(csv.DictReader((output / "metrics.csv").read_text().splitlines()))
    assert [row["tokens"] for row in rows] == ["40", "25", "40"]
    assert float(rows[0]["effective_rank"]) > 4 and rows[2]["effective_rank"] == ""
    curves = list(csv.DictReader((output / "effective_rank.csv").read_text().splitlines()))
    assert [row["tokens"] for row in curves] == ["8", "16", "24", "32", "40", "8", "16", "24"]
    assert (output / "effective_rank.png").read_bytes().startswith(PNG)


def test_mistakes_are_named_before_jax_is_loaded(tmp_path, monkeypatch):
    (tmp_path / "jax.py").write_text("raise SystemExit('JAX is loaded')")
    (tmp_path / "generation.json").write_text("{}")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert_each_is_one_line(
        "launch.analyze",
        ([], "first argument must be one of metrics, study, curve, but there"),
        (["plot"], "not 'plot'"),
        (["metrics", "again"], "'again' is not a flag"),
        (["metrics"], "--input is needed"),
        (["metrics", "--input=x.npz", "--window=half"], "--window=half"),
        (["study", "--run=x", "--policy=y"], "--policy belongs to --input"),
        (
            ["study", f"--input={tmp_path}", f"--output={tmp_path}"],
            "launch.generate wrote there; name a new directory",
        ),
    )


@pytest.mark.slow
def test_curve_fits_what_it_is_told_to(tmp_path):
    """Twelve rows of a log; the last half is left for the error."""
    rows = [
        {"step": step, "reward/correct": 0.1 + 0.5 / (1 + (4 / max(step, 1e-9)) ** 2)}
        for step in range(12)
    ]
    (tmp_path / "config.json").write_text('{"run_id": "1", "config": {}}')
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    flags = f"--run={tmp_path}", "--compute=steps", "--skip=2", "--fraction=0.5"
    result = succeed("launch.analyze", "curve", *flags, f"--output={tmp_path}")
    assert "reward/correct over steps: 5 evaluations" in result.stdout
    assert "ceiling 0.6" in result.stdout and "5 later evaluations" in result.stdout
    assert (tmp_path / "curve.png").read_bytes().startswith(PNG)
    assert len((tmp_path / "curve.csv").read_text().splitlines()) == 13
    few = run("launch.analyze", "curve", *flags[:2], "--fraction=0.2")
    assert_one_line(few, "2 points are too few; a curve needs 4")


@pytest.mark.slow
def test_wrong_files_are_named(states, tmp_path):
    missing = run("launch.analyze", "metrics", f"--input={tmp_path / 'x.npz'}")
    assert_one_line(missing, "x.npz is no file")
    here = run("launch.analyze", "metrics", f"--input={states}", f"--output={states}")
    assert_one_line(here, "cannot be made or written: File exists")
