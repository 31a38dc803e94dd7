"""Trains a model on conversations of your own; or runs only the warm start of a config.

    python -m launch.sft --config=configs/default.py --workdir=runs/sft \\
        --config.model.path=MODEL --config.sft.files=chats.jsonl

With sft.files: supervised fine-tuning of model.path with the loss on assistant tokens, see
docs/data.md. Resumes the run if the workdir holds one. Writes WORKDIR/model.

Without: the supervised warm start of a random model (warm_start.num_steps). Writes
WORKDIR/warm_start; a later launch.train with the same --workdir continues from it.

Both are Hugging Face directories that launch.train accepts as --config.model.path. Exit codes: 0
done, 1 the last checkpoint could not be written to disk, 2 wrong setting, 75 ended by a signal
(a fine-tuning saves a checkpoint first), 76 another process was lost.
"""

import functools

from absl import flags
from ml_collections import config_flags

from launch import cli
from semrl_jax.runs.workdir import check_early
from semrl_jax.support import compilation
from semrl_jax.support.errors import UserError

CONFIG = config_flags.DEFINE_config_file("config", None, "experiment file, such as configs/sft.py")
WORKDIR = flags.DEFINE_string("workdir", None, "directory of the run, made if missing")
QUIET = flags.DEFINE_bool("quiet", False, "print only the last block and what needs attention")
DRY_RUN = flags.DEFINE_bool("dry_run", False, "check settings, files, model and disk, and end")


def main() -> int:
    config, workdir = cli.checked_config(CONFIG), cli.required(WORKDIR)
    check_early(workdir, config)
    if config.sft.files:
        if not config.model.path:
            raise UserError(
                "sft.files needs model.path; python -m launch.random_model makes a small model."
            )
        if DRY_RUN.value:
            from semrl_jax.runs.dry_run import dry_run_sft

            return dry_run_sft(config, workdir)
        from semrl_jax.runs import fine_tune  # here: mistakes and --help need no JAX

        work = functools.partial(fine_tune, file=flags.FLAGS["config"].config_filename)
    elif config.model.path or not config.warm_start.num_steps:
        raise UserError(
            "nothing to train: name sft.files; or, without model.path, raise warm_start.num_steps."
        )
    elif DRY_RUN.value:
        from semrl_jax.runs.dry_run import dry_run

        return dry_run(config, workdir)
    else:
        from semrl_jax.runs import warm_start as work

    compilation.keep_programs()
    return work(config, workdir, quiet=QUIET.value)


if __name__ == "__main__":
    cli.run(main, __doc__)
