"""Evaluates policies on benchmarks: samples, grades, scores, compares.

    python -m launch.evaluate --policy=runs/quickstart --benchmarks=gsm8k,math500 --n=16 \\
        --k=1,8,16 --output=results

A policy is a run directory, one of its checkpoints, or a Hugging Face directory. Several: repeat
--policy, or --steps=0,20,40 of a run. A benchmark is a known name (docs/data.md), a .jsonl or
.parquet file, environment:NAME, or a module; without --benchmarks, the held-out problems of the
run. Writes samples.parquet, results.json and page.html into --output, for several policies into a
directory each, and a comparison; and eval_results.csv with the figures of all. The same command
continues an interrupted evaluation. Any field of the config can be set,
--config.rollout.engine=vllm. Without --config, the command takes the config of the run, or the
default config. docs/evaluation.md has the figures. Exit codes: 0 done, 2 wrong setting (one line
names it), 75 ended by a signal.
"""

import os
import pathlib
import re

import ml_collections
from absl import flags
from ml_collections import config_flags

from launch import cli
from launch.fields import (
    OF_SAMPLING,
    chosen_fields,
    config_of_policy,
    define_flags,
    first_run,
    short_flags,
    values_of,
)
from semrl_jax.runs.config_checks import check_sections
from semrl_jax.settings.environment import PREFIX
from semrl_jax.settings.evaluation import SAMPLING, complete
from semrl_jax.support import compilation
from semrl_jax.support.errors import UserError

POLICY = flags.DEFINE_multi_string(
    "policy", [], "run, checkpoint, Hugging Face directory or hub id; repeat it for several"
)
STEPS = flags.DEFINE_string(
    "steps",
    None,
    "checkpoints of runs, 20,40 or all; 0: the first model; default: the newest valid one",
)
OUTPUT = flags.DEFINE_string("output", None, "directory of the results, made if missing")
QUIET = flags.DEFINE_bool("quiet", False, "print only the last block and what needs attention")
DRY_RUN = flags.DEFINE_bool("dry_run", False, "check everything, sample nothing, and end")
CONFIG = config_flags.DEFINE_config_file(
    "config", None, "experiment file; default: the config of the run, or configs/default.py"
)
# Flags that set a field of the config.
FIELDS = {
    "benchmarks": ("evaluation.benchmarks", "list", "names, files or modules, separated by commas"),
    "data_dir": ("evaluation.data_dir", "string", "where the files of named benchmarks are"),
    "n": ("evaluation.n", "integer", "responses per problem; default 1"),
    "k": ("evaluation.k", "list", "of pass@k, maj@k, best@k; default: powers of two up to n"),
    "temperature": ("evaluation.temperature", "float", "default 0.6; 0 is greedy"),
    "top_p": ("evaluation.top_p", "float", "default 0.95"),
    "num_problems": ("evaluation.num_problems", "integer", "at most, per benchmark; default: all"),
    "template": ("evaluation.template", "string", "prompt template, docs/data.md"),
    "verifier": ("evaluation.verifier", "string", "grader of all benchmarks, docs/verifiers.md"),
    "scores": ("evaluation.scores", "list", "default: all but greedy"),
    "metrics": ("evaluation.metrics", "bool", "measure the hidden states, too"),
    "reward_model": ("evaluation.reward_model", "string", "sequence classifier for best@k"),
    "max_prompt_tokens": ("rollout.max_prompt_tokens", "integer", "longer prompts count as wrong"),
    **OF_SAMPLING,
}

GIVEN = define_flags(FIELDS)


def main() -> int:
    config = cli.checked_config(CONFIG, prepare, short_flags(FIELDS, values_of(GIVEN)))
    output, steps = pathlib.Path(OUTPUT.value), chosen_steps(STEPS.value)
    from semrl_jax.jobs import evaluate  # here: mistakes and --help need no JAX
    from semrl_jax.runs import policies  # here: mistakes and --help need no JAX

    sources = [
        found
        for path, name in zip(POLICY.value, policies.policy_names(POLICY.value))
        for found in policies.find_policies(path, steps, name=name)
    ]
    names = [source.name for source in sources]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UserError(f"--policy: two policies are named {twice[0]!r}; name each once.")
    compilation.keep_programs()
    return evaluate.evaluate(config, sources, output, only_check=DRY_RUN.value, quiet=QUIET.value)


def prepare(config: ml_collections.ConfigDict) -> None:
    """Sets the fields of the flags and the command's own defaults; UserError for a wrong value."""
    given = flags.FLAGS["config"].override_values
    fields = chosen_fields(FIELDS, values_of(GIVEN), SAMPLING)
    if GIVEN["k"].value is not None:
        fields["evaluation.k"] = tuple(whole_number("k", text) for text in GIVEN["k"].value)
    if "environment.name" in given:
        raise UserError(
            f"give --benchmarks={PREFIX}{given['environment.name']}, not --config.environment.name."
        )
    has_problems = CONFIG_GIVEN or first_run() is not None
    of_run = has_problems and not {"evaluation.benchmarks"} & {*fields, *given}
    config.update_from_flattened_dict(fields)
    if not CONFIG_GIVEN and "model.family" not in given:
        config.model.family = ""  # of the first run; each policy has its own
    if not POLICY.value:
        raise UserError("--policy is needed; see --help.")
    for path in POLICY.value:
        is_hub_id = re.fullmatch(r"[\w.-]+/[\w.-]+", path)
        is_file = path.endswith(".gguf") and os.path.isfile(path)
        if not is_hub_id and not os.path.isdir(path) and not is_file:
            raise UserError(
                f"--policy={path} is no directory and no .gguf file; name a run or a model."
            )
    cli.required(OUTPUT), chosen_steps(STEPS.value)
    if not (of_run or config.evaluation.benchmarks):
        raise UserError("--benchmarks is needed; or the problems of --policy=RUN or --config=FILE.")
    complete(config, {*fields, *given}, of_run)
    check_sections(config)


def chosen_steps(text: str | None) -> list[int] | None:
    """The steps of --steps; [] is all; UserError for anything else."""
    if text is None:
        return None
    return [] if text == "all" else [whole_number("steps", part) for part in text.split(",")]


def whole_number(flag: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", text.strip()):
        raise UserError(f"--{flag} has {text!r}; it must be whole numbers separated by commas.")
    return int(text)


if __name__ == "__main__":
    CONFIG_GIVEN = config_of_policy()
    cli.run(main, __doc__)
