"""Which package indexes make_env.sh asks; what would be installed is only noted."""

import os
import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).parents[3] / "third_party" / "vllm_patch" / "make_env.sh"
CPU_INDEX = "https://download.pytorch.org/whl/cpu"
# Makes an "environment" of itself; notes what pip is to install, and asks the real one of settings.
PYTHON = f"""#!/bin/sh
case "$*" in
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  "-m pip config list") exec {sys.executable} -m pip config list ;;
  "-m pip install"*) echo "$*" >> "$NOTES"; exit "$INSTALL_EXIT" ;;
esac
"""


@pytest.fixture
def make_env(tmp_path):
    """Runs the script with these pip variables; returns what pip was asked for, and stderr."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").write_text(PYTHON)
    (tmp_path / "bin" / "python3").chmod(0o755)
    notes = tmp_path / "notes"

    def run(kind, install_exit=0, **variables):
        notes.write_text("")
        plain = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
        result = subprocess.run(
            [SCRIPT, kind, tmp_path / "environment"],
            env={
                **plain, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}", "NOTES": str(notes),
                "INSTALL_EXIT": str(install_exit), "PIP_CONFIG_FILE": os.devnull, **variables,
            },
            capture_output=True, text=True, timeout=30,
        )  # fmt: skip
        assert (result.returncode == 0) == (install_exit == 0), result.stderr
        return notes.read_text().splitlines()[0], result.stderr

    return run


def test_torch_comes_from_the_index_of_cpu_builds(make_env):
    asked, _ = make_env("cpu")
    assert f"--extra-index-url {CPU_INDEX} -e" in asked and asked.endswith("vllm_patch[cpu]")


@pytest.mark.parametrize("variable", ["PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"])
def test_the_users_indexes_are_not_added_to(make_env, variable):
    asked, _ = make_env("cpu", **{variable: "https://mirror.example/simple"})
    assert "index" not in asked
    _, said = make_env("cpu", install_exit=1, **{variable: "https://mirror.example/simple"})
    assert CPU_INDEX in said.splitlines()[-1]


def test_on_a_gpu_nothing_is_said_of_cpu_builds(make_env):
    asked, _ = make_env("cuda")
    assert "index" not in asked and asked.endswith("vllm_patch[cuda]")
    _, said = make_env("cuda", install_exit=1)
    assert said.splitlines()[-1].endswith("vLLM could not be installed, see above.")
