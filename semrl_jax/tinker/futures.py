"""Requests and their results in a file, so that both survive a killed server.

A request that is sent again has the same id and is done once. The body of a training request is
kept until a snapshot of its model includes it: a new server does such requests again.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import sqlite3
import threading
import time
from typing import Any

from semrl_jax.support.errors import UserError
from semrl_jax.tinker import requests
from semrl_jax.tinker.messages import read_pass

KEPT_S = 24 * 3600.0  # of a result
_CLEAN_EVERY = 1000  # requests
REPEATED = ("forward_backward", "optim_step", "load_weights")  # what changes a model
_READERS = {
    "forward_backward": read_pass,
    "create_model": requests.CreateModel.model_validate_json,
    "optim_step": requests.OptimStep.model_validate_json,
    "save_weights": requests.SaveWeights.model_validate_json,
    "save_weights_for_sampler": requests.SaveForSampler.model_validate_json,
    "load_weights": requests.LoadWeights.model_validate_json,
    "sample": requests.Sample.model_validate_json,
}
_TABLES = """
CREATE TABLE IF NOT EXISTS requests (
  id TEXT PRIMARY KEY, kind TEXT, model TEXT, seq INTEGER, body BLOB, result BLOB,
  error TEXT, is_ended INTEGER DEFAULT 0, time REAL
);
CREATE INDEX IF NOT EXISTS of_model ON requests (model, seq);
CREATE TABLE IF NOT EXISTS records (kind TEXT, id TEXT, content TEXT, PRIMARY KEY (kind, id));
"""


@dataclasses.dataclass(frozen=True)
class Request:
    """A request whose answer is fetched later."""

    id: str
    kind: str
    body: bytes
    model: str = ""  # "" for a sample
    seq: int = 0  # of the model's requests

    @functools.cached_property
    def content(self) -> Any:
        """The decoded body; raises ValueError if it is malformed."""
        return _READERS[self.kind](self.body)


@dataclasses.dataclass(frozen=True)
class Ended:
    """How a request ended: `result` if `error` is ""."""

    kind: str
    result: bytes = b""
    error: str = ""
    is_users: bool = False  # whether the request caused the error


class Futures:
    """The file. Threads may share it."""

    def __init__(self, path: pathlib.Path):
        try:
            self._database = sqlite3.connect(
                path, check_same_thread=False, isolation_level=None, timeout=1.0
            )
            self._database.execute("PRAGMA locking_mode=EXCLUSIVE")  # one server
            self._database.execute("PRAGMA journal_mode=WAL")
            self._database.execute("PRAGMA synchronous=NORMAL")
            self._database.executescript(_TABLES)
        except sqlite3.Error as error:
            raise UserError(
                f"{path} cannot be used: {error}. Take another --workdir, or remove the file."
            ) from None
        self._lock = threading.Lock()
        self._num_added = 0

    def add(self, request: Request) -> bool:
        """Keeps a request; False if there is one with its id."""
        self._num_added += 1
        if self._num_added % _CLEAN_EVERY == 1:
            old = time.time() - KEPT_S
            self._run("DELETE FROM requests WHERE is_ended AND time < ? AND body = x''", old)
        fields = vars(request)
        row = [fields[name] for name in ("id", "kind", "model", "seq", "body")]
        return bool(
            self._run(
                "INSERT OR IGNORE INTO requests (id, kind, model, seq, body, time) "
                "VALUES (?, ?, ?, ?, ?, ?)",
                *row,
                time.time(),
            ).rowcount
        )

    def find(self, request_id: str) -> Ended | None:
        """How a request ended, or None; KeyError for one that is not known."""
        found = self._run(
            "SELECT is_ended, kind, result, error FROM requests WHERE id = ?", request_id
        ).fetchone()
        if found is None:
            raise KeyError(request_id)
        is_ended, kind, result, error = found
        if not is_ended:
            return None
        return Ended(kind, result, **json.loads(error))

    def end(self, request: Request, ended: Ended) -> None:
        text = json.dumps({"error": ended.error, "is_users": ended.is_users})
        body = request.body if _is_repeated(request, ended) else b""
        self._run(
            "UPDATE requests SET is_ended = 1, result = ?, error = ?, body = ? WHERE id = ?",
            ended.result, text, body, request.id,
        )  # fmt: skip

    def pending(self) -> list[Request]:
        """The requests without an end, in the order in which they came."""
        return self._requests("NOT is_ended ORDER BY rowid")

    def since(self, model: str, seq: int) -> list[Request]:
        """The ended training requests of a model with a number above `seq`, in their order."""
        condition = "is_ended AND model = ? AND seq > ? AND body != x'' ORDER BY seq"
        return self._requests(condition, model, seq)

    def forget(self, model: str, seq: int) -> None:
        """Removes the bodies that a snapshot has made needless."""
        self._run(
            "UPDATE requests SET body = x'' WHERE is_ended AND model = ? AND seq <= ?", model, seq
        )

    def put(self, kind: str, name: str, content: dict[str, Any]) -> None:
        """Keeps a record; an earlier one with this name stays."""
        row = kind, name, json.dumps(content)
        self._run("INSERT OR IGNORE INTO records VALUES (?, ?, ?)", *row)

    def change(self, kind: str, name: str, **fields: Any) -> None:
        """Changes fields of a record."""
        content = json.dumps(self.get(kind, name) | fields)
        self._run("UPDATE records SET content = ? WHERE kind = ? AND id = ?", content, kind, name)

    def get(self, kind: str, name: str) -> dict[str, Any]:
        """A record; KeyError if there is none."""
        found = self._run(
            "SELECT content FROM records WHERE kind = ? AND id = ?", kind, name
        ).fetchone()
        if found is None:
            raise KeyError(name)
        return json.loads(found[0])

    def names(self, kind: str) -> list[str]:
        """The names of all records of a kind, the newest first."""
        query = "SELECT id FROM records WHERE kind = ? ORDER BY rowid DESC"
        return [name for (name,) in self._run(query, kind).fetchall()]

    def last_time(self, model: str) -> float | None:
        """When the last request of a model came; None if none is kept."""
        query = "SELECT MAX(time) FROM requests WHERE model = ?"
        return self._run(query, model).fetchone()[0]

    def close(self) -> None:
        with self._lock:
            self._database.close()

    def _requests(self, condition: str, *values: Any) -> list[Request]:
        query = f"SELECT id, kind, body, model, seq FROM requests WHERE {condition}"
        return [Request(*row) for row in self._run(query, *values).fetchall()]

    def _run(self, query: str, *values: Any) -> sqlite3.Cursor:
        with self._lock:
            return self._database.execute(query, values)


def _is_repeated(request: Request, ended: Ended) -> bool:
    """Whether a server that starts from an earlier snapshot has to do the request again.

    A pass adds to a gradient at its end only. One that failed, or went forward only, left nothing.
    """
    if request.kind == "forward_backward":
        return not ended.error and request.content.is_backward
    return request.kind in REPEATED
