"""Trains a policy; resumes if the directory holds the run.

    python -m launch.train --config=configs/quickstart.py --workdir=runs/quickstart

Any field of the config can be overridden: --config.training.num_steps=10. One process a host.
Several processes form one run: see docs/clusters.md, and launch.local for those of one machine.
Exit codes: 0 done, 1 the disk refused the last checkpoint or a row, 2 wrong setting (one line says
which), 75 ended by a signal, checkpoint saved, 76 another process was lost (the same command goes
on from the last checkpoint).
"""

from absl import flags
from ml_collections import config_flags

from launch import cli
from semrl_jax import compilation

CONFIG = config_flags.DEFINE_config_file(
    "config", None, "experiment file, as configs/quickstart.py"
)
WORKDIR = flags.DEFINE_string("workdir", None, "directory of the run, made if missing")


def main() -> int:
    config, workdir = cli.checked_config(CONFIG), cli.required(WORKDIR)
    from semrl_jax.runs import train  # loads JAX, for which no mistake and no --help waits

    compilation.keep_programs()
    return train(config, workdir)


if __name__ == "__main__":
    cli.run(main, __doc__)
