"""A verifier in its own process: the pool runs `python -m semrl_jax.rewards.verifier_worker`.

It reads and writes one JSON object per line, as `support.isolation` says. The first request has the
"settings" of each verifier and the "field" of the config that names them, and its reply is
{"ready": true, "takes_row": [bool, ...]} or {"problem": text}. Every later request has "verifier"
(an index), "response", "reference" and "columns" (the row of the prompt, a JSON object as text, or
""), and its reply has the fields of a `Verdict` without `parts`. For verifier code, standard input
is empty, and prints go to standard error.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from semrl_jax.rewards.function import NonsenseError, as_verdict, load_builtin, load_function
from semrl_jax.rewards.verdict import Verdict, VerifierSettings, failed_verdict
from semrl_jax.support.errors import UserError
from semrl_jax.support.isolation import (
    answer,
    begin_worker,
    error_line,
    error_text,
    hidden,
    keep_from_children,
    leave_standard_streams,
    limit_memory,
)


def main() -> int:
    """Serves verdicts until standard input ends."""
    begin_worker()
    requests, replies = os.fdopen(hidden(0), "rb"), os.fdopen(hidden(1), "wb")
    leave_standard_streams()
    keep_from_children(requests, replies)
    worker_pid = os.getpid()
    start = json.loads(requests.readline())
    settings = [VerifierSettings(**fields) for fields in start["settings"]]
    limit_memory(settings[0].memory_limit_gib)
    try:
        built = [build_verifier(each, start["field"]) for each in settings]
    except UserError as e:
        answer(replies, start, {"problem": str(e)})
        return 1
    answer(replies, start, {"ready": True, "takes_row": [takes_row for _, takes_row in built]})
    for line in requests:
        request = json.loads(line)
        columns = json.loads(request["columns"] or "{}")  # a new dict, which it may change
        verifier, _ = built[request["verifier"]]
        verdict = verifier(request["response"], request["reference"], columns)
        if os.getpid() != worker_pid:
            os._exit(0)  # the verifier forked, and this is the child
        fields = dataclasses.asdict(verdict)
        del fields["parts"]
        answer(replies, request, fields)
    return 0


def build_verifier(
    settings: VerifierSettings, field: str = "rewards.function"
) -> tuple[Callable[[str, str, dict[str, Any]], Verdict], bool]:
    """Makes the function of (response, reference, row) that answers a request.

    It returns a verdict for every text. The second result is whether it uses the row. UserError: a
    user's function, named by `field` of the config, cannot be imported or called.
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
            error = error_line("invalid", e)
        except BaseException as e:
            error = error_line("exception", error_text(e))
        return failed_verdict(settings, response, error)

    return guarded, takes_row


if __name__ == "__main__":
    sys.exit(main())
