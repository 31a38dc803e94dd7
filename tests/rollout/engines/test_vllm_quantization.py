"""vLLM with 8-bit weights: rounded again at every update, and corrected for in the trainer.

On a CPU without AMX, vLLM 0.32 has one such format, fp8_per_channel.
"""

import dataclasses

import numpy as np
import pytest

from configs import default
from semrl_jax.runs import validate
from semrl_jax.settings.algorithms import importance_options
from semrl_jax.support.errors import UserError
from tests.fixtures import read_rows
from tests.launch.conftest import run
from tests.rollout.engines.test_vllm import Model, random_prompts, requests_of, sampled
from tests.rollout.engines.test_vllm_ends import FLAGS, SAMPLING, STATES, distances
from tests.rollout.engines.test_vllm_training import FLAGS as TRAINING_FLAGS
from tests.rollout.engines.vllm_replica import environment, running, serving

FORMAT = "--config.rollout.vllm_quantization=fp8_per_channel"


def config_of(**fields):
    config = default.get_config()
    for name, value in fields.items():
        config.rollout[name] = value
    return config


def test_8_bit_weights_turn_the_correction_on():
    assert importance_options(config_of())["level"] == "none"
    config = config_of(vllm_quantization="fp8_per_channel", engine="vllm", weight_dtype="bfloat16")
    validate(config)
    assert importance_options(config)["level"] == "token"
    config.algorithms.importance.level_ahead = "none"
    assert importance_options(config)["level"] == "none"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vllm_quantization": "int4"}, "rollout.vllm_quantization='int4'"),
        ({"vllm_quantization": "fp8_per_channel"}, "is of vLLM, and the engine is 'jax'"),
        (
            {"vllm_quantization": "fp8_per_channel", "engine": "vllm"},
            "needs weight_dtype='bfloat16', not float32",
        ),
    ],
)
def test_what_cannot_have_8_bit_weights_is_refused(fields, message):
    with pytest.raises(UserError, match=message):
        validate(config_of(**fields))


@pytest.mark.soak
def test_weights_are_rounded_again_at_every_update(tmp_path):
    """States come from the newest weights in 8 bits; the first weights are sent a second time."""
    first, second = (Model(tmp_path, tied=True, seed=seed, scale=1.0) for seed in (0, 1))
    requests = requests_of(random_prompts(first, [1, 17, 60]), 2)
    sampling = dataclasses.replace(SAMPLING, max_tokens=32)

    def error(rollout, model):
        states = rollout.hidden_states[:, 0].astype(np.float32)
        return distances(states, model.states_and_logits(rollout)[0]).mean()

    with serving(first.path, *FLAGS, FORMAT) as client:
        for step, (newest, other) in enumerate(((first, second), (second, first), (first, second))):
            version = newest.sync(client, step, "bfloat16")
            rollouts = sampled(client, version, requests, sampling, STATES).values()
            # A value keeps 3 bits of its mantissa: 0.12. bfloat16 alone gives less than 0.02.
            assert all(0.03 < error(rollout, newest) < 0.4 for rollout in rollouts)
            assert all(error(rollout, other) > 1 for rollout in rollouts)


@pytest.mark.soak
def test_a_run_logs_and_corrects_the_mismatch_of_8_bit_weights(tmp_path):
    result = run(
        "launch.train", *TRAINING_FLAGS, FORMAT, "--config.rollout.weight_dtype=bfloat16",
        "--config.training.num_steps=2", f"--workdir={tmp_path / 'run'}",
        env=environment(), timeout=400,
    )  # fmt: skip
    assert result.returncode == 0, (result.stdout, result.stderr)
    *rows, _ = read_rows(tmp_path / "run")
    for row in rows:
        # Weights of an earlier update would be nats away: the learning rate is 1e-2.
        assert 1e-3 < row["rollout/logprob_mismatch/mean"] < 0.1
        assert (
            0 < row["policy/importance_weight/min"] < 1 < row["policy/importance_weight/max"] <= 2
        )


@pytest.mark.soak
@pytest.mark.parametrize("name", ["fp8_per_tensor", "fp8_per_block"])
def test_a_format_that_this_machine_lacks_is_one_line(tmp_path, name):
    """This machine has no AMX."""
    model = Model(tmp_path, tied=True)
    with running(model.path, *FLAGS, f"--config.rollout.vllm_quantization={name}") as replica:
        assert replica.wait(300) == 2, replica.lines
        assert f"with {name} weights here" in replica.lines[-1]
