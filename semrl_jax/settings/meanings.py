"""What each setting means, and its unit: the comments of configs/default.py are the only source."""

from __future__ import annotations

import ast
import functools
import io
import pathlib
import tokenize
from collections.abc import Mapping
from types import MappingProxyType

from configs import default

# Each field of the first section has the meaning of the same field of the second section.
COPIES = {"evaluation.metric_options": "metrics"}
# Unit by the end of a field's name. The first one that fits counts.
UNITS = (
    ("tokens_per_step", "tokens"),
    ("max_num_seqs", "responses"),
    ("batched_tokens", "tokens"),
    ("special_tokens", ""),
    ("_tokens", "tokens"),
    ("decay_growth", "tokens per step"),
    ("_steps", "steps"),
    ("keep_every", "steps"),
    ("compare_every", "steps"),
    ("drift_every", "steps"),
    ("_s", "seconds"),
    ("_gib", "GiB"),
    ("metrics.stride", "tokens"),
    ("metric_options.stride", "tokens"),
    ("dataset_stride", "responses"),
    ("constant_length", "tokens"),
    ("prompts_per_step", "prompts"),
    ("prompts_per_minibatch", "prompts"),
    ("responses_per_step", "responses"),
    ("responses_per_call", "responses"),
    ("groups_per_call", "prompts"),
    ("group_size", "responses"),
    ("evaluation.n", "responses"),
    ("max_sampling_rounds", "rounds"),
    ("max_staleness", "steps"),
    ("jax_max_batch", "responses"),
    ("device_batch", "responses"),
    ("warm_start.batch_size", "sequences"),
    ("warm_start.micro_batch_size", "sequences"),
    ("sft.batch_size", "conversations"),
    ("sft.micro_batch_size", "conversations"),
    ("training.micro_batch_size", "responses"),
    ("num_prompts", "prompts"),
    ("num_problems", "problems"),
    ("num_demonstrations", "sequences"),
    ("num_epochs", "epochs"),
    ("max_skipped_updates", "updates"),
    ("num_workers", "processes"),
    ("num_threads", "threads"),
    ("jax_processes", "processes"),
    ("jax_process_cores", "cores"),
    ("num_processes", "processes"),
    ("_parallelism", "devices"),
    ("mesh.replica", "devices"),
    ("mesh.fsdp", "devices"),
    ("mesh.sequence", "devices"),
    ("mesh.tensor", "devices"),
    ("mesh.expert", "devices"),
    ("kl_target", "nats per token"),
    ("kl_horizon", "responses"),
    ("checkpoints.keep", "checkpoints"),
    ("extra_steps", "steps"),
)


def unit(field: str) -> str:
    """The unit of a field by its full name; "" if it is a text, a choice or a plain number."""
    return next((unit for end, unit in UNITS if f".{field}".endswith(end)), "")


@functools.cache
def meanings() -> Mapping[str, str]:
    """The comment of each field and of each section, by full name; "" where there is none.

    A comment stands on the lines above an assignment, or in it, or both.
    """
    text = pathlib.Path(default.__file__).read_text()
    comments, alone = {}, set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            comments[token.start[0]] = token.string.lstrip("# ")
            if not token.line[: token.start[1]].strip():
                alone.add(token.start[0])
    found = {}
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Assign) or not isinstance(node.targets[0], ast.Attribute):
            continue
        name = ast.unparse(node.targets[0]).removeprefix("config.")
        within = range(node.lineno, node.end_lineno + 1)
        lines = [comments[line] for line in within if line in comments]
        above = node.lineno - 1
        while above in alone:
            lines.insert(0, comments[above])
            above -= 1
        found[name] = " ".join(lines)
    for copy, original in COPIES.items():
        for name in [name for name in found if name.startswith(f"{original}.")]:
            found[copy + name.removeprefix(original)] = found[name]
    return MappingProxyType(found)
