"""The messages of make_env.sh if nothing can be installed; a fake pip records its calls."""

import os
import pathlib
import subprocess

import pytest

SCRIPT = pathlib.Path(__file__).parents[3] / "third_party" / "vllm_patch" / "make_env.sh"
# Stands for the environment: records what pip should install, and fails.
PYTHON = """#!/bin/sh
case "$*" in
  "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
  "-m pip install"*) echo "$*" >> "$NOTES"; exit 1 ;;
esac
"""


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_only_the_cpu_build_is_told_of_its_index(kind, tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").write_text(PYTHON)
    (tmp_path / "bin" / "python3").chmod(0o755)
    notes = tmp_path / "notes"
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    result = subprocess.run(
        [SCRIPT, kind, tmp_path / "environment"],
        env=os.environ | {"PATH": path, "NOTES": str(notes)},
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert result.returncode == 1
    assert notes.read_text().endswith(f"vllm_patch[{kind}]\n")
    said = result.stderr.splitlines()[-1]
    assert "vLLM could not be installed, see above." in said
    assert ("PIP_EXTRA_INDEX_URL" in said) == (kind == "cpu")
