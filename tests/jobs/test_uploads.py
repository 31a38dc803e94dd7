"""Figures of evaluations reach trackers once, also after a failure."""

import json

import pytest

from semrl_jax.jobs.uploads import SENT, check_upload, upload
from semrl_jax.runs import trackers
from semrl_jax.support.errors import UserError

RESULTS = {
    "math": {"pass@1": 0.5, "pass@1_interval": [0.4, 0.6], "num_problems": 4, "maj@2": None},
    "average": {"pass@1": 0.5},
}
ROW = {"eval/math/pass@1": 0.5, "eval/math/num_problems": 4.0, "eval/average/pass@1": 0.5}


@pytest.fixture
def runs(monkeypatch):
    """What a tracker in the place of MLflow has: project, directory, id and rows of each run."""
    found = []

    class Memory:
        repeats = False
        is_broken = False

        def __init__(self, project, workdir, run_id, settings):
            assert settings["evaluation.upload"] and workdir.is_dir()
            self.rows = []
            found.append((project, workdir.name, run_id, self.rows))

        def write(self, step, scalars):
            if Memory.is_broken:
                raise ConnectionError("gone")
            self.rows.append((step, dict(scalars)))

        def close(self, final):
            assert final == {}

    monkeypatch.setitem(trackers.OPTIONAL, "mlflow", Memory)
    found.append(Memory)
    return found


def results_of(directory, **changes):
    directory.mkdir(exist_ok=True)
    file = directory / "results.json"
    file.write_text(json.dumps(RESULTS | changes))
    return file


@pytest.fixture
def uploading(config):
    config.evaluation.upload, config.logging.mlflow = True, "mine"
    return config


def test_each_policy_is_a_run_with_a_row_for_each_step(uploading, runs, tmp_path):
    files = {step: results_of(tmp_path / f"a-step{step}") for step in (20, 0)}
    other = results_of(tmp_path / "b", math={"pass@1": 0.25})
    evaluations = {"a": list(files.items()), "b": [(0, other)]}
    upload(uploading, evaluations, tmp_path, print)
    (_, *found) = runs
    assert [(project, name, rows) for project, name, _, rows in found] == [
        ("mine", "a", [(0, ROW), (20, ROW)]),
        ("mine", "b", [(0, {"eval/math/pass@1": 0.25, "eval/average/pass@1": 0.5})]),
    ]
    assert len({run_id for *_, run_id, _ in found}) == 2
    upload(uploading, evaluations, tmp_path, print)  # nothing is new
    assert len(runs) == 3
    results_of(tmp_path / "b")
    upload(uploading, evaluations, tmp_path, print)
    assert len(runs) == 4 and runs[-1][1] == "b"
    assert [*json.loads((tmp_path / SENT).read_text())] == ["mlflow:mine"]


def test_a_tracker_that_fails_gets_the_figures_at_the_next_start(uploading, runs, tmp_path):
    evaluations, warnings = {"a": [(0, results_of(tmp_path))]}, []
    runs[0].is_broken = True
    upload(uploading, evaluations, tmp_path, warnings.append)
    assert not (tmp_path / SENT).exists()
    assert "ConnectionError: gone; the same command sends the figures again" in warnings[0]
    runs[0].is_broken = False
    upload(uploading, evaluations, tmp_path, warnings.append)
    assert len(warnings) == 1
    assert runs[-1][1:2] == (tmp_path.name,) and runs[-1][3] == [(0, ROW)]


def test_an_upload_without_a_tracker_is_refused(config):
    check_upload(config)
    config.evaluation.upload = True
    with pytest.raises(UserError, match=r"upload=True needs a tracker: set logging\.wandb or"):
        check_upload(config)
