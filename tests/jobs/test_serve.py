"""A followed run: a newer checkpoint that cannot be read leaves the weights that are served."""

import asyncio
import shutil
import types

import pytest

from semrl_jax.jobs import serve


class Source(types.SimpleNamespace):
    def params(self, policy, mesh):
        if self.error:
            raise self.error
        return self.step


def source(step, error=None):
    return Source(name=f"run-step{step}", step=step, error=error, checkpoint=None)


def followed(monkeypatch, tmp_path, *sources):
    """What is said, the steps that were loaded, and how it ended."""
    (tmp_path / "checkpoints").mkdir(exist_ok=True)
    monkeypatch.setattr(serve, "CHECK_S", 0)
    found, said, loaded = iter(sources), [], []

    def newest(path, steps):
        try:
            return [next(found)]
        except StopIteration:
            raise KeyboardInterrupt from None  # the end of the test

    monkeypatch.setattr(serve, "find_policies", newest)

    class Server:
        async def load(self, version, tensors):
            loaded.append(version.step)

    policy = serve.Followed(str(tmp_path), said.append)
    ready = []
    with pytest.raises((KeyboardInterrupt, FileNotFoundError)) as ended:
        asyncio.run(policy.feed(Server(), lambda: ready.append(list(loaded)), None, None))
    return said, loaded, ready, ended.type


def test_a_checkpoint_that_is_removed_while_it_is_read(monkeypatch, tmp_path):
    gone = FileNotFoundError("checkpoints/2 is gone")
    sources = source(1), source(2, gone), source(1), source(3)
    said, loaded, ready, _ = followed(monkeypatch, tmp_path, *sources)
    assert loaded == [1, 3] and ready == [[1]]
    assert said == [
        "serves run-step1",
        "checkpoints/2 is gone The weights of run-step1 stay.",
        "serves run-step3",
    ]


def test_the_first_one_must_be_read(monkeypatch, tmp_path):
    gone = FileNotFoundError("checkpoints/1 is gone")
    said, loaded, ready, ended = followed(monkeypatch, tmp_path, source(1, gone))
    assert (said, loaded, ready, ended) == ([], [], [], FileNotFoundError)


def test_a_checkpoint_is_read_again_only_if_there_is_a_newer_one(monkeypatch, tmp_path):
    for step in (1, 2):
        (tmp_path / "checkpoints" / str(step)).mkdir(parents=True)
    reads = []

    def newest(path, steps):
        reads.append(path)
        made = source(2)
        made.checkpoint = tmp_path / "checkpoints" / "2"
        return [made]

    monkeypatch.setattr(serve, "find_policies", newest)
    policy = serve.Followed(str(tmp_path), lambda line: None)
    assert policy._newest() is policy.source and len(reads) == 1
    (tmp_path / "checkpoints" / "3").mkdir()
    policy._newest()
    assert len(reads) == 2
    shutil.rmtree(tmp_path)
    assert policy._newest() is policy.source
