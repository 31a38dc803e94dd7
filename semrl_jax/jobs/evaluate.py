"""Evaluates policies on benchmarks; an interrupted evaluation continues, see `jobs.sample`.

A call samples the responses to a fixed range of problems of one benchmark.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import operator
import pathlib
import urllib.parse
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, BinaryIO, NamedTuple

import ml_collections
import numpy as np
from jax.sharding import Mesh

from semrl_jax import data, models
from semrl_jax.cluster.preemption import StopRequest
from semrl_jax.environments.pool import EnvironmentPools
from semrl_jax.evaluation import catalogue, comparison, problem_page, results
from semrl_jax.evaluation.entries import benchmark_settings, check_benchmarks, environment_names
from semrl_jax.evaluation.evaluator import Benchmark, Evaluator, options_of
from semrl_jax.evaluation.graders import open_graders, takes_rows
from semrl_jax.evaluation.problems import load_problems
from semrl_jax.evaluation.programs import runs_programs, with_programs
from semrl_jax.evaluation.protocols import Plan, load_scores
from semrl_jax.evaluation.samples import Sample, read_samples, table_of
from semrl_jax.jobs.inference import (
    Inference,
    check_inference,
    dry_run_policy,
    open_inference,
    open_measuring,
)
from semrl_jax.jobs.result_directory import SAMPLES, Part, ResultDirectory, open_results
from semrl_jax.jobs.sample import request_of, resumable, sample_calls
from semrl_jax.jobs.uploads import check_upload, upload
from semrl_jax.metrics import Measurement, MetricKey
from semrl_jax.models.of_config import build_policy
from semrl_jax.pages.report.evaluations import RESULTS, TABLE, read_evaluated, write_table
from semrl_jax.rewards import VerifierPool
from semrl_jax.runs.policies import PolicySource
from semrl_jax.sampling.environment_tasks import first_answers, opening_of
from semrl_jax.sampling.prompt_sources import check_prompts
from semrl_jax.sampling.scoring import Scored
from semrl_jax.support.console import Reporter
from semrl_jax.support.errors import UserError
from semrl_jax.support.safe_files import write_json
from semrl_jax.training.reward_model import RewardModelFiles, Scorer, find_reward_model
from semrl_jax.training.rollout_batch import pad_batch
from semrl_jax.types import Rollout, SamplingParams, distribution_of

REWARD_MODEL = MetricKey("reward_model")


class Judge(NamedTuple):
    """A reward model."""

    judged: Callable[[Scored], Scored]  # adds its scores to the metrics of responses
    identity: Mapping[str, str] = MappingProxyType({})  # of its weights and tokenizer


class Call(NamedTuple):
    """Problems `first` to `last` of a benchmark, sampled with one call."""

    benchmark: Benchmark
    first: int
    last: int

    @property
    def plan(self) -> Plan:
        """How its responses are sampled: all scores of an evaluation have one plan."""
        (plan,) = self.benchmark.scores
        return plan

    @property
    def num_responses(self) -> int:
        """How many it has, including those to too long prompts."""
        return (self.last - self.first) * self.plan.num_samples

    @property
    def part(self) -> str:
        """The name of its part."""
        name = urllib.parse.quote(self.benchmark.name, safe="")
        return f"{name}.{self.first:06d}-{self.last:06d}"


class Evaluated(NamedTuple):
    """The figures of one policy, by benchmark, and where they are."""

    source: PolicySource
    directory: pathlib.Path
    figures: dict[str, results.Figures]


def evaluate(
    config: ml_collections.ConfigDict,
    sources: Sequence[PolicySource],
    output: pathlib.Path,
    *,
    only_check: bool = False,
    quiet: bool = False,
) -> int:
    """Samples, grades and scores the responses of all policies, and compares the policies.

    The results of a single policy are in `output`, of several in a directory each below it. With
    `only_check` nothing is sampled or written. `config.model.path` is not read. Returns 0, or 75
    after a signal; UserError for a wrong setting, file, policy or replica.
    """
    check_upload(config)
    places = {source: output if len(sources) == 1 else output / source.name for source in sources}

    def work(reporter: Reporter, stop: StopRequest) -> None:
        found = []
        models_of = operator.attrgetter("model", "family")
        for _, group in itertools.groupby(sources, key=models_of):
            of_model = {source: places[source] for source in group}
            found.extend(_evaluate_model(config, of_model, reporter, stop, only_check))
        if len(found) > 1:
            _write_comparison(found, output, reporter)
        if found:
            files = {item.source.name: item.directory / RESULTS for item in found}
            write_table(output / TABLE, [read_evaluated(*item) for item in files.items()])
            reporter.notice(f"done: see {output / 'page.html'} and the other files there")
        if found and config.evaluation.upload:
            evaluations: dict[str, list[tuple[int, pathlib.Path]]] = {}
            for source, directory, _ in found:
                run = source.name.removesuffix(f"-step{source.step}")
                evaluations.setdefault(run, []).append((source.step, directory / RESULTS))
            upload(config, evaluations, output, reporter.notice)

    return resumable(work, quiet=quiet and not only_check)


def _evaluate_model(
    config: ml_collections.ConfigDict,
    sources: Mapping[PolicySource, pathlib.Path],
    reporter: Reporter,
    stop: StopRequest,
    only_check: bool,
) -> Iterator[Evaluated]:
    """Evaluates policies of one architecture, each into its directory."""
    first_source, *_ = sources
    config = first_source.of_model(config)
    with contextlib.ExitStack() as stack, stop.interruptible():
        check_benchmarks(config)
        policy, tokenizer = build_policy(config)
        scores = load_scores(config.evaluation.scores)
        settings = benchmark_settings(config)
        keep = takes_rows(config, settings)
        names = environment_names(config)
        environments = stack.enter_context(EnvironmentPools(config.environment, names))
        shared = {"keep_columns": keep, "environments": environments}
        problems = load_problems(config, tokenizer, reporter.line, **shared)
        vocab_size = policy.config.vocab_size
        check_prompts("evaluation", problems, config, tokenizer, vocab_size, reporter.line)
        if environments:
            for line in first_answers(problems, tokenizer, environments):
                reporter.line(line)
        measuring = open_measuring(config, policy, stack)
        graders = open_graders(stack, config, problems, settings)
        # An environment grades its episodes itself.
        alone = {p.data_source for p in problems if opening_of(p.columns) is None}
        if alone - graders.keys():
            rewards = stack.enter_context(VerifierPool.of(config.rewards))
            graders = {p.data_source: graders.get(p.data_source, rewards) for p in problems}
        graders = with_programs(stack, config, problems, graders)
        if only_check:
            mesh = check_inference(config, policy, tokenizer)
            _find_reward_model(config, policy, tokenizer, mesh, problems)
            benchmarks = sorted({problem.data_source for problem in problems})
            counts = f"{len(problems)} problems", f"benchmarks {' '.join(benchmarks)}"
            for source, path in sources.items():
                dry_run_policy(config, source, policy, tokenizer, path, reporter, *counts)
            return
        directories = {source: open_results(path) for source, path in sources.items()}
        for directory in directories.values():
            stack.enter_context(contextlib.closing(directory))
        first = directories[first_source]
        inference = stack.enter_context(
            open_inference(
                config,
                policy,
                tokenizer,
                first.path,
                run_id=first.run_id,
                num_requests=config.evaluation.responses_per_call,
                reporter=reporter,
                stop=stop,
                environments=environments,
            )
        )
        judge = _reward_model(inference, problems)
        evaluator = Evaluator(
            config=config,
            problems=problems,
            scores=scores,
            sampler=inference.sampler,
            settings=settings,
            graders=graders,
            measurer=measuring and measuring.measurer,
        )
        _check_plans(evaluator)
        for source, directory in directories.items():
            yield _evaluate_policy(source, directory, inference, evaluator, judge, reporter, stop)


def _reward_model(inference: Inference, problems: Sequence[data.PromptExample]) -> Judge:
    """The model of `evaluation.reward_model`; without one, nothing is added."""
    config, mesh = inference.config, inference.mesh
    files = _find_reward_model(config, inference.policy, inference.tokenizer, mesh, problems)
    if files is None:
        return Judge(lambda items: items)
    scorer = Scorer.load(files, config, mesh)

    def judged(items: Scored) -> Scored:
        if not items:
            return items
        batch = functools.partial(
            pad_batch,
            [item.rollout for item in items],
            pad_token_id=inference.tokenizer.pad_token_id,
            max_prompt_tokens=config.rollout.max_prompt_tokens,
            max_response_tokens=config.rollout.max_response_tokens,
        )
        scores = scorer.scores(items, batch)
        return items.with_metrics({REWARD_MODEL: Measurement(scores, np.isfinite(scores))})

    identity = {"reward model": models.weights_sample(files.directory)}
    if files.texts:
        identity["texts of the reward model"] = files.texts.identity
    return Judge(judged, identity)


def _find_reward_model(
    config: ml_collections.ConfigDict,
    policy: models.Policy,
    tokenizer: Any,
    mesh: Mesh,
    problems: Sequence[data.PromptExample],
) -> RewardModelFiles | None:
    path, options = config.evaluation.reward_model, config.rewards.model
    if path and options.tokenizer == "own" and _has_episodes(problems):
        raise UserError(
            f"evaluation.reward_model={path!r}: rewards.model.tokenizer='own' reads one question "
            "and one response, and a benchmark has an environment; leave one of them out."
        )
    of_policy = config, policy, tokenizer, mesh
    return find_reward_model("evaluation.reward_model", path, *of_policy, problems)


def _has_episodes(problems: Sequence[data.PromptExample]) -> bool:
    return any(opening_of(problem.columns) is not None for problem in problems)


def _of_texts(config: ml_collections.ConfigDict) -> list[str]:
    """Settings of a reward model with its own tokenizer, which decide its scores."""
    if not config.evaluation.reward_model or config.rewards.model.tokenizer == "policy":
        return []
    names = "tokenizer", "chat_template", "max_tokens", "truncation"
    return [f"rewards.model.{name}" for name in names]


def _check_plans(evaluator: Evaluator) -> None:
    """Raises UserError if scores of a benchmark sample differently, or one has a wrong name."""
    for name, benchmark in evaluator.benchmarks.items():
        if results.is_average(name):
            raise UserError(
                f"a benchmark is named {name!r:.100}, as results.json needs; set FILE:name=NAME."
            )
        if len(benchmark.scores) > 1:
            names = [scores[0].__name__.rpartition(".")[2] for scores in benchmark.scores.values()]
            raise UserError(
                f"evaluation.scores: {' and '.join(map(repr, names))} sample in different ways; "
                "choose one, and set evaluation.n and temperature."
            )


def _evaluate_policy(
    source: PolicySource,
    directory: ResultDirectory,
    inference: Inference,
    evaluator: Evaluator,
    judge: Judge,
    reporter: Reporter,
    stop: StopRequest,
) -> Evaluated:
    config = inference.config
    reporter.line(f"{source.name}: sending the weights")
    digest = inference.load(source)
    benchmarks = evaluator.benchmarks
    directory.check(
        request_of(config, "evaluation.reward_model", *_of_texts(config))
        | {"weights": digest}
        | judge.identity,
        {
            name: _identity(benchmark, evaluator, inference)
            for name, benchmark in benchmarks.items()
        },
    )
    directory.note(policy=source.name)
    finished = directory.finished()
    for benchmark in benchmarks.values():
        if of_benchmark := finished.get(benchmark.name):
            call = Call(benchmark, 0, len(benchmark.problems))
            _check_complete(directory.path / SAMPLES, of_benchmark, call)
    calls = [
        call
        for name, benchmark in benchmarks.items()
        if name not in finished
        for call in _calls(benchmark, config.evaluation.responses_per_call)
    ]

    def sample(call: Call, arrived: Callable[[Rollout], None]) -> Part:
        places = range(call.first, call.last)
        in_benchmark = [(call.benchmark, place) for place in places]
        items = judge.judged(evaluator.sample(in_benchmark, call.plan, arrived))
        lists = evaluator.samples(call.benchmark, places, call.plan, items)
        files = {}
        if items.mean_states is not None:
            file = directory.part(call.part, ".npy")
            files[file] = functools.partial(_write_array, array=items.mean_states)
        return Part(table_of([*itertools.chain.from_iterable(lists)]), files)

    sample_calls(calls, sample, config, directory, reporter, stop, source.name)
    parts = []
    for call in calls:
        parts.append((call.benchmark.name, *directory.read_part(call.part)))
        _check_complete(directory.part(call.part), parts[-1][1], call)
    over_set = {name: directory.over_set(name) for name in finished}
    for name in [name for name in benchmarks if name not in finished]:
        own = [(samples, states) for of, samples, states in parts if of == name]
        finished[name] = [sample for samples, _ in own for sample in samples]
        states = [rows for _, rows in own if rows is not None]
        if states:
            pending = evaluator.measurer.submit_batch(np.concatenate(states))
            over_set[name] = pending.result()
    samples = list(itertools.chain.from_iterable(finished.values()))
    directory.finish([call.part for call in calls], over_set)
    options = {
        name: options_of(config.evaluation, {"n": max(s.sample_index for s in of_name) + 1})
        for name, of_name in finished.items()
    } | {name: benchmark.options for name, benchmark in benchmarks.items()}
    figures = results.evaluate(
        samples, evaluator.scores, config.evaluation, catalogue.GROUPS, options
    )
    found = results.as_results(figures)
    for name, values in over_set.items():
        found[name] |= {f"metrics/{label}": value for label, value in values.items()}
    write_json(directory.path / RESULTS, found)
    problem_page.write_page(
        directory.path / "page.html", {source.name: samples}, {source.name: found}, source.name
    )
    reporter.line(f"{source.name}, {_sampling_text(config)}")
    reporter.table(results.results_table(found))
    if (table := results.selection_table(found)) is not None:
        reporter.table(table)
    return Evaluated(source, directory.path, figures)


def _write_comparison(found: Sequence[Evaluated], output: pathlib.Path, reporter: Reporter) -> None:
    """Writes comparison.json and page.html, and curves.png if a run has several steps."""
    compared = comparison.compare({item.source.name: item.figures for item in found})
    samples = {item.source.name: read_samples(item.directory / SAMPLES) for item in found}
    supports = comparison.supports(samples)
    found_supports = {n: {b: s._asdict() for b, s in of.items()} for n, of in supports.items()}
    write_json(output / "comparison.json", compared | {"supports": found_supports})
    reporter.table(comparison.comparison_table(compared))
    for name, of_policy in supports.items():
        for benchmark, each in of_policy.items():
            reporter.line(f"{benchmark}: {name} {each.sentence}")
    problem_page.write_page(output / "page.html", samples, compared["results"], output.name)
    runs: dict[str, dict[int, results.Results]] = {}
    for item in found:
        run = item.source.name.removesuffix(f"-step{item.source.step}")
        runs.setdefault(run, {})[item.source.step] = results.as_results(item.figures)
    if runs := {run: steps for run, steps in runs.items() if len(steps) > 1}:
        comparison.write_curves(output / "curves.png", runs)


def _sampling_text(config: ml_collections.ConfigDict) -> str:
    options, usual = distribution_of(config.evaluation), vars(SamplingParams(1))
    how = [f"temperature {options.pop('temperature'):g}", f"top-p {options.pop('top_p'):g}"]
    if config.evaluation.temperature == 0:
        how = ["greedy"]
    how += [
        f"{name.replace('_', '-')} {value:g}"
        for name, value in options.items()
        if value != usual[name]
    ]
    return ", ".join([*how, f"at most {config.rollout.max_response_tokens} tokens"])


def _write_array(out: BinaryIO, array: np.ndarray) -> None:
    content = io.BytesIO()  # NumPy writes a file in a way of its own, which names no full disk
    np.save(content, array)
    out.write(content.getvalue())


def _check_complete(file: pathlib.Path, samples: Sequence[Sample], call: Call) -> None:
    """Raises UserError if the samples, read from a file, are not the samples of the call."""
    expected = itertools.product(
        [call.benchmark.name], range(call.first, call.last), range(call.plan.num_samples)
    )
    if [(s.benchmark, s.group_id, s.sample_index) for s in samples] != list(expected):
        raise UserError(
            f"{file} lacks responses to {call.benchmark.name!r:.100}; remove it and start again."
        )


def _calls(benchmark: Benchmark, responses_per_call: int) -> list[Call]:
    count, (plan,) = len(benchmark.problems), benchmark.scores
    size = max(responses_per_call // plan.num_samples, 1)
    return [Call(benchmark, first, min(first + size, count)) for first in range(0, count, size)]


def _identity(benchmark: Benchmark, evaluator: Evaluator, inference: Inference) -> dict[str, Any]:
    """What decides the responses to a benchmark and their verdicts, other than shared settings."""
    config = inference.config
    (plan,) = benchmark.scores
    problems = tuple(evaluator.problems[index] for index in benchmark.problems)
    options = evaluator.settings.get(benchmark.name, {})
    verifier = config.evaluation.verifier or options.get("verifier", "")
    fields = () if verifier else ("function", "functions", "mode", "unboxed_penalty")
    limits, has_rows = {}, takes_rows(config, {benchmark.name: options})
    if (opening := opening_of(problems[0].columns)) is not None:
        has_rows = True
        fields = ("failure_score",)
        limits = {"environment.name": opening.environment} | {
            f"environment.{field}": config.environment[field]
            for field in ("max_turns", "max_observation_chars")
        }
    return {
        "template": problems[0].template,
        "special tokens before a prompt": data.special_prefix(
            inference.tokenizer, problems[0].template, config.data.add_special_tokens
        ),
        "problems": data.dataset_hash(data.PromptDataset(problems)),
        # Other columns may change, and are only there if another benchmark needs them.
        **({"columns": data.columns_hash(data.PromptDataset(problems))} if has_rows else {}),
        **plan._asdict(),
        "verifier": verifier,
        "evaluation.run_programs": any(runs_programs(config, problem) for problem in problems),
        **{f"rewards.{field}": config.rewards[field] for field in fields},
        **limits,
    }
