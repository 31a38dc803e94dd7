"""Settings of `config.rollout`."""

from __future__ import annotations

import dataclasses

import ml_collections

from semrl_jax.settings.environment import PREFIX
from semrl_jax.settings.rules import Section
from semrl_jax.support.addresses import split_address
from semrl_jax.support.choices import DTYPES
from semrl_jax.support.errors import UserError
from semrl_jax.support.fields import at_most, setting
from semrl_jax.types import DISTRIBUTION, MAX_STOP_CHARACTERS, MAX_STOP_STRINGS

ENGINES = ("jax", "vllm")
QUANTIZATIONS = ("", "fp8_per_channel", "fp8_per_tensor", "fp8_per_block")  # as vLLM names them
MIN_TEMPERATURE = 0.01  # below, the logits divided by it exceed float32


@dataclasses.dataclass(frozen=True)
class Rollout:
    addresses: tuple[str, ...] = setting(
        (),
        "host:port, repeat the flag; empty: the trainer's own replica",
        items=str,
        may_change=True,
    )
    addresses_file: str = setting(
        "",
        "File with one host:port a line in place of addresses; read before each sync. "
        "docs/clusters.md",
        may_change=True,
    )
    engine: str = setting(
        "jax",
        "engine of the trainer's own replica: jax, embedded, or vllm, a child process",
        choices=ENGINES,
    )
    recorded: str = setting(
        "",
        "Set by launch.replay: run whose recorded responses take the place of sampling",
        may_change=True,
    )
    token_file: str = setting(
        "", "token for the addresses; empty: $SEMRL_ROLLOUT_TOKEN", may_change=True
    )
    tls_ca_file: str = setting(
        "", "certificate authority for the addresses; empty: no TLS", may_change=True
    )
    group_size: int = setting(8, "responses per prompt", "responses", above=0)
    given_responses: int = setting(
        0,
        "Most responses of a group that the data gives (data.given_field), in place of the last "
        "sampled ones; 0: all are sampled. docs/data.md",
        "responses",
        at_least=0,
    )
    given_when: str = setting(
        "always",
        "always: each group has its given responses, and samples the others; failed: only a group "
        "in which no sampled response is correct",
        choices=("always", "failed"),
    )
    hint_rounds: int = setting(
        0,
        "GHPO: how often a group without a correct response is sampled again, each time with a "
        "longer part of a solution (data.given_field) in its prompt; 0: never. docs/data.md",
        "rounds",
        at_least=0,
    )
    branching: str = setting(
        "",
        "cure or random_token, with :option=value, or my_package.my_module: most responses of a "
        "group go on after a prefix of another one; empty: each is sampled from its prompt. "
        "docs/data.md",
    )
    groups_per_call: int = setting(
        0,
        "N: a free replica gets the next N; 0: each gets an equal part. docs/clusters.md",
        "prompts",
        at_least=0,
        may_change=True,
    )
    temperature: float = setting(1.0, "temperature of the sampling; 0 is greedy", at_least=0)
    top_p: float = setting(
        1.0,
        "sample from the most probable tokens with this total probability; 1: all",
        within="(0, 1]",
    )
    top_k: int = setting(0, "sample from this many most probable tokens; 0: all", at_least=0)
    min_p: float = setting(
        0.0,
        "sample from tokens with at least this share of the largest probability; 0: all",
        within=DISTRIBUTION["min_p"],
    )
    presence_penalty: float = setting(
        0.0,
        "subtracted from logits of tokens in the response; docs/data.md",
        within=DISTRIBUTION["presence_penalty"],
    )
    frequency_penalty: float = setting(
        0.0, "as presence_penalty, times their number", within=DISTRIBUTION["frequency_penalty"]
    )
    repetition_penalty: float = setting(
        1.0,
        "divides positive logits and multiplies others of tokens in prompt and response",
        within=DISTRIBUTION["repetition_penalty"],
    )
    min_tokens: int = setting(0, "least number before an end token", "tokens", at_least=0)
    max_prompt_tokens: int = setting(512, "longer prompts of files are left out", above=0)
    max_response_tokens: int = setting(1536, "a response is truncated there", above=0)
    stop_token_ids: tuple[int, ...] = setting(
        (), "ids that end a response, in addition to the end token. docs/data.md", items=int
    )
    stop_words: tuple[str, ...] = setting(
        (), "words of one token that end a response, or verl:llama, ...; repeat the flag", items=str
    )
    stop_strings: tuple[str, ...] = setting(
        (), "texts that end a response; they may span tokens; repeat the flag", items=str
    )
    in_flight: str = setting(
        "wait",
        "wait: new weights come between responses; keep: within them. docs/ahead.md",
        choices=("wait", "keep"),
    )
    weight_dtype: str = setting(
        "", "dtype of weights on the wire; empty: model.compute_dtype", choices=("", *DTYPES)
    )
    router_replay: bool = setting(
        False,
        "True: the trainer's tokens go to the experts that they went to in the engine; only for "
        "mixtures of experts. docs/models.md",
    )
    max_staleness: int = setting(
        0,
        "Lag k: weights of step s - k sample the batch of step s. docs/ahead.md",
        "steps",
        at_least=0,
    )
    in_turns: bool = setting(
        False,
        "True: trainer and replicas have the same devices in turns. docs/memory.md",
        may_change=True,
    )
    connect_timeout_s: float = setting(
        300.0, "limit for all replicas to answer", above=0, may_change=True
    )
    call_timeout_s: float = setting(
        7200.0,
        "limit of a batch of responses or a sync, retries included",
        above=0,
        may_change=True,
    )
    sync_wait_s: float = setting(
        60.0, "limit for other replicas, once one has new weights", above=0, may_change=True
    )
    stall_timeout_s: float = setting(
        600.0, "longest silence of a replica, compilation included", above=0, may_change=True
    )
    jax_processes: int = setting(
        0, "child processes that sample; 0: the trainer itself", "processes", at_least=0
    )
    jax_process_cores: int = setting(
        0, "cores of each child process; 0: all share all", "cores", at_least=0
    )
    jax_max_batch: int = setting(
        128,
        "responses decoded side by side; a CPU divides them among its cores",
        "responses",
        above=0,
    )
    jax_chunk_tokens: int = setting(16, "decoded tokens between two transfers", above=0)
    jax_tensor_parallelism: int = setting(
        1, "devices of a copy of the weights; -1: the rest", "devices", may_change=True
    )
    jax_data_parallelism: int = setting(
        1,
        "copies of the weights, a power of two; -1: the rest. docs/clusters.md",
        "devices",
        may_change=True,
    )
    vllm_python: str = setting(
        ".venv-vllm/bin/python", "Python of vLLM's environment", may_change=True
    )
    vllm_max_num_seqs: int = setting(
        256, "responses decoded side by side", "responses", above=0, may_change=True
    )
    vllm_max_num_batched_tokens: int = setting(
        0, "per engine step; 0: vLLM's default", at_least=0, may_change=True
    )
    vllm_tensor_parallelism: int = setting(
        1, "devices of a replica", "devices", above=0, may_change=True
    )
    vllm_gpu_memory_utilization: float = setting(
        0.9,
        "share of a GPU, else of the machine, for weights and cache",
        within="(0, 1]",
        may_change=True,
    )
    vllm_kv_cache_gib: float = setting(
        0.0,
        "size of the cache; 0: the rest of that memory, 4 on a CPU",
        at_least=0,
        may_change=True,
    )
    vllm_enforce_eager: bool = setting(
        False, "True: no compilation, a start in half the time", may_change=True
    )
    vllm_inner_states: bool = setting(
        False, "True: states of all layers, without compilation, in more memory"
    )
    vllm_quantization: str = setting(
        "",
        "8-bit weights: fp8_per_channel, fp8_per_tensor or fp8_per_block; empty: no. docs/vllm.md",
        choices=QUANTIZATIONS,
        may_change=True,
    )


