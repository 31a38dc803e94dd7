"""`launch.rollout --policy`: a run's newest checkpoint over HTTP, without a trainer."""

import contextlib
import json
import random
import threading

import pytest

from tests.launch.comparison import assert_same_run
from tests.launch.conftest import TINY, read_until, run, start, succeed
from tests.rollout.http.conftest import ask
from tests.rollout.http.test_server import BODIES, ROUTES, mutated
from tests.rollout.server.test_prometheus import free_port


def train(workdir, num_steps):
    flags = f"--config.training.num_steps={num_steps}", "--config.checkpoints.every_steps=1"
    succeed("launch.train", f"--config={TINY}", f"--workdir={workdir}", *flags, timeout=300)


@pytest.mark.soak
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


@contextlib.contextmanager
def flooded(port, num_threads):
    """Sends requests over HTTP meanwhile; yields the statuses of the answers."""
    statuses, is_over = [], threading.Event()

    def flood(seed):
        draw = random.Random(seed)
        while not is_over.is_set():
            kind = draw.randrange(1, 3)  # the policy of the run has no chat template
            body = {**BODIES[kind], "model": "policy"}
            if draw.random() < 0.5:
                body = mutated(draw, body)
            answer = ask(f"http://127.0.0.1:{port}{ROUTES[kind]}", body, timeout_s=120)
            statuses.append(answer.status)

    threads = [threading.Thread(target=flood, args=[seed]) for seed in range(num_threads)]
    for thread in threads:
        thread.start()
    try:
        yield statuses
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


@pytest.mark.soak
def test_a_trainer_gets_the_same_rows_during_a_flood(tmp_path):
    for name, num_threads in (("alone", 0), ("flooded", 4)):
        port = free_port()
        process = start("launch.rollout", f"--config={TINY}", "--port=0", f"--http_port={port}")
        try:
            address = read_until(process, "listens on").split()[-1]
            flags = f"--config.rollout.addresses={address}", "--config.training.num_steps=2"
            with flooded(port, num_threads) as statuses:
                succeed(
                    "launch.train", f"--config={TINY}", f"--workdir={tmp_path}/{name}", *flags,
                    timeout=600,
                )  # fmt: skip
        finally:
            process.terminate()
            process.communicate(timeout=60)
    assert_same_run(tmp_path / "flooded", tmp_path / "alone", 2)
    assert statuses.count(200) > 10 and statuses.count(400) > 10, statuses
    assert set(statuses) <= {200, 400, 404, 503}  # 503: before the first weights
