"""Distributes requests over replicas: every response arrives once, even if replicas fail."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import queue
import statistics
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType

import grpc

from semrl_jax.rollout.client.replica import Counters, Replica, Waits, describe_error, fatal_error
from semrl_jax.rollout.wire.codec import GenerateCall
from semrl_jax.support import compilation
from semrl_jax.types import Rollout, SampleRequest, WeightVersion

_QUEUED_RESPONSES = 16  # with more unread responses, the replicas wait for the consumer
_MAX_ENGINE_FAILURES = 3  # consecutive, without a response in between
_MAX_ABORTS = 3  # per response
_ENGINE_FAILURES = {grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN}
# A call is slow once it has run this many times as long as the median of those that have ended.
# With less, calls whose responses are only longer than others would often be asked for twice.
_SLOW = 1.5
_MAX_NAMED = 4  # replicas in a line about a wait
_REQUEST_BYTES = 320  # of a request in a message, with the longest name, but for the prompt
_STATUS_TIMEOUT_S = 1.0  # for a replica to say what it does, for such a line


def split_by_group(
    requests: Sequence[SampleRequest],
    num_parts: int,
    homes: Mapping[int, int] = MappingProxyType({}),
) -> list[list[SampleRequest]]:
    """Assigns whole groups to the parts in turn, or to their home if they have one."""
    part_of: dict[int, int] = {}
    parts: list[list[SampleRequest]] = [[] for _ in range(num_parts)]
    for request in requests:
        group = request.group_id
        part = part_of.setdefault(group, homes.get(group, len(part_of)) % num_parts)
        parts[part].append(request)
    return parts


def split_into_calls(
    requests: Sequence[SampleRequest], groups_per_call: int
) -> list[list[SampleRequest]]:
    """Calls of so many whole groups, the last of fewer, in the order of the requests."""
    groups: dict[int, list[SampleRequest]] = {}
    for request in requests:
        groups.setdefault(request.group_id, []).append(request)
    ordered = list(groups.values())
    return [
        list(itertools.chain.from_iterable(ordered[start : start + groups_per_call]))
        for start in range(0, len(ordered), groups_per_call)
    ]


def split_by_size(
    requests: Sequence[SampleRequest], max_bytes: int | None
) -> list[Sequence[SampleRequest]]:
    """Consecutive parts of at most so many bytes in a message; None: there is no message."""
    if max_bytes is None:
        return [requests]
    parts: list[list[SampleRequest]] = [[]]
    num_bytes, prompts = 0, set()
    for request in requests:
        # A token id has at most 4 bytes on the wire, as in memory, and a prompt is sent once.
        prompt = request.prompt_ids.tobytes()
        size = _REQUEST_BYTES + len(prompt) * (prompt not in prompts)
        if parts[-1] and num_bytes + size > max_bytes:
            parts.append([])
            num_bytes, prompts, size = 0, set(), _REQUEST_BYTES + len(prompt)
        parts[-1].append(request)
        num_bytes += size
        prompts.add(prompt)
    return parts


@dataclasses.dataclass(eq=False)
class _Unit:
    """Requests of one call, which may be asked for several times."""

    requests: Sequence[SampleRequest]
    streams: list[_Stream] = dataclasses.field(default_factory=list)  # the running calls
    is_again: bool = False  # whether a call for it has failed
    num_passed: int = 0  # first requests that are known to have responses

    def is_complete(self, pending: Collection[str]) -> bool:
        """Whether no request is pending; as none becomes so again, all calls together pass once."""
        while (
            self.num_passed < len(self.requests)
            and self.requests[self.num_passed].sample_id not in pending
        ):
            self.num_passed += 1
        return self.num_passed == len(self.requests)


@dataclasses.dataclass(eq=False)
class Dispatcher:
    """Hands out units to free replicas; others take over those of a replica that fails.

    Without `groups_per_call`, every replica gets one unit of an equal part of the requests; or
    several, if a message would be too large.

    Args:
      replicas: returns the present replicas; a sync within `resync` may change them.
      restore: gives the weights of the call to one replica, or sets it aside, in a thread during
        the other replicas' calls. It holds the lock while it reads, and ends soon after the event.
      homes: by group, the number of the replica that keeps its caches; a call that keeps adds its
        groups. Only without `groups_per_call`.
    """

    _call: GenerateCall
    _replicas: Callable[[], Sequence[Replica]]
    _counters: Counters
    _waits: Waits
    _client_closed: threading.Event
    _groups_per_call: int
    _resync: Callable[[], WeightVersion] | None
    _restore: Callable[[Replica, threading.Event, threading.Lock], None] | None
    _homes: dict[int, int] = dataclasses.field(default_factory=dict)

    def __post_init__(self):
        self._pending = {request.sample_id for request in self._call.requests}
        if len(self._pending) < len(self._call.requests):
            raise ValueError("requests: sample ids must be unique in a call.")
        self._queue: collections.deque[_Unit] = collections.deque()
        self._backlog: list[SampleRequest] = []  # without groups_per_call: to be divided
        self._streams: list[_Stream] = []
        self._cancelled: list[_Stream] = []
        self._durations: list[float] = []  # of the calls that have ended
        self._overtaken: set[Replica] = set()  # and have not ended a call since
        self._restoring: dict[Replica, tuple[threading.Thread, threading.Event]] = {}
        self._reading = threading.Lock()
        self._events: queue.Queue[tuple[_Stream, Rollout | Exception | None]] = queue.Queue(
            _QUEUED_RESPONSES
        )
        self._closed = threading.Event()
        self._num_engine_failures = 0
        self._num_aborts: collections.Counter[str] = collections.Counter()
        self._deadline = time.monotonic() + self._waits.generate_timeout_s
        self._stall_s = self._waits.stall_timeout_s  # twice as long after each stall

    def run(self) -> Iterator[Rollout]:
        """Yields every requested response once, as `RolloutClient.generate` describes."""
        self._divide()
        longest_s = min(0.5, self._waits.stall_timeout_s / 4, self._waits.progress_every_s)
        last_report = time.monotonic()
        while self._pending:
            if self._client_closed.is_set():
                raise RuntimeError("the rollout client is closed.")
            self._restore_lost()
            poll_s = min(longest_s, self._use_idle_replicas())
            asked = time.monotonic()
            try:
                stream, event = self._events.get(timeout=poll_s)
            except queue.Empty:
                self._forgive(time.monotonic() - asked - poll_s)
                last_report = self._check_clocks(last_report)
                continue
            if isinstance(event, Rollout):
                stream.received.add(event.sample_id)
                stream.replica.load.add(len(event.response_ids))
                if event.sample_id not in self._pending:
                    self._counters.add(duplicates=1)
                    continue
                if event.finish_reason == "aborted":
                    self._note_abort(stream, event.sample_id)
                    continue
                self._pending.remove(event.sample_id)
                self._counters.add(responses=1)
                self._num_engine_failures = 0
                stream.replica.succeeded()
                self._cancel_surplus(stream)
                yield event
                last_report = time.monotonic()
            elif stream in self._streams:
                self._remove(stream)
                self._join(stream)
                self._end(stream, event)

    def _divide(self) -> None:
        requests = self._call.requests
        if self._groups_per_call:
            most = min(
                (r.max_call_bytes for r in self._replicas() if r.max_call_bytes), default=None
            )
            for call in split_into_calls(requests, self._groups_per_call):
                self._queue.extend(map(_Unit, split_by_size(call, most)))
        elif ready := self._serving():
            parts = split_by_group(requests, len(ready), self._homes)
            for number, (replica, part) in enumerate(zip(ready, parts)):
                for small in split_by_size(part, replica.max_call_bytes):
                    self._start(replica, _Unit(small))
                if self._call.keep:
                    self._homes |= dict.fromkeys((r.group_id for r in part), number)
        else:
            self._backlog = list(requests)

    def _forgive(self, stopped_s: float) -> None:
        """Leaves out a time in which this process did not run, such as after Ctrl-Z."""
        if stopped_s > 0:
            self._deadline += stopped_s
            for stream in self._streams:
                stream.started += stopped_s
                stream.waiting_since += stopped_s

    def close(self) -> None:
        """Cancels the running calls and joins their threads."""
        self._closed.set()
        for stream in list(self._streams):
            self._cancel(stream)
        for stream in self._cancelled:
            self._join(stream)
        self._end_restoring()
        with self._reading:  # the weights may change from now on
            pass

    def _join(self, stream: _Stream) -> None:
        stream.thread.join()
        self._counters.add(**stream.responses.num_bytes)

    def _serving(self) -> list[Replica]:
        return [r for r in self._replicas() if r.version == self._call.version and not r.is_leaving]

    def _missing(self, requests: Sequence[SampleRequest]) -> list[SampleRequest]:
        return [r for r in requests if r.sample_id in self._pending]

    def _num_running(self, replica: Replica) -> int:
        return sum(stream.replica is replica for stream in self._streams)

    def _start(self, replica: Replica, unit: _Unit) -> None:
        requests = self._missing(unit.requests)
        if not requests:
            return
        if unit.streams:
            self._counters.add(taken_over=len(requests))
        elif unit.is_again:
            self._counters.add(retries=len(requests))
        if self._groups_per_call and replica.description.is_deterministic:
            # The same call as before gives the same responses. A smaller one would not: rounding
            # depends on the responses that are decoded side by side.
            requests = unit.requests
        call = self._call._replace(requests=tuple(requests))
        timeout_s = self._deadline - time.monotonic()
        stream = _Stream(replica, unit, call, timeout_s, self._events, self._closed)
        replica.load.begin()
        self._streams.append(stream)
        unit.streams.append(stream)

    def _remove(self, stream: _Stream) -> None:
        self._streams.remove(stream)
        stream.unit.streams.remove(stream)
        stream.replica.load.end()

    def _cancel(self, stream: _Stream) -> None:
        """Ends the call; its thread is joined later, when it does not wait for this one."""
        self._remove(stream)
        stream.responses.cancel()
        self._cancelled.append(stream)

    def _cancel_surplus(self, last: _Stream) -> None:
        """Ends the calls for the latest response's unit that would send more than is missing."""
        if not last.unit.is_complete(self._pending):
            return
        for stream in list(last.unit.streams):
            if len(stream.received) < len(stream.call.requests):
                self._cancel(stream)
                if stream is not last:
                    self._overtaken.add(stream.replica)

    def _use_idle_replicas(self) -> float:
        """Starts calls on free replicas; returns the seconds after which it should look again."""
        self._backlog = self._missing(self._backlog)
        while self._queue and not self._missing(self._queue[0].requests):
            self._queue.popleft()
        serving = self._serving()
        if not serving and not self._streams:
            self._end_restoring()  # the sync sends to all at once
            if not self._restoring:
                self._sync_again()
            return 0.05
        now = time.monotonic()
        usable = [r for r in serving if now >= r.retry_at]
        if self._backlog:
            for replica in usable:
                if not self._num_running(replica) and self._backlog:
                    share, *rest = split_by_group(self._backlog, len(usable))
                    self._backlog = [request for part in rest for request in part]
                    for small in split_by_size(share, replica.max_call_bytes):
                        self._start(replica, _Unit(small, is_again=True))
        while self._queue:
            free = [r for r in usable if self._num_running(r) < r.calls_at_once]
            if not free:
                return float("inf")
            self._start(min(free, key=self._num_running), self._queue.popleft())
        if not self._groups_per_call:
            return float("inf")
        quick = [r for r in usable if r not in self._overtaken]
        return self._take_over([r for r in quick if not r.load.num_calls], now)

    def _take_over(self, idle: Sequence[Replica], now: float) -> float:
        """Asks idle replicas for slow units; returns the seconds until the next unit is slow."""
        if not idle or not self._durations:
            return float("inf")
        limit_s = _SLOW * statistics.median(self._durations)
        units = {s.unit: None for s in self._streams if self._missing(s.unit.requests)}
        newest = [max(unit.streams, key=lambda stream: stream.started) for unit in units]
        newest.sort(key=lambda stream: stream.started)
        for replica, stream in zip(idle, newest):
            if now - stream.started < limit_s:
                return max(stream.started + limit_s - now, 0.01)
            self._waits.progress(
                f"{stream.replica.name} is slow; {replica.name} takes over "
                f"{len(self._missing(stream.unit.requests))} responses"
            )
            self._start(replica, stream.unit)
        return float("inf")

    def _restore_lost(self) -> None:
        """Gives the weights to replicas that have lost them, while others sample."""
        for replica in [r for r, (thread, _) in self._restoring.items() if not thread.is_alive()]:
            del self._restoring[replica]
        if self._restore is None:
            return
        now = time.monotonic()
        lost = [r for r in self._replicas() if r.version != self._call.version and not r.is_leaving]
        if len(lost) == len(self._replicas()):
            return  # `_sync_again` reads the weights once for all
        for replica in lost:
            if replica not in self._restoring and now >= replica.retry_at:
                ended = threading.Event()
                thread = threading.Thread(
                    target=self._restore,
                    args=(replica, ended, self._reading),
                    name=f"restore {replica.address}",
                    daemon=True,
                )
                self._restoring[replica] = thread, ended
                thread.start()

    def _end_restoring(self) -> None:
        for _, ended in self._restoring.values():
            ended.set()

    def _sync_again(self) -> None:
        errors = "; ".join(f"{r.name}: {r.error or 'not synced'}" for r in self._replicas())
        reason = f"no replica serves weights {self._call.version} ({errors})"
        if self._resync is None or time.monotonic() > self._deadline:
            raise RuntimeError(f"{reason}; sync weights first.")
        self._waits.progress(f"{reason}; syncing")
        version = self._resync()
        if version != self._call.version:
            raise RuntimeError(f"syncing again gave weights {version}, not {self._call.version}.")

    def _note_abort(self, stream: _Stream, sample_id: str) -> None:
        """Counts an aborted response, which stays pending and is requested again."""
        stream.aborted.add(sample_id)
        self._counters.add(aborted=1)
        self._num_aborts[sample_id] += 1
        if self._num_aborts[sample_id] >= _MAX_ABORTS:
            raise RuntimeError(
                f"response {sample_id!r} was aborted {_MAX_ABORTS} times, last by "
                f"{stream.replica.name}; call no Abort while responses are sampled."
            )

    def _end(self, stream: _Stream, error: Exception | None) -> None:
        """Handles the end of a call: complete, to be retried, or a permanent failure."""
        replica = stream.replica
        missing = self._missing(stream.call.requests)
        if isinstance(error, ValueError):
            raise RuntimeError(f"{replica.name} sent an inconsistent reply: {error}") from error
        if error is None:
            if lost := [r for r in missing if r.sample_id not in stream.aborted]:
                raise RuntimeError(
                    f"{replica.name} sent an inconsistent reply: the stream ended without "
                    f"{len(lost)} of {len(stream.call.requests)} responses, the first "
                    f"{lost[0].sample_id!r}."
                )
            if missing:
                self._give_back(stream.unit)
                self._waits.progress(
                    f"{replica.name} aborted {len(missing)} responses, which are sampled again"
                )
            else:
                self._overtaken.discard(replica)
                self._durations.append(time.monotonic() - stream.started)
            return
        if not isinstance(error, grpc.RpcError):
            raise error
        if self._client_closed.is_set():  # which ended the call
            raise RuntimeError("the rollout client is closed.") from error
        if fatal := fatal_error(replica, error):
            raise fatal from error
        if error.code() in _ENGINE_FAILURES and stream.started >= replica.failed_at:
            self._num_engine_failures += 1
            if self._num_engine_failures >= _MAX_ENGINE_FAILURES:
                raise RuntimeError(
                    f"{replica.name} fails again and again: {describe_error(error)}"
                ) from error
        if error.code() == grpc.StatusCode.FAILED_PRECONDITION:
            replica.version = None  # until it gets the weights again
        self._set_aside(stream, describe_error(error))

    def _set_aside(self, stream: _Stream, error: str, *, wait_s: float = 0.0) -> None:
        self._give_back(stream.unit)
        if stream.started < stream.replica.failed_at:
            return  # several of its calls fail together, which is one failure
        stream.replica.set_aside(error, wait_s=wait_s)
        self._counters.add(replica_failures=1)
        self._waits.progress(
            f"{stream.replica.name} is set aside ({error}); "
            f"{len(self._missing(stream.unit.requests))} responses go elsewhere or are retried"
        )

    def _give_back(self, unit: _Unit) -> None:
        """The unit is handed out again, unless another call for it is running."""
        unit.is_again = True
        if unit.streams:
            return
        if self._groups_per_call:
            self._queue.appendleft(unit)
        else:
            self._backlog += self._missing(unit.requests)

    def _check_clocks(self, last_report: float) -> float:
        """Ends stalled calls and checks the deadline; returns the time of the last report."""
        now, limit_s = time.monotonic(), self._stall_s
        for stream in list(self._streams):
            silent_s = stream.silent_s(now)
            if silent_s > limit_s and stream in self._streams:
                self._cancel(stream)
                # It may be at work on a long response: the next attempt has more time for it.
                self._stall_s = 2 * limit_s
                error = f"no message for {silent_s:.1f} s; see rollout.stall_timeout_s"
                self._set_aside(stream, error, wait_s=self._waits.stall_timeout_s)
        if now > self._deadline:
            raise RuntimeError(
                f"{len(self._pending)} responses did not come within "
                f"{self._waits.generate_timeout_s:g} s; awaited: {self._awaited(now)}."
            )
        if now - last_report < self._waits.progress_every_s:
            return last_report
        if program := compilation.current():
            self._waits.progress(f"compiling {program}; {len(self._pending)} response(s) to come")
            return now
        self._waits.progress(
            f"waiting for {len(self._pending)} responses from {self._awaited(now)};{self._view()} "
            f"a silent replica is given up after {self._stall_s:g} s, the call in "
            f"{self._deadline - now:.0f} s"
        )
        return now

    def _awaited(self, now: float) -> str:
        """The replicas with running calls, or why there are none."""
        kind = self._call.sampling, self._call.hidden_states
        silent: dict[Replica, float] = {}
        for stream in self._streams:
            silent_s = stream.silent_s(now)
            silent[stream.replica] = min(silent.get(stream.replica, silent_s), silent_s)
        named = []
        for replica, silent_s in itertools.islice(silent.items(), _MAX_NAMED):
            if program := replica.compiling(_STATUS_TIMEOUT_S):
                named.append(f"{replica.name} (compiling {program})")
                continue
            first = kind not in replica.answered
            hint = "; a first response may wait for compilation" if first else ""
            named.append(f"{replica.name} (silent for {silent_s:.0f} s{hint})")
        if len(silent) > _MAX_NAMED:
            named.append(f"{len(silent) - _MAX_NAMED} more")
        return ", ".join(named) or "; ".join(
            f"{r.name}: {r.error}" for r in self._replicas() if r.error
        )

    def _view(self) -> str:
        """What the replicas do, if there are several."""
        if len(self._replicas()) == 1:
            return ""
        num_busy = len({stream.replica for stream in self._streams})
        aside = [f"{r.address} ({r.error})" for r in self._replicas() if r.error]
        view = f" replicas {num_busy}/{len(self._replicas())} busy"
        if aside:
            more = f", {len(aside) - _MAX_NAMED} more" if len(aside) > _MAX_NAMED else ""
            view += f", {len(aside)} set aside: {', '.join(aside[:_MAX_NAMED])}{more}"
        return f"{view};"


