"""The plan of a sweep, and what is said of its seeds."""

import io
import json
import math
import os
import signal
import subprocess
import sys
import time
import tracemalloc

import numpy as np
import pytest
from rich.console import Console
from scipy import stats

from launch import cli
from semrl_jax.jobs.sweep import Planned, Sweep, Variant, _last_line, plan, summarize, variants_of
from semrl_jax.pages.report import over_seeds
from semrl_jax.pages.report.over_seeds import Estimate, compared, compared_key
from semrl_jax.runs.lifecycle import EXIT_PREEMPTED
from semrl_jax.support.console import Reporter
from semrl_jax.support.errors import UserError
from tests.cases import refused


def test_a_grid_a_list_and_a_draw(tmp_path):
    grid = variants_of(["a.b=1,2", "c=x,y"], [])
    assert [variant.name for variant in grid] == [
        "a.b=1, c=x",
        "a.b=1, c=y",
        "a.b=2, c=x",
        "a.b=2, c=y",
    ]
    assert variants_of(["a.b=1,2"], ["c=x a.b=3", ""])[2:] == [
        Variant((("c", "x"), ("a.b", "3"))), Variant(()),
    ]  # fmt: skip
    assert variants_of([], []) == [Variant(())]
    named, plain = variants_of([], ["my own: t.u=v:w x=1", "base:"])
    assert (named.name, named.directory) == ("my own", "my_own") and plain == Variant((), "base")
    assert named.settings == (("t.u", "v:w"), ("x", "1"))
    drawn = variants_of(["a=1,2,3,4", "b=1,2,3,4"], [], count=5)
    assert len(set(drawn)) == 5 and drawn == variants_of(["a=1,2,3,4", "b=1,2,3,4"], [], count=5)
    runs = plan(grid[:2], [3, 5], tmp_path, 7)
    assert [(run.variant.directory, run.seed) for run in runs] == [
        ("b=1,c=x", 3), ("b=1,c=y", 3), ("b=1,c=x", 5), ("b=1,c=y", 5),
    ]  # fmt: skip
    assert runs[0].flags() == [
        f"--workdir={tmp_path}/b=1,c=x/seed3", "--config.a.b=1", "--config.c=x", "--config.seed=3",
    ]  # fmt: skip
    odd = Planned(Variant((("data.template", "a/b {input}"),)), 0, tmp_path, 1)
    assert odd.variant.directory == "template=a_b_input_" and not odd.is_finished


def test_the_runs_get_the_flags_of_the_config_alone(monkeypatch):
    of_config = ["--config=a.py", "--config.seed", "-1", "--noconfig.c.d", "--config.data.shuffle"]
    for others in ([], ["--vary=e.f=1,2"], ["-quiet"]):
        monkeypatch.setattr(sys, "argv", ["launch.sweep", *of_config, *others])
        assert cli.config_arguments() == of_config


def test_a_run_is_finished_at_the_steps_that_are_asked_for_now(tmp_path):
    variants = variants_of(["training.num_steps=5,9"], [""])
    (short, long, default) = plan(variants, [0], tmp_path, 7)
    assert [run.num_steps for run in (short, long, default)] == [5, 9, 7]
    for run in (short, long, default):
        (run.workdir / "checkpoints" / "7").mkdir(parents=True)
        run.log.write_text("step    7/7\n")  # its last evaluation is missing
        assert not run.is_finished
        run.log.write_text("step    7/7\ndone: 7 steps\nnext:\n")
    assert [run.is_finished for run in (short, long, default)] == [True, False, True]
    assert not default._replace(num_steps=8).is_finished  # the same command with more steps
    # The default of num_steps says nothing about a run of epochs.
    (of_variant,) = plan([Variant((("training.num_epochs", "2"),), "e")], [0], tmp_path, 7)
    (of_config,) = plan([Variant(())], [0], tmp_path, 7, num_epochs=2)
    for run in (of_variant, of_config):
        (run.workdir / "checkpoints" / "7").mkdir(parents=True, exist_ok=True)
        assert run.num_steps is None and not run.is_finished
    with pytest.raises(UserError, match=r"training\.num_steps=many must be a whole number"):
        plan(variants_of(["training.num_steps=many"], []), [0], tmp_path, 7)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((["a"], []), "--vary='a' must be FIELD=VALUE,VALUE, such as rollout.group_size=4,8"),
        ((["a="], []), "--vary='a=' must be FIELD=VALUE,VALUE"),
        ((["a=1,2"], [], 3), "--random=3 is more than the 2 combinations"),
        (([], ["a b=1"]), "--variant='a b=1' must be FIELD=VALUE FIELD=VALUE"),
        ((["seed=1,2"], []), "--seeds names the seeds"),
        ((["a=1,1"], []), "two variants are named 'a=1'"),
        (([], ["a: x.y=1", "b: x.y=1"]), "'a' and 'b' have the same settings; leave one out"),
    ],
)
def test_a_wrong_entry_is_one_line(arguments, message):
    assert message in refused(".", variants_of, *arguments)


