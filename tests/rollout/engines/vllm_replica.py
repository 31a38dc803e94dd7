"""A vLLM replica as a process of its own, in the environment that make_env.sh makes."""

import contextlib
import os
import pathlib
import subprocess

from semrl_jax.rollout.client import RolloutClient

ROOT = pathlib.Path(__file__).parents[3]
PYTHON = pathlib.Path(os.environ.get("SEMRL_VLLM_PYTHON", ROOT / ".venv-vllm" / "bin" / "python"))
TOKEN = "a-token-for-tests-of-vllm"


def environment():
    """This one, without what tests set for JAX and with a quiet vLLM."""
    assert PYTHON.exists(), (
        f"{PYTHON} is missing: run third_party/vllm_patch/make_env.sh, or set SEMRL_VLLM_PYTHON."
    )
    return {
        **os.environ, "XLA_FLAGS": "", "SEMRL_ROLLOUT_TOKEN": TOKEN, "VLLM_LOGGING_LEVEL": "ERROR",
        # The engine lives in its worker: a process less to start.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }  # fmt: skip


def start_replica(model_path, *flags):
    """`launch.rollout --engine=vllm` on a free port; both outputs are text pipes."""
    return subprocess.Popen(
        [
            str(PYTHON), "-m", "launch.rollout", "--engine=vllm", "--port=0",
            "--config=configs/quickstart.py", f"--config.model.path={model_path}",
            "--config.rollout.vllm_enforce_eager=True", "--config.rollout.vllm_kv_cache_gib=0.25",
            *flags,
        ],
        cwd=ROOT, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def address_of(process):
    """Where it listens; fails with what it wrote where it ends first."""
    seen = []
    for line in process.stdout:
        seen.append(line)
        if "listens on" in line:
            return line.split()[-1]
    raise AssertionError(f"no replica: {seen} {process.stderr.read()}")


@contextlib.contextmanager
def serving(model_path, *flags):
    """A client of a replica that is ended with the block."""
    process = start_replica(model_path, *flags)
    try:
        with RolloutClient(
            (address_of(process),), TOKEN, run_id="run", attempt_id="attempt"
        ) as client:
            client.process = process
            yield client
        process.terminate()
        assert process.wait(timeout=30) == 0
    finally:
        process.kill()
        process.communicate()
