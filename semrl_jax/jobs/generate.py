"""Generates responses to the prompts of files; an interrupted generation continues.

A call samples a fixed range of responses, see `jobs.sample`.
"""

from __future__ import annotations

import contextlib
import functools
import pathlib
import shutil
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import ml_collections
import numpy as np

from semrl_jax import data, models
from semrl_jax.cluster.preemption import StopRequest
from semrl_jax.evaluation import generated_files as files
from semrl_jax.jobs.inference import Inference, dry_run_policy, open_inference, open_measuring
from semrl_jax.jobs.result_directory import PARTS, Part, ResultDirectory, open_results
from semrl_jax.jobs.sample import request_of, resumable, sample_calls
from semrl_jax.models.of_config import build_policy
from semrl_jax.rewards import VerifierPool
from semrl_jax.runs.policies import PolicySource
from semrl_jax.runs.workdir import versions
from semrl_jax.sampling.prompt_sources import check_prompts, prompts_of_files
from semrl_jax.sampling.requests import GENERATION, Measuring, stream_seed
from semrl_jax.support import response_files
from semrl_jax.support.console import Reporter
from semrl_jax.support.errors import UserError
from semrl_jax.types import (
    DISTRIBUTION,
    HiddenStateParams,
    Rollout,
    SampleRequest,
    config_hash,
    distribution_of,
)

RECORD = "generation.json"
GRADER_OPTIONS = ("timeout_s", "num_workers", "memory_limit_gib")  # of config.rewards
MAX_STATE_BYTES = 2**30  # of hidden states of one call, which are in memory together
# Further settings that decide which responses are sampled, and what is written of them.
FIELDS = (
    "evaluation.n", *(f"evaluation.{name}" for name in DISTRIBUTION), "evaluation.verifier",
)  # fmt: skip


class Contents(NamedTuple):
    """What is generated."""

    num_prompts: int = 0  # rows that are read, at most; 0 is all
    logprobs: bool = False  # whether log-probabilities per token are written
    states: HiddenStateParams | None = None  # hidden states that are written; None: none
    conversations: str = "none"  # "none", or "all" or "correct" responses as conversations


class Call(NamedTuple):
    """Responses `first` to `last`: response r is sample r % n to prompt r // n."""

    number: int
    first: int
    last: int

    @property
    def num_responses(self) -> int:
        """How many it has."""
        return self.last - self.first

    @property
    def part(self) -> str:
        """The name of its part."""
        return f"{self.first:09d}-{self.last:09d}"


def generate(
    config: ml_collections.ConfigDict,
    source: PolicySource,
    output: pathlib.Path,
    contents: Contents,
    *,
    only_check: bool = False,
    quiet: bool = False,
) -> int:
    """Samples `evaluation.n` responses to each prompt of `data.files`.

    With `only_check` nothing is sampled or written. `config.model.path` is not read. Returns 0, or
    75 after a signal; UserError for a wrong setting, file, policy or replica.
    """

    def work(reporter: Reporter, stop: StopRequest) -> None:
        _generate(config, source, output, contents, reporter, stop, only_check)

    return resumable(work, quiet=quiet and not only_check)


def _generate(
    config: ml_collections.ConfigDict,
    source: PolicySource,
    output: pathlib.Path,
    contents: Contents,
    reporter: Reporter,
    stop: StopRequest,
    only_check: bool,
) -> None:
    config = source.of_model(config)
    with contextlib.ExitStack() as stack, stop.interruptible():
        policy, tokenizer = build_policy(config)
        check_layers(contents.states, policy.config)
        verifier = config.evaluation.verifier
        prompts = prompts_of_files(
            config,
            tokenizer,
            reporter.line,
            keep_columns=True,
            num_rows=contents.num_prompts,
            needs_answer=bool(verifier),
        )
        vocab_size = policy.config.vocab_size
        check_prompts("generation", prompts.examples, config, tokenizer, vocab_size, reporter.line)
        if not only_check:
            directory = stack.enter_context(contextlib.closing(open_results(output, RECORD)))
            directory.check(settings_of(config, prompts, contents), {})
            template = data.chosen_template(config.data.template, tokenizer)
            directory.note(
                versions=versions(),
                policy=str(source.checkpoint or source.model),
                template=template,
                special_tokens_before_a_prompt=data.special_prefix(
                    tokenizer, template, config.data.add_special_tokens
                ),
                files=[str(pathlib.Path(file).absolute()) for file in config.data.files],
            )
        grader = None
        if verifier:
            options = {name: config.rewards[name] for name in GRADER_OPTIONS}
            grader = stack.enter_context(VerifierPool(function=verifier, **options))
        measuring = open_measuring(config, policy, stack)
        calls = calls_of(config, policy.config, len(prompts), contents.states)
        if only_check:
            counts = f"{len(prompts)} prompts", f"{calls[-1].last} responses"
            dry_run_policy(config, source, policy, tokenizer, output, reporter, *counts)
            return
        inference = stack.enter_context(
            open_inference(
                config,
                policy,
                tokenizer,
                directory.path,
                run_id=directory.run_id,
                num_requests=max(call.num_responses for call in calls),
                reporter=reporter,
                stop=stop,
            )
        )
        reporter.line(f"{source.name}: sending the weights")
        directory.check({"weights": inference.load(source)}, {})
        work = Generation(inference, prompts.examples, contents, directory, grader, measuring)
        if not (directory.path / files.RESPONSES).exists():
            sample = functools.partial(work.sample, num_calls=len(calls))
            sample_calls(calls, sample, config, directory, reporter, stop, "generate")
            with stop.deferred():
                work.finish(calls)
        # Also those of an earlier start that was killed before this.
        shutil.rmtree(directory.path / PARTS, ignore_errors=True)
        work.report(reporter)


