"""The configs of the published runs, beside the launcher's table (METHOD.md section 11, [D]).

`python -m pytest -s tests/launch/test_verl_configs.py -k difference` prints the comparison.
"""

import importlib

import pytest

from semrl_jax.training import validate

# Field of ours -> the launcher's value. Where a row is a departure, `DEPARTURES` has ours.
LAUNCHER = {
    "data.prompts_per_step": 48,
    "training.prompts_per_minibatch": 24,
    "rollout.group_size": 4,
    "training.learning_rate": 5e-7,
    "training.learning_rate_warmup_steps": 0,  # schedule: constant
    "training.adam_b1": 0.9,
    "training.adam_b2": 0.999,
    "training.weight_decay": 0.01,
    "training.max_grad_norm": 1.0,
    "training.micro_batch_size": 4,  # 1 on each of its 4 devices
    "rollout.max_prompt_tokens": 512,
    "rollout.temperature": 1.0,
    "rollout.top_p": 1.0,
    "rollout.top_k": 0,
    "training.num_steps": 160,
    "checkpoints.every_steps": 40,
    "evaluation.every_steps": 10,
    "algorithms.loss.clip_epsilon": 0.2,
    "algorithms.loss.kl_coefficient": 0.001,
    "algorithms.loss.entropy_coefficient": 0.001,
    "algorithms.loss.kl_estimator": "low_var_kl",
    "algorithms.aggregation": "response_mean",  # what a micro-batch of one response comes to
    "metrics.stride": 40,
    "metrics.names": ("effective_rank", "traditional_rank"),
    "metrics.window": "release",
    "shaping.target": "advantage",
    "shaping.tokens": "last",
    "shaping.alpha": 0.3,
    "shaping.gain": 2.0,
    "shaping.eta": 1.0,
    "shaping.kappa": 2.0,
    "model.compute_dtype": "bfloat16",
    "model.reference_dtype": "bfloat16",
    "rewards.mode": "independent",
}
RUNS = {
    "grpo_llama3_2_3b": {"rollout.max_response_tokens": 1280},
    "grpo_qwen2_5_7b": {},  # its limit is not published
    "grpo_mathstral_7b": {"rollout.max_response_tokens": 1536},
}
DEPARTURES = {
    "algorithms.aggregation": "token_mean",
    "metrics.names": ("effective_rank",),
    "metrics.window": "exact",
    "shaping.tokens": "all",
}


def load(name):
    return importlib.import_module(f"configs.verl.{name}").get_config()


def value(config, field):
    for part in field.split("."):
        config = config[part]
    return config


@pytest.mark.parametrize("name", RUNS)
def test_difference_from_the_launcher_is_what_the_comments_say(name):
    config = load(name)
    departures = {}
    print(f"\n{name}")
    for field, launcher in (LAUNCHER | RUNS[name]).items():
        ours = value(config, field)
        mark = " " if ours == launcher else "*"
        print(f"{mark} {field:42} launcher {launcher!s:44} ours {ours}")
        if ours != launcher:
            departures[field] = ours
    assert departures == DEPARTURES


@pytest.mark.parametrize("name", RUNS)
def test_published_runs_pass_the_check_of_configs(name):
    validate(load(name).lock())
