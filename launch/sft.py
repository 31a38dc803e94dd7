"""Runs only the supervised warm start of a config.

    python -m launch.sft --config=configs/quickstart.py --workdir=runs/sft

Writes WORKDIR/warm_start, a Hugging Face directory that launch.train accepts as
--config.model.path. A later launch.train with the same --workdir continues from it. Exit codes:
0 done, 2 wrong setting, 75 ended by a signal before it was done.
"""

from absl import flags
from ml_collections import config_flags

from launch import cli
from semrl_jax import compilation
from semrl_jax.errors import UserError

CONFIG = config_flags.DEFINE_config_file("config", None, "experiment file with a warm_start")
WORKDIR = flags.DEFINE_string("workdir", None, "directory of the run, made if missing")


def main() -> int:
    config, workdir = cli.checked_config(CONFIG), cli.required(WORKDIR)
    if config.model.path or not config.warm_start.num_steps:
        raise UserError(
            "the warm start trains a random model: model.path must be empty and "
            "warm_start.num_steps above 0."
        )
    from semrl_jax.runs import warm_start  # here: mistakes and --help need no JAX

    compilation.keep_programs()
    return warm_start(config, workdir)


if __name__ == "__main__":
    cli.run(main, __doc__)
