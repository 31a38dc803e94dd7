"""Runs steps of a run again, and names the first number that differs from the run's.

    python -m launch.replay runs/first
    python -m launch.replay runs/first --from=40 --to=60 --set=shaping.target=none
    python -m launch.replay runs/first runs/second --bisect

The steps begin at a checkpoint, and their responses are sampled again, or with --recorded taken
from the records of the run (logging.replay_every). --set, --code and --weights change one thing
from --from on. --bisect finds the first difference between two runs, between the run and its
settings of --set, or between two revisions, --good and --bad. A page shows what was found.
docs/replay.md explains all. Exit codes: 0 no difference, 1 a difference (one line names it), 2
wrong run or flag.
"""

import ast
import pathlib

from absl import flags

from launch import cli
from semrl_jax.support.errors import UserError

FROM = flags.DEFINE_integer(
    "from", None, "first step; default: the oldest checkpoint", lower_bound=0
)
TO = flags.DEFINE_integer("to", None, "last step; default: the last one of the run", lower_bound=0)
RECORDED = flags.DEFINE_bool("recorded", False, "take responses and verdicts from the records")
SET = flags.DEFINE_multi_string(
    "set", [], "section.field=value, from the first step on; repeat it for several"
)
CODE = flags.DEFINE_string("code", None, "another checkout of semrl_jax that runs the steps")
WEIGHTS = flags.DEFINE_string(
    "weights", None, "run, checkpoint, model directory or .safetensors file to begin with"
)
BISECT = flags.DEFINE_bool("bisect", False, "compare all numbers of two sides, see above")
GOOD = flags.DEFINE_string("good", None, "with --bisect: a revision whose steps are right")
BAD = flags.DEFINE_string("bad", None, "with --bisect: a later revision whose steps differ")
OUTPUT = flags.DEFINE_string("output", None, "HTML file to write; default: replay.html in the run")


def main(names: list[str]) -> int:
    if not names or len(names) > 1 + BISECT.value:
        raise UserError("name the directory of a run, or with --bisect of two; see --help.")
    runs = [pathlib.Path(name) for name in names]
    changes = dict(map(_change, SET.value))
    if (GOOD.value is None) != (BAD.value is None) or (GOOD.value and not BISECT.value):
        raise UserError("--good and --bad are two revisions, for --bisect; give all three.")
    is_changed = bool(changes or WEIGHTS.value)
    sides = [len(runs) > 1, is_changed, GOOD.value is not None, CODE.value is not None]
    if BISECT.value and sum(sides) != 1:
        raise UserError(
            "--bisect needs two sides: another run, or --set and --weights, or --code, or --good "
            "and --bad."
        )
    if len(runs) > 1 and (WEIGHTS.value or RECORDED.value):
        raise UserError("two runs are compared as they are; leave out --weights and --recorded.")
    if not runs[0].is_dir():
        raise UserError(f"{runs[0]} is no directory; name that of a run.")
    output = cli.output_file("output", OUTPUT.value or str(runs[0] / "replay.html"))
    from semrl_jax.jobs import replay_report  # here: mistakes and --help need no JAX
    from semrl_jax.support import compilation

    compilation.keep_programs()
    return replay_report.replay(
        runs,
        FROM.value,
        TO.value,
        output,
        changes=changes,
        recorded=RECORDED.value,
        code=None if CODE.value is None else pathlib.Path(CODE.value),
        weights=WEIGHTS.value or "",
        bisect=BISECT.value,
        revisions=(GOOD.value, BAD.value) if GOOD.value else None,
    )


def _change(text: str) -> tuple[str, object]:
    """The field and the value of section.field=value; a value that is no literal is a text."""
    field, equals, value = text.partition("=")
    if not field or not equals:
        raise UserError(f"--set={text} must be section.field=value.")
    try:
        return field, ast.literal_eval(value.capitalize() if value in ("true", "false") else value)
    except (SyntaxError, ValueError):
        return field, value


if __name__ == "__main__":
    cli.run(main, __doc__, names=True)
