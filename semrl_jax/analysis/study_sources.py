"""Responses with their states and probabilities, from a run, generated files, or one file.

All of them come prompt by prompt, so that the states of one prompt at a time need be in memory.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from safetensors import safe_open

from semrl_jax import models
from semrl_jax.analysis.measures import StudiedResponse
from semrl_jax.analysis.runs import RunSteps, find_steps, read_responses, response_states
from semrl_jax.analysis.states import OPTIONAL, read_arrays
from semrl_jax.evaluation.generated_files import RESPONSES, STATES_INDEX
from semrl_jax.metrics.names import FINAL_LAYER
from semrl_jax.runs.policies import find_policies
from semrl_jax.support.errors import UserError
from semrl_jax.support.response_files import IDS, KEYS
from semrl_jax.support.rounding import next_power_of_two
from semrl_jax.support.run_directory import run_of, setting_of
from semrl_jax.support.safe_files import check_regular, read_json_object

TOP_K = 20  # of the confidence
_ROWS = 256  # of one block of logits, at most


def of_run(
    workdir: str | os.PathLike[str], step: int | None
) -> tuple[Iterator[StudiedResponse], str, int]:
    """The responses of a step of a run (None: the last), what they are, and metrics.stride.

    Their states are recomputed from the weights. UserError if there is no run, or no such step.
    """
    run = find_steps(workdir)
    step = run.steps[-1] if step is None else step
    if step not in run.steps:
        raise UserError(
            f"--step={step}: {workdir} has responses and weights of the steps {list(run.steps)}."
        )
    params = run.params(step)
    responses = responses_of_step(run, step, params)
    each = (with_probabilities(response, run.policy, params) for response in responses)
    return each, f"{workdir}, step {step}", run.stride


def responses_of_step(run: RunSteps, step: int, params: models.Params) -> Iterator[StudiedResponse]:
    """The recorded responses of a step, with the states that `params` give their tokens."""
    rows = sorted(read_responses(run.rollouts[step], KEYS), key=lambda row: row["group_id"])
    prompts, ids = ([row[name] for row in rows] for name in IDS)
    states = response_states(run.policy, params, prompts, ids)

    def each() -> Iterator[StudiedResponse]:
        for row, response in zip(rows, states):
            yield _of_row(row, response[row["response_mask"]])

    return each()


def of_generated(
    directory: pathlib.Path, policy: str | None, layer: int = FINAL_LAYER
) -> tuple[Iterator[StudiedResponse], str]:
    """The responses of a directory of `launch.generate`, with their recorded states of a layer.

    Without a `policy`, entropies and confidences are unknown; they need final states. UserError for
    other or damaged states.
    """
    if not (directory / STATES_INDEX).is_file():
        raise UserError(
            f"{directory} has no {STATES_INDEX}; generate again with --hidden_states=-1."
        )
    index = read_json_object(directory / STATES_INDEX)
    try:
        layers, kinds = index["metadata"]["layers"], index["metadata"]["kinds"]
        shards = dict(index["weight_map"])
    except (KeyError, TypeError, ValueError):
        raise UserError(f"{directory / STATES_INDEX} is no index of launch.generate.") from None
    if layer not in layers or "decode" not in kinds:
        raise UserError(
            f"{directory} has states of layers {layers}, {' and '.join(kinds)}; a study needs "
            f"states of the response tokens: --hidden_states={layer} --states=decode."
        )
    rows = sorted(read_responses(directory / RESPONSES, KEYS), key=lambda row: row["group_id"])
    model = load_policy(policy)

    def each() -> Iterator[StudiedResponse]:
        for row in rows:
            name = f"{row['group_id']}/{row['sample_index']}/decode"
            try:
                shard = directory / pathlib.Path(shards[name]).name
                check_regular(shard)
                with safe_open(str(shard), framework="numpy") as tensors:
                    states = tensors.get_tensor(name)[:, layers.index(layer)]
            except Exception as error:  # a damaged file breaks the reader in any way
                text = " ".join(f"{type(error).__name__}: {error}".split())
                raise UserError(f"{directory}: {name} cannot be read: {text:.200}") from None
            item = _of_row(row, states.astype(np.float32))
            yield with_probabilities(item, *model) if model else item

    return each(), str(directory)


def of_file(file: pathlib.Path, policy: str | None) -> tuple[Iterator[StudiedResponse], str]:
    """The responses of a file, see `states.read_arrays`; without `group_id`, of a prompt each."""
    arrays = read_arrays(file, OPTIONAL)
    model = load_policy(policy)
    prompts = arrays.get("group_id", np.arange(len(arrays["hidden_states"])))

    def each() -> Iterator[StudiedResponse]:
        for i in np.argsort(prompts, kind="stable"):
            mask = arrays["response_mask"][i]
            known = {name: arrays[name][i] for name in OPTIONAL if name in arrays}
            item = StudiedResponse(
                group_id=int(prompts[i]),
                sample_index=int(i),
                states=arrays["hidden_states"][i][mask].astype(np.float32),
                token_ids=known["response_ids"][mask] if "response_ids" in known else None,
                score=_number(known.get("score")),
                correct=_number(known.get("correct")),
                logprobs=known["logprobs"][mask] if "logprobs" in known else None,
            )
            yield with_probabilities(item, *model) if model else item

    return each(), str(file)


def stride_of(policy: str | None) -> int | None:
    """metrics.stride of the run of a policy; None without a run."""
    run = None if policy is None else run_of(pathlib.Path(policy))
    return setting_of(run, "metrics", "stride")


def load_policy(path: str | None) -> tuple[models.Policy, models.Params] | None:
    """The policy of a run, a checkpoint, a directory or a hub id; None for None."""
    if path is None:
        return None
    source = find_policies(path, None)[0]
    policy = models.Policy(models.load_config(source.model, source.family))
    return policy, jax.device_put(source.params(policy))  # once, not in the call of each response


def with_probabilities(
    response: StudiedResponse, policy: models.Policy, params: models.Params
) -> StudiedResponse:
    """Adds the policy's distribution of each token; UserError if the states have another width."""
    num_tokens, width = response.states.shape
    if width != policy.config.hidden_size:
        raise UserError(
            f"the states have width {width}, but those of --policy {policy.config.hidden_size}; "
            "name the policy that the states are from."
        )
    ids = np.zeros(num_tokens, np.int32) if response.token_ids is None else response.token_ids
    parts, block = [], min(next_power_of_two(num_tokens), _ROWS)
    for first in range(0, num_tokens, block):  # of few shapes, so that few are compiled
        part = slice(first, first + block)
        missing = block - len(ids[part])
        states = np.pad(response.states[part], ((0, missing), (0, 0)))
        found = jax.device_get(_of_logits(policy, params, states, np.pad(ids[part], (0, missing))))
        parts.append([values[: len(ids[part])] for values in found])
    logprobs, entropies, confidences = map(np.concatenate, zip(*parts)) if parts else [ids[:0]] * 3
    if response.token_ids is None:
        logprobs = response.logprobs
    return dataclasses.replace(
        response, logprobs=logprobs, entropies=entropies, confidences=confidences
    )


