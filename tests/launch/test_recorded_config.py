"""configs/recorded.py: the settings of a run, read from its record."""

import importlib
import json

import pytest

from configs import recorded
from semrl_jax.runs.workdir import jsonable
from tests.launch.conftest import run


@pytest.mark.parametrize("name", ["quickstart", "gsm8k", "verl.grpo_qwen2_5_7b"])
def test_a_recorded_config_is_the_one_recorded(tmp_path, name):
    config = importlib.import_module(f"configs.{name}").get_config()
    config.rollout.stop_token_ids = (3, 5)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"config": jsonable(config.to_dict())}))
    assert recorded.get_config(str(file)).to_dict() == config.to_dict()


@pytest.mark.slow
def test_the_environment_of_vllm_is_asked_for_before_any_work(tmp_path):
    result = run(
        "launch.train", "--config=configs/quickstart_vllm.py", f"--workdir={tmp_path}/run",
        "--config.rollout.vllm_python=/nowhere/python",
    )  # fmt: skip
    assert result.returncode == 2
    (line,) = result.stderr.strip().splitlines()
    assert "rollout.vllm_python=/nowhere/python does not exist" in line and "make_env.sh" in line
    assert "warm start" not in result.stdout
