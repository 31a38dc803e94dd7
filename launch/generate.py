"""Generates responses to the prompts of a file, for studies and distillation.

    python -m launch.generate --policy=runs/quickstart --prompts=questions.jsonl --n=4 \\
        --output=generated --logprobs --hidden_states=-1

The policy is a run directory, one of its checkpoints, or a Hugging Face directory. Writes
responses.parquet into --output; with --hidden_states, safetensors shards; with --conversations,
conversations.jsonl for launch.sft. The same command continues an interrupted generation. Any field
of the config can be set, --config.data.question_fields=problem. Without --config, the command takes
the config of the run, or the default config. docs/generation.md has the columns. Exit codes: 0
done, 2 wrong setting (one line names it), 75 ended by a signal.
"""

import pathlib

import ml_collections
from absl import flags
from ml_collections import config_flags

from launch import cli
from launch.fields import (
    OF_SAMPLING,
    UNMODIFIED,
    chosen_fields,
    chosen_states,
    config_of_policy,
    define_flags,
    short_flags,
    template_of_run,
    values_of,
)
from semrl_jax import data
from semrl_jax.runs.config_checks import check_sections
from semrl_jax.support import compilation
from semrl_jax.support.errors import UserError, prefixed

POLICY = flags.DEFINE_string("policy", None, "run, checkpoint, Hugging Face directory or hub id")
OUTPUT = flags.DEFINE_string("output", None, "directory of the results, made if missing")
QUIET = flags.DEFINE_bool("quiet", False, "print only the last block and what needs attention")
DRY_RUN = flags.DEFINE_bool("dry_run", False, "check everything, sample nothing, and end")
CONFIG = config_flags.DEFINE_config_file(
    "config", None, "experiment file; default: the config of the run, or configs/default.py"
)
NUM_PROMPTS = flags.DEFINE_integer("num_prompts", 0, "rows to read, at most; 0: all", lower_bound=0)
LOGPROBS = flags.DEFINE_bool("logprobs", False, "write log-probabilities per token")
HIDDEN_STATES = flags.DEFINE_list(
    "hidden_states", [], "layers to write, -1,12; -1: the final one; i: the input of layer i"
)
STATES = flags.DEFINE_list(
    "states", None, "default decode; tokens whose states are written: decode, of the response; "
    "prefill, of the prompt"
)  # fmt: skip
CONVERSATIONS = flags.DEFINE_enum(
    "conversations",
    "none",
    ("none", "all", "correct"),
    "responses to write as conversations for launch.sft; correct needs --verifier",
)
# Flags that set a field of the config.
FIELDS = {
    "prompts": ("data.files", "list", ".jsonl or .parquet files, separated by commas"),
    "n": ("evaluation.n", "integer", "responses per prompt; default 1"),
    "temperature": ("evaluation.temperature", "float", "default 1; 0 is greedy"),
    "top_p": ("evaluation.top_p", "float", "default 1: all tokens"),
    "template": ("data.template", "string", "prompt template, docs/data.md"),
    "verifier": ("evaluation.verifier", "string", "grades the responses, docs/verifiers.md"),
    "metrics": ("evaluation.metrics", "bool", "measure the hidden states"),
    "states_dtype": ("hidden_states.dtype", "string", "bfloat16 or float32"),
    "max_prompt_tokens": ("rollout.max_prompt_tokens", "integer", "longer prompts are left out"),
    **OF_SAMPLING,
}
GIVEN = define_flags(FIELDS)
DEFAULTS = {"evaluation.n": 1, **UNMODIFIED, "evaluation.verifier": "", "evaluation.metrics": False}
# Settings of training that would have no meaning here.
FIXED = {
    "data.task": "files",
    "environment.name": "",
    "data.prompts_per_step": 1,
    "rollout.group_size": 1,
    "rollout.given_responses": 0,
    "rollout.hint_rounds": 0,
    "evaluation.k": (1,),
    "hidden_states.source": "none",
}


def main() -> int:
    config = cli.checked_config(CONFIG, prepare, short_flags(FIELDS, values_of(GIVEN)))
    policy, output = POLICY.value, pathlib.Path(OUTPUT.value)
    dtype = config.hidden_states.dtype
    states = chosen_states(HIDDEN_STATES.value, STATES.value, dtype)
    if CONVERSATIONS.value == "correct" and not config.evaluation.verifier:
        raise UserError("--conversations=correct needs --verifier; or give --conversations=all.")
    from semrl_jax.jobs import generate  # here: mistakes and --help need no JAX
    from semrl_jax.runs import policies  # here: mistakes and --help need no JAX

    (source,) = policies.find_policies(policy, None)
    compilation.keep_programs()
    contents = generate.Contents(NUM_PROMPTS.value, LOGPROBS.value, states, CONVERSATIONS.value)
    return generate.generate(
        config, source, output, contents, only_check=DRY_RUN.value, quiet=QUIET.value
    )


def prepare(config: ml_collections.ConfigDict) -> None:
    """Sets the fields of the flags and the command's own defaults; UserError for a wrong value."""
    given = flags.FLAGS["config"].override_values
    fields = chosen_fields(FIELDS, values_of(GIVEN), DEFAULTS, FIXED)
    if not {"data.template"} & {*fields, *given}:
        config.data.template = template_of_run(config, flags.FLAGS["config"].config_filename)
    config.update_from_flattened_dict(fields)
    cli.required(POLICY), cli.required(OUTPUT)
    if not {"data.files"} & {*fields, *given}:
        raise UserError("--prompts is needed: a .jsonl or .parquet file; see --help.")
    check_sections(config)
    for file in config.data.files:
        with prefixed("--prompts"):
            data.check_file(file)


if __name__ == "__main__":
    config_of_policy()
    cli.run(main, __doc__)
