"""docs/algorithms.md is what the docstrings say."""

import runpy

from tests.analysis.test_verl_page import ROOT


def test_the_page_is_current():
    made = runpy.run_path(str(ROOT / "docs" / "make_algorithms.py"))
    assert (ROOT / "docs" / "algorithms.md").read_text() == made["page"](), (
        "run: python docs/make_algorithms.py"
    )
