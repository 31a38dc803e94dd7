"""What a client knows of one replica: its description, weights, load, and whether it failed."""

from __future__ import annotations

import abc
import collections
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import grpc

from semrl_jax.rollout.wire.codec import GenerateCall
from semrl_jax.rollout.wire.proto import rollout_pb2 as pb
from semrl_jax.support.errors import UserError
from semrl_jax.types import (
    HiddenStateParams,
    ReplicaDescription,
    Rollout,
    SamplingParams,
    TensorSum,
    WeightVersion,
)

_log = logging.getLogger(__name__)

_MAX_BACKOFF_S = 30.0
_MAX_DETAILS = 2000  # characters kept of a status message
ADDRESSES = "rollout.addresses"
_MAX_CALLS_AT_ONCE = 8  # even if a replica says more: its server admits 64 calls of all clients


@dataclasses.dataclass(frozen=True)
class Waits:
    """Timeouts of a client, and its reports."""

    connect_timeout_s: float = 300.0  # until all replicas have answered
    sync_timeout_s: float = 1800.0  # of one `sync_weights`, retries included
    # After one replica has confirmed the weights, the others have this long. A replica may also
    # make the others wait this long for the next bytes.
    sync_wait_s: float = 60.0
    generate_timeout_s: float = 7200.0  # of one `generate`, retries included
    # A replica that sends nothing for this long, compilation included, loses its call.
    stall_timeout_s: float = 600.0
    progress_every_s: float = 10.0  # interval between two lines about the same wait
    # Takes one line; the default logs it as a warning.
    progress: Callable[[str], None] = _log.warning


class Figures(NamedTuple):
    """What a replica has done for this client; what came twice counts twice."""

    responses: int = 0
    tokens: int = 0
    busy_s: float = 0.0  # seconds in which it had at least one call
    failures: int = 0  # times that it was set aside


class Counters:
    """Counts by name; several threads may add to them."""

    def __init__(self):
        self._lock = threading.Lock()
        self._counts: collections.Counter[str] = collections.Counter()

    def __getitem__(self, name: str) -> int:
        return self._counts[name]

    def add(self, **counts: int) -> None:
        with self._lock:
            self._counts.update(counts)


class Load:
    """Counts what a replica does; several threads may use it."""

    def __init__(self):
        self._lock = threading.Lock()
        self._figures = Figures()
        self.num_calls = 0  # running now
        self._busy_since = 0.0

    @property
    def figures(self) -> Figures:
        """The totals so far, those of running calls included."""
        with self._lock:
            found = self._figures
            if self.num_calls:
                found = found._replace(busy_s=found.busy_s + time.monotonic() - self._busy_since)
            return found

    def begin(self) -> None:
        with self._lock:
            if not self.num_calls:
                self._busy_since = time.monotonic()
            self.num_calls += 1

    def end(self) -> None:
        with self._lock:
            self.num_calls -= 1
            if not self.num_calls:
                self._count(busy_s=time.monotonic() - self._busy_since)

    def add(self, num_tokens: int) -> None:
        with self._lock:
            self._count(responses=1, tokens=num_tokens)

    def fail(self) -> None:
        with self._lock:
            self._count(failures=1)

    def _count(self, **more: int | float) -> None:
        changed = {name: getattr(self._figures, name) + value for name, value in more.items()}
        self._figures = self._figures._replace(**changed)


class Responses(abc.ABC):
    """The responses of one call, read by one thread."""

    num_bytes: Mapping[str, int]  # received so far: "state_bytes", "token_bytes" and "metric_bytes"

    @abc.abstractmethod
    def __iter__(self) -> Iterator[Rollout | None]:
        """Yields each response, and None for other messages; raises grpc.RpcError or ValueError."""

    @abc.abstractmethod
    def cancel(self) -> None:
        """Ends the call, and soon the iteration."""


