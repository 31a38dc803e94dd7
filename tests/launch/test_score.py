"""launch.score: mistakes are named before any response is graded."""

import json

import pytest

from tests.cases import slow_after
from tests.launch.conftest import run
from tests.launch.test_bad_input import assert_one_line


@pytest.mark.parametrize(
    ("flags", "message"),
    slow_after(
        1,
        [
            (["--output=graded.jsonl", "--group=level"], "--group=level is no field of"),
            (["--output=/proc/x.jsonl"], "--output=/proc/x.jsonl cannot be written: No such file"),
        ],
    ),
)
def test_a_mistake_is_named(flags, message, tmp_path):
    samples = tmp_path / "samples.jsonl"
    samples.write_text(json.dumps({"response": "2", "reference": "2"}) + "\n")
    done = run("launch.score", f"--samples={samples}", "--verifier=math", *flags)
    assert_one_line(done, message)
