"""Studies hidden states and runs, outside training.

    python -m launch.analyze metrics --input=states.npz --output=study
    python -m launch.analyze study --run=runs/quickstart --output=study
    python -m launch.analyze curve --run=runs/quickstart --output=study

metrics: the metrics of each response in a file with `hidden_states` [B, T, D] or [T, D] and perhaps
the bool `response_mask`. Writes metrics.csv, effective_rank.csv and effective_rank.png.

study: the measures of the reference implementation, 10 per response and 28 per prompt, and their
correlations, of a run's saved responses (--run) or of states in a file or in a directory of
launch.generate (--input). Writes tables as Parquet and CSV, and pictures. See docs/study.md.

curve: a sigmoid through the evaluations of a run over its compute, with the ceiling that the run is
heading for. Writes curve.csv and curve.png.

Files in --output with these names are replaced. Exit codes: 0 done, 2 wrong flag or file (one line
names it).
"""

from __future__ import annotations

import pathlib
from typing import Any

from absl import flags

from launch import cli
from semrl_jax.metrics import WINDOWS
from semrl_jax.support import compilation
from semrl_jax.support.errors import UserError

DEFAULT_STRIDE = 40

INPUT = flags.DEFINE_string(
    "input",
    None,
    "metrics, study: .npz or .safetensors file; study: also a directory of launch.generate",
)
RUN = flags.DEFINE_string(
    "run", None, "study, curve: directory of a run, for study one with rollouts/"
)
STEP = flags.DEFINE_integer(
    "step", None, "study: of --run; default: the last with responses and weights", lower_bound=0
)
POLICY = flags.DEFINE_string(
    "policy",
    None,
    "study: what sampled the states of --input, for entropy and confidence: a run, a checkpoint, a "
    "model directory or a hub id",
)
MEASURE = flags.DEFINE_multi_string(
    "measure",
    None,
    "study: a measure, or a metric of metrics.names; repeat the flag for several. Default: all "
    "measures",
)
STRIDE = flags.DEFINE_integer(
    "stride",
    None,
    f"tokens between two prefixes; default: the run's, or {DEFAULT_STRIDE}",
    lower_bound=1,
)
WINDOW = flags.DEFINE_enum("window", WINDOWS[0], WINDOWS, "which prefixes")
METHOD = flags.DEFINE_enum(
    "method", "gram", ("gram", "svd"), "decomposition; svd: 5 digits, slower"
)
KEY = flags.DEFINE_string(
    "key", None, "curve: key of the log; default: the accuracy that launch.report compares"
)
COMPUTE = flags.DEFINE_enum(
    "compute", "hours", ("hours", "flops", "steps"), "curve: what the horizontal axis counts"
)
SKIP = flags.DEFINE_float(
    "skip", 0.0, "curve: compute at the beginning that is not fitted", lower_bound=0.0
)
FRACTION = flags.DEFINE_float(
    "fraction",
    1.0,
    "curve: share of the evaluations that is fitted; the error at the others is shown",
    lower_bound=0.0,
    upper_bound=1.0,
)
OUTPUT = flags.DEFINE_string("output", None, "directory for CSV and PNG files, made if missing")


def metrics() -> int:
    file, stride, window = cli.required(INPUT), STRIDE.value or DEFAULT_STRIDE, WINDOW.value
    from rich.console import Console

    from semrl_jax import analysis  # not at the top: --help works without JAX

    states, mask = analysis.read_states(file)
    output = output_directory()
    compilation.keep_programs()
    options: dict[str, Any] = {"stride": stride, "window": window, "method": METHOD.value}
    measured = analysis.measure_responses(states, mask, **options)
    Console().print(analysis.response_table(measured))
    if output is not None:
        curves = [analysis.rank_curve(*response, **options) for response in zip(states, mask)]
        analysis.write_columns(output / "metrics.csv", measured)
        analysis.write_rank_curves(output / "effective_rank.csv", curves)
        figure = analysis.draw_rank_curves(curves, window=window)
        figure.savefig(output / "effective_rank.png", dpi=110)
        print(f"done: {output} has metrics.csv, effective_rank.csv and effective_rank.png")
    return 0