def check(rollout: Section) -> None:
    from semrl_jax.data.stop_words import expand_stop_words  # see settings.data

    expand_stop_words(rollout["stop_words"])
    check_stop_strings("rollout.", rollout)
    for address in rollout["addresses"]:
        split_address(address, "rollout.addresses")
    if rollout["addresses"] and rollout["addresses_file"]:
        raise UserError(
            "rollout.addresses_file and rollout.addresses both name the replicas; set one of them."
        )
    if 0 < rollout["temperature"] < MIN_TEMPERATURE:
        raise UserError(
            f"rollout.temperature={rollout['temperature']} must be 0 or at least {MIN_TEMPERATURE}."
        )
    for field in ("jax_tensor_parallelism", "jax_data_parallelism"):
        if rollout[field] != -1 and rollout[field] < 1:
            raise UserError(
                f"rollout.{field}={rollout[field]} must be at least 1, or -1: the rest."
            )
    if rollout["jax_tensor_parallelism"] == rollout["jax_data_parallelism"] == -1:
        raise UserError(
            "rollout.jax_tensor_parallelism and rollout.jax_data_parallelism: one alone may be -1."
        )
    count, cores = rollout["jax_processes"], rollout["jax_process_cores"]
    if cores and not count:
        raise UserError(
            f"rollout.jax_process_cores={cores} is for rollout.jax_processes; set both, or neither."
        )
    if rollout["router_replay"] and rollout["engine"] == "vllm":
        raise UserError(
            "rollout.router_replay=True replays experts that rollout.engine='vllm' does not send; "
            "set engine='jax', or router_replay=False."
        )
    named = [field for field in ("addresses", "addresses_file") if rollout[field]]
    others = [f"rollout.{field}" for field in named] or ["rollout.engine='vllm'"]
    if count and (named or rollout["engine"] != "jax"):
        raise UserError(
            f"rollout.jax_processes={count} and {others[0]} both name replicas; set one of the two."
        )


