"""The thread's work with a trainer whose models are numbers, and the names of weights."""

import concurrent.futures
import contextlib
import dataclasses
import json
import os
import shutil
import signal
import sqlite3
import threading
import types

import numpy as np
import pydantic
import pytest

from semrl_jax.support.safe_files import replacing_directory
from semrl_jax.tinker import serving, weights
from semrl_jax.tinker.futures import Futures, Request
from semrl_jax.tinker.requests import SaveForSampler, SaveWeights
from semrl_jax.tinker.work import Work
from tests.tinker.conftest import encoded

DATA = [([5, 6], [6, 7], {"weights": [1, 1]})]
LORA = types.SimpleNamespace(rank=4)


@dataclasses.dataclass
class Model:
    """A model whose passes each add 1 at the next step."""

    value: int = 0
    gradient: int | None = None
    seq: int = 0
    lora = LORA


class Trainer:
    fails = False

    def lora(self, wanted):
        return LORA

    def create(self, lora, seed):
        return Model()

    def passes(self, jobs):
        if self.fails:
            raise RuntimeError("no memory")
        for model, _ in jobs:
            model.gradient = (model.gradient or 0) + 1
        return [types.SimpleNamespace(logprobs=[np.zeros(2)], loss=0.0) for _ in jobs]

    def step(self, model, adam):
        model.value, model.gradient = model.value + (model.gradient or 0), None
        return {"value": float(model.value)}

    def save(self, model, path, optimizer=True):
        path.mkdir(parents=True)
        path.joinpath("model.json").write_text(json.dumps([model.value, model.seq]))

    def load(self, path, optimizer):
        value, seq = json.loads(path.joinpath("model.json").read_text())
        return Model(value, None, seq)


def test_a_model_that_cannot_be_made_again_is_not_used(tmp_path):
    trainer = Trainer()
    with contextlib.closing(Futures(tmp_path / "futures.sqlite3")) as futures:

        def started():
            return Work(futures, trainer, types.SimpleNamespace(limits=None), tmp_path)

        def done(work, kind, seq, body):
            request = Request(f"m:{seq}", kind, body, "m", seq)
            futures.add(request)
            (end,) = work._ends([request])
            futures.end(request, end)
            return end

        def trained(work, seq):
            done(work, "forward_backward", seq, encoded("m", seq, DATA))
            step = {"model_id": "m", "seq_id": seq + 1, "adam_params": {}}
            return done(work, "optim_step", seq + 1, json.dumps(step).encode())

        work, lora = started(), {"rank": 4, "seed": 1}
        new = {"session_id": "s", "model_seq_id": 0, "base_model": "x", "lora_config": lora}
        done(work, "create_model", 0, json.dumps(new).encode())
        trained(work, 1), trained(work, 3)
        work, trainer.fails = started(), True
        assert trained(work, 5).error == "RuntimeError: no memory"
        trainer.fails = False
        assert json.loads(trained(work, 7).result) == {"metrics": {"value": 3.0}}


def test_a_server_whose_thread_has_failed_ends(tmp_path, monkeypatch):
    """Its clients would ask again for ever; a supervisor starts it again."""

    @contextlib.contextmanager
    def open_work(config, workdir, name, futures):
        futures.add(Request("m:1", "optim_step", b"{}", "m", 1))
        limits = types.SimpleNamespace(name=name)
        work = Work(futures, Trainer(), types.SimpleNamespace(limits=limits), workdir)
        yield work
        work.close()

    def full(self, request, ended):
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(serving, "open_work", open_work)
    monkeypatch.setattr(Futures, "end", full)
    timer = threading.Timer(20.0, os.kill, (os.getpid(), signal.SIGTERM))
    timer.start()
    config = types.SimpleNamespace(model=types.SimpleNamespace(path="x"))
    place = {"host": "127.0.0.1", "port": 0, "tls_certificate": "", "tls_key": ""}
    options = {"workdir": tmp_path, "name": "x", "key": "tml-x", "announce": print}
    with pytest.raises(RuntimeError, match=f"kept in {tmp_path}: database or disk is full; make"):
        serving.serve(config, **options, **place)
    timer.cancel()


@pytest.mark.parametrize("name", ["unnamed-mine", "mine.writing", "mine.replaced"])
def test_names_of_the_server_itself_are_refused(name):
    for kind in (SaveWeights, SaveForSampler):
        with pytest.raises(pydantic.ValidationError, match="the server itself uses names"):
            kind(model_id="m", path=name)
        assert kind(model_id="m", path=f"my-{name}s").path


def test_a_path_that_is_too_long_does_not_exist(tmp_path):
    (tmp_path / "m" / weights.WEIGHTS).mkdir(parents=True)
    with pytest.raises(ValueError, match="does not exist on this server"):
        weights.find(tmp_path, weights.path_of("m", weights.WEIGHTS, "x" * 300))


def end_of(work, kind, body):
    request = Request(f"m:{kind}", kind, json.dumps(body).encode(), "m", 1)
    (end,) = work._ends([request])
    return end


def test_a_model_has_the_rank_of_the_weights_that_it_loaded(tmp_path):
    trainer = Trainer()
    directory = tmp_path / "m" / weights.WEIGHTS / "wide"
    trainer.save(Model(), directory)
    record = {"rank": 4, "user_metadata": {"of": "me"}}
    with contextlib.closing(Futures(tmp_path / "futures.sqlite3")) as futures:
        futures.put("model", "m", record)
        work = Work(futures, trainer, types.SimpleNamespace(limits=None), tmp_path)
        trainer.load = lambda path, optimizer: Wide()
        path = weights.path_of("m", weights.WEIGHTS, "wide")
        body = {"model_id": "m", "seq_id": 1, "path": path, "optimizer": False}
        assert not end_of(work, "load_weights", body).error
        assert futures.get("model", "m") == record | {"rank": 8}


class Wide(Model):
    lora = types.SimpleNamespace(rank=8)


class Replacing(Trainer):
    def save(self, model, path, optimizer=True):
        with replacing_directory(path) as staging:
            (staging / "model.json").touch()


def test_weights_can_be_saved_while_those_of_their_name_are_deleted(tmp_path, monkeypatch):
    """The deletion stands still in the middle, until the save is done or for half a second."""
    trainer, remove = Replacing(), shutil.rmtree
    entered, saved = threading.Event(), threading.Event()

    def slow(path):
        if threading.current_thread() is not threading.main_thread():
            entered.set(), saved.wait(0.5)
        remove(path)

    directory = tmp_path / "m" / weights.WEIGHTS / "a"
    trainer.save(Model(), directory)
    monkeypatch.setattr(shutil, "rmtree", slow)
    samples = types.SimpleNamespace(limits=None, forget=lambda path: None)
    with (
        contextlib.closing(Futures(tmp_path / "futures.sqlite3")) as futures,
        concurrent.futures.ThreadPoolExecutor() as threads,
    ):
        work = Work(futures, trainer, samples, tmp_path)
        work._models["m"] = Model()
        path = weights.path_of("m", weights.WEIGHTS, "a")
        deleted = threads.submit(weights.delete, tmp_path, path)
        assert entered.wait(10)
        end = end_of(work, "save_weights", {"model_id": "m", "seq_id": 1, "path": "a"})
        saved.set()
        deleted.result()
        assert not end.error
    assert [file.name for file in directory.parent.iterdir()] == ["a"]
