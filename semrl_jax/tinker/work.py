"""The thread that trains and samples: one request after the other, those alike together."""

from __future__ import annotations

import collections
import contextlib
import json
import logging
import pathlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from semrl_jax.support.safe_files import remove
from semrl_jax.tinker import weights
from semrl_jax.tinker.futures import Ended, Futures, Request
from semrl_jax.tinker.messages import encode_output
from semrl_jax.tinker.samples import Samples, number_of
from semrl_jax.tinker.training import Trained, Trainer
from semrl_jax.tinker.weights import SAMPLERS, SNAPSHOTS, UNNAMED, WEIGHTS

_log = logging.getLogger(__name__)

SNAPSHOT_S = 20.0  # least time between two snapshots of a model
KEPT_SAMPLERS = 16  # unnamed sampler weights of a model
MAX_RESPONSES = 512  # sampled in one call
CLOSE_S = 10.0
MAX_TOGETHER = 8  # models whose passes are one program
MAX_MODELS = 32  # in memory; the one that was not used for longest is read again when it is needed


class Work:
    """Does requests in a thread, and keeps their results.

    Args:
      directory: has a folder for each model.

    Attributes:
      on_end: called with the id of a request that has ended, in the thread.
      on_failure: called in the thread if it cannot go on.
      failure: why it cannot, or None.
    """

    def __init__(
        self, futures: Futures, trainer: Trainer, samples: Samples, directory: pathlib.Path
    ):
        self._futures, self._trainer, self._samples = futures, trainer, samples
        self.directory, self.limits = directory, samples.limits
        self.on_end: Callable[[str], None] = lambda request_id: None
        self.on_failure: Callable[[], None] = lambda: None
        self.failure: Exception | None = None
        self._models: dict[str, Trained] = {}
        self._saved: dict[str, float] = {}  # time of a model's last snapshot
        self._queue: collections.deque[Request] = collections.deque(futures.pending())
        self._again = {request.id for request in self._queue}  # perhaps partly done before
        self._changed = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="tinker", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def add(self, request: Request) -> None:
        with self._changed:
            self._queue.append(request)
            self._changed.notify()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def size(self) -> tuple[int, int]:
        """Number and bytes of the requests that wait."""
        with self._changed:
            return len(self._queue), sum(len(request.body) for request in self._queue)

    def close(self) -> None:
        """Ends soon; the next server does what is not done."""
        with self._changed:
            self._is_closed = True
            self._changed.notify()
        if self._thread.is_alive():
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        try:
            while jobs := self._take():
                ends = self._ends(jobs)
                if self._is_closed:  # the next server does them again
                    return
                for job, end in zip(jobs, ends, strict=True):
                    self._futures.end(job, end)
                    self.on_end(job.id)
        except Exception as error:  # of the file of requests, such as a full disk
            self.failure = error
            self.on_failure()

    def _ends(self, jobs: Sequence[Request]) -> list[Ended]:
        """Does requests of one key; if that fails, each by itself."""
        try:
            if jobs[0].kind == "sample":
                results = self._samples.sample(jobs)
            elif jobs[0].kind == "forward_backward":
                results = self._passes(jobs)
            else:
                results = [self._do(jobs[0])]
            return [Ended(job.kind, result) for job, result in zip(jobs, results, strict=True)]
        except Exception as error:
            if len(jobs) > 1:
                return [self._ends([job])[0] for job in jobs]
            return [_failure(jobs[0].kind, error)]

    def _take(self) -> list[Request]:
        """The next request and others that can be done with it; empty once this is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._queue or self._is_closed)
            if self._is_closed:
                return []
            found, rest = [self._queue.popleft()], []
            key, busy, size = self._key(found[0]), {found[0].model}, 1
            while self._queue and key is not None:
                request = self._queue.popleft()
                is_alike = request.kind == found[0].kind and self._key(request) == key
                if request.kind == "sample":
                    size += request.content.num_samples if is_alike else 0
                    is_alike &= size < MAX_RESPONSES
                else:  # after the earlier requests of its model
                    is_alike &= request.model not in busy and len(found) < MAX_TOGETHER
                    busy.add(request.model)
                (found if is_alike else rest).append(request)
            self._queue.extend(rest)
            return found

    def _key(self, request: Request) -> Any:
        """Requests of one key can be done together; None: alone."""
        try:
            if request.kind == "sample":
                return self._samples.key(request.content)
            if request.kind == "forward_backward" and request.model in self._models:
                return self._models[request.model].lora, request.content.kind
        except (ValueError, KeyError):  # told when it is done
            pass
        return None

    def _do(self, request: Request) -> bytes:
        """A request of one model other than a pass; returns what its future becomes."""
        content, model = request.content, request.model
        if request.kind == "create_model":
            lora = self._trainer.lora(content.lora_config)
            seed = content.lora_config.seed
            seed = number_of(model) if seed is None else seed
            self._begin(request, self._trainer.create(lora, seed))
            return _json(model_id=model)
        if request.kind == "load_weights":
            self._load(request)
            return _json(path=content.path, model_id=model)
        trained = self._model(model)
        if request.kind == "optim_step":
            metrics = {}
            if request.seq > trained.seq:  # else a snapshot has this step
                metrics = self._step(trained, request)
                self._snapshot(model, trained)
            return _json(metrics=metrics)
        folder, name = WEIGHTS, content.path
        if request.kind == "save_weights_for_sampler":
            folder, name = SAMPLERS, content.path or f"{UNNAMED}{request.seq:08}"
        self._save(trained, request, folder, name)
        path = weights.path_of(model, folder, name)
        if content.path is not None:
            return _json(path=path)
        session, number = model.partition(":train:")[0], content.sampling_session_seq_id
        sampler = f"{session}:sample:{number}"
        self._futures.put("sampler", sampler, {"model_path": path})
        for old in sorted((self.directory / model / folder).glob(f"{UNNAMED}*"))[:-KEPT_SAMPLERS]:
            remove(old)
        return _json(sampling_session_id=sampler)

    def _passes(self, jobs: Sequence[Request]) -> list[bytes]:
        """The passes of several models."""
        pairs = [(self._model(job.model), job.content) for job in jobs]
        found = self._trainer.passes(pairs)
        return [encode_output(each.logprobs, {"loss:sum": each.loss}) for each in found]

    def _step(self, trained: Trained, request: Request) -> dict[str, float]:
        metrics = self._trainer.step(trained, request.content.adam_params)
        trained.seq = request.seq
        return metrics

    def _load(self, request: Request) -> None:
        directory = weights.find(self.directory, request.content.path)
        found = self._trainer.load(directory, optimizer=request.content.optimizer)
        found.seq = request.seq
        self._begin(request, found)

    def _begin(self, request: Request, trained: Trained) -> None:
        """A new model, or an earlier one with other weights."""
        model, metadata = request.model, request.content.user_metadata
        self._keep(model, trained)
        rank = trained.lora.rank
        self._futures.put("model", model, {"rank": rank, "user_metadata": metadata})
        self._futures.change("model", model, rank=rank)  # of an earlier record, which stays
        self._snapshot(model, trained, always=True)

    def _save(self, trained: Trained, request: Request, folder: str, name: str) -> None:
        path = self.directory / request.model / folder / name
        may_replace = getattr(request.content, "overwrite", False) or request.id in self._again
        with weights.changing:
            if path.exists() and request.content.path is not None and not may_replace:
                raise ValueError(f"path={name!r} exists already; choose another, or set overwrite.")
            self._trainer.save(trained, path, optimizer=folder == WEIGHTS)
        self._samples.forget(path)

    def _snapshot(self, model: str, trained: Trained, always: bool = False) -> None:
        """Saves a model without a gradient, from which another server goes on."""
        if not always and time.monotonic() - self._saved.get(model, 0.0) < SNAPSHOT_S:
            return
        path = self.directory / model / SNAPSHOTS / f"{trained.seq:012}"
        if not path.exists():
            self._trainer.save(trained, path)
        self._saved[model] = time.monotonic()
        self._futures.forget(model, trained.seq)
        for other in path.parent.iterdir():
            if other != path:
                remove(other)

    def _model(self, model: str) -> Trained:
        """A model; that of an earlier server as it was when that server ended."""
        if model not in self._models:
            folder = self.directory / model / SNAPSHOTS
            found = sorted(folder.glob("[0-9]*[0-9]")) if folder.is_dir() else []
            if not found:
                raise ValueError(f"model_id={model!r:.80} does not exist on this server.")
            trained = self._trainer.load(found[-1], optimizer=True)
            self._keep(model, trained)
            try:
                for request in self._futures.since(model, trained.seq):
                    self._repeat(request)
            except BaseException:
                del self._models[model]  # it lacks steps
                raise
        self._models[model] = self._models.pop(model)  # the last one used is last
        return self._models[model]

    def _keep(self, model: str, trained: Trained) -> None:
        self._models[model] = trained
        for old in list(self._models)[:-MAX_MODELS]:
            forgotten = self._models.pop(old)
            if forgotten.gradient is None:  # else its passes are repeated
                self._snapshot(old, forgotten, always=True)

    def _repeat(self, request: Request) -> None:
        """Changes a model as an earlier server did."""
        trained = self._models[request.model]
        with contextlib.suppress(ValueError):  # as then
            if request.kind == "forward_backward" and request.content.is_backward:
                self._trainer.passes([(trained, request.content)])
            elif request.kind == "optim_step":
                self._step(trained, request)
            elif request.kind == "load_weights":
                self._load(request)


def _json(**values: Any) -> bytes:
    return json.dumps(values).encode()


def _failure(kind: str, error: Exception) -> Ended:
    is_users = isinstance(error, ValueError | KeyError)
    if not is_users:
        _log.error("a request of kind %s failed", kind, exc_info=error)
    text = " ".join(str(error).split())[:1000] or type(error).__name__
    return Ended(
        kind, error=text if is_users else f"{type(error).__name__}: {text}", is_users=is_users
    )