def check_training_rollout(rollout: Section) -> None:
    """Rules of responses that are trained on; other commands sample as `evaluation` says."""
    if rollout["temperature"] == 0:
        raise UserError(
            "rollout.temperature=0 samples equal responses, without advantage; set it above 0."
        )
    lag = rollout["max_staleness"]
    if lag and rollout["in_turns"]:
        raise UserError(
            f"rollout.in_turns=True: replicas sleep during the updates, in which "
            f"rollout.max_staleness={lag} makes them sample; set one of them to its default."
        )
    if rollout["in_flight"] != "keep":
        return
    if lag < 2:
        raise UserError(
            "rollout.in_flight='keep' needs rollout.max_staleness of 2 or more, because with "
            f"{lag} the next weights come after the batch; or set in_flight='wait'."
        )
    if lag > rollout["max_response_tokens"]:
        raise UserError(
            f"rollout.in_flight='keep' samples each response in rollout.max_staleness={lag} parts, "
            f"which must be at most rollout.max_response_tokens={rollout['max_response_tokens']}."
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


def longest_prompt(config: ml_collections.ConfigDict) -> int:
    """Tokens of the longest prompt that a replica gets: it ends with earlier parts or turns."""
    rollout = config.rollout
    is_played = any(entry.startswith(PREFIX) for entry in config.evaluation.benchmarks)
    if config.environment.name or is_played or rollout.branching:
        return rollout.max_prompt_tokens + rollout.max_response_tokens - 1
    return rollout.max_prompt_tokens + (num_parts(rollout) - 1) * part_tokens(rollout)


def slots_of_replicas(rollout: Section) -> int | None:
    """Responses that the trainer's own JAX replicas decode side by side; None: it has none."""
    if rollout["engine"] != "jax" or rollout["addresses"] or rollout["addresses_file"]:
        return None
    return rollout["jax_max_batch"] * max(rollout["jax_processes"], 1)


def rows_of_slots(
    rollout: Section, responses_per_step: int, num_shards: int = 1
) -> tuple[int, int]:
    """Rows of slots of the JAX engine, and the slots of a row, which share the cache of a prompt.

    If responses wait for slots, each is a row. A row has a part of a group if groups are few.
    """
    slots = min(rollout["jax_max_batch"], responses_per_step)
    size = group = rollout["group_size"] if slots == responses_per_step else 1
    while group > 1 and slots // size * -(-size // group) < num_shards:
        group //= 2
    rows = slots // size * -(-size // group)
    return rows + -rows % num_shards, group


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
            f"rollout.vllm_quantization={wanted!r} needs weight_dtype='bfloat16', not {dtype}."
        )


def check_stop_strings(place: str, section: Section) -> None:
    """The field `stop_strings` of a section is within the limits of the protocol."""
    field, strings = f"{place}stop_strings", section["stop_strings"]
    if strings and section["min_tokens"]:
        raise UserError(
            f"{place}min_tokens={section['min_tokens']} keeps back tokens, and {field}="
            f"{strings!r:.60} are texts; set min_tokens=0 or stop_strings=()."
        )
    at_most(f"number of {field}", len(strings), MAX_STOP_STRINGS)
    for text in strings:
        if not 0 < len(text) <= MAX_STOP_CHARACTERS:
            raise UserError(
                f"{field} has {text!r:.60}; each text has 1 to {MAX_STOP_CHARACTERS} characters."
            )
        if "\ufffd" in text or any("\ud800" <= character <= "\udfff" for character in text):
            raise UserError(f"{field} has {text!r}, which is not valid Unicode text; leave it out.")
        if strings.count(text) > 1:
            raise UserError(f"{field} has {text!r} twice; keep one.")
