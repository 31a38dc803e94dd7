"""The replicas of a run: at given addresses, embedded in the trainer, or a child process."""

from __future__ import annotations

import collections
import contextlib
import pathlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import ml_collections

from semrl_jax import data
from semrl_jax.cluster.agreement import on_first
from semrl_jax.cluster.peers import Peers, Processes
from semrl_jax.models import Policy
from semrl_jax.rollout.building import jax_children, jax_engine, read_token, vllm_child
from semrl_jax.rollout.client import RolloutClient
from semrl_jax.rollout.client.local import LocalReplica
from semrl_jax.rollout.wire.auth import new_token
from semrl_jax.sampling.branching import find_rule
from semrl_jax.settings.algorithms import importance_options
from semrl_jax.settings.rollout import longest_prompt
from semrl_jax.support.addresses import split_address
from semrl_jax.support.console import Reporter
from semrl_jax.support.errors import UserError
from semrl_jax.support.safe_files import check_regular
from semrl_jax.types import ReplicaDescription

FIELD = "rollout.addresses_file"
MAX_BYTES = 1 << 20  # of the file


@contextlib.contextmanager
def open_client(
    config: ml_collections.ConfigDict,
    policy: Policy,
    tokenizer: Any,
    device_lock: threading.Lock,
    reporter: Reporter,
    *,
    run_id: str,
    attempt_id: str,
    directory: pathlib.Path,
    place: tuple[int, int] = (0, 1),
    num_problems: int = 0,
) -> Iterator[RolloutClient]:
    """A connected client of `rollout.addresses`, or of new replicas with `rollout.engine`.

    Args:
      device_lock: held by the embedded replica while it computes.
      directory: of the run; a child process writes its settings and output below it.
      place: (i, n): this is number i of the n sampling processes; it uses every n-th address.
      num_problems: requests of one evaluation, over all processes.

    UserError: a replica cannot be used for this run.
    """
    rollout = config.rollout

    def own_part(addresses: Sequence[str]) -> tuple[str, ...]:
        return tuple(addresses)[place[0] :: place[1]]

    def find() -> tuple[str, ...]:
        return own_part(read_addresses(rollout.addresses_file))

    def check(description: ReplicaDescription) -> None:
        # Such a replica would refuse the weights, but only after the warm start.
        version = description.version
        if version and version.run_id != run_id and not description.is_free:
            raise UserError(
                f"replica {description.replica_id} belongs to run {version.run_id!r:.100}, and "
                f"this run is {run_id!r}; wait for the end of that run, or restart the replica if "
                "it was killed."
            )
        _check_limits(description, config, num_problems, place[1])

    with contextlib.ExitStack() as stack:
        addresses, token, local = (), "", None
        if rollout.addresses:
            addresses = own_part(rollout.addresses)
            token = read_token(rollout.token_file)
        elif is_embedded(config):
            local = LocalReplica(jax_engine(config, policy, tokenizer, device_lock))
        else:
            token, own = new_token(), directory / f"replica{place[0]}"
            if rollout.engine == "vllm":
                children = [vllm_child(config, own, reporter.line, token)]
            else:
                children = jax_children(config, own, reporter.line, token)
            for child in children:
                stack.enter_context(child)
            addresses = tuple(child.address for child in children)
        client = stack.enter_context(
            RolloutClient(
                addresses,
                token,
                local=local,
                run_id=run_id,
                attempt_id=attempt_id,
                connect_timeout_s=rollout.connect_timeout_s,
                sync_timeout_s=rollout.call_timeout_s,
                sync_wait_s=rollout.sync_wait_s,
                generate_timeout_s=rollout.call_timeout_s,
                stall_timeout_s=rollout.stall_timeout_s,
                tls_ca=rollout.tls_ca_file,
                check=check,
                in_turns=rollout.in_turns,
                find_addresses=find if rollout.addresses_file else None,
                progress=reporter.line,
            )
        )
        client.connect(
            model_hash=policy.config.hash,
            tokenizer_hash=data.tokenizer_hash(tokenizer),
            vocab_size=policy.config.vocab_size,
        )
        if rollout.in_turns:
            client.release(weights=True)  # the devices are for loading the models now
        yield client


def is_embedded(config: ml_collections.ConfigDict) -> bool:
    """Whether the trainer's own process samples."""
    rollout = config.rollout
    return rollout.engine == "jax" and not (rollout.addresses or rollout.jax_processes)


def take_addresses(config: ml_collections.ConfigDict, peers: Processes | None = None) -> None:
    """Sets `rollout.addresses` from the file, if any, in all processes; none may occur twice."""
    rollout = config.rollout
    if rollout.addresses_file:
        found = on_first(
            peers or Peers(), "check_inputs", lambda: list(read_addresses(rollout.addresses_file))
        )
        rollout.addresses = tuple(found)
    check_addresses(rollout.addresses)


