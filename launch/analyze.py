"""Studies hidden states and runs, outside training.

    python -m launch.analyze metrics --input=states.npz --output=study
    python -m launch.analyze correlation --run=runs/quickstart --output=study
    python -m launch.analyze growth --output=study

metrics: the metrics of each response in a file with `hidden_states` [B, T, D] or [T, D] and perhaps
the bool `response_mask`. Writes metrics.csv, effective_rank.csv and effective_rank.png.

correlation: how strongly ERV and ERA are correlated with ER, on a run's saved responses, under each
--window and --stride. Writes correlation.csv and correlation.png.

growth: the same study on long responses. Their rank grows by a known law, or a small random model
samples them. Writes growth.csv and growth.png.

Files in --output with these names are replaced. Exit codes: 0 done, 2 wrong flag or file (one line
names it).
"""

from __future__ import annotations

import pathlib
from typing import Any

from absl import flags

from launch import cli
from semrl_jax import compilation
from semrl_jax.errors import UserError
from semrl_jax.metrics import WINDOWS

STRIDE = 40
GROWTH_STRIDE = 128

INPUT = flags.DEFINE_string("input", None, "metrics: .npz or .safetensors file")
RUN = flags.DEFINE_string("run", None, "correlation: directory of a run with rollouts/")
STRIDES = flags.DEFINE_multi_integer(
    "stride",
    None,
    f"tokens between two prefixes. Default of metrics: {STRIDE}; of correlation: half, once and "
    f"twice the run's stride; of growth: {GROWTH_STRIDE}. For correlation and growth, repeat the "
    "flag for several values",
    lower_bound=1,
)
WINDOW = flags.DEFINE_multi_enum(
    "window",
    None,
    WINDOWS,
    "which prefixes. Default of metrics: exact; of the others: all. For correlation and growth, "
    "repeat the flag for several values",
)
METHOD = flags.DEFINE_enum(
    "method", "gram", ("gram", "svd"), "metrics, correlation: decomposition; svd: 5 digits, slower"
)
RESPONSES = flags.DEFINE_integer("responses", 32, "growth: number per source", lower_bound=3)
TOKENS = flags.DEFINE_integer("tokens", 2048, "growth: of the longest response", lower_bound=64)
SEED = flags.DEFINE_integer("seed", 0, "growth: random seed", lower_bound=0)
OUTPUT = flags.DEFINE_string("output", None, "directory for CSV and PNG files, made if missing")


def metrics() -> int:
    file, stride, window = cli.required(INPUT), one(STRIDES, STRIDE), one(WINDOW, WINDOWS[0])
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
        analysis.write_responses(output / "metrics.csv", measured)
        analysis.write_rank_curves(output / "effective_rank.csv", curves)
        figure = analysis.draw_rank_curves(curves, window=window)
        figure.savefig(output / "effective_rank.png", dpi=110)
        print(f"done: {output} has metrics.csv, effective_rank.csv and effective_rank.png")
    return 0


def correlation() -> int:
    run = cli.required(RUN)
    from semrl_jax import analysis
    from semrl_jax.analysis.runs import run_states

    steps, stride = run_states(run)
    output = output_directory()
    compilation.keep_programs()
    options: dict[str, Any] = {
        "strides": STRIDES.value or sorted({max(1, stride // 2), stride, 2 * stride}),
        "windows": WINDOW.value or WINDOWS,
        "method": METHOD.value,
    }
    found = []
    for step, responses in steps.items():
        found += analysis.correlate(responses, source=f"step {step}", **options)
    report(found, output, "correlation")
    return 0


def growth() -> int:
    from semrl_jax.analysis.growth import growth_study

    output = output_directory()
    compilation.keep_programs()
    found = growth_study(
        num_responses=RESPONSES.value,
        max_tokens=TOKENS.value,
        strides=tuple(STRIDES.value or [GROWTH_STRIDE]),
        windows=tuple(WINDOW.value or WINDOWS),
        seed=SEED.value,
    )
    report(found, output, "growth")
    return 0


def report(found: list[Any], output: pathlib.Path | None, name: str) -> None:
    """Prints correlations, and writes them if a directory was given."""
    from rich.console import Console

    from semrl_jax import analysis

    Console().print(analysis.correlation_table(found))
    if output is not None:
        analysis.write_correlations(output / f"{name}.csv", found)
        # Several strides in one picture would hide each other, so only the middle one is drawn.
        strides = sorted({correlation.stride for correlation in found})
        drawn = [c for c in found if c.stride == strides[len(strides) // 2]]
        analysis.draw_correlations(drawn).savefig(output / f"{name}.png", dpi=110)
        print(f"done: {output} has {name}.csv and {name}.png")


def one(flag: flags.FlagHolder[Any], default: Any) -> Any:
    """The only value of a flag that the other commands accept several times."""
    values = flag.value or [default]
    if len(values) > 1:
        raise UserError(f"--{flag.name} is given {len(values)} times; metrics takes one.")
    return values[0]


def output_directory() -> pathlib.Path | None:
    """--output, made if missing; None if it was not given."""
    if OUTPUT.value is None:
        return None
    output = pathlib.Path(OUTPUT.value)
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output={output} cannot be made: {error.strerror}.") from None
    return output


if __name__ == "__main__":
    cli.run({"metrics": metrics, "correlation": correlation, "growth": growth}, __doc__)
