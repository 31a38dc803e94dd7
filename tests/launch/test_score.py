"""launch.score: mistakes are named before any response is graded."""

import json

import pytest

from tests.launch.conftest import run
from tests.launch.test_bad_input import assert_one_line


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--output=/proc/x.jsonl"], "--output=/proc/x.jsonl cannot be written: No such file"),
        (["--output=graded.jsonl", "--group=level"], "--group=level is no field of"),
    ],
)
def test_a_mistake_is_named(flags, message, tmp_path):
    samples = tmp_path / "samples.jsonl"
    samples.write_text(json.dumps({"response": "2", "reference": "2"}) + "\n")
    done = run("launch.score", f"--samples={samples}", "--verifier=math", *flags)
    assert_one_line(done, message)
