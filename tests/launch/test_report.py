"""The command launch.report: its files, its mistakes, and a server that ends with Ctrl-C."""

import os
import signal
import subprocess
import sys
import urllib.request

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.launch.conftest import ROOT, environment, read_until, run, start, succeed
from tests.launch.test_bad_input import assert_each_is_one_line
from tests.pages.report.making import make_run

pytestmark = pytest.mark.slow


@pytest.fixture
def runs(config, tmp_path):
    return [make_run(tmp_path / name, config) for name in ("first", "second")]


def test_the_command_writes_reports_and_names_mistakes(runs, config, tmp_path):
    first, second = runs
    empty = make_run(tmp_path / "empty", config, num_steps=0)
    done = succeed("launch.report", first)
    assert done.stdout == f"done: wrote {first}/report.html and {first}/curves.png\n"
    page = (first / "report.html").read_bytes()
    assert len(page) > 2**22
    # Files of the package are UTF-8 in every locale.
    ascii_locale = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    succeed("launch.report", first, env=ascii_locale)
    assert (first / "report.html").read_bytes() == page
    succeed("launch.report", first, second, f"--output={tmp_path}/both.html",
               f"--csv={tmp_path}/rows.csv")  # fmt: skip
    assert '"title":"first, second"' in (tmp_path / "both.html").read_text()
    assert len((tmp_path / "rows.csv").read_text().splitlines()) == 25
    done = assert_each_is_one_line(
        "launch.report",
        ([], "name the directory of a run"),
        ([tmp_path / "nothing"], "nothing is no run; name --workdir"),
        ([empty], "has no log yet"),
        ([first, second], "--output is needed to compare runs"),
        ([first, f"--output={tmp_path}/no/page.html"], "must be a file in a directory that exists"),
        ([first, "--serve", "--csv=rows.csv"], "--serve writes no file"),
    )
    assert not any(each.stdout for each in done)


def test_responses_of_another_type_are_shown_or_named(runs, tmp_path):
    """In a process of its own, because the type checks of these tests would hide a wrong type."""
    rollouts = runs[0] / "rollouts"
    table = pq.read_table(rollouts / "step_000000.parquet")
    for step, name, values in (
        (8, "extracted", pa.array(range(1000, 1016))),
        (98, "prompt", pa.array([b"\xff"] * 16)),
    ):
        other = table.set_column(table.column_names.index(name), name, values)
        pq.write_table(other, rollouts / f"step_{step:06d}.parquet")
    os.mkfifo(rollouts / "step_000099.parquet")
    done = run("launch.report", *runs, f"--output={tmp_path}/page.html")
    assert (done.returncode, done.stderr) == (0, "")
    text = (tmp_path / "page.html").read_text()
    assert "Unreadable: step_000099.parquet, step_000098.parquet." in text
    assert '"1015"' in text


def test_the_server_ends_with_ctrl_c(runs):
    # A process of the background of a shell inherits that SIGINT is ignored.
    process = start(
        "launch.report", runs[0], "--serve",
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    address = read_until(process, "http://127.0.0.1:").strip()
    with urllib.request.urlopen(address, timeout=20) as answer:
        assert answer.status == 200
    read_until(process, "Ctrl-C ends")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=20)
    assert (process.returncode, out, err) == (0, "stopped\n", "")


def test_a_comparison_loads_no_jax(runs, tmp_path):
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "launch.report", *map(str, runs),
         f"--output={tmp_path}/page.html"],
        cwd=ROOT, env=environment(), capture_output=True, text=True,
    )  # fmt: skip
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert done.returncode == 0 and "plotly.offline" in loaded
    assert not loaded & {"jax", "torch", "matplotlib", "transformers", "grpc"}
