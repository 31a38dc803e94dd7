"""Shows responses whose text is shaded by entropy, log-probability, ER, ERV or ERA.

    python -m launch.view --policy=runs/quickstart --output=view.html
    python -m launch.view --policy=runs/a --policy=runs/b --steps=40 --output=view.html
    python -m launch.view --policy=runs/a --samples=generated/responses.parquet --output=view.html
    python -m launch.view --policy=runs/a --steps=0,40 --verdicts=wrong,correct --seed=1 \\
        --output=view.html

Without --samples, each policy has the responses of the evaluation that its run recorded at its
step (logging.rollouts_every_steps). With --samples, all policies read the same responses. The
values are computed again with the weights of each policy. docs/report.md explains the page. Exit
codes: 0 done, 2 wrong flag or file (one line names it).
"""

import pathlib

from absl import flags

from launch import cli
from semrl_jax.support.errors import UserError

POLICY = flags.DEFINE_multi_string(
    "policy", [], "run, checkpoint, Hugging Face directory or hub id; repeat it for several"
)
STEPS = flags.DEFINE_list(
    "steps", [], "checkpoints of runs, such as 0,20,40; default: all, at most 8"
)
SAMPLES = flags.DEFINE_string("samples", None, ".parquet file with token ids of responses")
PROBLEM = flags.DEFINE_multi_string(
    "problem", [], "name of a problem to show, such as 'arithmetic 3'; repeat it for several"
)
SHOW = flags.DEFINE_enum(
    "show", "all", ("all", "correct", "incorrect", "changed"),
    "problems by the verdict of the last policy; changed: the policies' verdicts differ",
)  # fmt: skip
VERDICTS = flags.DEFINE_list(
    "verdicts", [], "problems by the verdict of each policy, in their order: correct, wrong or any"
)
SEED = flags.DEFINE_integer(
    "seed", None, "of a random choice of --limit problems; default: the first ones", lower_bound=0
)
LIMIT = flags.DEFINE_integer("limit", 20, "number of problems", lower_bound=1, upper_bound=500)
STRIDE = flags.DEFINE_integer(
    "stride", 0, "tokens of a window; 0: metrics.stride of the run", lower_bound=0
)
OUTPUT = flags.DEFINE_string("output", None, "HTML file to write")


def main() -> int:
    output = cli.output_file("output", cli.required(OUTPUT))
    if not POLICY.value:
        raise UserError("--policy is needed: a run or a model; see --help.")
    if bad := [step for step in STEPS.value if not step.strip().isdecimal()]:
        raise UserError(f"--steps has {bad[0]!r}; it must be whole numbers separated by commas.")
    samples = None if SAMPLES.value is None else pathlib.Path(SAMPLES.value)
    from semrl_jax.jobs import view  # here: mistakes and --help are quick
    from semrl_jax.support import compilation

    steps = [int(step) for step in STEPS.value] or None
    columns = view.find_columns(POLICY.value, steps, samples)
    if bad := [verdict for verdict in VERDICTS.value if verdict not in view.VERDICTS]:
        raise UserError(f"--verdicts has {bad[0]!r}; each must be correct, wrong or any.")
    names = view.chosen_problems(
        columns, PROBLEM.value, SHOW.value, LIMIT.value, verdicts=VERDICTS.value, seed=SEED.value
    )
    compilation.keep_programs()
    view.write_view(output, columns, names, stride=STRIDE.value, progress=print)
    print(f"done: {output} shows {len(names)} problems; open it in a browser")
    return 0


if __name__ == "__main__":
    cli.run(main, __doc__)
