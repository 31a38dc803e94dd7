"""A user mistake gives one line and exit code 2, and leaves no files."""

import socket
import subprocess
import sys

import pytest

from semrl_jax.runs import train
from tests.cases import refused
from tests.launch.conftest import ROOT, TINY, environment, run, run_each, start, succeed


def assert_one_line(result, *messages):
    lines = result.stderr.strip().splitlines()
    assert result.returncode == 2, result.stderr
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("python -m launch.")
    assert all(message in lines[0] for message in messages), lines[0]


def assert_each_is_one_line(module, *cases, imports=()):
    """Each case has arguments of the command, and texts of the line that it must print."""
    done = run_each(module, *(arguments for arguments, *_ in cases), imports=imports)
    for result, (_, *messages) in zip(done, cases, strict=True):
        assert_one_line(result, *messages)
    return done


def test_train_names_the_mistake(tmp_path):
    config, workdir = f"--config={TINY}", f"--workdir={tmp_path / 'run'}"
    assert_each_is_one_line(
        "launch.train",
        ([config, workdir, "foo"], "'foo' is not a flag"),
        ([workdir], "--config is needed"),
        ([workdir, "--config=nowhere.py"], "No such file"),
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_mistake_that_is_found_late_leaves_no_files(config, tmp_path):
    for fields, message in (
        ({"model.path": "/nowhere"}, "'/nowhere' does not exist"),
        ({"rollout.stop_token_ids": (99,)}, "stop_token_ids has 99"),
        ({"rollout.top_k": 1000}, "top_k=1000 must be at most"),
        ({"mesh.tensor": 3}, "needs 6 devices, but 8 are there"),
        ({"model.hidden_size": 16384, "model.num_layers": 200}, "or container has"),  # TiBs
    ):
        wrong = config.copy_and_resolve_references()
        wrong.update_from_flattened_dict(fields)
        refused(message, train, wrong, str(tmp_path / "run"))
        assert not (tmp_path / "run").exists()
    result = run(
        "launch.train", f"--config={TINY}", f"--workdir={tmp_path / 'run'}",
        "--config.rollout.addresses=127.0.0.1:1", "--config.rollout.connect_timeout_s=1",
    )  # fmt: skip
    assert_one_line(result, "cannot be reached within 1 s")
    assert_one_line(run("launch.train", f"--config={TINY}"), "--workdir is needed")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_directory_of_something_else_is_named_before_the_trainer_is_loaded(tmp_path, monkeypatch):
    (tmp_path / "orbax.py").write_text("raise SystemExit('the trainer is loaded')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    files = {"mine/thesis.tex": "", "other/config.json": '{"run_id": "a", "config": {"seed": 17}}'}
    for name, content in files.items():
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(content)
    for command in ("launch.train", "launch.sft"):
        assert_each_is_one_line(
            command,
            ([f"--config={TINY}", f"--workdir={tmp_path}/mine"], "has no config.json of a run"),
            ([f"--config={TINY}", f"--workdir={tmp_path}/other"], "config (seed: 17 -> 0)"),
            imports=["semrl_jax.training.optimizer"],  # which the check of a config loads
        )
    assert {str(file.relative_to(tmp_path)) for file in tmp_path.glob("*/*")} == files.keys()


@pytest.mark.slow
def test_a_replica_that_does_not_fit_is_refused(replica, tmp_path):
    places = f"--workdir={tmp_path / 'run'}", f"--config.rollout.addresses={replica}"
    for flags, variables, message in (
        ((), {"SEMRL_ROLLOUT_TOKEN": "another"}, f"{replica} refuses the token"),
        (
            ("--config.rollout.max_response_tokens=57",),
            {},
            "serves max_response_tokens=56, but the trainer asks for 57",
        ),
    ):
        result = run("launch.train", f"--config={TINY}", *places, *flags, env=variables)
        assert_one_line(result, message)
        assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_rollout_names_the_mistake(tmp_path):
    config = f"--config={TINY}"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert_each_is_one_line(
            "launch.rollout",
            ([config, f"--port={taken.getsockname()[1]}"], "Address already in use"),
            ([config, "--host=0.0.0.0", "--port=0"], "needs TLS"),
            ([config, "--config.rollout.jax_chunk_tokens=0"], "jax_chunk_tokens=0 must be above 0"),
            ([config, "--engine=abacus"], "--engine=abacus: value should be one of <jax|"),
            ([config, "--config.rollout.token_file=/nowhere"], "token_file='/nowhere' cannot be r"),
            ([config, f"--config.rollout.token_file={sys.executable}"], "one printable ASCII word"),
            imports=["semrl_jax.rollout.building", "semrl_jax.rollout.server"],
        )
    result = run("launch.rollout", config, env={"SEMRL_ROLLOUT_TOKEN": ""})
    assert_one_line(result, "token is empty")


@pytest.mark.slow
def test_a_mistake_is_named_while_standard_input_is_watched():
    process = start(
        "launch.rollout", f"--config={TINY}", "--until_stdin_closes", "--port=0",
        "--tls_key=/nowhere", "--tls_certificate=/nowhere", stdin=subprocess.PIPE,
    )  # fmt: skip
    assert process.wait(timeout=60) == 2  # standard input is still open
    assert "='/nowhere' cannot be read" in process.communicate()[1]


@pytest.mark.slow
def test_sft_is_one_process(tmp_path):
    place = {"coordinator": "127.0.0.1:7000", "num_processes": 2, "process_id": 1}
    flags = [f"--config.distributed.{name}={value}" for name, value in place.items()]
    result = run("launch.sft", f"--config={TINY}", f"--workdir={tmp_path / 'run'}", *flags)
    assert_one_line(result, "one process makes a warm start, this is 1 of 2 (from settings)")
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_no_command_is_advised_to_install_pytorch():
    """transformers gives this advice at its import if PyTorch is missing; here it is simulated."""
    program = """
import importlib.util, os, sys
{first}
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *package: None if name == "torch" else real(name, *package)
from transformers import AutoTokenizer
"""
    variables = environment()
    # A test that imported one of our commands has set this variable in this process.
    variables.pop("TRANSFORMERS_NO_ADVISORY_WARNINGS", None)
    for first, advised in (("", True), ("import launch.train", False)):
        result = subprocess.run(
            [sys.executable, "-c", program.format(first=first)],
            cwd=ROOT, env=variables, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert ("PyTorch was not found" in result.stderr) == advised, result.stderr


def test_help_says_what_the_command_does():
    result = succeed("launch.train", "--help")
    assert "python -m launch.train" in result.stdout and "--config" in result.stdout
    assert not result.stderr
