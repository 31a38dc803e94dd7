"""Checks of `config.rollout`."""

from __future__ import annotations

import ml_collections

from semrl_jax.data.stop_words import expand_stop_words
from semrl_jax.settings.rules import Section, above_zero, at_least_zero, at_most, items_are, one_of
from semrl_jax.support.addresses import split_address
from semrl_jax.support.errors import UserError
from semrl_jax.types import MAX_STOP_CHARACTERS, MAX_STOP_STRINGS

ENGINES = ("jax", "vllm")
QUANTIZATIONS = ("", "fp8_per_channel", "fp8_per_tensor", "fp8_per_block")  # as vLLM names them
MIN_TEMPERATURE = 0.01  # below, the logits divided by it exceed float32


def check(rollout: Section) -> None:
    above_zero(
        "rollout", rollout,
        "group_size", "max_prompt_tokens", "max_response_tokens", "connect_timeout_s",
        "call_timeout_s", "sync_wait_s", "stall_timeout_s", "jax_max_batch", "jax_chunk_tokens",
        "vllm_max_num_seqs", "vllm_tensor_parallelism", "vllm_gpu_memory_utilization",
    )  # fmt: skip
    at_least_zero(
        "rollout", rollout,
        "temperature", "top_k", "max_staleness", "jax_processes", "jax_process_cores",
        "groups_per_call",
        "vllm_max_num_batched_tokens", "vllm_kv_cache_gib",
    )  # fmt: skip
    one_of("rollout.engine", rollout["engine"], ENGINES)
    one_of("rollout.vllm_quantization", rollout["vllm_quantization"], QUANTIZATIONS)
    one_of("rollout.in_flight", rollout["in_flight"], ("wait", "abort", "keep"))
    one_of("rollout.weight_dtype", rollout["weight_dtype"], ("", "float32", "bfloat16"))
    items_are(str, "rollout", rollout, "addresses", "stop_words")
    expand_stop_words(rollout["stop_words"])
    check_stop_strings("rollout", rollout)
    items_are(int, "rollout", rollout, "stop_token_ids")
    for address in rollout["addresses"]:
        split_address(address, "rollout.addresses")
    if rollout["addresses"] and rollout["addresses_file"]:
        raise UserError(
            f"rollout.addresses_file={rollout['addresses_file']!r} names the replicas, and so does "
            "rollout.addresses; set one of the two."
        )
    _check_sampling(rollout)
    _check_annealing(rollout)
    for field in ("jax_tensor_parallelism", "jax_data_parallelism"):
        if rollout[field] != -1 and rollout[field] < 1:
            raise UserError(
                f"rollout.{field}={rollout[field]} must be at least 1, or -1 for the remaining "
                "devices."
            )
    if rollout["jax_tensor_parallelism"] == rollout["jax_data_parallelism"] == -1:
        raise UserError(
            "rollout.jax_tensor_parallelism=-1 and rollout.jax_data_parallelism=-1: only one of "
            "them can take the remaining devices; give the other a number."
        )
    if rollout["vllm_gpu_memory_utilization"] > 1:
        raise UserError(
            f"rollout.vllm_gpu_memory_utilization={rollout['vllm_gpu_memory_utilization']} must be "
            "at most 1: it is the share of a GPU's memory that the replica takes."
        )
    _check_processes(rollout)


def check_training(rollout: Section) -> None:
    """Rules of responses that are trained on; other commands sample as `evaluation` says."""
    if rollout["temperature"] == 0:
        raise UserError(
            "rollout.temperature=0 samples the same response in every slot of a group, which "
            "leaves no advantage; set it above 0."
        )
    if rollout["annealing"]["enabled"]:
        _check_annealed(rollout)
    _check_lag(rollout)


def _check_lag(rollout: Section) -> None:
    """The lag, and the settings with which responses are sampled in parts."""
    lag, way = rollout["max_staleness"], rollout["in_flight"]
    if lag and way == "abort":
        raise UserError(
            f"rollout.max_staleness={lag} samples beside the updates, but "
            "rollout.in_flight='abort' throws running responses away when new weights arrive; set "
            "it to 'wait' or 'keep'."
        )
    if way != "keep" or not lag:
        return
    if lag == 1:
        raise UserError(
            "rollout.in_flight='keep' gives running responses new weights, but with "
            "rollout.max_staleness=1 the next weights come when the batch is needed; set "
            "max_staleness to 2 or more, or in_flight='wait'."
        )
    if lag > rollout["max_response_tokens"]:
        raise UserError(
            f"rollout.in_flight='keep' samples each response in rollout.max_staleness={lag} parts, "
            f"which must be at most rollout.max_response_tokens={rollout['max_response_tokens']}."
        )
    if rollout["annealing"]["enabled"]:
        raise UserError(
            f"rollout.in_flight='keep' with rollout.max_staleness={lag} samples a response in "
            "parts, and each part would begin with the first temperature of rollout.annealing; "
            "set annealing.enabled=False or in_flight='wait'."
        )


def num_earlier(rollout: Section) -> int:
    """Steps whose parameters the train state keeps, since batches in work have their weights."""
    return rollout["max_staleness"]


def num_parts(rollout: Section) -> int:
    """Parts of a response, each sampled with later weights; see `sampling.in_parts`."""
    return max(rollout["max_staleness"], 1) if rollout["in_flight"] == "keep" else 1


