"""A short quickstart whose replica is vLLM."""

import os
import pathlib
import signal

import pytest

from tests.fixtures import read_rows, save_chat_model
from tests.launch.conftest import read_until, run, start
from tests.rollout.engines.test_vllm_ends import assert_gone, queues
from tests.rollout.engines.vllm_replica import PYTHON, descendants, environment

pytestmark = pytest.mark.slow
FLAGS = (
    "--config=configs/quickstart_vllm.py", f"--config.rollout.vllm_python={PYTHON}",
    "--config.rollout.vllm_max_num_seqs=16", "--config.warm_start.num_steps=12",
    "--config.data.prompts_per_step=4", "--config.training.prompts_per_minibatch=4",
    "--config.rollout.group_size=4", "--config.evaluation.num_problems=8",
    "--config.training.learning_rate=1e-2",  # weights that stay behind would be seen at once
    "--config.training.learning_rate_warmup_steps=0", "--config.logging.plot_every_steps=0",
)  # fmt: skip


@pytest.mark.soak  # tests/launch/test_real_model.py has a replica before and after an update
@pytest.mark.parametrize(
    "fields", [(), ("--config.lora.rank=4",), ("--config.rollout.in_turns=True",)],
    ids=["all parameters", "adapters", "in turns"],
)  # fmt: skip
def test_a_run_with_a_vllm_child(tmp_path, fields):
    """Weights reach vLLM at every step: its log-probabilities agree with the trained policy.

    Adapters are sent without their base after the first step.
    """
    result = run(
        "launch.train", *FLAGS, *fields, "--config.training.num_steps=3",
        f"--workdir={tmp_path / 'run'}", env=environment(), timeout=400,
    )  # fmt: skip
    assert result.returncode == 0, (result.stdout, result.stderr)
    assert "done: 3 steps" in result.stdout
    *rows, last = read_rows(tmp_path / "run")
    assert [row["step"] for row in rows] == [0, 1, 2]
    if "--config.lora.rank=4" in fields:
        assert rows[1]["rollout/weight_bytes"] < 0.1 * rows[0]["rollout/weight_bytes"]
    for row in rows:
        assert row["rollout/logprob_mismatch/max"] < 1e-4
        assert row["policy/grad_norm"] > 0 and row["rollout/weight_bytes"] > 0
        assert row["rollout/responses"] >= 16 and row["rollout/replica_failures"] == 0
        assert row["metrics/effective_rank/mean"] > 1
    # The config compares hidden states every 10 steps; on the wire they are bfloat16.
    assert rows[0]["rollout/hidden_state_mismatch/max"] < 2**-8
    assert "rollout/hidden_state_mismatch/max" not in rows[1]
    assert "eval/arithmetic/greedy_accuracy" in last


@pytest.mark.soak
def test_a_run_with_an_environment_and_a_vllm_child(tmp_path):
    """Each turn continues the tokens before it: log-probabilities agree on all own tokens."""
    save_chat_model(tmp_path / "model", head_dim=32)  # the least on a CPU
    # An untrained policy never writes the end token: one token in seven ends a turn.
    stops = (f"--config.rollout.stop_token_ids={token}" for token in range(0, 280, 7))
    result = run(
        "launch.train", *FLAGS, *stops, f"--config.model.path={tmp_path / 'model'}",
        "--config.data.task=environment", "--config.evaluation.every_steps=0",
        "--config.environment.name=tests.environments.users:Vowels",
        "--config.rollout.max_prompt_tokens=64", "--config.rollout.max_response_tokens=96",
        "--config.warm_start.num_steps=0", "--config.training.num_steps=2",
        f"--workdir={tmp_path / 'run'}", env=environment(), timeout=400,
    )  # fmt: skip
    assert result.returncode == 0, (result.stdout, result.stderr)
    for row in read_rows(tmp_path / "run"):
        assert row["episode/turns/max"] == 3 and row["episode/failed_fraction"] == 0
        assert row["rollout/logprob_mismatch/max"] < 1e-4
        assert row["policy/grad_norm"] > 0


@pytest.mark.soak
def test_a_run_that_samples_ahead_survives_the_end_of_its_vllm_child_and_of_itself(tmp_path):
    """The child is started again and gets the weights; the same command continues the run."""
    flags = (
        *FLAGS, "--config.rollout.max_staleness=1", "--config.training.num_steps=6",
        "--config.checkpoints.every_steps=1", "--config.hidden_states.compare_every=0",
        f"--workdir={tmp_path / 'run'}",
    )  # fmt: skip
    trainer = start("launch.train", *flags, env=environment())
    try:
        read_until(trainer, "step    2/6")
        (child,) = [
            pid
            for pid in descendants(trainer.pid)
            if b"launch.rollout" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        os.kill(child, signal.SIGKILL)
        read_until(trainer, "started again")
        read_until(trainer, "step    5/6")
        pids = descendants(trainer.pid)
        assert pids and child not in pids
    finally:
        trainer.send_signal(signal.SIGKILL)
        trainer.communicate()
    assert_gone(pids, 20.0)
    result = run("launch.train", *flags, env=environment(), timeout=400)
    assert result.returncode == 0, (result.stdout, result.stderr)
    *rows, last = read_rows(tmp_path / "run")
    assert [row["step"] for row in rows] == [*range(6)] and last["step"] == 6
    for row in rows:
        assert row["rollout/staleness"] == row["rollout/staleness/max"] == min(row["step"], 1)
        # The engine has the weights before the last update, which changed much.
        assert (row["rollout/logprob_mismatch/max"] < 1e-4) == (row["step"] == 0)
        assert row["policy/importance_weight/mean"] > 0 and row["policy/grad_norm"] > 0


@pytest.mark.soak
def test_nothing_of_vllm_outlives_a_trainer_that_is_killed(tmp_path):
    """Neither its processes nor their files in /dev/shm."""
    trainer = start(
        "launch.train", *FLAGS, "--config.training.num_steps=10000",
        "--config.rollout.vllm_enforce_eager=True",
        f"--workdir={tmp_path / 'run'}", env=environment(VLLM_ENABLE_V1_MULTIPROCESSING="1"),
    )  # fmt: skip
    try:
        read_until(trainer, "step    2/10000")
        pids = descendants(trainer.pid)
        shared = queues(pids)
        assert len(pids) >= 3 and shared  # the replica, its engine and its worker
    finally:
        trainer.send_signal(signal.SIGKILL)
        trainer.communicate()
    assert_gone(pids, 20.0)
    assert not [path for path in shared if path.exists()]
