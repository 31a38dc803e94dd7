"""Checks a whole configuration once, before anything is started or written, and without JAX."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import ml_collections

from semrl_jax.choices import (
    DTYPES,
    IMPORTANCE_LEVELS,
    KL_ESTIMATORS,
    REMAT_POLICIES,
    TOKEN_INDICATORS,
)
from semrl_jax.data import ROW_FORMATS
from semrl_jax.data.arithmetic import MAX_PROMPT_TOKENS, NUM_HELD_OUT
from semrl_jax.errors import UserError
from semrl_jax.metrics import METHODS, METRICS, WINDOWS, MetricKey, count_windows
from semrl_jax.metrics.names import FINAL_LAYER, ORDERS, check_metrics, metric_name
from semrl_jax.shaping import ShapingOptions
from semrl_jax.training.prompts import evaluation_files

TASKS = ("arithmetic", "files")
ENGINES = ("jax", "vllm")


def validate(config: ml_collections.ConfigDict) -> None:
    """Raises UserError naming field, value, rule and way out for the first contradiction."""
    positive = (
        "data.prompts_per_step", "data.num_prompts", "rollout.max_prompt_tokens",
        "rollout.max_response_tokens", "rollout.connect_timeout_s",
        "rollout.call_timeout_s", "rollout.stall_timeout_s",
        "rollout.jax_max_batch", "rollout.jax_chunk_tokens", "metrics.stride",
        "rollout.vllm_max_num_seqs", "rollout.vllm_tensor_parallelism",
        "rollout.vllm_gpu_memory_utilization",
        "metrics.num_threads", "rewards.timeout_s", "rewards.num_workers",
        "training.prompts_per_minibatch", "training.micro_batch_size", "training.learning_rate",
        "training.max_grad_norm",
        "algorithms.advantage.epsilon", "training.max_skipped_updates", "training.grace_s",
        "evaluation.num_problems", "checkpoints.every_steps", "checkpoints.keep",
        "warm_start.batch_size", "warm_start.micro_batch_size", "warm_start.learning_rate",
        "warm_start.num_demonstrations",
        "distributed.connect_timeout_s", "distributed.heartbeat_timeout_s",
        "distributed.phase_timeout_s",
        "model.hidden_size",
        "model.intermediate_size",
        "model.num_layers",
        "model.num_heads",
        "model.num_kv_heads",
    )  # fmt: skip
    for field, value in flatten(config).items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UserError(f"{field}={value} must be a finite number.")
        limit = 2**63 if field == "seed" else 2**31  # above, clocks and arrays overflow
        if isinstance(value, int | float) and abs(value) >= limit:
            raise UserError(f"{field}={value} must be below 2^{limit.bit_length() - 1}.")
    for field in positive:
        value = _get(config, field)
        if not value > 0:
            raise UserError(f"{field}={value} must be above 0.")
    not_negative = (
        "seed", "training.num_steps", "training.weight_decay", "rollout.temperature",
        "rollout.top_k", "training.learning_rate_warmup_steps", "training.micro_batch_tokens",
        "rollout.vllm_max_num_batched_tokens", "rollout.vllm_kv_cache_gib",
        "hidden_states.compare_every",
        "warm_start.num_steps", "evaluation.every_steps", "logging.rollouts_every_steps",
        "rewards.memory_limit_gib", "checkpoints.keep_every", "metrics.dataset_stride",
        "metrics.device_batch",
        "distributed.num_processes",
        "logging.plot_every_steps", "algorithms.loss.kl_coefficient",
        "algorithms.loss.entropy_coefficient",
    )  # fmt: skip
    for field in not_negative:
        value = _get(config, field)
        if not value >= 0:
            raise UserError(f"{field}={value} must be at least 0.")
    choices = {
        "data.task": TASKS,
        "data.row_format": ROW_FORMATS,
        "evaluation.row_format": ROW_FORMATS,
        "hidden_states.source": ("rollout", "policy", "none"),
        "hidden_states.dtype": ("bfloat16", "float32"),
        "rollout.engine": ENGINES,
        "rollout.in_flight": ("wait", "abort", "keep"),
        "rollout.weight_dtype": ("", "float32", "bfloat16"),
        "algorithms.importance.level": ("none", *IMPORTANCE_LEVELS),
        "algorithms.aggregation": ("token_mean", "response_mean"),
        "rewards.mode": ("independent", "mix"),
        "model.compute_dtype": DTYPES,
        "model.reference_dtype": DTYPES,
        "model.remat": REMAT_POLICIES,
        "metrics.placement": ("trainer", "rollout"),
        "metrics.window": WINDOWS,
        "metrics.method": METHODS,
        "algorithms.loss.kl_estimator": KL_ESTIMATORS,
    }
    for field, allowed in choices.items():
        value = _get(config, field)
        if value not in allowed:
            raise UserError(f"{field}={value!r} must be one of {allowed}.")
    if config.metrics.window_growth < 1:
        raise UserError(
            f"metrics.window_growth={config.metrics.window_growth} must be at least 1; "
            "1 measures every prefix."
        )
    check_metrics("metrics.names", config.metrics.names)
    if not 0 < config.algorithms.loss.clip_epsilon < 1:
        raise UserError(
            f"algorithms.loss.clip_epsilon={config.algorithms.loss.clip_epsilon} must be in (0, 1)."
        )
    if config.model.path == "" and config.model.hidden_size % config.model.num_heads:
        raise UserError(
            f"model.num_heads={config.model.num_heads} must divide "
            f"model.hidden_size={config.model.hidden_size}."
        )
    for field in ("training.adam_b1", "training.adam_b2"):
        if not 0 <= _get(config, field) < 1:
            raise UserError(f"{field}={_get(config, field)} must be in [0, 1).")
    limits = {
        "rewards.num_workers": 1024,
        "metrics.num_threads": 1024,
        "seed": 2**32 - 1,
    }
    for field, limit in limits.items():
        value = _get(config, field)
        if value > limit:
            raise UserError(f"{field}={value} must be at most {limit}.")
    lists = {
        "rollout.addresses": str,
        "rollout.stop_token_ids": int,
        "metrics.layers": int,
        "data.files": str,
        "data.question_fields": str,
        "evaluation.files": str,
        "evaluation.question_fields": str,
        "checkpoints.extra_steps": int,
    }
    for field, kind in lists.items():
        for item in _get(config, field):
            if type(item) is not kind:
                kinds = {int: "whole numbers", str: "texts"}[kind]
                raise UserError(f"{field} has {item!r}; it may have {kinds}, one for each flag.")
    for address in config.rollout.addresses:
        if not re.fullmatch(r".+:\d{1,5}", address):
            raise UserError(
                f"rollout.addresses has {address!r}; an address is host:port, such as "
                "127.0.0.1:50051."
            )
    for step in config.checkpoints.extra_steps:
        if step < 1:
            raise UserError(f"checkpoints.extra_steps has {step}; steps count from 1.")
    _check_data(config)
    _check_sizes(config)
    _check_method(config)
    _check_not_built(config)


def _check_data(config: ml_collections.ConfigDict) -> None:
    data, evaluation = config.data, config.evaluation
    if data.task == "files":
        if not data.files:
            raise UserError("data.task='files' needs data.files; name a .jsonl or .parquet file.")
        if not config.model.path:
            raise UserError(
                "data.task='files' needs model.path: a random model of config.model's sizes has "
                "the tokenizer of the arithmetic task alone; python -m launch.random_model makes a "
                "small directory to try with."
            )
        evaluation_files(evaluation.files)
        return
    if data.files or evaluation.files:
        raise UserError(
            f"data.files={tuple(data.files)}, evaluation.files={tuple(evaluation.files)}: files "
            f"are not read with data.task={data.task!r}; set data.task='files'."
        )
    if evaluation.num_problems > NUM_HELD_OUT:
        raise UserError(
            f"evaluation.num_problems={evaluation.num_problems} must be at most {NUM_HELD_OUT}, "
            "the held-out arithmetic problems."
        )
    if config.rollout.max_prompt_tokens < MAX_PROMPT_TOKENS:
        raise UserError(
            f"rollout.max_prompt_tokens={config.rollout.max_prompt_tokens} must be at least the "
            f"{MAX_PROMPT_TOKENS} tokens of an arithmetic prompt."
        )
    if data.num_prompts < data.prompts_per_step:
        raise UserError(
            f"data.num_prompts={data.num_prompts} must be at least "
            f"data.prompts_per_step={data.prompts_per_step}."
        )


def _check_sizes(config: ml_collections.ConfigDict) -> None:
    data, rollout, training = config.data, config.rollout, config.training
    if rollout.group_size < 2:
        raise UserError(
            f"rollout.group_size={rollout.group_size} must be at least 2: the advantage compares "
            "the responses of a group."
        )
    product = data.prompts_per_step * rollout.group_size
    if training.responses_per_step != product:
        raise UserError(
            f"training.responses_per_step={training.responses_per_step} is derived and must be "
            f"data.prompts_per_step * rollout.group_size = {product}; change one of those two."
        )
    # A shorter last mini-batch would be as large a step of the optimiser as the others.
    if data.prompts_per_step % training.prompts_per_minibatch:
        raise UserError(
            f"training.prompts_per_minibatch={training.prompts_per_minibatch} must divide "
            f"data.prompts_per_step={data.prompts_per_step}."
        )
    longest = rollout.max_prompt_tokens + rollout.max_response_tokens
    if 0 < training.micro_batch_tokens < longest:
        raise UserError(
            f"training.micro_batch_tokens={training.micro_batch_tokens} must be at least the "
            f"{longest} tokens of the longest sequence (rollout.max_prompt_tokens + "
            "rollout.max_response_tokens); 0 counts rows by training.micro_batch_size."
        )
    if training.pack_sequences and not training.micro_batch_tokens:
        raise UserError(
            "training.pack_sequences=True packs rows of training.micro_batch_tokens, which is 0; "
            f"set it to {longest} or more."
        )
    warm_start = config.warm_start
    if warm_start.batch_size % warm_start.micro_batch_size:
        raise UserError(
            f"warm_start.micro_batch_size={warm_start.micro_batch_size} must divide "
            f"warm_start.batch_size={warm_start.batch_size}."
        )
    for field in ("jax_tensor_parallelism", "jax_data_parallelism"):
        if rollout[field] != -1 and rollout[field] < 1:
            raise UserError(
                f"rollout.{field}={rollout[field]} must be at least 1, or -1 for the devices left "
                "over."
            )
    if rollout.jax_tensor_parallelism == rollout.jax_data_parallelism == -1:
        raise UserError(
            "rollout.jax_tensor_parallelism=-1 and rollout.jax_data_parallelism=-1: one of them at "
            "most takes the devices left over; give the other a number."
        )
    if rollout.vllm_gpu_memory_utilization > 1:
        raise UserError(
            f"rollout.vllm_gpu_memory_utilization={rollout.vllm_gpu_memory_utilization} must be at "
            "most 1: it is the share of a GPU's memory that the replica takes."
        )
    if not 0 < rollout.top_p <= 1:
        raise UserError(f"rollout.top_p={rollout.top_p} must be in (0, 1].")
    if 0 < rollout.temperature < 0.01:
        raise UserError(
            f"rollout.temperature={rollout.temperature} must be at least 0.01: below, logits over "
            "it leave float32."
        )
    if rollout.temperature == 0:
        raise UserError(
            "rollout.temperature=0 samples the same response in every slot of a group, which "
            "leaves no advantage; set it above 0."
        )
    if not 0 <= warm_start.forget_probability <= 1:
        raise UserError(
            f"warm_start.forget_probability={warm_start.forget_probability} must be in [0, 1]."
        )


def _check_method(config: ml_collections.ConfigDict) -> None:
    shaping, metrics = config.shaping, config.metrics
    _check_importance(config)
    _check_placement(config)
    _check_layers(config)
    if config.evaluation.metrics and config.hidden_states.source == "none":
        raise UserError(
            "evaluation.metrics=True needs hidden states, but hidden_states.source='none'; set "
            "another source."
        )
    try:
        options = ShapingOptions(**shaping)
    except ValueError as error:
        raise UserError(str(error)) from None
    measured = [metric_name(name) for name in metrics.names]
    for indicator in options.tracked:
        if indicator in TOKEN_INDICATORS:
            continue
        name, _, layer = MetricKey.parse(indicator)
        if name not in (*measured, *METRICS):
            raise UserError(
                f"shaping uses {indicator!r}, which is unknown; it may use metrics of "
                f"metrics.names, such as {METRICS}, with _velocity and _acceleration after the "
                f"name, and of the tokens {', '.join(TOKEN_INDICATORS)}."
            )
        if shaping.target == "none":
            continue
        if config.hidden_states.source == "none":
            raise UserError(
                f"hidden_states.source='none' measures no hidden states, but the shaping uses "
                f"{indicator!r}; set another source, shaping.target='none', or indicators of the "
                f"tokens: {', '.join(TOKEN_INDICATORS)}."
            )
        if layer not in metrics.layers:
            raise UserError(
                f"shaping uses {indicator!r}, but metrics.layers={tuple(metrics.layers)} does not "
                "have its layer; add it there."
            )
        if name not in measured:
            raise UserError(
                f"shaping uses {indicator!r}, which metrics.names={tuple(metrics.names)} does not "
                "measure; add its metric there."
            )
    if shaping.target != "none":
        _check_windows(config, options.used)


def _check_windows(config: ml_collections.ConfigDict, used: Sequence[str]) -> None:
    """Whether the longest response has the orders that the shaping uses."""
    metrics, limit = config.metrics, config.rollout.max_response_tokens
    found = count_windows(limit, metrics.stride, metrics.window)
    for name in sorted(used, key=lambda name: -ORDERS[MetricKey.parse(name).order]):
        least = ORDERS[MetricKey.parse(name).order]
        if found >= least:
            continue
        fitting = [
            stride
            for stride in range(1, metrics.stride)
            if count_windows(limit, stride, metrics.window) >= least
        ]
        way_out = f"set a stride of at most {fitting[-1]}" if fitting else "raise that limit"
        raise UserError(
            f"metrics.stride={metrics.stride} leaves {found} prefixes in "
            f"rollout.max_response_tokens={limit} under metrics.window={metrics.window!r}, so no "
            f"response would have the {name!r} that the shaping uses, which takes {least}; "
            f"{way_out}."
        )


def _check_importance(config: ml_collections.ConfigDict) -> None:
    importance, rollout = config.algorithms.importance, config.rollout
    if importance.cap < 1:
        raise UserError(
            f"algorithms.importance.cap={importance.cap} must be at least 1: below, the weights of "
            "all tokens would be lowered, and with them the learning rate."
        )
    if importance.level == "none":
        return
    # Of a distribution cut to its likeliest tokens a log-probability says how much was cut, too.
    for field, cuts in (("top_p", rollout.top_p < 1), ("top_k", rollout.top_k > 0)):
        if cuts:
            raise UserError(
                f"algorithms.importance.level={importance.level!r} compares log-probabilities of "
                f"the whole vocabulary, but rollout.{field}={rollout[field]} samples from a part "
                "of it; set rollout.top_p=1.0 and rollout.top_k=0, or the level to 'none'."
            )


def _check_placement(config: ml_collections.ConfigDict) -> None:
    if config.metrics.placement == "trainer":
        return
    source, device_batch = config.hidden_states.source, config.metrics.device_batch
    if source != "rollout":
        raise UserError(
            f"metrics.placement='rollout' measures the replica's hidden states, but "
            f"hidden_states.source={source!r}; set it to 'rollout', or the placement to 'trainer'."
        )
    if device_batch:
        raise UserError(
            f"metrics.device_batch={device_batch} is of the trainer's accelerator, but "
            "metrics.placement='rollout' measures on the replica's host; set it to 0."
        )
    for name in config.metrics.names:
        if name not in METRICS:
            raise UserError(
                f"metrics.names has {name!r}, but with metrics.placement='rollout' the replica "
                "measures, which has the metrics of this package only; set the placement to "
                "'trainer'."
            )


def _check_layers(config: ml_collections.ConfigDict) -> None:
    layers = tuple(config.metrics.layers)
    if FINAL_LAYER not in layers or min(layers) < FINAL_LAYER or len(set(layers)) < len(layers):
        raise UserError(
            f"metrics.layers={layers} must have -1, the final layer, and may have indices of other "
            "layers from 0 on, each once."
        )
    others = [layer for layer in layers if layer != FINAL_LAYER]
    for field, needed in (("hidden_states.source", "rollout"), ("metrics.placement", "trainer")):
        value = _get(config, field)
        if others and value != needed:
            raise UserError(
                f"metrics.layers has {others[0]}, but {field}={value!r} has the final layer only; "
                f"set it to {needed!r}, or metrics.layers=(-1,)."
            )


def _check_not_built(config: ml_collections.ConfigDict) -> None:
    if config.rollout.max_staleness != 0:
        raise UserError(
            f"rollout.max_staleness={config.rollout.max_staleness} is not built yet: "
            "sampling ahead of the update is refused rather than ignored; set it to 0."
        )


def flatten(config: ml_collections.ConfigDict) -> dict[str, Any]:
    """Every field by its full name."""
    flat = {}
    for name, value in config.items():
        if isinstance(value, ml_collections.ConfigDict):
            flat |= {f"{name}.{field}": item for field, item in flatten(value).items()}
        else:
            flat[name] = value
    return flat


def _get(config: ml_collections.ConfigDict, field: str):
    for part in field.split("."):
        config = config[part]
    return config
