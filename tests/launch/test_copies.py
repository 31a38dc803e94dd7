"""Runs lose their disks and continue from a bucket of a local S3 server, bit for bit."""

import contextlib
import itertools
import os
import shutil
import signal
import socket
import subprocess
import sys
import time

import fsspec
import pytest

from semrl_jax.runs.checkpoint_files import checkpoint_problem
from semrl_jax.runs.copies import Store, StoreError
from tests.launch.comparison import assert_same_run
from tests.launch.conftest import TINY, start, succeed, xla_flags
from tests.launch.processes import finish, free_port, start_processes

pytestmark = pytest.mark.slow
NUM_STEPS = 6
ACCOUNT = {
    "AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true",
}  # fmt: skip
numbers = itertools.count()


def serve(*command, port):
    """Starts a server of Python on this machine, and waits until it listens."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([sys.executable, "-m", *command], **quiet)
    while True:
        assert process.poll() is None
        with contextlib.suppress(OSError), socket.create_connection(("localhost", port)):
            return process
        time.sleep(0.1)


@pytest.fixture(scope="module")
def server():
    """Sets the environment, also of processes that the tests start, to a server with a bucket."""
    port = free_port()
    process = serve("moto.server", "-H", "localhost", "-p", str(port), port=port)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (ACCOUNT | {"AWS_ENDPOINT_URL": f"http://localhost:{port}"}).items():
            patch.setenv(name, value)
        try:
            fsspec.filesystem("s3").mkdir("bucket")
            yield process
        finally:
            process.kill()
            process.wait()


@pytest.fixture
def bucket(server):
    return f"s3://bucket/run{next(numbers)}"


@pytest.fixture(params=["s3", "gs"])
def place(request, tmp_path, monkeypatch):
    """The address of a directory in a bucket of a store of each kind."""
    if request.param == "s3":
        yield request.getfixturevalue("bucket")
        return
    port = free_port()
    command = ["gcp_storage_emulator", "start", "--in-memory", "--default-bucket", "bucket"]
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://localhost:{port}")
    process = serve(*command, "--port", str(port), port=port)
    yield "gs://bucket/run"
    process.kill()
    process.wait()


def test_a_store_takes_and_gives_files(place, tmp_path):
    """Both kinds divide a large file into parts."""
    store, name = Store(place), "checkpoints/1/state/d/large"
    large, small, back = tmp_path / "large", tmp_path / "small", tmp_path / "deep" / "back"
    large.write_bytes(bytes(range(256)) * (101 * 2**20 // 256))
    small.write_bytes(b"x")
    store.check_writable()
    assert store.sizes() == {}
    store.put({name: large, "checkpoints/1/manifest.0.json": small, "rollouts/a": small})
    store.write("metrics.jsonl", b"{}\n")
    assert store.sizes("checkpoints/1") == {name: 101 * 2**20, "checkpoints/1/manifest.0.json": 1}
    store.get({name: back})
    assert back.read_bytes() == large.read_bytes()
    store.write("metrics.jsonl", b"{}\n{}\n")
    assert store.read("metrics.jsonl") == b"{}\n{}\n"
    for _ in range(2):
        store.remove_checkpoint(1)
        assert store.sizes() == {"rollouts/a": 1, "metrics.jsonl": 6}
    with pytest.raises(StoreError, match="FileNotFoundError"):
        store.read("nothing")


def wait_for_a_copy(url, processes, after=0):
    """Waits until the bucket has a whole checkpoint of a step from `after` on."""
    deadline = time.monotonic() + 900
    while True:
        manifests = [name for name in Store(url).sizes() if name.endswith("manifest.0.json")]
        if any(int(name.split("/")[1]) >= after for name in manifests):
            return
        assert time.monotonic() < deadline
        assert all(process.poll() is None for process in processes)
        time.sleep(0.1)


def kill(processes):
    for process in processes:
        process.send_signal(signal.SIGKILL)
    for process in processes:
        process.communicate()


@pytest.mark.soak
def test_a_killed_run_without_its_disk_continues_from_the_bucket(bucket, tmp_path):
    undisturbed, run = tmp_path / "undisturbed", tmp_path / "run"
    succeed("launch.train", f"--config={TINY}", f"--workdir={undisturbed}", timeout=900)
    flag = f"--config.checkpoints.copy_to={bucket}"
    process = start("launch.train", f"--config={TINY}", f"--workdir={run}", flag)
    wait_for_a_copy(bucket, [process], after=2)
    kill([process])
    shutil.rmtree(run)
    done = succeed("launch.train", f"--config={TINY}", f"--workdir={run}", flag, timeout=900)
    assert f"{run} is written from {bucket}" in done.stdout and "resumed" in done.stdout
    assert_same_run(run, undisturbed, NUM_STEPS)
    there = Store(bucket).sizes()  # the end of a run is copied too
    assert there["report.html"] == (run / "report.html").stat().st_size
    assert f"checkpoints/{NUM_STEPS}/manifest.0.json" in there


def test_two_disks_exchange_their_parts_of_a_checkpoint(tmp_path):
    """Process 0 has whole checkpoints. Both restore one after both disks are lost."""

    def both():
        port = free_port()
        one_device = {"XLA_FLAGS": xla_flags(1)}
        processes = [start("tests.runs.apart", i, port, tmp_path, env=one_device) for i in (0, 1)]
        found = finish(processes, 600)
        assert [code for code, _, _ in found] == [0, 0], found
        return [out.strip().splitlines()[-1] for _, out, _ in found]

    assert both() == ["restored 0"] * 2
    saved = tmp_path / "disk0" / "run" / "checkpoints" / "2"
    assert checkpoint_problem(saved) == ""
    assert {"ocdbt.process_0", "ocdbt.process_1"} < {path.name for path in saved.glob("state/*")}
    assert not list((tmp_path / "disk1" / "run" / "process1" / "checkpoints").iterdir())
    shutil.rmtree(tmp_path / "disk0")
    shutil.rmtree(tmp_path / "disk1")
    assert both() == ["restored 2"] * 2


@pytest.mark.soak
def test_processes_that_share_no_disk_continue_from_the_bucket(bucket, tmp_path):
    """Each has a directory of its own; all disks are lost."""
    num_steps = 3
    # On a busy machine, a process may be silent for longer than `start_processes` allows.
    flags = ("--config.distributed.heartbeat_timeout_s=120.0",
             f"--config.training.num_steps={num_steps}")  # fmt: skip
    undisturbed = tmp_path / "undisturbed"
    for code, _, err in finish(start_processes(undisturbed, 2, *flags), 900):
        assert code == 0, err

    def begin(attempt):
        directory = tmp_path / f"attempt{attempt}"
        flag = f"--config.checkpoints.copy_to={bucket}"
        own = {1: (f"--workdir={directory}/other/run",)}
        run = directory / "run"
        return run, start_processes(run, 2, *flags, flag, own_flags=own)

    _, processes = begin(1)
    wait_for_a_copy(bucket, processes, after=1)
    kill(processes)
    shutil.rmtree(tmp_path / "attempt1")
    run, processes = begin(2)
    found = finish(processes, 900)
    assert [code for code, _, _ in found] == [0, 0], found
    assert f"{run} is written from {bucket}" in found[0][1] and "resumed" in found[0][1]
    assert_same_run(run, undisturbed, num_steps)
    left = [path for path in (run.parent / "other").rglob("*") if path.is_file()]
    assert not [path for path in left if "checkpoints" in path.parts]  # they are with process 0


@pytest.mark.soak
def test_a_store_that_is_lost_does_not_end_the_run(server, bucket, tmp_path):
    def train(url):
        return start(
            "launch.train", f"--config={TINY}", f"--workdir={tmp_path}/run",
            f"--config.checkpoints.copy_to={url}",
        )  # fmt: skip

    def ends(process, message):
        out, err = process.communicate(timeout=300)
        assert process.returncode == 2, (out, err)
        assert message in err and len(err.strip().splitlines()) == 1
        assert not (tmp_path / "run").exists()

    ends(train("s3://nowhere/run"), "cannot be used (FileNotFoundError: The specified bucket")
    process = train(bucket)
    wait_for_a_copy(bucket, [process])
    os.kill(server.pid, signal.SIGSTOP)  # it answers nothing, until it is killed
    time.sleep(1)
    server.kill()
    out, err = process.communicate(timeout=900)
    assert process.returncode == 0, err
    assert "could not be copied" in out + err
    assert "never awaited" not in err
    with pytest.raises(StoreError):
        Store(bucket).sizes()
    shutil.rmtree(tmp_path / "run")
    ends(train(bucket), "cannot be used (")