@functools.partial(jax.jit, static_argnames="policy")
def _of_logits(
    policy: models.Policy,
    params: models.Params,
    states: Float[Array, "N D"],
    token_ids: Int[Array, " N"],
) -> tuple[Float[Array, " N"], Float[Array, " N"], Float[Array, " N"]]:
    """Log-probabilities of the tokens, entropies and confidences of their distributions."""
    logprobs = jax.nn.log_softmax(policy.logits(params, states).astype(jnp.float32))
    chosen = jnp.take_along_axis(logprobs, token_ids[:, None], axis=1)[:, 0]
    entropies = -jnp.sum(jnp.exp(logprobs) * logprobs, axis=1)
    likeliest = jax.lax.top_k(logprobs, min(TOP_K, logprobs.shape[1]))[0]
    return chosen, entropies, -jnp.mean(likeliest, axis=1)


def _of_row(row: Mapping[str, Any], states: Float[np.ndarray, "T D"]) -> StudiedResponse:
    raw = row.get("rollout_raw_logprobs")
    return StudiedResponse(
        **{name: row[name] for name in KEYS},
        states=states,
        token_ids=row["response_ids"][row["response_mask"]],
        text=row.get("response"),
        score=_number(row.get("score")),
        correct=_number(row.get("correct")),
        logprobs=None if raw is None else np.asarray(raw, np.float32),
    )


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)
