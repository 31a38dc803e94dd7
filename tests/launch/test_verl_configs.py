"""Compares the configs of the published runs with every setting of the launcher.

`tests/golden/verl_launcher.json` records the launcher's settings. Each is compared with one of our
fields or has a reason in `NONE`. Each of our fields is compared or has a reason in `OURS_ALONE`.
Therefore no setting of the launcher and no new field of configs/default.py is forgotten.

`python -m pytest -s tests/launch/test_verl_configs.py -k difference` prints the comparison.
"""

import dataclasses
import importlib
import json
import pathlib
import re

import pytest

from configs.default import get_config
from configs.verl import grpo as published
from semrl_jax.algorithms import grpo, ppo
from semrl_jax.planning.estimate import make_estimate
from semrl_jax.planning.plan import check
from semrl_jax.runs import validate
from semrl_jax.settings.environment import Environment
from semrl_jax.settings.rules import flatten
from semrl_jax.types import DISTRIBUTION

RECORD = json.loads(
    (pathlib.Path(__file__).parents[1] / "golden" / "verl_launcher.json").read_text()
)
RANKS = {
    "Effective Rank": "effective_rank",
    "Effective Rank diff": "effective_rank_velocity",
    "Effective Rank diff 2": "effective_rank_acceleration",
}
FAMILIES = {
    "grpo_llama3_2_3b": "llama",
    "grpo_qwen2_5_7b": "qwen2.5, 7b",
    "grpo_mathstral_7b": "mistral, 7b-v0.1",  # by "mistralai" in its path
}


def same(value):
    return value


def only(value, ours):
    """Translates the one known value of the launcher; any other value raises KeyError."""
    return {value: ours}.__getitem__


def prompt_file(path):
    return (path.replace("DATA/", "data/").replace("/t", "_t"),)


# The PPO runs: the launcher has one record, of a GRPO run.
RUNS = (*FAMILIES, *(name.replace("grpo_", "ppo_") for name in FAMILIES))