def check_addresses(addresses: Sequence[str], field: str = "rollout.addresses") -> None:
    """Raises UserError for a repeated address: two processes could connect to one replica."""
    twice = [address for address, n in collections.Counter(addresses).items() if n > 1]
    if twice:
        raise UserError(f"{field} names {twice[0]!r} more than once; name each replica once.")


def read_addresses(file: str) -> tuple[str, ...]:
    """The addresses in the file, one host:port a line, # for comments; UserError for wrong ones."""
    try:
        check_regular(file)
        with open(file, "rb") as opened:
            content = opened.read(MAX_BYTES + 1)
        text = content.decode()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", "it is not UTF-8")
        raise UserError(
            f"{FIELD}={file} cannot be read ({reason}); name a file with one host:port a line."
        ) from error
    if len(content) > MAX_BYTES:
        raise UserError(f"{FIELD}={file} has more than {MAX_BYTES} bytes; name a list of replicas.")
    lines = [line.partition("#")[0].strip() for line in text.splitlines()]
    addresses = tuple(line for line in lines if line)
    for number, line in enumerate(lines, 1):
        if line:
            split_address(line, f"{FIELD}={file}, line {number}")
    if not addresses:
        raise UserError(f"{FIELD}={file} has no address; write one host:port a line.")
    check_addresses(addresses, f"{FIELD}={file}")
    return addresses


def _check_limits(
    replica: ReplicaDescription,
    config: ml_collections.ConfigDict,
    num_problems: int = 0,
    num_processes: int = 1,
) -> None:
    """Raises UserError if the replica would refuse one process's share of a step or evaluation."""
    rollout = config.rollout
    groups = -(-config.data.prompts_per_step // num_processes)
    num_prompts = max(groups * rollout.group_size, -(-num_problems // num_processes))
    fewer = "lower evaluation.num_problems, data.prompts_per_step or rollout.group_size"
    same = "start the replica with the trainer's config"
    for field, value, way_out in (
        ("max_prompts", num_prompts, fewer),
        ("max_prompt_tokens", longest_prompt(config), same),
        ("max_response_tokens", rollout.max_response_tokens, same),
    ):
        limit = getattr(replica, field)
        if value > limit:
            raise UserError(
                f"replica {replica.replica_id} serves {field}={limit}, but the trainer asks for "
                f"{value}; {way_out}."
            )
    if config.hidden_states.source == "rollout":
        way_out = "set hidden_states.source='policy'"
        _check_measured(replica, "metrics", config.metrics, way_out)
    if config.evaluation.metrics:
        name, way_out = "evaluation.metric_options", "set evaluation.metrics=False"
        _check_measured(replica, name, config.evaluation.metric_options, way_out)
    level = importance_options(config)["level"]
    if level != "none" and "sampling" not in replica.logprob_kinds:
        raise UserError(
            f"replica {replica.replica_id} ({replica.engine} engine) sends no log-probabilities, "
            f"but algorithms.importance corrects by {level!r}; start a replica from this release, "
            "or set level and level_ahead to 'none'."
        )
    if rollout.router_replay and not replica.routed_experts:
        raise UserError(
            f"replica {replica.replica_id} ({replica.engine} engine) does not send the experts "
            "that rollout.router_replay=True replays; start a JAX replica of this release, or set "
            "it to False."
        )
    rule = find_rule(rollout.branching)
    if rule and rule.module.NEEDS_ENTROPIES and "entropy" not in replica.logprob_kinds:
        raise UserError(
            f"replica {replica.replica_id} ({replica.engine} engine) sends no entropies, which "
            f"rollout.branching={rollout.branching!r} needs; start a replica of this release, or "
            "set branching='random_token'."
        )
    for section in ("rollout", "evaluation"):
        if config[section].stop_strings and "stop_strings" not in replica.sampling_kinds:
            raise UserError(
                f"replica {replica.replica_id} ({replica.engine} engine) lacks the kind of "
                f"sampling 'stop_strings' that {section}.stop_strings asks for; start a replica of "
                "this release whose engine has it, or leave the setting out."
            )


def _check_measured(
    replica: ReplicaDescription, section: str, metrics: ml_collections.ConfigDict, way_out: str
) -> None:
    if -1 not in replica.layers:
        raise UserError(f"replica {replica.replica_id} sends no final hidden states; {way_out}.")
    for layer in metrics.layers:
        if layer not in replica.layers:
            reason = f" ({replica.layers_reason})" if replica.layers_reason else ""
            raise UserError(
                f"replica {replica.replica_id} sends hidden states of layers "
                f"{list(replica.layers)}{reason}, but {section}.layers has {layer}; leave it out."
            )
    for name in metrics.names if metrics.placement == "rollout" else ():
        if name not in replica.metric_kinds:
            raise UserError(
                f"replica {replica.replica_id} measures {list(replica.metric_kinds)}, but "
                f"{section}.names has {name!r}; start the replica with this release, or set "
                f"{section}.placement='trainer'."
            )
