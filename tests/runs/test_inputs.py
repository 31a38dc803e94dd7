"""A run records the hash of its first weights, and later reads only samples of unchanged files."""

import concurrent.futures
import io
import os
import threading

import numpy as np
import pytest

from semrl_jax.cluster.peers import Peers
from semrl_jax.models import directory as model_files
from semrl_jax.runs.setup import record_inputs
from semrl_jax.runs.workdir import open_workdir
from tests.cases import refused

SIZE = 2 * 2**20
SAMPLES = model_files.NUM_SAMPLES * model_files.SAMPLE_BYTES  # per file, start and process


@pytest.fixture
def model(tmp_path):
    """Two files of weights with random content."""
    directory = tmp_path / "model"
    directory.mkdir()
    for name in ("a", "b"):
        values = np.random.default_rng(ord(name)).bytes(SIZE)
        (directory / f"{name}.safetensors").write_bytes(values)
    return directory


@pytest.fixture
def read_bytes(monkeypatch):
    """Bytes of weight files read so far, by thread."""
    count = {}

    class Counted(io.FileIO):
        def add(self, num_bytes):
            name = threading.current_thread().name
            count[name] = count.get(name, 0) + num_bytes
            return num_bytes

        def read(self, size=-1):
            content = super().read(size)
            self.add(len(content))
            return content

        def readinto(self, buffer):
            return self.add(super().readinto(buffer))

    monkeypatch.setattr(
        model_files, "open", lambda file, *_args, **_options: Counted(file), raising=False
    )
    return count


@pytest.fixture
def workdir(config, tmp_path):
    opened = open_workdir(str(tmp_path / "run"), config)
    yield opened
    opened.close()


def start(workdir, model, read_bytes):
    """The bytes that a start of one process reads."""
    read_bytes.clear()
    record_inputs(Peers(), workdir, {"data": "the same"}, str(model))
    return sum(read_bytes.values())


def test_unchanged_weights_are_read_once(workdir, model, read_bytes):
    assert start(workdir, model, read_bytes) == 2 * SIZE + 2 * SAMPLES
    assert start(workdir, model, read_bytes) == 2 * SAMPLES
    moved = model.rename(model.with_name("moved"))
    assert start(workdir, moved, read_bytes) == 2 * SAMPLES
    os.utime(moved / "a.safetensors")  # a copy with a new time: read, and equal
    assert start(workdir, moved, read_bytes) == 2 * SIZE + 2 * SAMPLES
    assert start(workdir, moved, read_bytes) == 2 * SAMPLES
    (workdir.path / "weights.json").write_text("{")  # incomplete
    assert start(workdir, moved, read_bytes) == 2 * SIZE + 2 * SAMPLES


def change_one_byte(model):
    with open(model / "b.safetensors", "r+b") as file:
        file.seek(SIZE // 3)
        old = file.read(1)[0]
        file.seek(SIZE // 3)
        file.write(bytes([old ^ 1]))


def change_all_but_the_time(model):
    """Changes the content and keeps the time, as in an image in which all files have one time."""
    file = model / "b.safetensors"
    time_ns = file.stat().st_mtime_ns
    file.write_bytes(np.random.default_rng(9).bytes(SIZE))
    os.utime(file, ns=(time_ns, time_ns))


def take_one_away(model):
    (model / "b.safetensors").unlink()


@pytest.mark.parametrize("change", [change_one_byte, change_all_but_the_time, take_one_away])
def test_other_weights_do_not_resume(change, workdir, model, read_bytes):
    start(workdir, model, read_bytes)
    change(model)
    for _ in range(2):  # a second attempt does not accept them
        refused("began with other weights", start, workdir, model, read_bytes)


def test_one_process_reads_all_weights_and_the_others_compare_samples(
    pair, workdir, model, tmp_path, read_bytes
):
    def of_both(*models):
        """Runs each process in a thread with its name."""
        with concurrent.futures.ThreadPoolExecutor(2) as pool:

            def one(index):
                threading.current_thread().name = f"process {index}"
                record_inputs(pair[index], workdir, {}, str(models[index]))

            return [done.exception() for done in concurrent.futures.wait(
                [pool.submit(one, index) for index in (0, 1)]
            ).done]  # fmt: skip

    assert of_both(model, model) == [None, None]
    assert read_bytes == {"process 0": 2 * SIZE + 2 * SAMPLES, "process 1": 2 * SAMPLES}
    other = tmp_path / "other"
    other.mkdir()
    for file in model.iterdir():
        (other / file.name).write_bytes(file.read_bytes()[::-1])
    errors = of_both(model, other)
    assert all("reads other weights than process" in str(error) for error in errors)