# The launcher's setting -> our field, and the translation of the value.
COUNTERPARTS = {
    "actor_rollout_ref.actor.clip_ratio": ("algorithms.loss.clip_epsilon", same),
    "actor_rollout_ref.actor.entropy_coeff": ("algorithms.loss.entropy_coefficient", same),
    "actor_rollout_ref.actor.fsdp_config.fsdp_size": ("mesh.fsdp", same),
    "actor_rollout_ref.actor.grad_clip": ("training.max_grad_norm", same),
    "actor_rollout_ref.actor.kl_loss_coef": ("algorithms.loss.kl_coefficient", same),
    "actor_rollout_ref.actor.kl_loss_type": ("algorithms.loss.kl_estimator", same),
    "actor_rollout_ref.actor.optim.lr": ("training.learning_rate", same),
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": (
        "training.learning_rate_warmup_steps",
        only(0, 0),
    ),
    # The launcher counts responses per device (4 devices); our field counts the whole mesh's.
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": (
        "training.micro_batch_size",
        lambda size: 4 * size,
    ),
    "actor_rollout_ref.actor.ppo_mini_batch_size": ("training.prompts_per_minibatch", same),
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": ("mesh.sequence", same),
    "actor_rollout_ref.actor.use_dynamic_bsz": ("training.micro_batch_tokens", only(False, 0)),
    "actor_rollout_ref.model.enable_gradient_checkpointing": ("model.remat", only(True, "full")),
    "actor_rollout_ref.model.path": ("model.path", lambda path: path.removeprefix("MODELS/")),
    "actor_rollout_ref.rollout.dtype": ("model.compute_dtype", same),
    "actor_rollout_ref.rollout.n": ("rollout.group_size", same),
    "actor_rollout_ref.rollout.return_decode": ("hidden_states.source", only(True, "rollout")),
    "actor_rollout_ref.rollout.temperature": ("rollout.temperature", same),
    "actor_rollout_ref.rollout.top_k": ("rollout.top_k", only(-1, 0)),
    "actor_rollout_ref.rollout.top_p": ("rollout.top_p", same),
    "algorithm.adv_estimator": ("algorithms.name", only("grpo", "grpo")),
    "algorithm.gamma": ("algorithms.advantage.gamma", same),
    "algorithm.kl_penalty": ("algorithms.advantage.kl_reward_estimator", same),
    "algorithm.lam": ("algorithms.advantage.gae_lambda", same),
    "critic.cliprange_value": ("algorithms.loss.value_clip", same),
    "critic.grad_clip": ("critic.max_grad_norm", same),
    "critic.optim.lr": ("critic.learning_rate", same),
    "critic.optim.lr_warmup_steps_ratio": ("critic.learning_rate_warmup_steps", only(0.0, 0)),
    "critic.optim.warmup_style": ("critic.learning_rate_schedule", same),
    "actor_rollout_ref.actor.optim.warmup_style": ("training.learning_rate_schedule", same),
    "actor_rollout_ref.actor.ppo_epochs": ("training.ppo_epochs", same),
    "data.shuffle": ("data.shuffle", same),
    "trainer.critic_warmup": ("critic.warmup_steps", same),
    "algorithm.add_adv": ("shaping.target", only(True, "advantage")),
    "algorithm.adv_shaping_kappa": ("shaping.kappa", same),
    "calculator.diff_stride": ("metrics.stride", same),
    "calculator.diff_svd_method": ("metrics.method", only("full", "svd")),
    "calculator.enable": ("evaluation.metrics", same),
    "calculator.global_diff_stride_train": ("metrics.dataset_stride", same),
    "calculator.global_diff_stride_val": ("metrics.dataset_stride", same),
    "calculator.metric_indices": (
        "metrics.names",
        lambda indices: tuple(("", "effective_rank", "traditional_rank")[i] for i in indices),
    ),
    "data.max_prompt_length": ("rollout.max_prompt_tokens", same),
    "data.max_response_length": ("rollout.max_response_tokens", same),
    "data.prompt_key": ("data.row_format", only("prompt", "simplerl")),
    "data.train_batch_size": ("data.prompts_per_step", same),
    "data.train_files": ("data.files", prompt_file),
    "data.val_files": ("evaluation.files", prompt_file),
    "reward_manager.add_reward": ("shaping.target", only(False, "advantage")),
    "reward_manager.aux_fix": ("shaping.scale", only(True, "fixed")),
    "reward_manager.aux_reward_global_weight": ("shaping.eta", same),
    "reward_manager.ema_alpha": ("shaping.alpha", same),
    "reward_manager.hypothesis_type": ("shaping.mixing", only("PlanB", "adaptive")),
    "reward_manager.indicator_names": (
        "shaping.indicators",
        lambda names: tuple(RANKS[name] for name in names),
    ),
    "reward_manager.modulation_gain": ("shaping.gain", same),
    "reward_manager.weights": ("shaping.explore_weights", tuple),
    "reward_manager.weights_exploit": ("shaping.exploit_weights", tuple),
    "trainer.except_save": ("checkpoints.extra_steps", tuple),
    "trainer.remove_previous_ckpt": ("checkpoints.keep_every", only(False, 40)),
    "trainer.resume_from_path": ("training.resume_from", only(False, "")),
    "trainer.save_freq": ("checkpoints.every_steps", same),
    "trainer.test_freq": ("evaluation.every_steps", same),
    "trainer.total_training_steps": ("training.num_steps", lambda steps: steps - 1),  # D23
    "trainer.val_sample_size": ("evaluation.num_problems", only(-1, 10_000)),  # all there are
    "REWORD_FUNCTION_TYPE": ("rewards.mode", same),
}
# The same for values in the launcher's code. The record has the file name before the colon.
COUNTERPARTS_IN_CODE = {
    "compute": ("model.compute_dtype", same),
    "reference": ("model.reference_dtype", same),
    "betas": (("training.adam_b1", "training.adam_b2"), tuple),
    "weight_decay": ("training.weight_decay", same),
    "loss is a token mean over a micro-batch, micro-batches a mean": (
        "algorithms.aggregation",
        only(True, "response_mean"),  # the effect of micro-batches of one response
    ),
    "add_special_tokens": ("data.add_special_tokens", same),
    "epsilon of the advantage": ("algorithms.advantage.epsilon", same),
    "tokens seen by differences": ("metrics.window", only(512, "release")),
    "tokens of the bonus": ("shaping.reproduce_release", only("last", True)),
    "first value of the baseline": ("shaping.reproduce_release", only(0.0, True)),
    "steps the baseline lags": ("shaping.reproduce_release", only(2, True)),
    "difference of a short response": ("shaping.reproduce_release", only(0.0, True)),
    "guidance": ("shaping.guidance", only("the first indicator", "effective_rank_acceleration")),
    "score of a wrong response without a box": ("rewards.unboxed_penalty", same),
    "stop_token_ids": ("rollout.stop_token_ids", tuple),
}
# The launcher's settings, or sections ending in a dot, for which we have no field.
NONE = {
    "actor_rollout_ref.actor.fsdp_config.grad_offload": "placement: rollout.in_turns",
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload": "placement: rollout.in_turns",
    "actor_rollout_ref.actor.fsdp_config.param_offload": "placement: rollout.in_turns",
    "actor_rollout_ref.actor.fsdp_config.use_orig_params": "placement",
    "actor_rollout_ref.actor.fsdp_config.wrap_policy.": "placement",
    "actor_rollout_ref.actor.lora_": "LoRA, which is off",
    "actor_rollout_ref.actor.optim.min_lr_ratio": "of another schedule",
    "actor_rollout_ref.actor.optim.total_training_steps": "of another schedule",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "of use_dynamic_bsz, which is off",
    "actor_rollout_ref.actor.ppo_micro_batch_size": "unset; the one per device counts",
    "actor_rollout_ref.actor.shuffle": "off: mini-batches are taken in order",
    "actor_rollout_ref.actor.strategy": "the mesh",
    "actor_rollout_ref.actor.use_kl_loss": "always: algorithms.loss.kl_coefficient",
    "actor_rollout_ref.actor.use_lora": "LoRA, which is off",
    "actor_rollout_ref.hybrid_engine": "placement: rollout.in_turns",
    "actor_rollout_ref.model.external_lib": "unset",
    "actor_rollout_ref.model.override_config": "empty",
    "actor_rollout_ref.model.use_remove_padding": "speed: rows are padded to buckets, or packed",
    "actor_rollout_ref.ref.": "as the policy's; its dtype is under 'code'",
    "actor_rollout_ref.rollout.disable_log_stats": "output of its engine",
    "actor_rollout_ref.rollout.do_sample": "training samples, evaluation is greedy, always",
    "actor_rollout_ref.rollout.enable_chunked_prefill": "speed of its engine",
    "actor_rollout_ref.rollout.enforce_eager": "speed of its engine; vllm_enforce_eager",
    "actor_rollout_ref.rollout.free_cache_engine": "placement: rollout.in_turns",
    "actor_rollout_ref.rollout.gpu_memory_utilization": "placement: configs/verl/grpo.py",
    "actor_rollout_ref.rollout.ignore_eos": "off, always",
    "actor_rollout_ref.rollout.load_format": "weights are streamed",
    "actor_rollout_ref.rollout.log_prob_": "as training.micro_batch_size",
    "actor_rollout_ref.rollout.max_num_batched_tokens": "speed of its engine",
    "actor_rollout_ref.rollout.max_num_seqs": "speed of its engine",
    "actor_rollout_ref.rollout.micro_rollout_batch_size": "speed of its engine",
    "actor_rollout_ref.rollout.model_path": "repeats model.path",
    "actor_rollout_ref.rollout.name": "rollout.engine",
    "actor_rollout_ref.rollout.prompt_length": "repeats data.max_prompt_length",
    "actor_rollout_ref.rollout.response_length": "repeats data.max_response_length",
    "actor_rollout_ref.rollout.return_hidden_states": "with return_decode: hidden_states.source",
    "actor_rollout_ref.rollout.return_prefill": "states of the prompt are measured by neither",
    "actor_rollout_ref.rollout.swap_space": "memory of its engine",
    "actor_rollout_ref.rollout.tensor_model_parallel_size": "placement of its engine",
    "algorithm.kl_ctrl.": "of a KL in the reward; the launcher has one in the loss",
    "calculator.compute_cumulative_global_metrics": "metrics.dataset_stride above 0",
    "calculator.compute_global_metrics": "metrics.dataset_stride above 0",
    "calculator.compute_log_effective_rank": "off, always",
    "calculator.diff_calculator_method": "speed of its code",
    "calculator.svd_": "of a low-rank method that is not chosen",
    "calculator.zeroth_order_svd_method": "as diff_svd_method",
    "critic.forward_": "as training.micro_batch_size",
    "critic.model.": "placement; its path is a default that no run can have used, see ppo.py",
    "critic.optim.min_lr_ratio": "of another schedule",
    "critic.optim.total_training_steps": "of another schedule",
    "critic.ppo_": "the policy's",
    "critic.shuffle": "the policy's",
    "critic.strategy": "the mesh",
    "critic.ulysses_sequence_parallel_size": "the mesh",
    "critic.use_dynamic_bsz": "the policy's",
    "data.return_raw_": "off",
    "data.tokenizer": "the model's",
    "data.val_batch_size": "not read: the set is one batch",
    "reward_model.": "off: rewards are rules",
    "trainer.confidence_metric_config.": "of its analysis mode",
    "trainer.default_": "--workdir",
    "trainer.experiment_name": "--workdir",
    "trainer.logger": "files in the run directory",
    "trainer.n_gpus_per_node": "the mesh",
    "trainer.nnodes": "the mesh",
    "trainer.plot_config.": "its analysis mode: launch.analyze",
    "trainer.project_name": "--workdir",
    "trainer.remove_clip": "off: the advantage of truncated responses is kept",
    "trainer.repetition_metric_config.": "of its analysis mode",
    "trainer.resume_mode": "the same command resumes",
    "trainer.total_epochs": "training.num_steps ends the run first",
    "trainer.val_before_train": "always, with evaluation.every_steps above 0",
    "trainer.val_only": "off",
}
OF_OTHERS = set(get_config().algorithms.advantage) - {
    field.name for kind in (grpo.Options, ppo.Options) for field in dataclasses.fields(kind)
}
# Our fields, or beginnings of them, for which the launcher has no setting.
OURS_ALONE = {
    "seed": "the launcher fixes none",
    **dict.fromkeys(
        ("model.reference_path", "model.references", "model.reference_addresses"),
        "the launcher's reference is the policy at the start",
    ),
    "metrics.layers": "the launcher measures the final layer",
    "data.reasoning_gym": "the launcher has none", "data.curriculum": "the launcher has none",
    "rewards.majority": "the launcher has none",
    "rewards.probability_after": "the launcher has none",
    **dict.fromkeys(
        (f"environment.{field.name}" for field in dataclasses.fields(Environment)),
        "the launcher's runs have a single turn",
    ),
    "metrics.of_groups": "the launcher has none",
    "metrics.drift_every": "the launcher has no reference",
    "metrics.probes": "the launcher has none",
    "data.given_field": "the launcher has none", "rollout.given_": "the launcher has none",
    "algorithms.loss.given_": "the launcher has none",
    "evaluation.n": "of other scores",
    "evaluation.k": "of other scores",
    **{f"evaluation.{name}": "of other scores" for name in DISTRIBUTION},
    **{
        f"rollout.{name}": "changes nothing by default"
        for name in DISTRIBUTION
        if name.startswith(("min_", "presence_", "frequency_", "repetition_"))
    },
    "evaluation.responses_per_call": "of another command",
    "evaluation.reward_model": "of another command",
    "evaluation.upload": "of another command",
    "evaluation.run_programs": "of another command",
    "evaluation.metric_series": "only more columns in files",
    "evaluation.held_out": "files alone", "evaluation.subset_seed": "all problems",
    "evaluation.verifier": "that of the rewards", "evaluation.metric_options.": "follow metrics",
    "evaluation.scores": "greedy, as there", "evaluation.benchmarks": "files alone",
    "evaluation.data_dir": "files alone", "evaluation.shots": "zero-shot",
    "evaluation.shots_file": "zero-shot",
    "distributed.": "connection of processes", "sft.": "another command",
    "environment.": "a single turn",
    "model.hidden_size": "of a random model", "model.intermediate_size": "of a random model",
    "model.num_": "of a random model", "model.tie_embeddings": "of a random model",
    "model.family": "that of config.json", "lora.": "all parameters are trained",
    "model.attention": "equal up to rounding",
    "mesh.replica": "placement", "mesh.tensor": "placement", "mesh.expert": "placement",
    "data.task": "files", "data.num_prompts": "of the generator",
    "data.question_fields": "of another row format", "data.answer_": "of another row format",
    "data.template": "the rows hold it", "data.system_prompt": "of a chat template",
    "data.teacher_input": "the launcher has no teacher",
    "data.skip_bad_rows": "a bad row ends the run",
    "evaluation.row_format": "follows data", "evaluation.question_fields": "follows data",
    "evaluation.answer_": "follows data", "evaluation.template": "follows data",
    "training.export": "a file at the end of the run", "training.offload": "placement",
    "optimizer.": "AdamW, as there", "model.param_dtype": "float32, as there",
    "rollout.addresses": "connection", "rollout.token_file": "connection",
    "rollout.addresses_file": "connection", "rollout.sync_wait_s": "connection",
    "rollout.branching": "each response is sampled from its prompt",
    "rollout.hint_rounds": "the launcher has none", "data.hint_input": "the launcher has none",
    "rollout.recorded": "of replays", "rollout.router_replay": "its models are dense",
    "rollout.in_turns": "placement, see configs/verl/grpo.py",
    "rollout.groups_per_call": "how responses are divided among replicas",
    "rollout.tls_ca_file": "connection", "rollout.engine": "connection",
    "rollout.connect_timeout_s": "connection", "rollout.call_timeout_s": "connection",
    "rollout.stall_timeout_s": "connection",
    "rollout.in_flight": "nothing is in flight during a sync of the trainer's",
    "rollout.weight_dtype": "empty: model.compute_dtype", "rollout.max_staleness": "0, as there",
    "rollout.jax_": "speed of the JAX engine", "rollout.vllm_": "speed and memory of the engine",
    "hidden_states.dtype": "on the wire", "hidden_states.compare_every": "a check",
    "metrics.placement": "where, not what",
    "metrics.num_threads": "speed", "metrics.device_batch": "speed",
    "algorithms.importance.": "not in the release, off",
    "rollout.stop_words": "the release's are set by their ids",
    "rollout.stop_strings": "not in its training", "evaluation.stop_strings": "follows rollout",
    "algorithms.batch_rules.": "not in the release, off",
    **{f"algorithms.advantage.{name}": "of other algorithms" for name in OF_OTHERS},
    "algorithms.advantage.kl_reward_coefficient": "0: the KL is in the loss, as there",
    "algorithms.advantage.credit": "of environments",
    "algorithms.advantage.kl_target": "of a KL in the reward",
    "algorithms.advantage.kl_horizon": "of a KL in the reward",
    "algorithms.loss.surrogate": "clip, the only one there",
    "algorithms.loss.clip_epsilon_high": "0: symmetric, as there",
    "algorithms.loss.dual_clip": "off, as there", "algorithms.loss.opmd_tau": "of opmd",
    "algorithms.loss.rec_": "of rec", "algorithms.loss.real_tau": "of real",
    "critic.path": "empty: the policy's; see configs/verl/ppo.py",
    "critic.adam_": "as the policy's", "critic.weight_decay": "as the policy's",
    "algorithms.constant_length": "of another aggregation",
    "rewards.function": "the release's own rules", "rewards.functions": "one verifier",
    "rewards.model.": "off, as there", "rewards.failure_score": "of such a function",
    "rewards.memory_limit_gib": "safety", "rewards.timeout_s": "safety",
    "rewards.num_workers": "speed", "rewards.shuffle": "a control, off",
    "warm_start.": "of a random model",
    "training.responses_per_step": "derived", "training.pack_sequences": "speed",
    "training.balance_lengths": "speed", "training.max_skipped_updates": "safety",
    "training.grace_s": "safety", "training.num_epochs": "0: num_steps counts",
    "training.learning_rate_final_fraction": "of another schedule",
    "critic.learning_rate_final_fraction": "of another schedule",
    "checkpoints.keep": "beside those that keep_every keeps",
    "checkpoints.copy_to": "files alone", "checkpoints.export": "none",
    "logging.": "files in the run directory",
    "profile.": "files in the run directory",
}  # fmt: skip
# Our fields that differ on purpose; a comment in configs/verl gives the reason.
DEPARTURES = {
    "algorithms.aggregation": "token_mean",
    "metrics.method": "gram",
    "metrics.names": ("effective_rank",),
    "metrics.window": "exact",
    "model.remat": "dots",
    "shaping.reproduce_release": False,
}
PPO = {"algorithms.name": "ppo", "rollout.group_size": 1}
DEPARTURES_OF = {
    "mathstral_7b": {"rollout.stop_token_ids": (23246, 25762, 27075, 10745, 1701, 3588)}
}


