"""Settings of `config.evaluation`; `evaluation.entries` checks those of each benchmark."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection

from semrl_jax.settings import metrics
from semrl_jax.settings.rewards import check_function
from semrl_jax.settings.rollout import MIN_TEMPERATURE, check_stop_strings
from semrl_jax.settings.rules import Section
from semrl_jax.support.errors import UserError
from semrl_jax.support.fields import at_least, fields_of, follows, section, setting, within
from semrl_jax.support.modules import module_names
from semrl_jax.types import DISTRIBUTION

ALL_PROBLEMS = 10**9  # evaluation.num_problems of an evaluation of its own, unless it is given
# The sampling of the published evaluations (docs/evaluation.md).
SAMPLING = {"evaluation.temperature": 0.6, "evaluation.top_p": 0.95}
SCORES, GREEDY = "semrl_jax.evaluation.scores", "greedy"
OF_TRAINING = ("of_groups", "drift_every", "probes")  # settings of metrics that evaluations lack
MetricOptions = dataclasses.make_dataclass(
    "MetricOptions",
    [
        (
            field.name,
            field.type,
            follows(f"metrics.{field.name}", known.meaning, unit=known.unit, **known.rules),
        )
        for field, known, _ in fields_of(metrics.Metrics)
        if field.name not in OF_TRAINING
    ],
    frozen=True,
)


@dataclasses.dataclass(frozen=True)
class Evaluation:
    every_steps: int = setting(
        10, "also before the first and after the last update; 0: never", at_least=0
    )
    num_problems: int = setting(512, "at most, per held-out set or file", "problems", above=0)
    subset_seed: int = setting(
        -1,
        "seed that chooses num_problems rows of a file or named benchmark; -1: the first rows",
        at_least=-1,
    )
    files: tuple[str, ...] = setting(
        (),
        "with data.task=files: FILE, or FILE:setting=value:... with a field below, "
        "num_problems or name; docs/data.md",
        items=str,
    )
    scores: tuple[str, ...] = setting(
        ("greedy",), 'names of docs/evaluation.md, or "my_package.module"', items=str
    )
    held_out: bool = setting(
        True, "False: evaluate benchmarks alone, not held-out problems of the task or files"
    )
    benchmarks: tuple[str, ...] = setting(
        (),
        "gsm8k, tiny, ..., FILE.jsonl, environment:NAME, each with :setting=value:..., or "
        '"my_package.module"; docs/data.md',
        items=str,
    )
    data_dir: str = setting("data/benchmarks", "where the files of named benchmarks are")
    shots: int = setting(0, "examples before each question, from shots_file", at_least=0)
    shots_file: str = setting("", ".jsonl or .parquet, with question and answer (or response)")
    n: int = setting(1, "per problem; greedy has one, at temperature 0", "responses")
    temperature: float = setting(0.0, "temperature of scores other than greedy")
    top_p: float = setting(1.0, "as rollout.top_p")
    top_k: int = setting(0, "as rollout.top_k")
    min_p: float = setting(0.0, "as rollout.min_p")
    presence_penalty: float = setting(0.0, "as rollout.presence_penalty")
    frequency_penalty: float = setting(0.0, "as rollout.frequency_penalty")
    repetition_penalty: float = setting(1.0, "as rollout.repetition_penalty")
    min_tokens: int = setting(0, "as rollout.min_tokens", "tokens")
    k: tuple[int, ...] = setting((1,), "k of pass@k, maj@k and best@k; at most n", items=int)
    responses_per_call: int = setting(
        1024, "per call of launch.evaluate; an interrupted call is repeated", "responses", above=0
    )
    reward_model: str = setting("", "classifier for best@k of launch.evaluate: directory or hub id")
    verifier: str = setting(
        "",
        "as rewards.function; empty: benchmark for named benchmarks, else the verifier of the "
        "rewards",
    )
    upload: bool = setting(False, "True: launch.evaluate sends its figures to the trackers")
    run_programs: str = setting(
        "auto",
        "whose Python programs launch.evaluate runs: auto, in responses to the templates pal, "
        "tora, tool-integrated and jiuzhang_tora; always; never",
        choices=("auto", "always", "never"),
    )
    metrics: bool = setting(False, "True: measure hidden states too")
    metric_series: bool = setting(
        False,
        "True: record each prefix's metrics in columns series/METRIC; needs "
        "evaluation.metrics=True",
    )
    row_format: str = follows(
        "data.row_format", "Rows of held-out files; follows data.row_format unless set"
    )
    question_fields: tuple[str, ...] = follows(
        "data.question_fields", "Follows data.question_fields unless set", items=str
    )
    answer_field: str = follows("data.answer_field", "Follows data.answer_field unless set")
    answer_after: str = follows("data.answer_after", "Follows data.answer_after unless set")
    template: str = follows("data.template", "Follows data.template unless set")
    stop_strings: tuple[str, ...] = follows(
        "rollout.stop_strings", "Follows rollout.stop_strings unless set", items=str
    )
    metric_options: MetricOptions = section(MetricOptions, "Options of evaluation.metrics.")


def check(evaluation: Section) -> None:
    from semrl_jax.data.prompt_rows import check_row_format  # see settings.data

    check_row_format(evaluation["row_format"], "evaluation.")
    check_sampling(evaluation, most=most_responses(evaluation))
    if evaluation["verifier"]:
        check_function("evaluation.verifier", evaluation["verifier"])
    options = evaluation["metric_options"]
    metrics.check(options, "evaluation.metric_options")
    if evaluation["metric_series"] and not evaluation["metrics"]:
        raise UserError("evaluation.metric_series=True needs evaluation.metrics=True.")
    if evaluation["metric_series"] and options["placement"] == "rollout":
        raise UserError(
            "evaluation.metric_series=True needs evaluation.metric_options.placement='trainer': "
            "replicas send one value of a metric per response."
        )
    if evaluation["shots"] and not evaluation["shots_file"]:
        raise UserError(
            f"evaluation.shots={evaluation['shots']} needs examples in evaluation.shots_file."
        )


def complete(config: Section, given: Collection[str], of_run: bool) -> None:
    """Sets the defaults of an evaluation of its own: all scores, all problems, powers of two as k.

    `given` are set by the user; `of_run`: with the held-out problems of the config.
    """
    from semrl_jax.data.templates import STOP_STRINGS  # see `check`

    evaluation = config.evaluation
    if not of_run:
        evaluation.held_out, config.environment.name = False, ""
    # Tasks and procedural problems have no end: those of a run are as many as the run held out.
    is_endless = of_run and config.data.task in ("reasoning_gym", "environment")
    if "evaluation.num_problems" not in given and not is_endless:
        evaluation.num_problems = ALL_PROBLEMS
    if "evaluation.scores" not in given:
        evaluation.scores = tuple(name for name in module_names(SCORES) if name != GREEDY)
    if not {"evaluation.stop_strings", "rollout.stop_strings"} & {*given}:
        own = evaluation.stop_strings or STOP_STRINGS.get(evaluation.template, ())
        evaluation.stop_strings = tuple(own)
    if "evaluation.k" not in given:
        evaluation.k = tuple(2**i for i in range(most_responses(evaluation).bit_length()))


def most_responses(evaluation: Section) -> int:
    """The largest n: of all benchmarks, or that an entry of `evaluation.benchmarks` sets."""
    own = [int(n) for text in evaluation["benchmarks"] for n in re.findall(r":n=(\d{1,9})", text)]
    return max(evaluation["n"], *own, 1)


def check_sampling(options: Section, place: str = "evaluation.", most: int = 0) -> None:
    """Checks n, k (up to `most`, or n), the stop strings and the fields of `DISTRIBUTION`."""
    n, temperature = options["n"], options["temperature"]
    at_least(f"{place}n", n, 1)
    for name, interval in DISTRIBUTION.items():
        within(f"{place}{name}", options[name], interval)
    check_stop_strings(place, options)
    if temperature != 0 and temperature < MIN_TEMPERATURE:
        raise UserError(
            f"{place}temperature={temperature} must be 0 or at least {MIN_TEMPERATURE}."
        )
    if temperature == 0 and n > 1:
        raise UserError(
            f"{place}temperature=0 gives {place}n={n} equal responses; set 0.6, or {place}n=1."
        )
    for k in options["k"]:
        if not 1 <= k <= max(n, most):
            raise UserError(
                f"{place}k has {k}, which must be from 1 to {place}n={n}; raise n or leave it out."
            )
