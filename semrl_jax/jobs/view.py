"""The page of `launch.view`: responses whose text is shaded by a value of each token or window."""

from __future__ import annotations

import codecs
import pathlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Bool, Int

from semrl_jax import data, models
from semrl_jax.analysis.along import Along, along_responses
from semrl_jax.pages.html import content_policy, data_element, filled, rounded, shortened
from semrl_jax.runs.policies import PolicySource, find_policies, policy_names
from semrl_jax.support import response_files
from semrl_jax.support.errors import UserError
from semrl_jax.support.response_files import IDS, lengths_of_runs
from semrl_jax.support.run_directory import run_of, setting_of
from semrl_jax.support.safe_files import replacing

SHOWN = ("all", "correct", "incorrect", "changed")
VERDICTS = ("correct", "wrong", "any")  # of a policy, in `verdicts`
MAX_COLUMNS = 8  # policies next to each other
MAX_ANSWER = 300  # characters
DEFAULT_STRIDE = 40
# Field of `Along`, label and unit, whether of tokens or of windows, whether 0 is the middle.
VALUES = (
    ("entropy", "token entropy (nats)", "token", False),
    ("logprob", "log-probability (nats)", "token", False),
    ("effective_rank", "ER of the prefix", "window", False),
    ("velocity", "ERV term of the prefix", "window", True),
    ("acceleration", "ERA term of the prefix", "window", True),
)
_TEMPLATE = pathlib.Path(__file__).with_suffix(".html")


class Response(NamedTuple):
    """One response of a file; fields that the file lacks are None."""

    prompt_ids: Int[np.ndarray, " P"]
    response_ids: Int[np.ndarray, " T"]
    prompt: str | None
    reference: str | None
    correct: bool | None
    extracted: str | None
    finish_reason: str | None
    response_mask: Sequence[bool] | None = None
    turn_rewards: Sequence[float] | None = None

    @property
    def is_own(self) -> Bool[np.ndarray, " T"]:
        """True on the policy's own tokens."""
        return np.array(self.response_mask or [True] * len(self.response_ids), bool)


class Column(NamedTuple):
    """A policy, its run, if it is of one, and its responses by the name of their problem."""

    source: PolicySource
    run: pathlib.Path | None
    responses: dict[str, Response]


def find_columns(
    paths: Sequence[str], steps: Sequence[int] | None, samples: pathlib.Path | None
) -> list[Column]:
    """The policies to compare; UserError if one has no responses, or they are too many.

    Without `steps`, all of a run that have responses and weights, at most `MAX_COLUMNS`, the first
    and the last among them. Without `samples`, each one's own responses of its recorded evaluation.
    """
    columns = []
    for path, name in zip(paths, policy_names(paths)):
        run = run_of(pathlib.Path(path))
        whole = run is not None and run.samefile(path)  # not one of its checkpoints
        sources = find_policies(path, (steps or []) if whole else steps, name=name)
        if samples is not None:
            read = read_responses(samples)
            columns += [Column(source, run, read) for source in sources]
            continue
        if run is None:
            raise UserError(
                f"--policy={path} is no run with a recorded evaluation; name a file by --samples."
            )
        files = {s.step: run / "rollouts" / f"eval_{s.step:06d}.parquet" for s in sources}
        with_responses = [source for source in sources if files[source.step].is_file()]
        if not with_responses or (steps and len(with_responses) < len(sources)):
            recorded = sorted(file.name for file in (run / "rollouts").glob("eval_*.parquet"))
            raise UserError(
                f"--policy={path}: weights of steps {[s.step for s in sources]}, evaluations of "
                f"{recorded or 'none'}; choose --steps that have both, or a file by --samples."
            )
        columns += [Column(s, run, read_responses(files[s.step])) for s in with_responses]
    if len(columns) > MAX_COLUMNS:
        if steps:
            raise UserError(
                f"{len(columns)} policies are more than {MAX_COLUMNS}; name fewer, or --steps."
            )
        chosen = np.linspace(0, len(columns) - 1, MAX_COLUMNS).round().astype(int)
        columns = [columns[i] for i in chosen]
    return columns


def read_responses(file: pathlib.Path) -> dict[str, Response]:
    """The responses of a Parquet file by problem and sample; UserError if it lacks token ids."""
    optional = (
        "benchmark", "group_id", "sample_index", "question", "conversations", *Response._fields[2:]
    )  # fmt: skip
    table = response_files.read(file, IDS, optional)
    found = {}
    for number, row in enumerate(table.to_pylist()):
        ids = np.asarray(row["response_ids"], np.int32)
        if not len(ids):
            continue
        if row.get("conversations") is not None:
            raise UserError(
                f"{file}: an episode has several conversations, which are not computed again here; "
                "name another file."
            )
        problem, sample = row.get("group_id", number), row.get("sample_index", 0)
        name = f"{row.get('benchmark') or 'problem'} {problem}" + f" sample {sample}" * bool(sample)
        row.setdefault("prompt", row.get("question"))
        found[name] = Response(
            np.asarray(row["prompt_ids"], np.int32),
            ids,
            *(row.get(key) for key in Response._fields[2:]),
        )
    if not found:
        raise UserError(f"{file} has no response with a token; name another file.")
    return found


