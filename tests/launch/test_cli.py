"""Wrong flags and settings are reported in one line, before anything slow is loaded."""

import os
import subprocess
import sys

import pytest
from absl import flags
from ml_collections import config_flags

from launch import cli
from launch.__main__ import NO_COMMANDS, commands
from semrl_jax.settings import moved
from semrl_jax.support.errors import UserError
from tests.cases import refused
from tests.launch.conftest import ROOT, environment, run
from tests.launch.test_bad_input import assert_one_line

QUICKSTART = "--config=configs/quickstart.py"


@pytest.fixture
def parse(monkeypatch):
    """The config that a command makes from these arguments."""

    def checked_config(*arguments):
        values = flags.FlagValues()
        monkeypatch.setattr(flags, "FLAGS", values)
        config = config_flags.DEFINE_config_file("config", None, "", flag_values=values)
        flags.DEFINE_integer("port", 1, "", flag_values=values)
        flags.DEFINE_integer("responses", 4, "", lower_bound=3, flag_values=values)
        monkeypatch.setattr(sys, "argv", ["program", *arguments])
        cli._parse("")
        return cli.checked_config(config)

    monkeypatch.chdir(ROOT)
    return checked_config


def test_an_output_that_cannot_be_written_is_refused_before_any_work(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    for name in ("new.html", "link"):
        assert cli.output_file("output", str(tmp_path / name)) == tmp_path / name
    assert {file.name for file in tmp_path.iterdir()} == {"pipe", "link"}
    # With root's rights a device would be replaced by the page.
    for bad in ("/dev/null", tmp_path / "pipe", tmp_path, tmp_path / "no" / "x.html"):
        refused("must be a file in a directory that exists", cli.output_file, "output", str(bad))
    for bad, reason in (
        (tmp_path / ("x" * 300), "File name too long"),
        ("/proc/x.html", "No such"),
    ):
        refused(f"--output={bad} cannot be written: {reason}", cli.output_file, "output", str(bad))


def test_flags_override_fields(parse):
    config = parse(
        QUICKSTART, "--config.training.num_steps", "7", "--config.shaping.target=none",
        "--noconfig.rewards.shuffle", "--config.checkpoints.extra_steps=3",
        "--config.checkpoints.extra_steps=5",
    )  # fmt: skip
    assert (config.training.num_steps, config.shaping.target) == (7, "none")
    assert config.checkpoints.extra_steps == (3, 5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--config.seed=abc"], "--config.seed=abc must be a whole number."),
        (["--config.training.num_steps=three"], "num_steps=three must be a whole number."),
        (["--config.metrics.stride", "4.5"], "--config.metrics.stride=4.5 must be a whole number."),
        (["--config.training.learning_rate=a: b"], "learning_rate=a: b must be a number."),
        (["--config.rewards.shuffle=maybe"], "shuffle=maybe must be true or false."),
        (["--config.metrics.names=(a, b"], "names=(a, b must be a value or a tuple, such as"),
        (["--port=x"], "--port=x must be a whole number."),
        (["--responses=2"], "--responses=2 must be a whole number of at least 3."),
        (["--port"], "--port has no value; give --port=VALUE."),
        (["--workdir=~/run"], "--workdir=~/run: the shell leaves ~ as it is after =, so this"),
        (["--prot=1"], "--prot is unknown; did you mean --port?"),
        (["--confg.seed=1"], "--confg.seed is unknown; did you mean --config.seed?"),
        (["--port", "--config.seed=1"], "--port has no value: '--config.seed=1' after it is a fla"),
        (["--config.shaping=none"], "--config.shaping: a section takes no value; set one of its"),
        (["--config.algorithms.loss={}"], "fields: algorithms.loss.clip_epsilon, algorithms"),
        (
            ["--config.training.num_step=3"],
            "--config.training.num_step is no field of the config; did you mean training.num_s",
        ),
        (["--config.training.lr=3"], "did you mean training.learning_rate?"),
        (["--config.trainin.num_steps=3"], "did you mean training.num_steps?"),
        (["--noconfig.rewards.shufle"], "did you mean rewards.shuffle?"),
        (["--config.num_steps=3"], "did you mean sft.num_steps or training.num_steps or warm_"),
        (["--config.seed.deep=3"], "--config.seed.deep is no field of the config"),
        (["--config.rollout.foo=1"], "--config.rollout.foo is no field of the config; see docs/"),
        (["--config.checkpoints.extra_steps=a"], "checkpoints.extra_steps has 'a'; it may have"),
        (["--config.data.files=(1, 2)"], "data.files has 1; it may have texts"),
        (["--config=nowhere.py", "--config.seed=1"], "'nowhere.py'; name one such as configs/"),
        (["--config=configs/quickstrat.py"], "did you mean configs/quickstart.py?"),
        (["--config=configs"], "--config: Is a directory: 'configs'"),
        (["--config=configs/recorded.py"], "recorded.py: TypeError: get_config() missing 1 req"),
    ],
)
def test_a_mistake_is_named_with_the_way_out(parse, arguments, message):
    assert message in refused(".", parse, QUICKSTART, *arguments)


