"""A verifier in a process of its own: `python -m semrl_jax.rewards.worker PARENT_PID`, by the pool.

One JSON object per line on the standard input and output it was started with. Every line in has an
`id` that cannot be guessed, and the line out that answers it has the same. The first line in holds
the settings; its answer is {"ready": true} or {"problem": text}. Then every {"response",
"reference"} is answered by the fields of a `Verdict`. Verifier code sees an empty standard input,
and its prints go to standard error.

The process is started, never forked: it holds no lock, device or thread of the trainer.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import os
import resource
import secrets
import sys
from collections.abc import Callable
from typing import Any

from semrl_jax.errors import UserError
from semrl_jax.rewards.function import NonsenseError, as_verdict, error_text, load_function
from semrl_jax.rewards.guard import fork_under_guard
from semrl_jax.rewards.math import answers_match, verify_math
from semrl_jax.rewards.verdict import Verdict, VerifierSettings, failed_verdict

MAX_ERROR_CHARS = 200


def main() -> int:
    """Serves verdicts until standard input ends."""
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

    # A process that the verifier forks must not take the next request, nor answer it.
    os.register_at_fork(after_in_child=leave_the_pipes)

    def reply(request: dict[str, Any], fields: dict[str, Any]):
        replies.write(json.dumps({"id": request["id"], **fields}).encode() + b"\n")
        replies.flush()

    start = json.loads(requests.readline())
    settings = VerifierSettings(**start["settings"])
    _limit_memory(settings.memory_limit_gib)
    try:
        verifier = build_verifier(settings)
    except UserError as e:
        reply(start, {"problem": str(e)})
        return 1
    reply(start, {"ready": True})
    for line in requests:
        request = json.loads(line)
        verdict = verifier(request["response"], request["reference"])
        if os.getpid() != worker_pid:
            os._exit(0)  # forked by the verifier and come back
        reply(request, dataclasses.asdict(verdict))
    return 0


def build_verifier(settings: VerifierSettings) -> Callable[[str, str], Verdict]:
    """Makes the function that answers a request; it returns a verdict whatever the text.

    Raises:
      UserError: if the user's function cannot be imported or called with two arguments.
    """
    if not settings.function:
        answers_match("\\frac{1}{2}", "0.3")  # imports sympy and builds the parser

        def verify(response: str, reference: str) -> Verdict:
            return verify_math(
                response,
                reference,
                mode=settings.mode,
                unboxed_penalty=settings.unboxed_penalty,
                max_answer_chars=settings.max_answer_chars,
            )
    else:
        function = load_function(settings.function)

        def verify(response: str, reference: str) -> Verdict:
            return as_verdict(function(response, reference), response)

    def guarded(response: str, reference: str) -> Verdict:
        try:
            return verify(response, reference)
        except NonsenseError as e:
            error = f"invalid: {e}"
        except BaseException as e:
            error = f"exception: {error_text(e)}"
        error = "".join(c if c.isprintable() else "?" for c in " ".join(error.split()))
        return failed_verdict(settings, response, error[:MAX_ERROR_CHARS])

    return guarded


def _limit_memory(limit_gib: float):
    """A sympy bomb then ends this process at worst; no core file of it is kept."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if limit_gib:
        limit = int(limit_gib * 2**30)
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        if hard != resource.RLIM_INFINITY:
            limit = min(limit, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _hidden(fd: int) -> int:
    """A duplicate at a random place, where code that writes to descriptors blindly misses it."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    limit = 4096 if limit == resource.RLIM_INFINITY else min(limit, 4096)
    return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, limit // 4 + secrets.randbelow(limit // 2))


if __name__ == "__main__":
    sys.exit(main())
