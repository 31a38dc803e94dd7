"""Shows where an engine and the trainer compute different numbers, and names the cause.

    python -m launch.mismatch --policy=runs/quickstart
    python -m launch.mismatch --policy=runs/quickstart --engine=jax --engine=vllm
    python -m launch.mismatch --policy=models/smollm2 --samples=generated --output=mismatch.html

The policy is a run directory, one of its checkpoints, or a Hugging Face directory. --samples is a
file of responses: of a run's rollouts/, or a directory of launch.generate with log-probabilities
and hidden states. With --samples alone, these recorded numbers are compared. Otherwise an engine
samples anew, from the same prompts, or prompts of the run: jax or vllm start one, host:port is a
replica that runs, and keeps the weights of the run if it serves them. Writes a page with a map of
layers and tokens, and a .json file of the same name. docs/mismatch.md has the causes. Exit codes: 0
rounding explains the difference, 1 it does not, 2 wrong setting or file (one line names it).
"""

import pathlib

import ml_collections
from absl import flags
from ml_collections import config_flags

from launch import cli
from launch.fields import config_of_policy, first_run
from semrl_jax.runs.config_checks import check_sections
from semrl_jax.support import compilation
from semrl_jax.support.addresses import split_address
from semrl_jax.support.errors import UserError

POLICY = flags.DEFINE_string("policy", None, "run, checkpoint, Hugging Face directory or hub id")
ENGINE = flags.DEFINE_multi_string(
    "engine", [], "jax, vllm, or host:port of a replica; may be repeated; default: what --samples "
    "recorded, or the engine of the config"
)  # fmt: skip
SAMPLES = flags.DEFINE_string(
    "samples", None, "responses to compare, or whose prompts are sampled from; default: the newest "
    "ones of the run, or random tokens"
)  # fmt: skip
OUTPUT = flags.DEFINE_string(
    "output", None, "page to write, .html; default: mismatch.html in the run, or here"
)
CONFIG = config_flags.DEFINE_config_file(
    "config", None, "experiment file; default: the config of the run, or configs/default.py"
)
NUM_RESPONSES = flags.DEFINE_integer("num_responses", 8, "how many are compared", lower_bound=1)
MAX_TOKENS = flags.DEFINE_integer("max_tokens", 64, "of a sampled response", lower_bound=1)
DTYPE = flags.DEFINE_enum(
    "dtype", None, ("float32", "bfloat16"), "that the engine is meant to compute in; default: of "
    "the config"
)  # fmt: skip
EARLIER = flags.DEFINE_multi_integer(
    "earlier", [], "step of a checkpoint that a stale engine may have; may be repeated; default: "
    "the one before, and 0, the first model", lower_bound=0
)  # fmt: skip
QUIET = flags.DEFINE_bool("quiet", False, "print only what was found")


def main() -> int:
    config = cli.checked_config(CONFIG, prepare)
    run = first_run()
    output = OUTPUT.value or str((run or pathlib.Path()) / "mismatch.html")
    if not output.endswith(".html"):
        raise UserError(f"--output={output} must end in .html.")
    samples = None if SAMPLES.value is None else pathlib.Path(SAMPLES.value)
    if samples is not None and not samples.exists():
        raise UserError(f"--samples={samples} does not exist; name a file of responses.")
    from semrl_jax.jobs import mismatch  # here: mistakes and --help need no JAX
    from semrl_jax.runs import policies

    file = cli.output_file("output", output)
    (source,) = policies.find_policies(POLICY.value, None)
    compilation.keep_programs()
    options = mismatch.Options(
        tuple(dict.fromkeys(ENGINE.value)), samples, NUM_RESPONSES.value, MAX_TOKENS.value,
        DTYPE.value or "", tuple(EARLIER.value),
    )  # fmt: skip
    return mismatch.compare(config, source, run, file, options, quiet=QUIET.value)


def prepare(config: ml_collections.ConfigDict) -> None:
    """Checks the flags; UserError for a wrong value."""
    cli.required(POLICY)
    for name in ENGINE.value:
        if name not in ("jax", "vllm"):
            split_address(name, f"--engine={name}")
    check_sections(config)


if __name__ == "__main__":
    config_of_policy()
    cli.run(main, __doc__)
