"""The notebooks of the pages run from their first cell to their last, with a small random model."""

import json
import pathlib
import re

import matplotlib
import pytest

DOCS = pathlib.Path(__file__).parents[2] / "docs"
matplotlib.use("Agg")


def cells_of(name):
    notebook = json.loads((DOCS / f"{name}.ipynb").read_text())
    assert not any(cell.get("outputs") for cell in notebook["cells"])
    return ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["first_training", "own_method"])
def test_the_cells_run(name, chat_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "smollm2").symlink_to(chat_model)
    names = {}
    for cell in cells_of(name):
        if written := re.match(r"%%writefile (\S+)\n", cell):
            (tmp_path / written[1]).write_text(cell[written.end() :])
        elif not cell.startswith("%pip"):
            cell = cell.replace('"num_steps": 10', '"num_steps": 2')
            exec(compile(cell, name, "exec"), names)
    log = names["trainer"].log
    assert log.column("reward/mean").null_count <= 1 and log.num_rows >= 2
    if name == "own_method":
        assert all(norm > 0 for norm in log.column("metrics/mean_norm/mean").to_pylist())
        settings = json.loads((tmp_path / "runs" / "own" / "config.json").read_text())["config"]
        assert settings["algorithms"]["options"] == {"scale": 0.5}