class Replica(abc.ABC):
    """One replica as the client sees it."""

    # The limit for the requests of a call, without what they share; None: no message has them.
    max_call_bytes: int | None = None

    def __init__(self, address: str, load: Load | None = None, field: str = ADDRESSES):
        self.address = address  # host:port, or another unique name
        self.field = field  # the setting that names it, for messages
        self.description: ReplicaDescription | None = None  # its last answer to Describe
        self.version: WeightVersion | None = None  # unknown; it then gets no Generate call
        self.base = ""  # of adapters; the digest of the one that it holds
        self.error = ""  # why it was set aside, if it was
        self.retry_at = 0.0  # in `time.monotonic()`; before it gets no call
        self.failed_at = 0.0  # when it was last set aside
        # When it last sent something while it had more calls than it runs at once: others wait.
        self.heard_at = 0.0
        self.answers = True  # the last question for its description
        self.is_leaving = False  # it gets no further call
        self.load = load or Load()
        # Kinds of calls that it has answered; a first response may wait for compilation.
        self.answered: set[tuple[SamplingParams, HiddenStateParams]] = set()
        self._num_failures = 0  # in a row

    @property
    def name(self) -> str:
        return f"rollout replica {self.address}"

    @property
    def calls_at_once(self) -> int:
        told = self.description.calls_at_once if self.description else 0
        return min(max(told, 1), _MAX_CALLS_AT_ONCE)

    @abc.abstractmethod
    def describe(
        self, timeout_s: float, memory: pb.SharedMemory | None = None
    ) -> ReplicaDescription:
        """Raises UserError if the reply is invalid, grpc.RpcError if there is none.

        `memory` is the client's; the description says whether the replica can read it.
        """

    @abc.abstractmethod
    def compiling(self, timeout_s: float) -> str:
        """What it compiles now, and for how long; "" if it compiles nothing or does not answer."""

    @abc.abstractmethod
    def generate(self, call: GenerateCall, timeout_s: float) -> Responses:
        """Starts a call."""

    @abc.abstractmethod
    def tensor_sums(self, timeout_s: float) -> list[TensorSum]:
        """Sums of its tensors; ValueError if the reply is invalid, grpc.RpcError if none came."""

    @abc.abstractmethod
    def close(self, run_id: str = "", attempt_id: str = "") -> None:
        """Ends all calls; a run, if one is named, hands over a replica of another process."""

    def set_aside(self, error: str, *, wait_s: float = 0.0) -> None:
        """Starts a pause without calls; it doubles with each consecutive failure."""
        self.error = error
        self.load.fail()
        self.failed_at = time.monotonic()
        backoff_s = min(0.5 * 2**self._num_failures, _MAX_BACKOFF_S)
        self.retry_at = self.failed_at + max(backoff_s, wait_s)
        self._num_failures += 1

    def succeeded(self) -> None:
        self.error, self.retry_at, self._num_failures = "", 0.0, 0


_FATAL = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED}
_TOO_MANY_CALLS = "Concurrent RPC limit exceeded!"  # gRPC's own text


def fatal_error(replica: Replica, error: grpc.RpcError) -> Exception | None:
    """The exception to raise for a permanent failure; None if a retry may succeed."""
    code, details = error.code(), _one_line(error)
    # This code is also that of a message that is too large, which is permanent.
    if details == _TOO_MANY_CALLS:
        return None
    if code == grpc.StatusCode.UNAUTHENTICATED:
        return UserError(
            f"{replica.name} refuses the token; give trainer and replica the same one, by "
            "$SEMRL_ROLLOUT_TOKEN or rollout.token_file."
        )
    if code == grpc.StatusCode.PERMISSION_DENIED:
        return UserError(f"{replica.name}: {details}")
    if code == grpc.StatusCode.UNIMPLEMENTED:
        return UserError(f"{replica.name} does not offer what the call asks for: {details}")
    if code == grpc.StatusCode.OUT_OF_RANGE:  # weights that are not finite
        return RuntimeError(f"{replica.name} refuses the weights: {details}")
    if code in _FATAL:
        return ValueError(f"{replica.name} refuses the call: {details}")
    return None


# What to do about a failed connection, by a part of gRPC's message; the first that fits.
_WAYS_OUT = {
    "certificate has expired": (
        "its certificate has expired: start it with a new one (docs/security.md)"
    ),
    "certificate is not yet valid": "correct the clocks of trainer and replica",
    "hostname verification": (
        "its certificate is for other names: correct {field}, or start it with a "
        "certificate for this name (docs/security.md)"
    ),
    "certificate_verify_failed": (
        "its certificate is not of the authority in rollout.tls_ca_file: correct that, or start "
        "the replica with a certificate of this authority"
    ),
    "wrong_version_number": (
        "it has no TLS: give the replica --tls_certificate and --tls_key, or leave "
        "rollout.tls_ca_file empty"
    ),
    # A replica with TLS closes a connection without it. Other causes are possible.
    "socket closed": (
        "if it has TLS, set rollout.tls_ca_file to its certificate's authority; else start it "
        "again, or raise rollout.connect_timeout_s"
    ),
    "handshake": (
        "give the replica --tls_certificate and --tls_key and the trainer that certificate's "
        "authority as rollout.tls_ca_file, or use none of them"
    ),
}


def way_out(reason: str, field: str) -> str:
    """What the user can do about a connection that failed, by `describe_error`.

    `field` is the setting with the address.
    """
    start = "start it with `python -m launch.rollout`, correct {field}"
    found = (text for sign, text in _WAYS_OUT.items() if sign in reason.lower())
    return next(found, f"{start}, or raise rollout.connect_timeout_s").format(field=field)


def describe_error(error: grpc.RpcError) -> str:
    return f"{error.code().name}: {_one_line(error)}"


def _one_line(error: grpc.RpcError) -> str:
    return " ".join((error.details() or "").split())[:_MAX_DETAILS]
