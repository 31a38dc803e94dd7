"""A verifier in a process of its own: `python -m semrl_jax.rewards.worker`, started by the pool.

One JSON object a line on the standard input and output it was started with. The first line in
holds the settings and the parent's process id; the first line out is {"ready": true} or
{"problem": text}. Then every {"response", "reference"} in is answered by the fields of a `Verdict`.
Verifier code sees an empty standard input, and its prints go to standard error.

The process is started, never forked: it holds no lock, device or thread of the trainer.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from semrl_jax.errors import UserError
from semrl_jax.rewards.function import NonsenseError, as_verdict, load_function
from semrl_jax.rewards.math import answers_match, verify_math
from semrl_jax.rewards.verdict import Verdict, VerifierSettings, failed_verdict

MAX_ERROR_CHARS = 200


def main() -> int:
    """Serves verdicts until standard input ends."""
    requests, replies = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)

    def reply(fields: dict[str, Any]):
        replies.write(json.dumps(fields).encode() + b"\n")
        replies.flush()

    start = json.loads(requests.readline())
    _die_with_parent(start["parent_pid"])
    settings = VerifierSettings(**start["settings"])
    _limit_memory(settings.memory_limit_gib)
    try:
        verifier = build_verifier(settings)
    except UserError as e:
        reply({"problem": str(e)})
        return 1
    reply({"ready": True})
    worker_pid = os.getpid()
    for line in requests:
        request = json.loads(line)
        verdict = verifier(request["response"], request["reference"])
        if os.getpid() != worker_pid:
            os._exit(0)  # forked by the verifier and come back: two would answer one request
        reply(dataclasses.asdict(verdict))
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
        except (Exception, SystemExit) as e:
            error = f"exception: {type(e).__name__}: {e}"
        return failed_verdict(settings, response, " ".join(error.split())[:MAX_ERROR_CHARS])

    return guarded


def _limit_memory(limit_gib: float):
    """A sympy bomb then ends this process at worst; no core file of it is kept."""
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if limit_gib:
        limit = int(limit_gib * 2**30)
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        if hard != resource.RLIM_INFINITY:
            limit = min(limit, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _die_with_parent(parent_pid: int):
    """End of input ends an idle worker; this also ends one that computes when the trainer dies."""
    if sys.platform == "linux":
        import ctypes

        set_parent_death_signal = 1
        ctypes.CDLL(None).prctl(set_parent_death_signal, signal.SIGKILL)
    if os.getppid() != parent_pid:
        sys.exit(1)


if __name__ == "__main__":
    sys.exit(main())