def logs(gain, seeds):
    """Rows of runs whose accuracy depends on the seed in the same way for every gain."""
    others = {"reward/correct": 0.0, "time/step_s": 2.0, "response/num_tokens": 10.0}
    key = "eval/sums/greedy_accuracy"
    return {
        seed: [
            {"step": step, key: 0.1 + gain * step + 0.05 * (seed % 3)} | others for step in range(3)
        ]
        for seed in seeds
    }


# In the place of launch.train: seed 0 saves when it is asked to end; seed 1 has a wrong setting.
RUNS = """
import pathlib, signal, sys, time
mine = pathlib.Path(next(a for a in sys.argv if "workdir" in a).partition("=")[2])
def save(*_):
    time.sleep(0.3)
    mine.with_suffix(".saved").touch()
    sys.exit(75)
signal.signal(signal.SIGTERM, save)
other = mine.with_name("seed0.ready")
if mine.name == "seed0":
    other.touch()
    time.sleep(60)
while not other.exists():
    time.sleep(0.01)
print("error: a.b=1 is wrong")
sys.exit(2)
"""


def test_a_wrong_setting_of_one_run_lets_the_others_save(tmp_path):
    sweep = Sweep([], [[], []], Reporter(quiet=True))
    sweep._command = [sys.executable, "-c", RUNS]
    runs = plan([Variant(())], [0, 1], tmp_path, 1)
    with pytest.raises(UserError, match=r"config, seed 1: error: a.b=1 is wrong"):
        sweep.run(runs)
    assert runs[0].workdir.with_suffix(".saved").exists()


def test_a_finished_run_with_other_settings_is_refused(tmp_path, capsys):
    sweep = Sweep([], [[]], Reporter())
    # In the place of the dry run of launch.train, which compares the settings.
    sweep._command = [sys.executable, "-c", "raise SystemExit(' '.join(__import__('sys').argv))"]
    runs = plan(variants_of([], ["my: a.b=2"]), [0, 1], tmp_path, 7)
    for run in runs:
        (run.workdir / "checkpoints" / "7").mkdir(parents=True)
    sweep.check(runs)  # they go on, and compare the settings themselves
    for run in runs:
        run.log.write_text("done: 7 steps\n")
    assert "seed0 --config.a.b=2 --config.seed=0 --dry_run" in refused("my: ", sweep.check, runs)
    assert capsys.readouterr().out == "checking my, 1 of 1\n"

    # One is enough if all have the same settings.
    only_seed_1 = "import sys; raise SystemExit('--config.seed=1' in sys.argv and 'error: a.b')"
    sweep._command = [sys.executable, "-c", only_seed_1]
    for run in runs:
        record = {"run_id": "x", "config": {"seed": run.seed, "a": {"b": 2}}}
        (run.workdir / "config.json").write_text(json.dumps(record))
    sweep.check(runs)
    (runs[1].workdir / "config.json").write_text(json.dumps(record | {"config": {"a": {"b": 3}}}))
    refused("my: error: a.b", sweep.check, runs)


def test_the_log_of_a_removed_run_does_not_count(tmp_path):
    """Its line "done" would count for the run that takes its place."""
    sweep = Sweep([], [[]], Reporter(quiet=True))
    sweep._command = [sys.executable, "-c", "print('step 1')"]
    run = plan([Variant(())], [0], tmp_path, 7)[0]
    run.log.parent.mkdir()
    run.log.write_text("done: 7 steps\n")
    assert sweep.run([run]) == 0
    assert run.log.read_text() == "step 1\n"