class _Stream:
    """One Generate call, whose responses are read in a thread."""

    def __init__(self, replica, unit, call, timeout_s, events, closed):
        self.replica: Replica = replica
        self.unit: _Unit = unit
        self.call: GenerateCall = call
        self.received: set[str] = set()  # sample ids
        self.aborted: set[str] = set()
        self._events: queue.Queue = events
        self._closed: threading.Event = closed
        self.started = self.waiting_since = time.monotonic()
        self.responses = replica.generate(call, timeout_s)
        self.thread = threading.Thread(
            target=self._read, name=f"generate {replica.address}", daemon=True
        )
        self.thread.start()

    def silent_s(self, now: float) -> float:
        """Seconds since the client began to wait for the next message.

        A call that waits on the replica for others of this client is not silent before them.
        """
        return now - max(self.waiting_since, self.replica.heard_at)

    def _read(self) -> None:
        try:
            for rollout in self.responses:
                if rollout is not None:
                    self.replica.answered.add((self.call.sampling, self.call.hidden_states))
                    # Blocks while the consumer is slow. That does not count as a stall: the
                    # consumer checks for stalls only while no response waits for it.
                    self._put(rollout)
                self.waiting_since = time.monotonic()
                if self.replica.load.num_calls > self.replica.calls_at_once:
                    self.replica.heard_at = self.waiting_since
            self._put(None)
        except Exception as error:  # any error must reach the waiting consumer
            self.responses.cancel()
            self._put(error)

    def _put(self, event: Rollout | Exception | None) -> None:
        while not self._closed.is_set():
            try:
                return self._events.put((self, event), timeout=0.2)
            except queue.Full:
                continue
