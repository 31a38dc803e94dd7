"""Makes the report of a run again, compares runs, or follows them while they write.

    python -m launch.report runs/quickstart
    python -m launch.report runs/first runs/second --output=comparison.html --csv=rows.csv
    python -m launch.report runs/quickstart --serve
    python -m launch.report results

A run is what was --workdir of launch.train or launch.sft. For one run without --output, its
report.html and curves.png are made again. A directory of launch.evaluate, or one above several, has
the figures of its policies over their steps; without --output, report.html and eval_results.csv are
written into it. --serve prints an address for a browser on this machine;
the page then refreshes itself until Ctrl-C. docs/report.md explains the page. Exit codes: 0 done,
2 wrong run or flag (one line names it).
"""

import pathlib
import sys

from absl import flags

from launch import cli
from semrl_jax.support.errors import UserError

OUTPUT = flags.DEFINE_string(
    "output", None, "HTML file to write; needed to compare runs, unless --csv or --serve is given"
)
CSV = flags.DEFINE_string("csv", None, "CSV file to write: the rows of all runs, or of all results")
SERVE = flags.DEFINE_bool("serve", False, "follow the runs in a browser on this machine")
PORT = flags.DEFINE_integer(
    "port", 0, "of --serve; 0: a free one", lower_bound=0, upper_bound=65535
)


def main(names: list[str]) -> int:
    if not names:
        raise UserError("name the directory of a run; see --help.")
    runs = [pathlib.Path(name) for name in names]
    if SERVE.value:
        if OUTPUT.value is not None or CSV.value is not None:
            raise UserError("--serve writes no file; leave out --output and --csv.")
        from semrl_jax.pages.report.serving import serve  # here: --help is quick

        serve(runs, PORT.value, lambda line: print(line, flush=True))
        return 0
    output = None if OUTPUT.value is None else cli.output_file("output", OUTPUT.value)
    csv_file = None if CSV.value is None else cli.output_file("csv", CSV.value)
    if len(runs) > 1 and output is None and csv_file is None:
        raise UserError("--output is needed to compare runs; name an HTML file.")
    if output is not None and csv_file is not None and output.absolute() == csv_file.absolute():
        raise UserError(f"--output and --csv are both {output}; name two files.")
    from semrl_jax.pages.report import write_report
    from semrl_jax.pages.report.evaluations import TABLE
    from semrl_jax.pages.report.page import write_page
    from semrl_jax.pages.report.reading import read_runs
    from semrl_jax.pages.report.several_runs import write_csv

    logs = read_runs(runs)
    for log in logs:
        for line in log.damage():
            print(line, file=sys.stderr)
    written = []
    if output is None and csv_file is None and logs[0].evaluated:
        output, csv_file = runs[0] / "report.html", runs[0] / TABLE
    try:
        if csv_file is not None:
            write_csv(csv_file, logs)
            written.append(csv_file)
        if output is not None:
            write_page(output, runs)
            written.append(output)
        if not written:
            write_report(runs[0])
            written = [runs[0] / "report.html", runs[0] / "curves.png"]
    except OSError as error:
        if error.filename is None:
            raise
        raise UserError(f"{error.filename} cannot be written: {error.strerror}.") from None
    print(f"done: wrote {' and '.join(map(str, written))}")
    return 0


if __name__ == "__main__":
    cli.run(main, __doc__, names=True)
