"""launch.evaluate: results, resuming to the bit, comparison of steps; mistakes give one line."""

import json
import shutil
import signal
import time

import pyarrow.parquet as pq
import pytest

from configs import default
from semrl_jax.evaluation.samples import read_samples
from tests.launch.conftest import TINY, run, run_each, start, succeed
from tests.launch.test_bad_input import assert_each_is_one_line
from tests.old_formats import EVALUATION, make_old
from tests.training.test_reward_model import classifier

# Calls of 4 problems with 4 responses each.
SIZES = ("--n=4", "--num_problems=48", "--config.evaluation.responses_per_call=16")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of two steps with checkpoints of steps 1 and 2."""
    workdir = tmp_path_factory.mktemp("evaluated") / "tiny"
    succeed(
        "launch.train", f"--config={TINY}", f"--workdir={workdir}",
        "--config.training.num_steps=2", "--config.evaluation.every_steps=1",
    )  # fmt: skip
    return workdir


def evaluate(*arguments, **options):
    return run("launch.evaluate", *arguments, **options)


@pytest.fixture(scope="module")
def judge(tmp_path_factory):
    """The directory of a random reward model."""
    directory = tmp_path_factory.mktemp("models") / "judge"
    classifier(directory)
    return directory


@pytest.fixture(scope="module")
def settings(trained, judge):
    """Flags that evaluate the last checkpoint, with metrics and the reward model."""
    series = "--config.evaluation.metric_series=True"
    return (f"--policy={trained}", "--metrics", series, f"--reward_model={judge}", *SIZES)


@pytest.fixture(scope="module")
def undisturbed(settings, tmp_path_factory):
    """The directory of such an evaluation."""
    output = tmp_path_factory.mktemp("evaluated") / "results"
    done = evaluate(*settings, f"--output={output}")
    assert done.returncode == 0, done.stderr
    assert "pass@4" in done.stdout
    return output


def test_endless_problems_are_as_many_as_the_run_held_out(tmp_path):
    (tmp_path / "config.py").write_text(
        "from configs import default\n\n\ndef get_config():\n    config = default.get_config()\n"
        "    config.data.update(task='reasoning_gym', reasoning_gym=('gcd',))\n"
        "    config.evaluation.num_problems = 64\n    return config\n"
    )
    flags = [f"--config={tmp_path}/config.py", f"--policy={tmp_path}", f"--output={tmp_path}/out"]
    own, named = run_each(
        "launch.evaluate", [*flags, "--explain"], [*flags, "--explain", "--benchmarks=gsm8k"]
    )
    assert "evaluation.num_problems = 64 problems  [" in own.stdout
    everything = "evaluation.num_problems = 1000000000 problems  [set by the command"
    assert everything in named.stdout


def test_the_family_of_the_first_run_is_not_that_of_all_policies(tmp_path):
    settings = default.get_config()
    settings.model.family = "tests.models.own_family"
    record = {"run_id": "a", "config": settings.to_dict()}
    (tmp_path / "config.json").write_text(json.dumps(record))
    flags = [f"--policy={tmp_path}", f"--output={tmp_path}/out", "--explain"]
    each, given = run_each(
        "launch.evaluate", flags, [*flags, "--config.model.family=tests.models.own_family"]
    )
    assert "model.family = ''  [set by the command" in each.stdout
    assert "model.family = tests.models.own_family  [" in given.stdout


def files_of(directory):
    return {name: (directory / name).read_bytes() for name in ("samples.parquet", "results.json")}


@pytest.mark.slow
def test_an_evaluation_writes_samples_and_figures(undisturbed):
    samples = read_samples(undisturbed / "samples.parquet")
    places = [(s.group_id, s.sample_index) for s in samples]
    assert places == [(p, i) for p in range(48) for i in range(4)]
    assert {s.benchmark for s in samples} == {"arithmetic"}
    found = json.loads((undisturbed / "results.json").read_text())["arithmetic"]
    assert found["num_problems"] == 48
    assert found["pass@1"] == pytest.approx(sum(s.correct for s in samples) / len(samples))
    low, high = found["pass@1_interval"]
    assert low <= found["pass@1"] <= high
    lengths = [s.num_tokens for s in samples]
    assert found["responses/mean_length"] == pytest.approx(sum(lengths) / len(lengths))
    assert found["metrics/effective_rank/mean"] > 0
    assert found["metrics/global/effective_rank"] > 0
    assert len({s.metrics["reward_model"] for s in samples}) > len(samples) / 2
    assert "best@2/reward_model" in found
    stride = json.loads((undisturbed / "evaluation.json").read_text())
    stride = stride["settings"]["evaluation.metric_options"]["stride"]
    table = pq.read_table(undisturbed / "samples.parquet").to_pydict()
    sizes = [len(series) for series in table["series/effective_rank"]]
    assert sizes == [length // stride for length in lengths] and max(sizes) > 0
    assert not (undisturbed / "parts").exists()


@pytest.mark.slow
def test_policies_in_directories_of_one_name_have_results_of_their_own(trained, tmp_path):
    second = tmp_path / "other" / trained.name
    shutil.copytree(trained, second)
    output = tmp_path / "both"
    done = evaluate(
        f"--policy={trained}", f"--policy={second}/checkpoints/1", f"--output={output}",
        "--num_problems=4", "--n=2",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    names = [f"{trained.parent.name}/{trained.name}-step2", f"other/{trained.name}-step1"]
    compared = json.loads((output / "comparison.json").read_text())
    assert list(compared["results"]) == names
    of_second = compared["supports"][names[1]]["arithmetic"]
    assert sum(value for name, value in of_second.items() if name.startswith("num_")) == 4
    assert f"arithmetic: {names[1]} solves" in done.stdout
    for name in names:
        assert name in done.stdout and (output / name / "results.json").is_file()
    again = evaluate(f"--policy={trained}", f"--policy={trained}", f"--output={tmp_path / 'no'}")
    assert again.returncode == 2 and "name each once" in again.stderr


@pytest.mark.soak
def test_a_killed_evaluation_continues_with_the_same_results(settings, undisturbed, tmp_path):
    command = (*settings, f"--output={tmp_path / 'killed'}")
    process = start("launch.evaluate", *command)
    parts = tmp_path / "killed" / "parts"
    deadline = time.monotonic() + 100
    while len(list(parts.glob("*.parquet"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    kept = {file.name: file.stat().st_mtime_ns for file in parts.glob("*.parquet")}
    assert 2 <= len(kept) < 12
    make_old(min(parts.glob("*.parquet")), EVALUATION)  # of an earlier release
    done = evaluate(*command)
    assert done.returncode == 0, done.stderr
    assert f"{16 * len(kept)} of 192 responses are there already" in done.stdout
    assert files_of(tmp_path / "killed") == files_of(undisturbed)


@pytest.mark.slow
def test_greedy_accuracy_of_steps_is_that_in_the_log_of_the_run(trained, tmp_path):
    output = tmp_path / "steps"
    done = evaluate(
        f"--policy={trained}", "--steps=0,1,2", f"--output={output}", "--temperature=0",
        "--top_p=1", "--num_problems=8",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    compared = json.loads((output / "comparison.json").read_text())
    assert list(compared["results"]) == ["tiny-step0", "tiny-step1", "tiny-step2"]
    rows = [json.loads(line) for line in (trained / "metrics.jsonl").read_text().splitlines()]
    for step, row in enumerate(rows):
        found = compared["results"][f"tiny-step{step}"]["arithmetic"]
        assert found["pass@1"] == row["eval/arithmetic/greedy_accuracy"]
        assert found["responses/mean_length"] == row["eval/arithmetic/mean_length"]
    assert (output / "curves.png").read_bytes().startswith(b"\x89PNG")
    table = (output / "eval_results.csv").read_text()
    places = [line.split(",")[:3] for line in table.splitlines()[1:]]
    assert places == [["tiny", str(step), "arithmetic"] for step in range(3)]
    collected = shutil.copytree(output, tmp_path / "collected")
    done = succeed("launch.report", collected)
    assert done.stdout == f"done: wrote {collected}/eval_results.csv and {collected}/report.html\n"
    assert (collected / "eval_results.csv").read_text() == table


@pytest.mark.soak
def test_benchmarks_can_be_added_to_results_and_other_settings_cannot(
    undisturbed, settings, tmp_path
):
    output = shutil.copytree(undisturbed, tmp_path / "results")
    (tmp_path / "sums.jsonl").write_text('{"question": "Q:1+1=\\nA:", "answer": "2"}\n')
    command = (*settings, f"--output={output}")
    done = evaluate(*command, f"--benchmarks={tmp_path / 'sums.jsonl'}")
    assert done.returncode == 0, done.stderr
    found = json.loads((output / "results.json").read_text())
    assert (
        found["arithmetic"] == json.loads((undisturbed / "results.json").read_text())["arithmetic"]
    )
    assert found["sums"]["num_problems"] == 1
    done = evaluate(*command, "--temperature=0.9")
    assert done.returncode == 2
    assert "holds responses with other temperature of arithmetic (0.6, now 0.9)" in done.stderr


def test_mistakes_are_named_in_one_line():
    given = ("--policy=.", "--output=x")
    assert_each_is_one_line(
        "launch.evaluate",
        ((), "--policy is needed"),
        ((*given, "--benchmarks=a", "--k=2"), "evaluation.k has 2, which must"),
        (given[:1], "--output is needed"),
        (given, "--benchmarks is needed"),
        ((*given, "--benchmarks=a", "--n=0"), "evaluation.n=0 must be"),
        ((*given, "--steps=1,b"), "--steps has 'b'; it must be whole"),
        (
            (*given, "--n=2", "--config.evaluation.n=3"),
            "--n and --config.evaluation.n set the same field",
        ),
    )