def load(name):
    return importlib.import_module(f"configs.verl.{name}").get_config()


def launcher_settings(run):
    """The launcher's settings of a run under its own names, and the values in its code.

    A value in code has the part of its name after the file.
    """
    code = {name.partition(": ")[2]: value for name, value in RECORD["code"].items()}
    code["stop_token_ids"] = code["stop_token_ids"][FAMILIES[run]]
    settings = RECORD["settings"] | RECORD["environment"] | RECORD["runs"][run]
    return settings, code


def record_of(name):
    """The recorded run of a config."""
    return name.replace("ppo_", "grpo_")


def counterparts(run):
    """Yields (our field, the launcher's value in our terms, the launcher's name)."""
    for settings, known in zip(
        launcher_settings(record_of(run)), (COUNTERPARTS, COUNTERPARTS_IN_CODE)
    ):
        for name, (fields, translate) in known.items():
            value = translate(settings[name])
            fields, values = (fields, value) if isinstance(fields, tuple) else ([fields], [value])
            yield from ((field, value, name) for field, value in zip(fields, values, strict=True))


def listed(name, reasons):
    """Whether `reasons` has the name, or a beginning of it that ends in '.' or '_'."""
    return any(name == key or (key[-1] in "._" and name.startswith(key)) for key in reasons)