def study() -> int:
    if (RUN.value is None) == (INPUT.value is None):
        raise UserError("study needs one of --run and --input; see --help.")
    for flag, other in ((STEP, RUN), (POLICY, INPUT)):
        if flag.value is not None and other.value is None:
            raise UserError(f"--{flag.name} belongs to --{other.name}.")
    if OUTPUT.value is not None and (pathlib.Path(OUTPUT.value) / "generation.json").exists():
        raise UserError(
            f"--output={OUTPUT.value}: launch.generate wrote there; name a new directory."
        )
    stride = STRIDE.value
    from semrl_jax.analysis import study as studies  # not at the top: --help works without JAX

    chosen = MEASURE.value or ()
    names = studies.check_measures(chosen)
    from rich.console import Console

    from semrl_jax.analysis import study_sources
    from semrl_jax.analysis.measures import measure
    from semrl_jax.analysis.study_files import write_study

    compilation.keep_programs()
    if RUN.value is not None:
        responses, source, own_stride = study_sources.of_run(RUN.value, STEP.value)
        stride = stride or own_stride
    elif pathlib.Path(INPUT.value).is_dir():
        responses, source = study_sources.of_generated(pathlib.Path(INPUT.value), POLICY.value)
    else:
        responses, source = study_sources.of_file(pathlib.Path(INPUT.value), POLICY.value)
    stride = stride or study_sources.stride_of(POLICY.value) or DEFAULT_STRIDE
    output = output_directory()
    measured = measure(
        responses,
        stride=stride,
        window=WINDOW.value,
        method=METHOD.value,
        names=names,
        wanted=lambda name: not chosen or name in (*chosen, "correct", "length"),
    )
    found = studies.correlations(measured)
    Console().print(studies.summary(measured, found, f"{source}, stride {stride}"))
    if output is not None:
        written = write_study(output, measured, found)
        print(f"done: {output} has {', '.join(written)}")
    return 0


def curve() -> int:
    run = pathlib.Path(cli.required(RUN))
    import numpy as np

    from semrl_jax.analysis import curve as curves  # not at the top: --help works without JAX
    from semrl_jax.pages.report.over_seeds import compared_key
    from semrl_jax.pages.report.reading import read_runs

    log, *others = read_runs([run])
    if others:
        raise UserError(f"--run={run} has results of {1 + len(others)} runs; name a run.")
    key = KEY.value or compared_key([log.rows])
    if not key:
        raise UserError(f"--run={run} has no accuracy in its log; name a --key.")
    found = curves.points(log.rows, key, COMPUTE.value)
    begins = 1 + int(np.sum(found.compute[1:] < SKIP.value))
    ends = begins + round(FRACTION.value * (len(found.steps) - begins))
    chosen = slice(begins, ends)
    try:
        fitted = curves.fit(found.compute[chosen], found.values[chosen], float(found.values[0]))
    except ValueError as error:
        raise UserError(f"--run={run}: {error} Use a longer run, --skip or --fraction.") from None
    errors = np.abs(found.values - fitted.at(found.compute))
    print(f"{key} over {COMPUTE.value}: {ends - begins} evaluations after the first were fitted")
    print(f"first {fitted.first:.4g}, ceiling {fitted.ceiling:.4g}")
    print(f"efficiency {fitted.efficiency:.4g}, half of the gain at {fitted.midpoint:.4g}")
    print(f"mean error where fitted {errors[chosen].mean():.2g}", end="")
    later = errors[ends:]
    print(f", at the {len(later)} later evaluations {later.mean():.2g}" if len(later) else "")
    if fitted.midpoint > found.compute[ends - 1]:
        print("half of the gain lies beyond what was fitted, so the ceiling is a guess")
    output = output_directory()
    if output is not None:
        written = curves.write_curve(output, found, fitted, chosen, key, COMPUTE.value)
        print(f"done: {output} has {', '.join(written)}")
    return 0


def output_directory() -> pathlib.Path | None:
    """--output, made if missing; None if it was not given."""
    if OUTPUT.value is None:
        return None
    output = pathlib.Path(OUTPUT.value)
    try:
        output.mkdir(parents=True, exist_ok=True)
        cli.check_writable(output)
    except OSError as error:
        raise UserError(f"--output={output} cannot be made or written: {error.strerror}.") from None
    return output


if __name__ == "__main__":
    cli.run({"metrics": metrics, "study": study, "curve": curve}, __doc__)