def test_the_table_says_what_is_missing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("semrl_jax.jobs.sweep.write_page", lambda *_: None)
    runs = plan([Variant((), "base"), Variant((), "other")], [0, 1], tmp_path, 2)
    values = logs(0.1, [0, 1])

    def write(run):
        run.workdir.mkdir(parents=True)
        text = "".join(json.dumps(row) + "\n" for row in values[run.seed])
        (run.workdir / "metrics.jsonl").write_text(text)

    write(runs[1])
    summarize(runs, tmp_path, Reporter(quiet=True))
    out = "".join(capsys.readouterr())
    assert "base has logged nothing; differences are from other" in out
    assert "not finished, so with their last values so far: other, seed 0" in out
    for run in (runs[2], runs[3], runs[0]):
        write(run)
    for run in runs:
        (run.workdir / "checkpoints" / "2").mkdir(parents=True)
        run.log.write_text("done: 2 steps\n")
    summarize(runs, tmp_path, Reporter(quiet=True))
    out = "".join(capsys.readouterr())
    assert "logged nothing" not in out and "not finished" not in out
    assert out.index("base") < out.index("other")


# Waits to be asked to end; without that, it ends as if it had failed.
WAITS = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
print("ready", flush=True)
time.sleep(20)
sys.exit(1)
"""


def test_a_signal_while_a_run_is_being_started_reaches_it(tmp_path, monkeypatch, capsys):
    sweep = Sweep([], [[]], Reporter(quiet=True))
    sweep._command = [sys.executable, "-c", WAITS]
    (run,) = plan([Variant(())], [0], tmp_path, 1)
    popen, processes = subprocess.Popen, []

    def started(*arguments, **options):
        process = popen(*arguments, **options)
        while "ready" not in run.log.read_text():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)  # before the sweep knows the process
        processes.append(process)
        return process

    monkeypatch.setattr(subprocess, "Popen", started)
    assert sweep.run([run]) == EXIT_PREEMPTED
    assert processes[0].returncode == EXIT_PREEMPTED
    told, last = capsys.readouterr().out.splitlines()
    assert told == "stopping when these have saved: config, seed 0" and "goes on" in last


def test_the_last_line_of_a_long_log_is_read_alone(tmp_path):
    """The log of every run is looked at several times a second."""
    file = tmp_path / "seed0.log"
    assert _last_line(file) == ""
    file.write_bytes(b"first\n\n")
    assert _last_line(file) == "first"
    with file.open("r+b") as log:
        log.seek(1 << 26)
        log.write("\nstep 100000/100000 é\n".encode())
    tracemalloc.start()
    assert _last_line(file) == "step 100000/100000 é"
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_intervals_are_those_of_scipy():
    values = np.array([0.3, 0.5, 0.45, 0.2])
    expected = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    found = Estimate.of(values)
    np.testing.assert_allclose([found.mean - found.half, found.mean + found.half], expected)
    assert math.isnan(Estimate.of(values[:1]).half) and str(Estimate.of(values[:1])) == "0.300"


def test_variants_are_compared_seed_by_seed():
    key = compared_key(list(logs(0.1, range(3)).values()))
    assert key == "eval/sums/greedy_accuracy"
    first = compared("first", logs(0.1, [0, 1, 2]), key)
    other = compared("other", logs(0.2, [1, 2, 4]), key)
    np.testing.assert_allclose(first.last, [0.3, 0.35, 0.4])
    np.testing.assert_allclose(first.over_steps, first.last - 0.05)  # steps 1 and 2
    difference = other.less(first)  # of the seeds 1 and 2, which differ by as much
    np.testing.assert_allclose([difference.mean, difference.half], [0.2, 0.0], atol=1e-12)
    assert Estimate.of(other.last).half > 0.05
    assert first.seconds.tolist() == [6.0] * 3 and first.tokens.tolist() == [30.0] * 3


def test_what_not_all_runs_have_is_not_compared():
    with_accuracy, without = logs(0.1, [0])[0], [{"step": 0, "reward/correct": 0.5}]
    assert compared_key([with_accuracy, without]) == "reward/correct"
    assert compared_key([with_accuracy, [{"step": 0}]]) == compared_key([]) == ""
    unknown = [{"step": 0, "reward/correct": 0.5, "eval/sums/greedy_accuracy": None}]
    assert compared_key([with_accuracy, unknown]) == "reward/correct"


def test_table_file_and_picture_name_every_variant(tmp_path):
    key = "reward/correct"
    found = [compared(name, logs(0.1, range(2)), key) for name in ("a=$x", "[b]=1")]
    text = io.StringIO()
    Console(file=text, width=100).print(over_seeds.results_table(key, found))
    assert all(part in text.getvalue() for part in ("a=$x", "[b]=1", "Fewer than three seeds"))
    over_seeds.write_csv(tmp_path / "sweep.csv", key, found)
    assert len((tmp_path / "sweep.csv").read_text().splitlines()) == 5
    over_seeds.draw(key, found).savefig(tmp_path / "sweep.png")
