"""launch.env: what a report of a problem needs, without what is private."""

import importlib
import json
import os
import socket

import jax
import pytest

import launch
from semrl_jax import library
from tests.launch.conftest import TOKEN, run, succeed
from tests.launch.test_bad_input import assert_one_line


@pytest.mark.slow
def test_settings_are_shown_without_what_is_private(tmp_path):
    settings = {
        "seed": 3,
        "model": {"path": "/home/alice/models/mine", "family": "llama"},
        "rollout": {"addresses": ["gpu7:50051"], "token_file": "/home/alice/token"},
        "metrics": {"names": ["effective_rank", "curvature"]},
    }
    (tmp_path / "config.json").write_text(json.dumps({"run_id": "a", "config": settings}))
    flags = "--xla_cpu_multi_thread_eigen=false --xla_dump_to=/home/alice/dump"
    done = succeed(
        "launch.env", f"--run={tmp_path}", env={"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    )
    found = dict(line.split(": ", 1) for line in done.stdout.splitlines())
    assert {"semrl_jax", "jax", "transformers", "git", "python", "system"} <= found.keys()
    assert found["devices"] == "1 x cpu" and found["JAX_PLATFORMS"] == "cpu"
    assert found["XLA_FLAGS"] == "--xla_cpu_multi_thread_eigen=false"
    assert found["seed"] == "3" and found["model.family"] == "llama"
    assert found["metrics.names"] == "('effective_rank', 'curvature')"
    for name in ("model.path", "rollout.addresses", "rollout.token_file"):
        assert found[name] == "(left out)"
    for private in ("alice", "gpu7", TOKEN, socket.gethostname(), str(tmp_path)):
        assert private not in done.stdout
    assert_one_line(run("launch.env", f"--run={tmp_path}/no"), "is no directory of a run.")


@pytest.mark.parametrize(
    ("given", "used"), [("cuda", "cuda,cpu"), ("cpu", "cpu"), ("tpu,cpu", "tpu,cpu"), ("", "")]
)
def test_the_host_stays_a_device_of_jax(monkeypatch, given, used):
    """It measures hidden states, and `JAX_PLATFORMS=cuda` alone would leave it out."""
    monkeypatch.setenv("JAX_PLATFORMS", given)
    importlib.reload(launch)
    assert os.environ["JAX_PLATFORMS"] == used
    earlier = jax.config.jax_platforms
    try:
        jax.config.update("jax_platforms", given)
        importlib.reload(library)
        assert jax.config.jax_platforms == used
    finally:
        jax.config.update("jax_platforms", earlier)