class Generation(NamedTuple):
    """What the calls need."""

    inference: Inference
    prompts: Sequence[data.PromptExample]  # the group of a response is the place of its prompt
    contents: Contents
    directory: ResultDirectory
    grader: VerifierPool | None  # None: nothing is graded
    measuring: Measuring | None  # None: nothing is measured

    def sample(self, call: Call, arrived: Callable[[Rollout], None], *, num_calls: int) -> Part:
        """Samples a call."""
        config, states = self.inference.config, self.contents.states
        requests = [self._request(response) for response in range(call.first, call.last)]
        asked = {request.group_id: self.prompts[request.group_id] for request in requests}
        items = self.inference.sampler.sample(
            requests,
            {place: prompt.answer for place, prompt in asked.items()},
            columns={place: prompt.columns for place, prompt in asked.items()},
            verifier=self.grader,
            measuring=self.measuring,
            stop_strings=config.evaluation.stop_strings,
            states=states,
            arrived=arrived,
            **distribution_of(config.evaluation),
        )
        table = files.response_table(
            items,
            self.prompts,
            with_logprobs=self.contents.logprobs,
            is_graded=self.grader is not None,
        )
        if states is None:
            return Part(table)
        write = functools.partial(
            files.write_states, items=items, prompts=self.prompts, asked=states
        )
        return Part(table, {pathlib.Path(files.shard_name(call.number, num_calls)): write})

    def _request(self, response: int) -> SampleRequest:
        config = self.inference.config
        place, sample = divmod(response, config.evaluation.n)
        prompt = self.prompts[place]
        return SampleRequest(
            sample_id=f"generate/{prompt.index}/{sample}",
            group_id=place,
            sample_index=sample,
            prompt_ids=prompt.prompt_ids,
            seed=stream_seed(config.seed, GENERATION, prompt.index, sample),
        )

    def finish(self, calls: Sequence[Call]) -> None:
        """Joins the parts."""
        path = self.directory.path
        parts = [self.directory.part(call.part) for call in calls]
        if self.contents.states is not None:
            files.write_states_index(path, parts, self.contents.states)
        response_files.join(parts, path / files.RESPONSES)

    def report(self, reporter: Reporter) -> None:
        """Writes the conversations, and prints what was generated."""
        path, config = self.directory.path, self.inference.config
        names = ["num_tokens", "finish_reason"] + ["correct"] * (self.grader is not None)
        table = response_files.read(path / files.RESPONSES, names, ())
        lengths = table["num_tokens"].to_numpy()
        finished = np.isin(table["finish_reason"].to_pylist(), files.FINISHED)
        line = (
            f"{len(table)} responses to {len(self.prompts)} prompts: {lengths.mean():.1f} tokens "
            f"per response, {100 * finished.mean():.1f}% finished"
        )
        if self.grader is not None:
            line += f", {100 * np.mean(table['correct'].to_pylist()):.1f}% correct"
        reporter.line(line)
        if self.contents.conversations != "none":
            count, truncated = files.write_conversations(
                path,
                only_correct=self.contents.conversations == "correct",
                system_prompt=config.data.system_prompt,
                template=config.data.template,
            )
            kind = "correct " if self.contents.conversations == "correct" else ""
            reporter.line(
                f"{files.CONVERSATIONS} has {count} conversations from {count + truncated} {kind}"
                f"responses; {truncated} truncated or empty ones are left out"
            )
        reporter.notice(f"done: see {path}")


def check_layers(states: HiddenStateParams | None, architecture: models.DecoderConfig) -> None:
    """Raises UserError for a layer that the model does not have."""
    for layer in states.layers if states else ():
        if not -1 <= layer <= architecture.num_layers:
            raise UserError(
                f"--hidden_states has {layer}; choose from 0 to {architecture.num_layers}, or -1."
            )


def calls_of(
    config: ml_collections.ConfigDict,
    architecture: models.DecoderConfig,
    num_prompts: int,
    states: HiddenStateParams | None,
) -> list[Call]:
    """All calls. With hidden states, a call has at most MAX_STATE_BYTES of them."""
    size = config.evaluation.responses_per_call
    if states is not None:
        layers = set(states.layers)
        if config.evaluation.metrics:
            layers.update(config.evaluation.metric_options.layers)
        num_tokens = config.rollout.max_response_tokens
        num_tokens += config.rollout.max_prompt_tokens * ("prefill" in states.kinds)
        itemsize = 2 if states.dtype == "bfloat16" else 4
        num_bytes = num_tokens * len(layers) * architecture.hidden_size * itemsize
        size = max(min(size, MAX_STATE_BYTES // num_bytes), 1)
    total = num_prompts * config.evaluation.n
    starts = range(0, total, size)
    return [Call(i, first, min(first + size, total)) for i, first in enumerate(starts)]


def settings_of(
    config: ml_collections.ConfigDict, prompts: data.PromptDataset, contents: Contents
) -> dict[str, Any]:
    """What decides the responses and their files, in addition to the weights."""
    return request_of(config, *FIELDS) | {
        "prompts": data.dataset_hash(prompts),
        "columns": data.columns_hash(prompts),
        # They number the responses and seed them: rows that are left out count too.
        "rows of the prompts": config_hash({"rows": [e.index for e in prompts.examples]}),
        "logprobs": contents.logprobs,
        "hidden_states": vars(contents.states) if contents.states else {},
    }
