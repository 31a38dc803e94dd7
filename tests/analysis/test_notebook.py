"""docs/metrics.ipynb runs from its first cell to its last, and shows what its text says."""

import json

import matplotlib
import pytest

from tests.analysis.test_verl_page import ROOT

matplotlib.use("Agg")


@pytest.mark.slow
def test_the_cells_run_and_show_what_the_text_says(capsys):
    notebook = json.loads((ROOT / "docs" / "metrics.ipynb").read_text())
    cells = ["".join(c["source"]) for c in notebook["cells"] if c["cell_type"] == "code"]
    names = {}
    for number, cell in enumerate(cells):
        exec(compile(cell, f"cell {number}", "exec"), names)
        plain = {"ER": "effective_rank", "ERV": "effective_rank_velocity"}
        plain["ERA"] = "effective_rank_acceleration"
        if "loops" in cell:
            loop, explores, saturates = (
                {short: float(names["found"][key][i]) for short, key in plain.items()}
                for i in range(3)
            )
            assert loop["ERV"] < 0.1 < saturates["ERA"] + 0.1 < explores["ERA"]
        if "lengths = (200" in cell:
            valid = {key.label: [*map(bool, m.valid)] for key, m in names["found"].items()}
            assert valid["effective_rank_velocity"] == [True, True, False]
            assert valid["effective_rank_acceleration"] == [True, False, False]
    repeated, looped, random = names["found"]["effective_rank"]
    assert repeated < looped < random
    assert "8 directions: ER" in capsys.readouterr().out