def test_a_shipped_config_is_found_from_every_directory(parse, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert parse(QUICKSTART, "--config.seed=3").training.num_steps == 30
    assert parse("--config", "configs/verl/grpo_llama3_2_3b.py").data.prompts_per_step == 48
    with pytest.raises(UserError, match=r"configs/nowhere\.py'; name one such as configs/quick"):
        parse("--config=configs/nowhere.py")
    (tmp_path / "configs").mkdir()  # one's own has priority
    (tmp_path / "configs" / "quickstart.py").write_text(
        "import ml_collections\ndef get_config(): raise ValueError('my own')\n"
    )
    refused("my own", parse, QUICKSTART)


def test_a_field_that_moved_is_named_with_its_place(parse, monkeypatch, tmp_path):
    monkeypatch.setitem(moved.MOVED, "rewards.luck.size", "rewards.failure_score")
    for arguments in (["--config.rewards.luck.size=1"], ["--config.rewards.luck.size", "1"]):
        with pytest.raises(UserError) as caught:
            parse(QUICKSTART, *arguments)
        assert str(caught.value) == (
            "--config.rewards.luck.size is of an earlier version: rewards.luck.size is now "
            "rewards.failure_score."
        )
    file = tmp_path / "mine.py"
    file.write_text(
        "from configs import default\n"
        "def get_config():\n"
        "    config = default.get_config()\n"
        "    config.rewards.luck.size = 1\n"
        "    return config\n"
    )
    with pytest.raises(
        UserError, match=r"mine\.py sets a field of an earlier version: rewards\.luck\.size is now"
    ):
        parse(f"--config={file}")


def test_a_mistake_in_a_config_file_is_named(parse, tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("from configs import default\ndef get_config(): return default.missing()\n")
    refused(rf"--config={file}: AttributeError: .*'missing'", parse, f"--config={file}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\0", "SyntaxError: source code string cannot contain null bytes"),
        ("import nothing_here", "ModuleNotFoundError: No module named 'nothing_here'"),
        ("def get_config(): return 3", "returns is 3, no ConfigDict; begin it with"),
        ("def get_config(): pass", "returns is None, no ConfigDict; begin it with"),
        (
            "import ml_collections as m\ndef get_config(): return m.ConfigDict({'seed': 1})",
            "has no field 'algorithms.advantage.baseline_rate'; begin it with",
        ),
    ],
)
def test_a_file_that_makes_no_config_is_named(parse, tmp_path, text, message):
    file = tmp_path / "mine.py"
    file.write_text(text)
    assert message in refused(f"--config={file}: ", parse, f"--config={file}")


@pytest.mark.parametrize("override", [[], ["--config.seed=1"]])
@pytest.mark.parametrize("text", [None, "{", "[]", "{}"])
def test_invalid_recorded_config_is_named(parse, tmp_path, text, override):
    file = tmp_path / "config.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UserError) as caught:
        parse(f"--config=configs/recorded.py:{file}", *override)
    assert str(caught.value).startswith("--config") and str(file) in str(caught.value)
    assert "UserError" not in str(caught.value) and "earlier failure" not in str(caught.value)


slow = pytest.mark.slow


@pytest.mark.parametrize(
    "command", ["train", pytest.param("sft", marks=slow), pytest.param("rollout", marks=slow)]
)
def test_a_wrong_value_is_refused_without_loading_jax(command):
    flags = [
        "--config.metrics.window=last",
        *(["--workdir=/nowhere"] if command != "rollout" else []),
    ]
    result = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", f"launch.{command}", QUICKSTART, *flags],
        cwd=ROOT, env=environment(), capture_output=True, text=True,
    )  # fmt: skip
    *imports, line = result.stderr.splitlines()
    assert (result.returncode, result.stdout) == (2, "")
    assert "metrics.window='last' must be one of" in line
    loaded = {entry.rpartition("|")[2].strip() for entry in imports}
    assert "ml_collections" in loaded
    assert not loaded & {"jax", "flax", "orbax", "transformers", "pyarrow", "grpc", "matplotlib"}


def test_the_commands_are_listed():
    listed = commands()
    files = {file.stem for file in (ROOT / "launch").glob("*.py")}
    assert listed.keys() | NO_COMMANDS == files
    for name in listed:
        assert "cli.run(" in (ROOT / "launch" / f"{name}.py").read_text()


def test_one_name_runs_every_command():
    def run(*arguments):
        command = [sys.executable, "-m", "launch", *arguments]
        return subprocess.run(command, capture_output=True, text=True)

    listed = run()
    assert listed.returncode == 0 and "  semrl train " in listed.stdout
    wrong = run("trian")
    assert wrong.returncode == 2 and "'trian' is no command; did you mean 'train'?" in wrong.stderr
    ran = run("train", "--config=configs/grpo.py", "--config.training.lr=1", "--workdir=x")
    assert ran.returncode == 2
    assert ran.stderr.startswith("python -m launch.train: --config.training.lr is no field")


def test_a_missing_flag_is_named_with_an_example(parse, monkeypatch):
    refused(r"--config is needed, such as --config=configs/quicks", parse)


def test_a_path_that_cannot_be_looked_up_is_one_line():
    done = run("launch.convert", f"--source={'a' * 5000}", "--target=unused")
    assert_one_line(done, "aaa: File name too long; name another path.")
    assert len(done.stderr) < 500


def test_a_platform_that_is_not_there_is_one_line(tmp_path):
    flags = f"--config={ROOT}/configs/quickstart.py", f"--workdir={tmp_path}/run", "--dry_run"
    done = run("launch.train", *flags, env={"JAX_PLATFORMS": "nowhere"})
    assert_one_line(done, "JAX_PLATFORMS='nowhere,cpu': Unable to initialize backend")
    done = run("launch.train", *flags, env={"JAX_PLATFORMS": "cuda", "CUDA_VISIBLE_DEVICES": ""})
    assert_one_line(done, "JAX_PLATFORMS='cuda,cpu' must name devices that this process sees")
