"""Work that ends with one agreed status, so that no process enters a collective alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from semrl_jax.cluster.peers import PeerFailed, Processes
from semrl_jax.support.errors import Preempted, UserError

T = TypeVar("T")


class Retry(RuntimeError):
    """All processes must do the phase again; the message says why."""


# How a process's part ended, worst first. A mistake is reported rather than its consequences.
KINDS = ("mistake", "failed", "preempted", "retry", "done")
KIND_OF = {UserError: "mistake", Preempted: "preempted", Retry: "retry"}  # of others: "failed"


def run_phase(peers: Processes, phase: str, work: Callable[[], T]) -> T:
    """Runs `work` in this process and waits for all others; every process must call it.

    Raises UserError, Preempted, Retry in every process, if it was raised in one; Exception in the
    process where `work` raised it. The others raise PeerFailed.
    """
    if peers.count == 1:
        return work()
    value, error, outcome = None, None, {"kind": "done", "text": ""}
    try:
        with peers.phase(phase):
            value = work()
    except (Exception, Preempted) as caught:
        error = caught
        kind = next((kind for base, kind in KIND_OF.items() if isinstance(caught, base)), "failed")
        outcome = {"kind": kind, "text": str(caught) or type(caught).__name__}
    outcomes = peers.gather(phase, outcome)
    index, worst = min(
        enumerate(outcomes), key=lambda pair: (KINDS.index(pair[1]["kind"]), pair[0])
    )
    if worst["kind"] == "done":
        return value
    if error is None or outcome["kind"] != worst["kind"]:
        kind, text = worst["kind"], worst["text"]
        error = PeerFailed(f"process {index} failed in phase {phase!r}: {text}")
        if kind == "preempted":
            error = Preempted(text)
        elif kind != "failed":
            error = (UserError if kind == "mistake" else Retry)(f"process {index}: {text}")
    error.agreed = True
    raise error


def is_agreed(error: BaseException) -> bool:
    """Whether every process has raised this error or its counterpart."""
    return getattr(error, "agreed", False)


def on_first(peers: Processes, phase: str, work: Callable[[], Any]) -> Any:
    """Runs `work` in process 0; its value, which JSON can hold, in all. Raises as `run_phase`."""
    if peers.count == 1:
        return work()
    found = run_phase(peers, phase, lambda: work() if peers.index == 0 else None)
    return peers.gather(phase, found)[0]
