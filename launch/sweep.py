"""Trains one config with several settings and seeds, and compares them.

    python -m launch.sweep --config=configs/quickstart.py --output=runs/sweep \\
        --vary=shaping.target=none,advantage --vary=training.learning_rate=3e-5,7e-5 --seeds=0,1,2

Every --vary multiplies the variants; --random=N draws N of the combinations; --variant adds one,
"NAME: FIELD=VALUE FIELD=VALUE". All other flags --config.FIELD=VALUE hold for all runs. Every run
is a launch.train in OUTPUT/VARIANT/seedN. The same command goes on after a kill, and may have more
seeds or variants. At the end, and with --summarize from what is there: a table, sweep.csv,
sweep.png and report.html in --output. Exit codes: 0 done, 1 a run has failed, 2 wrong setting (one
line names it), 75 ended by a signal.
"""

import pathlib
import re

from absl import flags
from ml_collections import config_flags

from launch import cli
from semrl_jax.runs.config_checks import check_sections
from semrl_jax.support.errors import UserError

CONFIG = config_flags.DEFINE_config_file("config", None, "experiment file of all runs")
OUTPUT = flags.DEFINE_string("output", None, "directory of the runs, made if missing")
VARY = flags.DEFINE_multi_string("vary", [], "FIELD=VALUE,VALUE; repeat it for a grid")
VARIANT = flags.DEFINE_multi_string("variant", [], "NAME: FIELD=VALUE FIELD=VALUE")
RANDOM = flags.DEFINE_integer("random", 0, "combinations drawn of --vary; 0: all", lower_bound=0)
SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "config.seed of each run of a variant")
PARALLEL = flags.DEFINE_integer("parallel", 1, "runs at a time", lower_bound=1)
REPLICAS = flags.DEFINE_multi_string(
    "replicas", [], "rollout.addresses of one run at a time; repeat it, as many run at a time"
)
SUMMARIZE = flags.DEFINE_bool("summarize", False, "only sum up the runs that are there")
QUIET = flags.DEFINE_bool("quiet", False, "print only the table and what needs attention")


def main() -> int:
    config = cli.checked_config(CONFIG, check_sections)
    output = pathlib.Path(cli.required(OUTPUT))
    seeds = [seed.strip() for seed in SEEDS.value]
    if not seeds or not all(re.fullmatch(r"[0-9]{1,9}", seed) for seed in seeds):
        raise UserError(f"--seeds={','.join(seeds)} must be whole numbers, such as 0,1,2.")
    if len(set(map(int, seeds))) < len(seeds):
        raise UserError(f"--seeds={','.join(seeds)} has one twice.")
    if REPLICAS.value and PARALLEL.value > 1:
        raise UserError("--parallel and --replicas both say how many run at a time; give one.")
    from semrl_jax.jobs import sweep  # here: mistakes and --help need no JAX
    from semrl_jax.support.console import Reporter

    variants = sweep.variants_of(VARY.value, VARIANT.value, RANDOM.value)
    length = config.training.num_steps, config.training.num_epochs
    planned = sweep.plan(variants, list(map(int, seeds)), output, *length)
    slots = [[f"--config.rollout.addresses={one}"] for one in REPLICAS.value]
    reporter = Reporter(quiet=QUIET.value)
    code = 0
    if not SUMMARIZE.value:
        one = sweep.Sweep(cli.config_arguments(), slots or [[]] * PARALLEL.value, reporter)
        one.check(planned)
        code = one.run(planned)
    if code != sweep.EXIT_PREEMPTED:
        sweep.summarize(planned, output, reporter)
    return code


if __name__ == "__main__":
    cli.run(main, __doc__)
