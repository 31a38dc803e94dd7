"""A pool of verifier processes with a hard deadline on every response.

Each slot of the pool is one thread and the worker process that it owns. The thread takes a job,
asks its worker, and waits for the reply until the deadline. A worker that is late, has ended, or
sends an unexpected reply is killed with all processes that it started, and is replaced. Only its
job fails.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import itertools
import queue
import subprocess
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

from semrl_jax.rewards.function import MAX_EXTRACTED_CHARS, as_verdict, load_builtin
from semrl_jax.rewards.verdict import Verdict, VerifierSettings, failed_verdict, weighted_verdict
from semrl_jax.settings.rewards import check_verifiers, reward_functions, split_functions
from semrl_jax.settings.rules import Section
from semrl_jax.support.errors import UserError
from semrl_jax.support.isolation import Guarded, Line

MAX_RESPONSE_CHARS = 1_000_000  # a longer response or reference is wrong, error "too_long"
MAX_JOBS_PER_WORKER = 20_000  # then it is replaced, before its libraries' caches fill its memory
MAX_START_ATTEMPTS = 3
START_TIMEOUT_S = 60.0
MAX_REPLY_BYTES = 16 * MAX_EXTRACTED_CHARS  # 12 per character outside the first plane
FAILURES = {  # counter -> kind of an error
    "num_timeouts": "timeout", "num_crashes": "crash", "num_too_long": "too_long",
    "num_exceptions": "exception", "num_invalid": "invalid",
}  # fmt: skip
KEPT_PREFIX = "VERIFIER_"  # variables that a verifier itself needs


class _Job(NamedTuple):
    verifier: int  # index of its settings
    response: str
    reference: str
    columns: str
    future: concurrent.futures.Future[Verdict]


class VerifierPool:
    """Scores responses in worker processes; a context manager, safe to use from several threads.

    The constructor returns at once: workers start in parallel, and jobs wait for them. A deadline
    starts when a worker takes the job, so the time in the queue does not count. Each of several
    functions gets a job of its own per response: if it fails, the others still count.

    Args:
      num_workers: processes.
      timeout_s: seconds a worker may spend on one job; then the response is wrong, error "timeout".
      functions: entries of `rewards.functions` without the reward model; () uses the `function`
        of the settings.
      settings: the fields of `VerifierSettings`.

    UserError: a value is out of range, or, on entering the context, `function` cannot be imported.
    """

    def __init__(
        self,
        num_workers: int = 2,
        timeout_s: float = 10.0,
        functions: Sequence[str] = (),
        **settings: Any,
    ):
        common = VerifierSettings(**settings)
        sizes = {"num_workers": num_workers, "timeout_s": timeout_s}
        check_verifiers({**vars(common), **sizes, "functions": functions})
        self._functions = reward_functions(functions)
        self._settings = [
            dataclasses.replace(common, function=function.function) for function in self._functions
        ] or [common]
        self._timeout_s = timeout_s
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()  # guards all below
        self._workers: set[_Worker] = set()
        self._counts: collections.Counter[str] = collections.Counter()
        self._failure: Exception | None = None  # why no job can be done any more
        # Whether each verifier takes the row of the prompt, as the first worker found.
        self._started: concurrent.futures.Future[list[bool]] = concurrent.futures.Future()
        self._threads = [
            threading.Thread(target=self._serve, name=f"verifier-{i}", daemon=True)
            for i in range(num_workers)
        ]
        for thread in self._threads:
            thread.start()

    @classmethod
    def of(cls, rewards: Section) -> VerifierPool:
        """The verifiers of `config.rewards`, without what acts on their verdicts."""
        options = rewards.to_dict()
        verifiers, _ = split_functions(reward_functions(options["functions"]))
        options["functions"] = tuple(function.entry for function in verifiers)
        for later in ("shuffle", "majority", "model", "probability_after"):
            del options[later]
        return cls(**options)

    def __enter__(self) -> VerifierPool:
        if self._has_users:
            try:
                self.wait_ready()
            except BaseException:
                self.close()
                raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def _has_users(self) -> bool:
        return any(settings.is_users for settings in self._settings)

    def submit(
        self, response: str, reference: str, columns: str = ""
    ) -> concurrent.futures.Future[Verdict]:
        """Queues one response text, without the prompt, and its reference answer.

        `columns` is the row of the prompt, a JSON object as text, or "". The future has a verdict
        for every text. It has an exception only if the pool cannot work: RuntimeError if it was
        closed or its workers do not start, UserError if the user's function cannot be imported.
        """
        futures = [
            self._submit(verifier, response, reference, columns)
            for verifier in range(len(self._settings))
        ]
        if not self._functions:
            return futures[0]
        combined: concurrent.futures.Future[Verdict] = concurrent.futures.Future()
        num_done = itertools.count(1)

        def combine(_: object) -> None:
            if next(num_done) < len(futures) or not combined.set_running_or_notify_cancel():
                return
            try:
                verdicts = [future.result() for future in futures]
                combined.set_result(weighted_verdict(self._functions, verdicts))
            except BaseException as error:
                combined.set_exception(error)

        for future in futures:
            future.add_done_callback(combine)
        return combined

    def _submit(
        self, verifier: int, response: str, reference: str, columns: str
    ) -> concurrent.futures.Future[Verdict]:
        future: concurrent.futures.Future[Verdict] = concurrent.futures.Future()
        if max(len(response), len(reference), len(columns)) > MAX_RESPONSE_CHARS:
            verdict = failed_verdict(self._settings[verifier], "", "too_long")
            self._count(verdict)
            future.set_result(verdict)
            return future
        with self._lock:  # so that no job is queued after the end marks of `close`
            if self._failure is None:
                self._jobs.put(_Job(verifier, response, reference, columns, future))
            else:
                future.set_exception(self._failure)
        return future

    def wait_ready(self) -> None:
        """Waits until a worker has started; raises the errors of the future of `submit`."""
        self._started.result(timeout=(START_TIMEOUT_S + 5) * MAX_START_ATTEMPTS)

    @property
    def takes_row(self) -> bool:
        if not self._has_users:  # no need to wait for a worker
            return any(load_builtin(settings.function)[1] for settings in self._settings)
        self.wait_ready()
        return any(self._started.result())

    def validate(self, response: str, reference: str, columns: str = "") -> Verdict:
        """Runs one example before a run starts; UserError if a verifier fails or takes too long."""
        verdict = self.submit(response, reference, columns).result()
        if verdict.error:
            name = "the built-in verifier"
            if self._functions:
                name = f"rewards.functions={tuple(f.entry for f in self._functions)}"
            elif self._has_users:
                name = f"rewards.function={self._settings[0].function!r}"
            raise UserError(
                f"{name} failed on the reference answer {reference!r:.80}: {verdict.error}; it "
                "must return a finite score, a mapping with 'score', or a Verdict within "
                f"{self._timeout_s} s."
            )
        return verdict

    @property
    def counters(self) -> dict[str, int]:
        """The number of verdicts so far, and the number of each kind of failure."""
        with self._lock:
            failures = {name: self._counts[kind] for name, kind in FAILURES.items()}
            return {"num_verdicts": self._counts.total(), **failures}

    def close(self) -> None:
        """Ends the workers at once; open jobs fail with RuntimeError. Idempotent."""
        self._fail(RuntimeError("the verifier pool was closed before this response was scored"))
        with self._lock:
            for _ in self._threads:
                self._jobs.put(None)
            for worker in self._workers:
                worker.kill()
        for thread in self._threads:
            thread.join()

    def _serve(self) -> None:
        """Gives jobs to the worker of one slot, one after the other, until the end mark."""
        worker = self._start_worker()
        while (job := self._jobs.get()) is not None:
            if not job.future.set_running_or_notify_cancel():
                continue
            if worker is not None and not worker.is_idle:  # it ended or wrote before this job
                self._retire(worker)
                worker = self._start_worker()
            if worker is None:
                job.future.set_exception(self._failure)
                continue
            verdict = self._ask(worker, job)
            is_lost = verdict.error_kind in ("timeout", "crash")
            if is_lost and self._failure is not None:
                job.future.set_exception(self._failure)  # `close` killed the worker
                continue
            self._count(verdict)
            job.future.set_result(verdict)
            if is_lost or worker.num_jobs >= MAX_JOBS_PER_WORKER:
                self._retire(worker)
                worker = self._start_worker()
        if worker is not None:
            self._retire(worker)

    def _ask(self, worker: _Worker, job: _Job) -> Verdict:
        try:
            return worker.ask(job, self._timeout_s)
        except TimeoutError:
            return failed_verdict(self._settings[job.verifier], job.response, "timeout")
        except (OSError, ValueError):  # it has ended, or sent an unexpected reply
            return failed_verdict(self._settings[job.verifier], job.response, "crash")

    def _start_worker(self) -> _Worker | None:
        """Starts a worker; None if the pool has failed, also after several failed starts."""
        reason = ""
        for _ in range(MAX_START_ATTEMPTS):
            try:
                with self._lock:  # so that `close` finds every worker
                    if self._failure is not None:
                        return None
                    worker = _Worker()
                    self._workers.add(worker)
            except OSError as e:
                reason = str(e)
                continue
            try:
                field = "rewards.functions" if self._functions else "rewards.function"
                problem = worker.wait_ready(self._settings, field, START_TIMEOUT_S)
            except (OSError, ValueError) as e:
                reason = str(e)
            else:
                if not problem:
                    with self._lock:
                        if not self._started.done():
                            self._started.set_result(worker.takes_row)
                    return worker
                self._fail(UserError(problem))
            self._retire(worker)
        self._fail(
            RuntimeError(
                f"verifier workers failed to start {MAX_START_ATTEMPTS} times in a row: {reason}. "
                f"Their own message is above; {START_TIMEOUT_S} s or "
                f"rewards.memory_limit_gib={self._settings[0].memory_limit_gib} may be too small."
            )
        )
        return None

    def _retire(self, worker: _Worker) -> None:
        with self._lock:
            self._workers.discard(worker)
        worker.end()

    def _fail(self, failure: Exception) -> None:
        with self._lock:
            if self._failure is None:
                self._failure = failure
            if not self._started.done():
                self._started.set_exception(self._failure)

    def _count(self, verdict: Verdict) -> None:
        with self._lock:
            self._counts[verdict.error_kind] += 1


class _Worker(Guarded):
    """One worker, its guard and their pipes. Only `kill` may be called from another thread."""

    def __init__(self):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}
        super().__init__("semrl_jax.rewards.verifier_worker", KEPT_PREFIX, {}, **pipes)
        stdin, stdout = self._process.stdin.fileno(), self._process.stdout.fileno()
        self._line = Line(stdout, stdin, "the verifier worker")
        self.takes_row: list[bool] = []
        self.num_jobs = 0

    def wait_ready(self, settings: Sequence[VerifierSettings], field: str, timeout_s: float) -> str:
        """Waits for the worker's first reply: "" or a problem that the user must solve."""
        request = {"settings": [vars(each) for each in settings], "field": field}
        reply = self._line.exchange(request, timeout_s, MAX_REPLY_BYTES)
        self.takes_row = [flag is True for flag in reply.get("takes_row", ())]
        return str(reply.get("problem", ""))

    def ask(self, job: _Job, timeout_s: float) -> Verdict:
        """Gets a verdict; raises TimeoutError, OSError or ValueError if the worker sends none."""
        self.num_jobs += 1
        request = {name: value for name, value in job._asdict().items() if name != "future"}
        if not self.takes_row[job.verifier]:
            request["columns"] = ""
        reply = self._line.exchange(request, timeout_s, MAX_REPLY_BYTES)
        error = str(reply.pop("error", ""))
        return dataclasses.replace(as_verdict(reply, job.response), error=error)

    @property
    def is_idle(self) -> bool:
        return self._process.poll() is None and self._line.is_quiet()

    def end(self) -> None:
        """Kills the worker, reaps the guard and closes the pipes."""
        super().end()
        self._process.stdin.close()
        self._process.stdout.close()