@pytest.mark.parametrize("name", RUNS)
def test_difference_from_the_launcher_matches_the_comments(name):
    ours = flatten(load(name))
    departures = {}
    print(f"\n{name}")
    for field, theirs, setting in counterparts(name):
        mark = " " if ours[field] == theirs else "*"
        print(f"{mark} {field:38} {ours[field]!s:32} launcher {theirs!s:32} {setting}")
        if ours[field] != theirs:
            departures[field] = ours[field]
    algorithm, _, model = name.partition("_")
    expected = DEPARTURES | DEPARTURES_OF.get(model, {}) | (PPO if algorithm == "ppo" else {})
    assert departures == expected


def test_every_setting_of_the_launcher_has_its_field_or_its_reason():
    settings, code = launcher_settings("grpo_mathstral_7b")
    assert code.keys() == COUNTERPARTS_IN_CODE.keys()
    assert not COUNTERPARTS.keys() - settings.keys()
    for name in settings:
        assert (name in COUNTERPARTS) != listed(name, NONE), (
            f"{name}={settings[name]!r} must be in one of COUNTERPARTS and NONE."
        )
    for reason in NONE:
        assert any(listed(name, {reason}) for name in settings), f"{reason} is no setting"


def test_every_field_of_ours_is_compared_or_has_its_reason():
    fields = flatten(load("grpo_mathstral_7b"))
    compared = {field for field, _, _ in counterparts("grpo_mathstral_7b")}
    for field in fields:
        assert (field in compared) != listed(field, OURS_ALONE), (
            f"{field} must be compared or be in OURS_ALONE: has tests/golden/verl_launcher.json "
            "such a setting? Put it in COUNTERPARTS, else say in OURS_ALONE why there is none."
        )
    for reason in OURS_ALONE:
        assert any(listed(field, {reason}) for field in fields), f"{reason} is no field"


@pytest.mark.parametrize("name", RUNS)
def test_published_runs_pass_the_check_of_configs(name):
    validate(load(name).lock())


@pytest.mark.parametrize("name", ["grpo_qwen2_5_7b", "grpo_llama3_2_3b"])
def test_published_runs_fit_the_launchers_gpus_with_vllm_in_turns(name):
    """The flags in configs/verl/grpo.py are taken; without turns, the larger model does not fit."""
    flags = re.findall(r"--config\.(rollout\.\w+)=(\S+)", published.__doc__)
    fits = {}
    for in_turns in (True, False):
        config = load(name)
        for field, value in flags:
            config.update_from_flattened_dict({field: type(flatten(config)[field])(value)})
        config.rollout.in_turns = in_turns
        where, architecture = check(config, "h100:1x4", compiles=False)
        fits[in_turns] = make_estimate(config, where, architecture)["fits"]
    assert len(flags) == 4 and fits == {True: True, False: "3b" in name}
