"""A real language model from PyPI through the commands. Needs the package index; else skipped."""

import json

import numpy as np
import pytest

from tests.launch.conftest import run

PROBLEMS = [
    {"question": f"What is {a} + {b}? Reply with the number only.", "answer": str(a + b)}
    for a, b in [(12, 30), (47, 38), (20, 21), (35, 14)]
]


@pytest.mark.slow
def test_smollm2_is_fetched_evaluated_trained_and_exported(tmp_path):
    model, rows = tmp_path / "smollm2", tmp_path / "sums.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in PROBLEMS))
    fetched = run("launch.prepare_model", "--name=smollm2-135m", f"--output={model}", timeout=600)
    if "cannot be fetched by pip" in fetched.stderr:
        pytest.skip(fetched.stderr.strip())
    assert fetched.returncode == 0, fetched.stderr
    limits = ["--config.rollout.max_prompt_tokens=64", "--config.rollout.max_response_tokens=16"]
    data = ["--config.data.task=files", f"--config.data.files={rows}"]
    done = run(
        "launch.train", "--config=configs/default.py", f"--workdir={tmp_path / 'run'}", *limits,
        f"--config.model.path={model}", f"--config.evaluation.files={rows}", *data,
        "--config.metrics.stride=4", "--config.training.num_steps=2",
        "--config.data.prompts_per_step=2", "--config.rollout.group_size=2",
        "--config.training.micro_batch_size=4", "--config.warm_start.num_steps=0", timeout=900,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "template 'chat', the tokenizer's chat template" in done.stdout
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    assert np.isfinite([row["policy/loss"] for row in found if "policy/loss" in row]).all()
    # With its chat template, the model answers in a few words; as plain text, it would go on.
    assert found[0]["eval/sums/finished_fraction"] == 1.0
    # The engine and the trainer agree on the log-probabilities of real weights, in nats.
    assert max(row.get("rollout/logprob_mismatch/max", 0) for row in found) < 1e-3
    exported = run("launch.convert", f"--source={tmp_path / 'run'}", f"--target={tmp_path / 'out'}")
    assert exported.returncode == 0, exported.stderr
    again = run(
        "launch.generate", f"--policy={tmp_path / 'out'}", f"--prompts={rows}", "--temperature=0",
        f"--output={tmp_path / 'responses'}", *limits, timeout=600,
    )  # fmt: skip
    assert again.returncode == 0, again.stderr
