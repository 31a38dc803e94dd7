"""Two steps of a whole run under algorithms and rules that differ from the default."""

import dataclasses

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from semrl_jax import data, models
from semrl_jax.models.of_config import build_policy
from semrl_jax.runs import train
from semrl_jax.support.errors import UserError
from semrl_jax.training import loop
from tests.cases import refused
from tests.fixtures import read_rows, stable
from tests.launch.comparison import restore_on_host
from tests.runs.resuming import rows_of_parts

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("reports_where_looked_at")]
# Each combines parts that need different passes and arrays. The tiny policy never ends a response
# rightly, so rewards come from the fixture `rewarded`.
RUNS = {
    "no pass at all": {
        "algorithms.name": "dr_grpo", "algorithms.loss.surrogate": "reinforce",
        "algorithms.loss.kl_coefficient": 0.0, "algorithms.aggregation": "constant_length",
        "algorithms.constant_length": 24,
    },
    "whole responses, packed": {
        "algorithms.name": "rloo", "algorithms.loss.surrogate": "gspo",
        "algorithms.loss.kl_estimator": "low_var_kl+", "algorithms.aggregation": "response_mean",
        "training.pack_sequences": True, "training.micro_batch_tokens": 80,
        "training.ppo_epochs": 2, "training.learning_rate_schedule": "linear",
        "training.learning_rate_warmup_steps": 0,
        "data.shuffle": False, "training.num_epochs": 1, "data.num_prompts": 8,
    },
    "KL in the reward, masks": {
        "algorithms.name": "reinforce_plus_plus", "algorithms.loss.surrogate": "cispo",
        "algorithms.loss.kl_coefficient": 0.0, "algorithms.advantage.kl_reward_coefficient": 0.1,
        "algorithms.importance.level": "geometric", "algorithms.importance.outside": "mask",
        "algorithms.importance.floor": 0.5, "algorithms.importance.cap": 2.0,
        "algorithms.batch_rules.overlong_tokens": 4, "algorithms.batch_rules.mask_truncated": True,
    },
    "quantile, dynamic bounds": {
        "algorithms.name": "quantile_baseline", "algorithms.loss.surrogate": "dcpo",
        "algorithms.loss.dual_clip": 10.0, "algorithms.loss.clip_epsilon_high": 0.3,
    },
}  # fmt: skip
# A critic, the adaptive KL, one response per prompt.
PPO = {
    "algorithms.name": "ppo", "rollout.group_size": 1, "data.prompts_per_step": 16,
    "data.num_prompts": 24, "training.prompts_per_minibatch": 8,
    "algorithms.advantage.gae_lambda": 0.95, "algorithms.advantage.kl_reward_coefficient": 0.1,
    "algorithms.advantage.kl_target": 0.01, "algorithms.loss.kl_coefficient": 0.0,
    "critic.learning_rate": 1e-2,
}  # fmt: skip


def check_rows(rows, name, config):
    """Rows have the keys of their algorithm's parts alone."""
    for row in rows:
        assert ("critic/loss" in row) == (config.algorithms.name == "ppo")
        assert np.isfinite(row["policy/loss"]) and row["policy/update_skipped"] == 0
        # Logged where one is computed.
        assert ("policy/kl" in row) == (name != "no pass at all")
        masked = "policy/importance_weight/masked_fraction"
        assert (masked in row) == (config.algorithms.importance.level != "none")
    assert any(row["policy/grad_norm"] > 0 for row in rows)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if i < 2 else pytest.mark.soak) for i, name in enumerate(RUNS)],
)
def test_a_run_under_another_algorithm(name, config, tmp_path, rewarded):
    config.training.num_steps = 2
    config.update_from_flattened_dict(RUNS[name])
    assert train(config, str(tmp_path / "run")) == 0
    rows = read_rows(tmp_path / "run")
    check_rows(rows[:2], name, config)
    assert [row["step"] for row in rows] == [0, 1, 2]
    if config.training.ppo_epochs == 2:  # the second step begins after 4 updates of 8
        rates = [row["policy/learning_rate"] for row in rows[:2]]
        assert rates == pytest.approx([1e-2, 5e-3])


