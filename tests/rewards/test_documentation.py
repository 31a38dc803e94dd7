"""The code of docs/verifiers.md does what the page says."""

import os
import pathlib
import re
import subprocess
import sys

import pytest

from semrl_jax.rewards import Verdict, VerifierPool

ROOT = pathlib.Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "verifiers.md").read_text()
EXAMPLE, WITH_ROW, STEPS, TEST = re.findall(
    r"^```python\n(.*?)^```$", PAGE, re.DOTALL | re.MULTILINE
)


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "my_verifiers.py").write_text(EXAMPLE)
    return tmp_path


def test_example_runs_in_the_pool(directory, monkeypatch):
    monkeypatch.syspath_prepend(str(directory))
    with VerifierPool(num_workers=1, function="my_verifiers:tagged_answer") as pool:
        for response, reference, expected in [
            ("so <answer> 1,234\n</answer>", "1234", Verdict(1.0, True, True, "1,234")),
            ("<answer>1</answer><answer>2</answer>", "1", Verdict(-0.5, False, True, "2")),
            (r"\boxed{1}", "1", Verdict(-1.0, False, False, None)),
        ]:
            assert pool.submit(response, reference).result(timeout=30) == expected


def test_example_with_a_row_runs_in_the_pool(tmp_path, monkeypatch):
    (tmp_path / "my_limits.py").write_text(WITH_ROW)
    (row,) = re.findall(r"^`(\{.*\})`:$", PAGE, re.MULTILINE)
    monkeypatch.syspath_prepend(str(tmp_path))
    with VerifierPool(num_workers=1, function="my_limits:short_enough") as pool:
        for response, score in [("It is 7.", 1.0), ("The answer is 7.", 0.0)]:
            verdict = pool.submit(response, "7", row).result(timeout=30)
            assert (verdict.score, verdict.correct, verdict.error) == (score, True, "")


def test_example_with_steps_runs_in_the_pool(tmp_path, monkeypatch):
    """Columns of 380 + 882; the second one is wrong, and the third goes on from it."""
    (tmp_path / "my_steps.py").write_text(STEPS)
    monkeypatch.syspath_prepend(str(tmp_path))
    columns = ["380+882:0+2+0=02,", "8+8+0=15,", "3+8+1=12;"]
    ends = [len("".join(columns[: i + 1])) for i in range(3)]
    with VerifierPool(num_workers=1, functions=["my_steps:worked:weight=0.5"]) as pool:
        found = pool.submit("".join(columns) + r"1252 \boxed{1262}", "1262").result(timeout=30)
        assert (found.score, found.correct, found.error) == (0.5, True, "")
        assert found.steps == tuple(zip(ends, (0.0, -0.5, 0.0)))
        assert pool.submit("5-7-0=18,", "8").result(timeout=30).steps == ((9, 0.0),)


def test_example_test_passes_and_can_fail(directory):
    (directory / "test_it.py").write_text(TEST)
    command = [sys.executable, "test_it.py"]
    options = {"cwd": directory, "capture_output": True, "text": True, "timeout": 60}
    options["env"] = {**os.environ, "PYTHONPATH": str(ROOT)}
    passed = subprocess.run(command, **options)
    assert passed.returncode == 0, passed.stderr
    assert "'num_verdicts': 2, 'num_timeouts': 0" in passed.stdout
    # The new source has another length: Python takes one of the same second and size for compiled.
    (directory / "my_verifiers.py").write_text(EXAMPLE.replace("<answer>", "<solution>"))
    assert subprocess.run(command, **options).returncode == 1


def test_the_page_names_every_kind_of_failure():
    """Its table is that of test_pool.py."""
    assert all(f"`{kind}`" in PAGE for kind in ("exception", "invalid", "timeout", "crash"))
