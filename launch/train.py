"""Trains a policy; resumes the run if the directory holds one.

    python -m launch.train --config=configs/quickstart.py --workdir=runs/quickstart

Any field of the config can be overridden: --config.training.num_steps=10. Start one process per
host. Several processes form one run: see docs/clusters.md, and launch.local for several processes
on one machine. Exit codes: 0 done, 1 the last checkpoint or a row could not be written to disk, 2
wrong setting (one line names it), 75 ended by a signal after saving a checkpoint, 76 another
process was lost (the same command continues from the last checkpoint).
"""

from absl import flags
from ml_collections import config_flags

from launch import cli
from semrl_jax.runs.workdir import check_early
from semrl_jax.support import compilation, cores
from semrl_jax.support.errors import UserError

CONFIG = config_flags.DEFINE_config_file(
    "config", None, "experiment file, such as configs/quickstart.py"
)
WORKDIR = flags.DEFINE_string("workdir", None, "directory of the run, made if missing")
QUIET = flags.DEFINE_bool("quiet", False, "print only the last block and what needs attention")
DRY_RUN = flags.DEFINE_bool(
    "dry_run", False, "check settings, files, model, replicas, memory and disk, and end"
)


def main() -> int:
    config, workdir = cli.checked_config(CONFIG), cli.required(WORKDIR)
    for field in flags.FLAGS["config"].override_values:
        if field.startswith("sft."):
            raise UserError(f"--config.{field} has no meaning in launch.train, only in launch.sft.")
    check_early(workdir, config)
    rollout = config.rollout
    cores.leave_cores(
        rollout.jax_processes, rollout.jax_process_cores, in_turn=not rollout.max_staleness
    )
    if DRY_RUN.value:
        from semrl_jax.runs.dry_run import dry_run

        return dry_run(config, workdir)
    from semrl_jax.runs import train  # here: mistakes and --help need no JAX

    compilation.keep_programs()
    return train(config, workdir, quiet=QUIET.value)


if __name__ == "__main__":
    cli.run(main, __doc__)