def test_a_run_with_a_critic_resumes_to_the_bit(config, tmp_path, rewarded):
    """Critic, its optimiser and the KL coefficient come back; the policy waits for its warm-up."""
    config.update_from_flattened_dict(PPO | {"critic.warmup_steps": 1})
    whole, parts = rows_of_parts(config, tmp_path, 2)
    assert stable(whole[2:]) == stable(parts[2:])
    first, second, third = whole[:3]
    assert "policy/loss" not in first and "policy/loss" in second
    check_rows([second, third], "ppo", config)
    assert first["critic/grad_norm"] > 0
    assert first["critic/learning_rate"] == pytest.approx(1e-2)
    coefficients = [row["algorithm/kl_coefficient"] for row in (first, second, third)]
    assert coefficients[0] == pytest.approx(0.1) and len(set(coefficients)) == 3
    assert first["critic/explained_variance"] == 0  # the head begins with zeros
    assert third["critic/explained_variance"] != 0
    saved = restore_on_host(tmp_path / "whole" / "checkpoints" / "2" / "state")
    # Four updates by Adam of about 1e-2 towards the positive returns; training.learning_rate, in
    # its warm-up, would give about half.
    assert saved["critic"]["params"]["value_head"]["bias"] > 0.03


@pytest.mark.soak
def test_engine_and_policy_are_compared_in_the_warm_up_of_a_critic(config, tmp_path, rewarded):
    """No update computes the policy's log-probabilities there; afterwards the only one does."""
    config.training.num_steps = 2
    config.update_from_flattened_dict(
        PPO
        | {
            "critic.warmup_steps": 1,
            "training.prompts_per_minibatch": 16,
            "algorithms.advantage.kl_reward_coefficient": 0.0,
            "algorithms.advantage.kl_target": 0.0,
        }
    )
    assert train(config, str(tmp_path / "run")) == 0
    rows = read_rows(tmp_path / "run")[:2]
    assert ["policy/loss" in row for row in rows] == [False, True]
    assert ["time/old_logprobs_s" in row for row in rows] == [True, False]
    assert all(row["rollout/logprob_mismatch/max"] < 1e-4 for row in rows)  # both are float32


def test_the_mismatch_is_of_the_responses_that_are_trained_on(config, tmp_path, rewarded):
    """The only update has no log-probabilities of those that a batch rule left out."""
    config.training.num_steps = 1
    config.training.prompts_per_minibatch = config.data.prompts_per_step
    config.rollout.max_response_tokens, config.metrics.stride = 8, 2
    config.algorithms.batch_rules.mask_truncated = True
    assert train(config, str(tmp_path / "run")) == 0
    row = read_rows(tmp_path / "run")[0]
    assert 0 < row["response/length_fraction"] < 1 and "time/old_logprobs_s" not in row
    assert row["rollout/logprob_mismatch/max"] < 1e-4  # both are float32


def test_a_reward_below_0_ends_a_run_of_max_likelihood(config, tmp_path):
    config.algorithms.name, config.rewards.function = "max_likelihood", "tests.verifiers:by_sign"
    refused("a response or turn has the reward -1, but", train, config, str(tmp_path / "run"))


def test_a_critic_whose_updates_are_not_finite_ends_the_run(
    config, tmp_path, rewarded, monkeypatch
):
    """The policy's updates are finite, so its learning rate is not the way out."""
    real = loop.assign_credit

    def spoiled(*arguments):
        credit = real(*arguments)
        return credit._replace(returns=credit.returns.at[0, 0].set(np.inf))

    monkeypatch.setattr(loop, "assign_credit", spoiled)
    config.update_from_flattened_dict(
        PPO | {"training.prompts_per_minibatch": 16, "training.max_skipped_updates": 1}
    )
    with pytest.raises(RuntimeError, match=r"\(critic\); .*Lower critic.learning_rate, or"):
        train(config, str(tmp_path / "run"))
    saved = np.load(tmp_path / "run" / "nonfinite_batch.npz")
    assert [name for name in saved if np.isinf(saved[name]).any()] == ["returns"]
    assert {"token_ids", "response_mask", "values", "advantages"} <= set(saved)


@pytest.mark.parametrize(
    "exact",
    [pytest.param(False, id="sampled", marks=pytest.mark.soak), pytest.param(True, id="exact")],
)
def test_a_run_with_a_teacher(exact, config, tmp_path, rewarded):
    """It has the policy's tokenizer, another size, and another vocabulary than is needed."""
    policy, tokenizer = build_policy(config)
    small = dataclasses.replace(policy.config, hidden_size=16, num_heads=2, head_dim=8)
    teacher = models.Policy(small)
    directory = tmp_path / "teacher"
    models.save_directory(directory, teacher.init(jax.random.key(3)), small, tokenizer)
    config.training.num_steps = 1
    config.update_from_flattened_dict(
        {
            "algorithms.name": "distillation", "model.reference_path": str(directory),
            "algorithms.loss.kl_coefficient": float(exact),
            **({"algorithms.loss.kl_estimator": "exact"} if exact else {}),
            "algorithms.advantage.teacher_weight": float(not exact),
        }
    )  # fmt: skip
    assert train(config, str(tmp_path / "run")) == 0
    row = read_rows(tmp_path / "run")[0]
    assert row["policy/grad_norm"] > 0 and row["policy/update_skipped"] == 0
    assert (row["advantage/min"] < 0) != exact and np.isfinite(row["policy/kl"])
    config.model.reference_path = ""
    refused("reference_path", train, config, str(tmp_path / "run"))