def chosen_problems(
    columns: Sequence[Column],
    problems: Sequence[str],
    show: str,
    limit: int,
    *,
    verdicts: Sequence[str] = (),
    seed: int | None = None,
) -> list[str]:
    """At most `limit` problems that all policies have and that fit; UserError if none.

    `show` and `verdicts`, one of VERDICTS for each policy, say which fit. With a `seed`, they are
    drawn at random, and without, they are the first.

    A problem that has another reference in another column is another problem of the same name: the
    policies were evaluated on other data. Prompts may differ, since runs may have other templates.
    """
    if verdicts and len(verdicts) != len(columns):
        names = ", ".join(column.source.name for column in columns)
        raise UserError(
            f"--verdicts has {len(verdicts)} values for {len(columns)} policies; give one for each "
            f"of {names}, in this order."
        )
    common = [
        name
        for name, response in columns[0].responses.items()
        if all(
            name in column.responses and column.responses[name].reference == response.reference
            for column in columns
        )
    ]
    if not common:
        raise UserError(
            "the policies have no problem in common: they were evaluated on other problems."
        )
    for name in problems:
        if name not in common:
            raise UserError(
                f"--problem={name!r} is not there; problems are {common[0]!r}, ..., {common[-1]!r}."
            )

    def fits(name: str) -> bool:
        correct = [bool(column.responses[name].correct) for column in columns]
        if any(v != "any" and (v == "correct") != is_correct
               for v, is_correct in zip(verdicts, correct)):  # fmt: skip
            return False
        return {
            "all": True,
            "correct": correct[-1],
            "incorrect": not correct[-1],
            "changed": len(set(correct)) > 1,
        }[show]

    found = [name for name in problems or common if fits(name)]
    if not found:
        rule = f" and --verdicts={','.join(verdicts)}" if verdicts else ""
        raise UserError(f"none of the {len(common)} problems fits --show={show}{rule}.")
    if seed is not None and len(found) > limit:
        drawn = np.random.default_rng(seed).choice(len(found), limit, replace=False)
        found = [found[place] for place in sorted(drawn)]
    return found[:limit]


def write_view(
    file: pathlib.Path,
    columns: Sequence[Column],
    names: Sequence[str],
    *,
    stride: int,
    progress: Callable[[str], None],
) -> None:
    """Computes the values with the weights of each policy, and writes the page.

    Without a `stride`, metrics.stride of the first policy's run, else DEFAULT_STRIDE.
    """
    stride = stride or setting_of(columns[0].run, "metrics", "stride") or DEFAULT_STRIDE
    cells: list[list[dict[str, Any]]] = [[] for _ in names]
    for number, column in enumerate(columns, 1):
        progress(f"{column.source.name} ({number}/{len(columns)}): {len(names)} responses")
        responses = [column.responses[name] for name in names]
        values, pieces = _values(column, responses, stride)
        for cell, *parts in zip(cells, responses, values, pieces):
            cell.append(_cell(*parts))
    index = {
        "columns": [column.source.name for column in columns],
        "stride": stride,
        "values": [dict(zip(("name", "label", "of", "signed"), value)) for value in VALUES],
        "problems": [
            {
                "name": name,
                "prompt": columns[0].responses[name].prompt or "",
                "reference": columns[0].responses[name].reference or "",
                "cells": cell,
            }
            for name, cell in zip(names, cells)
        ],
    }
    template = _TEMPLATE.read_text("utf-8")
    script = template.split("<script>")[-1].split("</script>")[0]
    parts = {"policy": content_policy(script), "data": data_element("index", index)}
    with replacing(file) as out:
        out.write(filled(template, parts))


def _values(
    column: Column, responses: Sequence[Response], stride: int
) -> tuple[list[Along], list[list[str]]]:
    """The values of each response with the weights of a policy, and the texts of its tokens."""
    source = column.source
    policy = models.Policy(models.load_config(source.model, source.family))
    largest = max(int(max(r.prompt_ids.max(), r.response_ids.max())) for r in responses)
    if largest >= policy.config.vocab_size:
        raise UserError(
            f"token {largest} is not of {source.name}: the responses are of another model."
        )
    mesh = models.make_mesh(
        {"replica": 1, "fsdp": 1, "sequence": 1, "tensor": 1}, jax.devices()[:1]
    )
    params = source.params(policy, mesh)
    ids = [[getattr(r, name) for r in responses] for name in IDS]
    tokens = data.TokenBytes(data.load_tokenizer(source.model))
    pieces = [list(token_texts(tokens, r.response_ids.tolist())) for r in responses]
    masks = [r.is_own for r in responses]
    return along_responses(policy, params, *ids, masks, stride=stride), pieces


def token_texts(tokens: data.TokenBytes, ids: Sequence[int]) -> Iterator[str]:
    """The text of each token; a character of several tokens belongs to the last of them."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    special = tokens.tokenizer.added_tokens_decoder
    for place, token_id in enumerate(ids):
        if token_id in special:
            yield str(special[token_id])
        else:
            yield decoder.decode(tokens[token_id], final=place + 1 == len(ids))


def _cell(response: Response, along: Along, pieces: list[str]) -> dict[str, Any]:
    return {
        "turns": lengths_of_runs(response.is_own),
        "rewards": [rounded(reward) for reward in response.turn_rewards or ()],
        "tokens": pieces,
        "correct": response.correct,
        "extracted": shortened(response.extracted or "", MAX_ANSWER),
        "finish": response.finish_reason or "",
        "ends": along.num_tokens.tolist(),
        **{name: [rounded(float(v)) for v in getattr(along, name)] for name, *_ in VALUES},
    }