def part_tokens(rollout: Section) -> int:
    """The most tokens of each part of a response."""
    return -(-rollout["max_response_tokens"] // num_parts(rollout))


def longest_prompt(rollout: Section) -> int:
    """Tokens of the longest prompt that a replica gets: it ends with earlier parts."""
    return rollout["max_prompt_tokens"] + (num_parts(rollout) - 1) * part_tokens(rollout)


def rows_of_slots(
    rollout: Section, responses_per_step: int, num_shards: int = 1
) -> tuple[int, int]:
    """Rows of slots of the JAX engine, and the slots of a row, which share the cache of a prompt.

    A response that waits for a slot may be to any prompt, so then each slot is a row. `num_shards`
    devices have as many rows each; a row has a part of a group where there are fewer groups.
    """
    slots = min(rollout["jax_max_batch"], responses_per_step)
    size = group = rollout["group_size"] if slots == responses_per_step else 1
    while group > 1 and slots // size * -(-size // group) < num_shards:
        group //= 2
    rows = slots // size * -(-size // group)
    return rows + -rows % num_shards, group


def replica_in_flight(rollout: Section) -> str:
    """What replicas do with running responses; parts end before new weights are sent."""
    return "wait" if num_parts(rollout) > 1 else rollout["in_flight"]


def _check_processes(rollout: Section) -> None:
    count, cores = rollout["jax_processes"], rollout["jax_process_cores"]
    if cores and not count:
        raise UserError(
            f"rollout.jax_process_cores={cores} is of child processes, and rollout.jax_processes=0 "
            "has none; set that to 1 or more, or the cores to 0."
        )
    named = [field for field in ("addresses", "addresses_file") if rollout[field]]
    others = [f"rollout.{field}" for field in named] or ["rollout.engine='vllm'"]
    if count and (named or rollout["engine"] != "jax"):
        raise UserError(
            f"rollout.jax_processes={count} starts replicas of its own, but {others[0]} names "
            "others; set one of the two."
        )


def weight_dtype(config: ml_collections.ConfigDict) -> str:
    """Dtype of the weights that replicas get."""
    return config.rollout.weight_dtype or config.model.compute_dtype


def check_quantization(config: ml_collections.ConfigDict, engine: str) -> None:
    """Refuses 8-bit weights with an engine or with weights that cannot have them."""
    wanted, dtype = config.rollout.vllm_quantization, weight_dtype(config)
    if not wanted:
        return
    if engine != "vllm":
        raise UserError(
            f"rollout.vllm_quantization={wanted!r} is of vLLM, and the engine is {engine!r}, which "
            "has no 8-bit weights; set rollout.engine='vllm', or vllm_quantization=''."
        )
    if dtype != "bfloat16":
        raise UserError(
            f"rollout.vllm_quantization={wanted!r} rounds bfloat16 weights, and replicas get "
            f"{dtype} ones; set rollout.weight_dtype='bfloat16'."
        )


def check_stop_strings(name: str, section: Section) -> None:
    """The field `stop_strings` of the section `name` is within the limits of the protocol."""
    field, strings = f"{name}.stop_strings", section["stop_strings"]
    items_are(str, name, section, "stop_strings")
    at_most(f"number of {field}", len(strings), MAX_STOP_STRINGS)
    for text in strings:
        if not 0 < len(text) <= MAX_STOP_CHARACTERS:
            raise UserError(
                f"{field} has {text!r:.60} of {len(text)} characters; each has 1 to "
                f"{MAX_STOP_CHARACTERS}."
            )
        if "\ufffd" in text or any("\ud800" <= character <= "\udfff" for character in text):
            raise UserError(
                f"{field} has {text!r}, which is not valid Unicode text; U+FFFD stands for bytes "
                "that are no text."
            )
        if strings.count(text) > 1:
            raise UserError(f"{field} has {text!r} twice; keep one.")


def _check_annealing(rollout: Section) -> None:
    name, options = "rollout.annealing", rollout["annealing"]
    above_zero(name, options, "maximum", "minimum", "decay_tokens", "max_decay_tokens")
    at_least_zero(name, options, "warmup_tokens", "decay_growth")
    at_most(f"{name}.minimum", options["minimum"], options["maximum"])


def _check_annealed(rollout: Section) -> None:
    name, options = "rollout.annealing", rollout["annealing"]
    least = rollout["temperature"] * options["minimum"]
    if least < MIN_TEMPERATURE:
        raise UserError(
            f"{name}.minimum={options['minimum']} times rollout.temperature="
            f"{rollout['temperature']} must be at least {MIN_TEMPERATURE}: below, the logits "
            "divided by it exceed float32."
        )
    names_replicas = rollout["addresses"] or rollout["addresses_file"]
    if rollout["engine"] == "vllm" and not names_replicas:
        raise UserError(
            f"{name}.enabled=True needs rollout.engine='jax': vLLM has one temperature per "
            "response."
        )


def _check_sampling(rollout: Section) -> None:
    if not 0 < rollout["top_p"] <= 1:
        raise UserError(f"rollout.top_p={rollout['top_p']} must be in (0, 1].")
    if 0 < rollout["temperature"] < MIN_TEMPERATURE:
        raise UserError(
            f"rollout.temperature={rollout['temperature']} must be at least {MIN_TEMPERATURE}: "
            "below, the logits divided by it exceed float32."
        )
