"""`launch.rollout --policy`: a run's newest checkpoint over HTTP, without a trainer."""

import json

import pytest

from tests.launch.conftest import TINY, read_until, run, start
from tests.rollout.http.conftest import ask
from tests.rollout.server.test_prometheus import free_port


def train(workdir, num_steps):
    flags = f"--config.training.num_steps={num_steps}", "--config.checkpoints.every_steps=1"
    result = run("launch.train", f"--config={TINY}", f"--workdir={workdir}", *flags, timeout=300)
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_a_run_is_served_and_followed(tmp_path):
    train(tmp_path / "run", 1)
    port = free_port()
    flags = f"--policy={tmp_path}/run", "--port=0", f"--http_port={port}"
    process = start("launch.rollout", *flags)
    try:
        assert "model run at" in read_until(process, "/v1")
        url, body = (
            f"http://127.0.0.1:{port}/v1/completions",
            {"model": "run", "prompt": "Q: 1+2=?"},
        )

        def answered(seed=1):
            answer = ask(url, {**body, "seed": seed, "max_tokens": 8}, timeout_s=120)
            assert answer.status == 200, answer.text
            return json.loads(answer.text)["choices"][0]

        first = answered()
        assert first["semrl"] == {"run_id": "run", "step": 1}
        assert answered()["text"] == first["text"]
        train(tmp_path / "run", 3)
        read_until(process, "serves run-step3")
        assert answered()["semrl"]["step"] == 3
    finally:
        process.terminate()
        assert process.wait(timeout=30) == 0
        process.stdout.close(), process.stderr.close()
    alone = run("launch.rollout", f"--policy={tmp_path}/nothing", "--port=0")
    assert alone.returncode == 2 and "--policy=" in alone.stdout + alone.stderr
