"""A verifier in its own process: the pool runs `python -m semrl_jax.rewards.worker`.

Its arguments are the parent's process id and the cores to use, such as 0,1 ("" for any). It reads
and writes one JSON object per line on its standard input and output. Every request has an `id` that
cannot be guessed, and its reply has the same `id`. The first request has the "settings" of each
verifier and the "field" of the config that names them, and its reply is {"ready": true,
"takes_row": [bool, ...]} or {"problem": text}. Every later request has "verifier" (an index),
"response", "reference" and "columns" (the row of the prompt, a JSON object as text, or ""), and its
reply has the fields of a `Verdict` without `parts`. For verifier code, standard input is empty, and
prints go to standard error.

The process is started, not forked: it has no lock, device or thread of the trainer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import resource
import secrets
import sys
from collections.abc import Callable
from typing import Any

from semrl_jax.rewards.function import (
    NonsenseError,
    as_verdict,
    error_text,
    load_builtin,
    load_function,
)
from semrl_jax.rewards.guard import fork_under_guard
from semrl_jax.rewards.verdict import Verdict, VerifierSettings, failed_verdict
from semrl_jax.support.errors import UserError

MAX_ERROR_CHARS = 200


def main() -> int:
    """Serves verdicts until standard input ends."""
    if sys.argv[2]:
        with contextlib.suppress(OSError):  # the system has moved the parent to other cores
            os.sched_setaffinity(0, map(int, sys.argv[2].split(",")))
    fork_under_guard(int(sys.argv[1]))
    requests, replies = os.fdopen(_hidden(0), "rb"), os.fdopen(_hidden(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    worker_pid = os.getpid()

    def leave_the_pipes():
        null = os.open(os.devnull, os.O_RDWR)
        for file in (requests, replies):
            os.dup2(null, file.fileno(), inheritable=False)
        os.close(null)

    # A process that the verifier forks must not read or answer the next request.
    os.register_at_fork(after_in_child=leave_the_pipes)

    def reply(request: dict[str, Any], fields: dict[str, Any]):
        replies.write(json.dumps({"id": request["id"], **fields}).encode() + b"\n")
        replies.flush()

    start = json.loads(requests.readline())
    settings = [VerifierSettings(**fields) for fields in start["settings"]]
    _limit_memory(settings[0].memory_limit_gib)
    try:
        built = [build_verifier(each, start["field"]) for each in settings]
    except UserError as e:
        reply(start, {"problem": str(e)})
        return 1
    reply(start, {"ready": True, "takes_row": [takes_row for _, takes_row in built]})
    for line in requests:
        request = json.loads(line)
        columns = json.loads(request["columns"] or "{}")  # a new dict, which it may change
        verifier, _ = built[request["verifier"]]
        verdict = verifier(request["response"], request["reference"], columns)
        if os.getpid() != worker_pid:
            os._exit(0)  # the verifier forked, and this is the child
        fields = dataclasses.asdict(verdict)
        del fields["parts"]
        reply(request, fields)
    return 0


def build_verifier(
    settings: VerifierSettings, field: str = "rewards.function"
) -> tuple[Callable[[str, str, dict[str, Any]], Verdict], bool]:
    """Makes the function of (response, reference, row) that answers a request.

    It returns a verdict for every text. The second result is whether it uses the row. `field` of
    the config names the verifier. Raises UserError if a user's function cannot be imported or
    called.
    """
    if settings.is_users:
        function, takes_row = load_function(settings.function, field)

        def verify(response: str, reference: str, columns: dict[str, Any]) -> Verdict:
            return as_verdict(function(response, reference, columns), response)
    else:
        module, takes_row = load_builtin(settings.function, field)
        if hasattr(module, "prepare"):
            module.prepare()

        def verify(response: str, reference: str, columns: dict[str, Any]) -> Verdict:
            row = {"row": columns} if takes_row else {}
            return module.verify(response, reference, settings=settings, **row)

    def guarded(response: str, reference: str, columns: dict[str, Any]) -> Verdict:
        try:
            return verify(response, reference, columns)
        except NonsenseError as e:
            error = f"invalid: {e}"
        except BaseException as e:
            error = f"exception: {error_text(e)}"
        error = "".join(c if c.isprintable() else "?" for c in " ".join(error.split()))
        return failed_verdict(settings, response, error[:MAX_ERROR_CHARS])

    return guarded, takes_row


def _limit_memory(limit_gib: float):
    """Limits the address space of this process, and writes no core file."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if limit_gib:
        limit = int(limit_gib * 2**30)
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        if hard != resource.RLIM_INFINITY:
            limit = min(limit, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _hidden(fd: int) -> int:
    """A duplicate with a random number, which code that guesses descriptors does not find."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    limit = 4096 if limit == resource.RLIM_INFINITY else min(limit, 4096)
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, limit // 4 + secrets.randbelow(limit // 2))


if __name__ == "__main__":
    sys.exit(main())
