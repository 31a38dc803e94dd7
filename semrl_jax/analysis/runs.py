"""Hidden states of the saved responses of a run, recomputed from its weights."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from semrl_jax import models
from semrl_jax.runs.checkpoint_files import checkpoint_steps
from semrl_jax.runs.policies import PolicySource
from semrl_jax.support import response_files
from semrl_jax.support.errors import UserError
from semrl_jax.support.response_files import IDS
from semrl_jax.support.run_directory import recorded
from semrl_jax.support.safe_files import read_json_object

MICRO_BATCH = 16


class RunSteps(NamedTuple):
    """The steps of a run with recorded responses and weights."""

    workdir: pathlib.Path
    start: pathlib.Path  # directory of the weights that it began with
    policy: models.Policy
    stride: int  # its metrics.stride
    rollouts: dict[int, pathlib.Path]  # step -> Parquet file; also of steps without weights
    steps: tuple[int, ...]  # ascending; at least one

    def params(self, step: int) -> models.Params:
        """The weights of a step: those of its checkpoint, else those the run began with."""
        checkpoint = self.workdir / "checkpoints" / str(step)
        found = None if step == 0 and not checkpoint.is_dir() else checkpoint
        return PolicySource("", self.start, found).params(self.policy)


def find_steps(workdir: str | os.PathLike[str]) -> RunSteps:
    """The steps of a run whose weights still exist, at least one; UserError if there is none."""
    workdir = pathlib.Path(workdir)
    try:
        config = read_json_object(workdir / "config.json")["config"]
        model, stride = config["model"]["path"], config["metrics"]["stride"]
        family = config["model"].get("family", "")
    except (FileNotFoundError, UserError, KeyError, TypeError, AttributeError):
        raise UserError(f"{workdir} is no run: its config.json is missing or unreadable.") from None
    if not isinstance(model, str) or type(stride) is not int or stride < 1:
        raise UserError(
            f"{workdir}/config.json: model.path={model!r:.100} must be text, and metrics.stride="
            f"{stride!r:.100} a whole number above 0."
        )
    rollouts = recorded(workdir, "step")
    start = models.find_directory(model) if model else workdir / "warm_start"
    saved = checkpoint_steps(workdir / "checkpoints") if (workdir / "checkpoints").is_dir() else []
    steps = [step for step in rollouts if step in saved or (step == 0 and start.is_dir())]
    if not steps:
        raise UserError(
            f"{workdir} has no step with both responses and weights: responses of steps "
            f"{list(rollouts)}, checkpoints of {saved}; let checkpoints.every_steps be a multiple "
            "of logging.rollouts_every_steps."
        )
    policy = models.Policy(models.load_config(start, family))
    return RunSteps(workdir, start, policy, stride, rollouts, tuple(steps))


def response_states(
    policy: models.Policy,
    params: models.Params,
    prompts: list[np.ndarray],
    responses: list[np.ndarray],
) -> list[Float[np.ndarray, "_ D"]]:
    """Final states of each response; UserError for a token beyond the policy's vocabulary."""
    largest = max(int(ids.max(initial=0)) for ids in (*prompts, *responses))
    if largest >= policy.config.vocab_size:
        raise UserError(
            f"token {largest} is beyond the policy's vocabulary: they are of another model."
        )
    lengths = [len(prompt) + len(response) for prompt, response in zip(prompts, responses)]
    columns = np.arange(-(-max(lengths) // 64) * 64, dtype=np.int32)
    forward = jax.jit(policy.final_states)
    states = []
    for first in range(0, len(lengths), MICRO_BATCH):
        rows = range(first, min(first + MICRO_BATCH, len(lengths)))
        ids = np.zeros((MICRO_BATCH, len(columns)), np.int32)
        segments = np.zeros_like(ids)
        for i, row in enumerate(rows):
            ids[i, : lengths[row]] = np.concatenate([prompts[row], responses[row]])
            segments[i, : lengths[row]] = 1
        positions = np.broadcast_to(columns, ids.shape)
        batch = jax.device_get(forward(params, ids, positions, segments))  # [B, S, D]
        for i, row in enumerate(rows):
            # A copy: a view would keep the padded batch in memory.
            states.append(batch[i, len(prompts[row]) - 1 : lengths[row] - 1].copy())
    return states


def read_responses(file: pathlib.Path, needed: Sequence[str] = ()) -> list[dict[str, Any]]:
    """The rows of a file, see `response_files.read`, with token ids and masks as arrays.

    Without the column `response_mask`, the policy sampled every response token.
    """
    rows = response_files.read(file, (*IDS, *needed)).to_pylist()
    if not rows:
        raise UserError(f"{file} has no response.")
    for row in rows:
        if row.get("conversations") is not None:
            raise UserError(
                f"{file}: an episode has several conversations, which are not computed again here."
            )
        row |= {name: np.asarray(row[name], np.int32) for name in IDS}
        mask, num_tokens = row.get("response_mask"), len(row["response_ids"])
        row["response_mask"] = np.asarray([True] * num_tokens if mask is None else mask, bool)
        if len(row["response_mask"]) != num_tokens:
            raise UserError(
                f"{file}: a response of {num_tokens} tokens has a mask of {len(mask)}: damaged."
            )
    return rows