@pytest.mark.parametrize(
    ("name", "group"),
    [("single_stream", 1), pytest.param("smooth_standardisation", 2, marks=pytest.mark.soak)],
)
def test_a_run_that_remembers_its_prompts_resumes_to_the_bit(
    name, group, config, tmp_path, rewarded
):
    """Eight prompts in four steps of four, so that each is visited twice."""
    config.update_from_flattened_dict(
        {
            "algorithms.name": name, "rollout.group_size": group, "data.num_prompts": 8,
            "data.prompts_per_step": 4, "training.prompts_per_minibatch": 2,
            "training.num_steps": 4,
        }
    )  # fmt: skip
    whole, parts = rows_of_parts(config, tmp_path, 3)
    assert stable(whole[3:4]) == stable(parts[3:4])
    saved = restore_on_host(tmp_path / "whole" / "checkpoints" / "4" / "state")["algorithm"]
    assert all(leaf.shape == (8,) for leaf in saved.values())
    counts = saved["weights" if name == "single_stream" else "visits"]
    assert (counts > 1).all()


def test_a_run_that_teaches_itself(config, tmp_path, rewarded):
    """The teacher is the policy with the answer in its prompt; in two parts it is the same run."""
    config.update_from_flattened_dict(
        {
            "algorithms.name": "distillation", "algorithms.advantage.teacher": "policy",
            "algorithms.loss.kl_coefficient": 0.0, "data.teacher_input": "{answer}\n{input}",
            "training.num_steps": 2,
        }
    )  # fmt: skip
    whole, parts = rows_of_parts(config, tmp_path, 1)
    assert all(row["policy/grad_norm"] > 0 and row["advantage/min"] < 0 for row in whole[:2])
    assert stable(parts[1:2]) == stable(whole[1:2])
    config.data.teacher_input = ""
    refused("needs data.teacher_input", train, config, str(tmp_path / "other"))
    config.data.teacher_input, config.algorithms.name = "{answer}{input}", "grpo"
    config.algorithms.advantage.teacher = "reference"
    refused("data.teacher_input=.* is not read", train, config, str(tmp_path / "other"))


def test_a_critic_of_its_own_directory(config, tmp_path, rewarded):
    """With the policy's tokenizer, another size and a trained head."""
    policy, tokenizer = build_policy(config)
    small = dataclasses.replace(policy.config, hidden_size=16, num_heads=2, head_dim=8)
    model = models.ValueModel.of(models.Policy(small))
    params = model.init(jax.random.key(3))
    params.pop("value_head")
    directory = tmp_path / "critic"
    models.save_directory(directory, params, model.decoder.config, tokenizer)
    file = directory / "model.safetensors"
    save_file(load_file(file) | {"score.weight": np.full((1, 16), 0.5, np.float32)}, file)
    config.training.num_steps = 1
    config.update_from_flattened_dict(PPO | {"critic.path": str(directory)})
    assert train(config, str(tmp_path / "run")) == 0
    row = read_rows(tmp_path / "run")[0]
    assert row["critic/explained_variance"] != 0 and row["critic/update_skipped"] == 0
    save_file(load_file(file) | {"score.weight": np.full((1, 16), 0.25, np.float32)}, file)
    refused("began with other critic", train, config, str(tmp_path / "run"))
    config.algorithms.name, config.algorithms.advantage.gae_lambda = "reinforce_plus_plus", 1.0
    with pytest.raises(UserError, match=r"critic.path is not read with .*'reinforce_plus_plus'"):
        train(config, str(tmp_path / "other"))
    data.train_tokenizer(["a b"], 270).save_pretrained(directory)
    config.algorithms.name = "ppo"
    with pytest.raises(UserError, match=r"critic.path=.* has another tokenizer than the policy"):
        train(config, str(tmp_path / "other"))
