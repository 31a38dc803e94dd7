"""Routes of the SDK's RestClient: training runs, their checkpoints, and sessions."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Sequence
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request

from semrl_jax.tinker import weights
from semrl_jax.tinker.futures import Futures
from semrl_jax.tinker.requests import Page

OWNER = "local"  # of every run: all clients have one key
Answer = Callable[[Request], dict[str, Any] | None]


class Listing:
    """Answers from the directories of weights and the file of requests; its functions may block.

    Args:
      root: has a folder for each model.
      name: of the base.
    """

    def __init__(self, futures: Futures, root: pathlib.Path, name: str):
        self._futures, self._root, self._name = futures, root, name

    def functions(self) -> dict[tuple[str, str], Answer]:
        """The functions by method and path."""
        of_run = "training_runs/{model_id}"
        return {
            ("GET", "training_runs"): self._runs,
            ("GET", of_run): self._run,
            ("GET", of_run + "/checkpoints"): self._checkpoints_of_run,
            ("DELETE", of_run + "/checkpoints/{folder}/{name}"): self._delete,
            ("GET", "checkpoints"): self._checkpoints,
            ("GET", "sessions"): self._sessions,
            ("GET", "sessions/{session_id}"): self._session,
        }

    def _runs(self, request: Request) -> dict[str, Any]:
        models, cursor = _page(request, self._futures.names("model"))
        return {"training_runs": [self._described(model) for model in models], "cursor": cursor}

    def _run(self, request: Request) -> dict[str, Any]:
        return self._described(request.path_params["model_id"])

    def _checkpoints_of_run(self, request: Request) -> dict[str, Any]:
        model = request.path_params["model_id"]
        known(self._futures, "model", model)
        return {"checkpoints": weights.checkpoints(self._root, model)}

    def _checkpoints(self, request: Request) -> dict[str, Any]:
        found = [
            checkpoint
            for model in self._futures.names("model")
            for checkpoint in weights.checkpoints(self._root, model)
        ]
        found, cursor = _page(request, weights.newest_first(found))
        return {"checkpoints": found, "cursor": cursor}

    def _delete(self, request: Request) -> None:
        model, folder, name = (request.path_params[key] for key in ("model_id", "folder", "name"))
        try:
            weights.delete(self._root, weights.path_of(model, folder, name))
        except ValueError as error:
            raise HTTPException(404, str(error)) from None

    def _sessions(self, request: Request) -> dict[str, Any]:
        return {"sessions": _page(request, self._futures.names("session"))[0]}

    def _session(self, request: Request) -> dict[str, Any]:
        session = request.path_params["session_id"]
        content = known(self._futures, "session", session)
        runs, samplers = (
            [name for name in self._futures.names(kind) if name.startswith(f"{session}:")]
            for kind in ("model", "sampler")
        )
        return {"training_run_ids": runs, "sampler_ids": samplers, **content}

    def _described(self, model: str) -> dict[str, Any]:
        """A model as the SDK's `TrainingRun`."""
        record = known(self._futures, "model", model)
        last: dict[str, Any] = {}
        for checkpoint in weights.checkpoints(self._root, model):  # the newest first
            last.setdefault(checkpoint["checkpoint_type"], checkpoint)
        seconds = self._futures.last_time(model) or self._root.joinpath(model).stat().st_mtime
        return {
            "training_run_id": model,
            "base_model": self._name,
            "model_owner": OWNER,
            "is_lora": True,
            "corrupted": False,
            "lora_rank": record["rank"],
            "last_request_time": weights.timestamp(seconds),
            "last_checkpoint": last.get("training"),
            "last_sampler_checkpoint": last.get("sampler"),
            "user_metadata": record.get("user_metadata"),
        }


def known(futures: Futures, kind: str, name: str) -> dict[str, Any]:
    """A record; raises HTTPException if there is none."""
    try:
        return futures.get(kind, name)
    except KeyError:
        raise HTTPException(404, f"{kind} {name!r:.80} does not exist here.") from None


def _page(request: Request, found: Sequence[Any]) -> tuple[Sequence[Any], dict[str, int]]:
    """The part that a request asks for, and the SDK's `Cursor`."""
    page = Page.model_validate(dict(request.query_params))
    cursor = {**page.model_dump(), "total_count": len(found)}
    return found[page.offset : page.offset + page.limit], cursor
