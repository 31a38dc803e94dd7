"""launch.score: mistakes are named before any response is graded."""

import json

import pytest

from tests.launch.test_bad_input import assert_each_is_one_line


@pytest.mark.slow
def test_mistakes_are_named(tmp_path):
    (tmp_path / "x.jsonl").write_text(json.dumps({"response": "2", "reference": "2"}) + "\n")
    given = ("--verifier=math", f"--samples={tmp_path}/x.jsonl")
    assert_each_is_one_line(
        "launch.score",
        ((*given, "--output=graded.jsonl", "--group=level"), "--group=level is no field of"),
        ((*given, "--output=/proc/x.jsonl"), "--output=/proc/x.jsonl cannot be written: No such"),
        ((*given, "--output=x.parquet"), "must end in .jsonl"),
        ((*given, "--output=x.jsonl", "--samples=/no.jsonl"), "--samples: prompt file '/no.jsonl'"),
        (("--verifier=math", "--output=x.jsonl"), "--samples is needed"),
        imports=["semrl_jax.jobs.score", "semrl_jax.rewards"],
    )
