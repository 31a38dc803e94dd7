"""Talks to a policy in the terminal; each response has its metrics.

    python -m launch.chat --policy=runs/quickstart
    echo "380+882" | python -m launch.chat --policy=runs/quickstart --temperature=0
    python -m launch.chat --policy=runs/calculator --environment=calculator:digits=2

The policy is a run directory, one of its checkpoints, or a Hugging Face directory. A line is a
question; /new forgets the conversation, /quit ends. Standard input may be a file or a pipe with a
question per line. With --environment, the policy plays held-out tasks turn by turn; a line is the
number of the next task, or empty for the one after. Any field of the config can be set,
--config.rollout.engine=vllm. Without --config, the command takes the config of the run, or the
default config. Exit codes: 0 done, 2 wrong setting (one line names it), or a question of a file or
pipe had no response.
"""

import ml_collections
from absl import flags
from ml_collections import config_flags

from launch import cli
from launch.fields import (
    OF_SAMPLING,
    UNMODIFIED,
    chosen_fields,
    config_of_policy,
    define_flags,
    short_flags,
    values_of,
)
from semrl_jax.runs.config_checks import check_sections
from semrl_jax.support import compilation
from semrl_jax.support.errors import UserError

POLICY = flags.DEFINE_string("policy", None, "run, checkpoint, Hugging Face directory or hub id")
CONFIG = config_flags.DEFINE_config_file(
    "config", None, "experiment file; default: the config of the run, or configs/default.py"
)
TEMPLATE = flags.DEFINE_string(
    "template", "", "prompt template, docs/data.md; default: of the run, or the tokenizer's chat"
)
MULTI_TURN = flags.DEFINE_bool(
    "multi_turn", None, "prompts have the conversation so far; default: with the template chat"
)
# Flags that set a field of the config.
FIELDS = {
    "temperature": ("evaluation.temperature", "float", "default 1; 0 is greedy"),
    "top_p": ("evaluation.top_p", "float", "default 1: all tokens"),
    "environment": ("environment.name", "string", "plays its episodes, docs/environments.md"),
    "system_prompt": ("data.system_prompt", "string", "for the template chat"),
    "metrics": ("evaluation.metrics", "bool", "measure the hidden states; default true"),
    "max_prompt_tokens": ("rollout.max_prompt_tokens", "integer", "limit of a prompt"),
    **OF_SAMPLING,
}
GIVEN = define_flags(FIELDS)
DEFAULTS = {**UNMODIFIED, "evaluation.metrics": True, "environment.name": ""}
OF_QUESTIONS = ("template", "multi_turn", "system_prompt")  # flags without a meaning for episodes
# Settings of training that would have no meaning here.
FIXED = {
    "data.prompts_per_step": 1,
    "rollout.group_size": 1,
    "evaluation.n": 1,
    "evaluation.k": (1,),
    "hidden_states.source": "none",
}


def main() -> int:
    config = cli.checked_config(CONFIG, prepare, short_flags(FIELDS, values_of(GIVEN)))
    from semrl_jax.jobs import chat, play  # here: mistakes and --help need no JAX
    from semrl_jax.runs import policies  # here: mistakes and --help need no JAX

    (source,) = policies.find_policies(POLICY.value, None)
    compilation.keep_programs()
    if config.environment.name:
        return play.play(config, source)
    return chat.chat(config, source, chat.Options(TEMPLATE.value, MULTI_TURN.value))


def prepare(config: ml_collections.ConfigDict) -> None:
    """Sets the fields of the flags and the command's own defaults; UserError for a wrong value."""
    fields = chosen_fields(FIELDS, values_of(GIVEN), DEFAULTS, FIXED)
    config.update_from_flattened_dict(fields)
    cli.required(POLICY)
    given = [name for name in OF_QUESTIONS if flags.FLAGS[name].present]
    if config.environment.name and given:
        raise UserError(f"--{given[0]} has no meaning with --environment; leave one of them out.")
    check_sections(config)


if __name__ == "__main__":
    config_of_policy()
    cli.run(main, __doc__)
