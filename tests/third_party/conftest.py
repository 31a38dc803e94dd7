"""The plugin's own package; only the environment of vLLM has it installed."""

import pathlib

import pytest


@pytest.fixture(autouse=True)
def plugin(monkeypatch):
    root = pathlib.Path(__file__).parents[2]
    monkeypatch.syspath_prepend(str(root / "third_party" / "vllm_patch"))
