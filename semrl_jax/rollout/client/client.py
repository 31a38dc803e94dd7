"""The client of several replicas: checks them, sends them weights, collects their responses."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

import grpc
import numpy as np

from semrl_jax.rollout.client.broadcast import Ended, Weights, hand_over, send_weights
from semrl_jax.rollout.client.dispatch import Dispatcher
from semrl_jax.rollout.client.remote import RemoteReplica
from semrl_jax.rollout.client.replica import (
    ADDRESSES,
    Counters,
    Figures,
    Load,
    Replica,
    Waits,
    describe_error,
    fatal_error,
    way_out,
)
from semrl_jax.rollout.wire import codec
from semrl_jax.rollout.wire.auth import check_token, read_certificates
from semrl_jax.rollout.wire.shared_memory import OwnMemory
from semrl_jax.support.errors import UserError
from semrl_jax.types import (
    Adapter,
    HiddenStateParams,
    MetricParams,
    ReplicaDescription,
    Rollout,
    SampleRequest,
    SamplingParams,
    TensorSpec,
    TensorSum,
    WeightVersion,
)

if TYPE_CHECKING:
    from jax import Array

    from semrl_jax.rollout.client.local import LocalReplica

T = TypeVar("T")
_PROBE_TIMEOUT_S = 5.0  # of one Describe
_RETRY_S = 10.0  # until a new replica that did not answer is asked again
_NUM_PROBED = 16  # replicas that are asked at the same time
_SYNC_END_S = 10.0  # longest wait of `close` for a sync in another thread
_NO_HIDDEN_STATES = HiddenStateParams()


class RolloutClient(contextlib.AbstractContextManager):
    """Samples from one or more rollout replicas, over gRPC or in this process.

    Calls are synchronous, and several threads may share a client. Every call has a deadline.

    Args:
      addresses: host:port of each replica.
      local: a replica of this process in place of addresses and token; the client closes it.
      run_id: a replica belongs to the first run that sends it weights, until that client is closed.
      attempt_id: a new one for every start of the trainer.
      tls_ca: PEM file of the certificate authority; "" connects without TLS, to loopback only.
      share_memory: replicas on this machine read the weights from memory of this process, which
        keeps one copy of them until `close`; all others receive them.
      check: raises UserError for the description of a replica that the caller cannot use.
      in_turns: `release` of weights makes replicas of other processes sleep.
      field: the setting with the addresses, for messages.
      find_addresses: asked before each sync of weights for the addresses; it may raise UserError.
      waits: fields of `Waits`.

    Raises:
      UserError: an address is repeated or missing, one other than loopback has no TLS, or the token
        or `tls_ca` cannot be used.
    """

    def __init__(
        self,
        addresses: Sequence[str] = (),
        token: str = "",
        *,
        run_id: str,
        attempt_id: str,
        local: LocalReplica | None = None,
        tls_ca: str = "",
        share_memory: bool = True,
        in_turns: bool = False,
        field: str = ADDRESSES,
        check: Callable[[ReplicaDescription], None] = lambda description: None,
        find_addresses: Callable[[], Sequence[str]] | None = None,
        **waits,
    ):
        if local is None:
            if not addresses or len(set(addresses)) < len(addresses):
                raise UserError(
                    f"{field}={tuple(addresses)} must name at least one replica, each once."
                )
            check_token(token)
        self._run_id = run_id
        self._attempt_id = attempt_id
        self._waits = Waits(**waits)
        self._counters = Counters()
        self._homes: dict[int, int] = {}  # see `Dispatcher`
        self._expected: dict[str, str | int] = {}
        self._token = token
        self._authority = read_certificates("rollout.tls_ca_file", tls_ca) if tls_ca else None
        self._in_turns = in_turns
        self._field = field
        self._check = check
        self._find_addresses = find_addresses
        self._reported: dict[str, str] = {}  # why an address is not used
        self._next_try: dict[str, float] = {}  # by address of a replica that did not answer
        self._loads: dict[str, Load] = {}  # by address, also of replicas that have left
        self._weights = Weights(())  # of the last sync
        self._leaving: list[Replica] = []
        self._one_sync = threading.Lock()
        self._one_resync = threading.Lock()
        self._closed = threading.Event()
        self._local = local
        self._memory: OwnMemory | None = None
        if share_memory and local is None:
            # This system, or the rules of its container, may not have such memory.
            with contextlib.suppress(OSError):
                self._memory = OwnMemory()
        self._replicas: list[Replica] = [self._new_replica(address) for address in addresses]
        if local is not None:
            self._replicas = [local]
        self._loads.update((replica.address, replica.load) for replica in self._replicas)

    def __exit__(self, *exc_info) -> None:
        self.close()

    def close(self) -> None:
        """Ends all calls; those of other threads raise RuntimeError."""
        self._closed.set()
        for replica in [*self._replicas, *self._leaving]:
            replica.close(self._run_id, self._attempt_id)
        # A sync in another thread may still write there; its calls have ended, so it fails soon.
        if self._memory is not None and self._one_sync.acquire(timeout=_SYNC_END_S):
            self._memory.close()
            self._memory = None
            self._one_sync.release()

    @property
    def counters(self) -> dict[str, int]:
        """Totals since the start, by name.

        `generate` yielded the `responses`. It requests aborted and lost samples again (retries) and
        drops responses that arrive twice (duplicates). A failure sets a replica aside. An idle
        replica was asked for samples that a slow one has not sent (taken_over).
        """
        names = ("responses", "retries", "taken_over", "aborted", "duplicates", "replica_failures")
        sizes = ("state_bytes", "token_bytes", "metric_bytes", "weight_bytes")
        return {name: self._counters[name] for name in names + sizes}

    @property
    def descriptions(self) -> tuple[ReplicaDescription, ...]:
        """What each replica said last of itself; `connect` asks them."""
        return tuple(replica.description for replica in self._replicas)

    @property
    def figures(self) -> dict[int, Figures]:
        """What each present replica has done; their numbers are in the order of their first use."""
        present = {replica.address for replica in self._replicas}
        return {
            number: load.figures
            for number, (address, load) in enumerate(list(self._loads.items()))
            if address in present
        }

    def connect(
        self, *, model_hash: str, tokenizer_hash: str, vocab_size: int
    ) -> tuple[ReplicaDescription, ...]:
        """Waits until all replicas answer; UserError unless each is reached and fits the run."""
        self._expected = {
            "protocol_major": codec.PROTOCOL_MAJOR,
            "model_hash": model_hash,
            "tokenizer_hash": tokenizer_hash,
            "vocab_size": vocab_size,
        }
        deadline = time.monotonic() + self._waits.connect_timeout_s
        for replica in self._replicas:
            self._await_replica(replica, deadline)
        ids = collections.Counter(r.description.replica_id for r in self._replicas)
        if repeated := [name for name, count in ids.items() if count > 1]:
            raise UserError(f"{self._field}: several lead to the same replica {repeated[0]!r}.")
        return tuple(replica.description for replica in self._replicas)

    def sync_weights(
        self,
        specs: Sequence[TensorSpec],
        read: Callable[[], Iterable[np.ndarray | Array]],
        *,
        step: int,
        adapter: Adapter | None = None,
        read_adapter: Callable[[], Iterable[np.ndarray | Array]] | None = None,
    ) -> WeightVersion:
        """Streams the weights to all replicas at the same time and commits them.

        With an adapter, the base before it is the same in all syncs, until `forget_base`. Replicas
        that hold the base get the adapter alone.

        A replica of this process takes arrays that are on devices as they are. One that is slower
        than another one by `sync_wait_s` is set aside. Before, replicas join and leave as
        `find_addresses` says; one that cannot be used is reported and left out.

        Args:
          read: starts a pass over the arrays in the order of `specs`. Called once, and once more
            each time that every replica has failed.
          step: part of the version; it may be lower than before.
          adapter: its tensors are the last ones. The replicas apply it unmerged; see
            `without_adapters`.
          read_adapter: starts a pass over its arrays, if every replica holds the base. None: `read`
            starts them all.

        Returns the version, which every replica that was not set aside serves. UserError: a replica
        belongs to another run, or refuses the token. ValueError: the arrays do not fit the specs,
        or the specs the replica's model. RuntimeError: no replica took the weights within
        `sync_timeout_s`, or the weights have a value that is not finite.
        """
        with self._one_sync:  # the memory holds one set of weights
            num_base = len(specs) - len(adapter.specs(specs)) if adapter else 0
            self._weights = self._weights.same_base(Weights(specs, adapter, num_base))
            self._change_replicas()
            return self._sync(read, read_adapter, step)

    def forget_base(self) -> None:
        """The adapters of later syncs have another base."""
        self._weights = Weights(())

    def without_adapters(self, rank: int) -> str:
        """A line about a replica that cannot apply adapters of this rank; "" if all can."""
        for replica in self._replicas:
            if (limit := replica.description.max_adapter_rank) < rank:
                engine = f"{replica.name} ({replica.description.engine})"
                least = f" of a rank above {limit}" if limit else ""
                return f"{engine} applies no adapters{least}"
        return ""

    def lacks_base(self) -> bool:
        """Whether a replica that answers does not hold the base of the last sync."""
        with self._one_sync:
            return not all(map(self._weights.missing, self._answering_replicas()))

    def _sync(
        self,
        read: Callable[[], Iterable[np.ndarray | Array]],
        read_adapter: Callable[[], Iterable[np.ndarray | Array]] | None,
        step: int,
    ) -> WeightVersion:
        new = WeightVersion(self._run_id, self._attempt_id, step, digest="")
        deadline = time.monotonic() + self._waits.sync_timeout_s
        while True:
            if self._closed.is_set():
                raise RuntimeError("the rollout client is closed.")
            version, failures, weights = None, {}, self._weights
            if replicas := self._answering_replicas():
                missing = {replica: weights.missing(replica) for replica in replicas}
                first = min(missing.values()) if read_adapter else 0
                sent = new, weights, first, read_adapter() if first else read()
                if self._local is None:
                    more = {"memory": self._memory, "waits": self._waits}
                    version, failures = send_weights(*sent, replicas, deadline=deadline, **more)
                else:
                    version, failures = hand_over(*sent, self._local, deadline=deadline)
            for replica in replicas:
                if replica in failures:
                    self._set_aside(replica, failures[replica])
                else:
                    self._note_weights(replica, version, missing[replica])
            if len(failures) < len(replicas):
                return version
            errors = "; ".join(f"{r.name}: {r.error}" for r in self._replicas)
            now, retry_at = time.monotonic(), min(r.retry_at for r in self._replicas)
            if retry_at >= deadline:
                raise RuntimeError(
                    f"no replica took the weights of step {step} within "
                    f"{self._waits.sync_timeout_s:g} s ({errors})."
                )
            self._waits.progress(
                f"no replica took the weights of step {step} ({errors}); next attempt in "
                f"{max(retry_at - now, 0):.1f} s, deadline in {deadline - now:.0f} s"
            )
            self._closed.wait(max(retry_at - now, 0))

    def generate(
        self,
        requests: Sequence[SampleRequest],
        sampling: SamplingParams,
        hidden_states: HiddenStateParams = _NO_HIDDEN_STATES,
        *,
        version: WeightVersion,
        metrics: MetricParams | None = None,
        groups_per_call: int = 0,
        keep: bool = False,
        routed_experts: bool = False,
        entropies: bool = False,
        resync: Callable[[], WeightVersion] | None = None,
        read: Callable[[], Iterable[np.ndarray]] | None = None,
    ) -> Iterator[Rollout]:
        """Yields every requested response exactly once, in the order of arrival.

        The groups are divided among the replicas that serve `version`. If a replica fails, its
        remaining samples go to the others, or are retried with growing pauses. A response that a
        replica aborts is sampled again, at most twice. Close the iterator to end the call early.

        With `groups_per_call`, calls have this many groups, and a free replica gets the next one.
        One that has nothing to do is asked for a slow call of another one: the first response of
        each sample is kept. Deterministic engines are always asked for whole calls. So their
        responses do not depend on the number of replicas, on their speed, or on failures.

        Args:
          requests: their sample ids must be unique.
          version: from `sync_weights`; tokens sampled with other weights are an error.
          metrics: what the replicas measure; fills `metrics` and `mean_state` of the rollouts.
          groups_per_call: 0: every replica gets one call of an equal part.
          keep: see `GenerateCall.keep`; ends with `release`, or with the weights.
          routed_experts: whether the rollouts have the experts that tokens went to.
          entropies: whether the rollouts have the entropy at each token.
          resync: called if no replica serves `version` any more. It should call `sync_weights` with
            the same weights, which gives the same version.
          read: starts a pass over the arrays of `version`. Replicas that have lost the weights then
            get them again, in a thread that reads until the iterator ends or is closed, while
            others sample. None: they wait for the next sync.

        RuntimeError: the deadline passed, no replica serves `version`, a response was aborted for
        the third time, an engine failed again and again, or a reply contradicts the request.
        UserError or ValueError: a replica refuses the call permanently, or does not offer what it
        asks for.
        """
        call = codec.GenerateCall(
            tuple(requests),
            sampling,
            hidden_states,
            version,
            metrics,
            keep,
            routed_experts=routed_experts,
            entropies=entropies,
        )

        def resync_once() -> WeightVersion:
            with self._one_resync:
                if any(replica.version == version for replica in self._replicas):
                    return version  # as another call has done
                return resync()

        dispatcher = Dispatcher(
            call,
            lambda: self._replicas,
            self._counters,
            self._waits,
            self._closed,
            groups_per_call,
            resync and resync_once,
            functools.partial(self._restore, version, read)
            if read and self._weights.specs
            else None,
            self._homes,
        )
        with contextlib.closing(dispatcher):
            yield from dispatcher.run()

    def await_weights(self, version: WeightVersion | None = None) -> WeightVersion:
        """Waits until a replica serves weights that it loaded itself; returns their version.

        Replicas that have lost them, such as by a new start, are asked again.

        Args:
          version: of earlier weights; None: the first one that is found.

        UserError: a replica serves another version, or no longer fits the run. RuntimeError: no
        replica serves weights within `sync_timeout_s`.
        """
        deadline = time.monotonic() + self._waits.sync_timeout_s
        version = version or next(filter(None, (r.version for r in self._replicas)), None)
        while not self._closed.is_set():
            lost = [r for r in self._replicas if r.version is None or r.version != version]
            due = [r for r in lost if time.monotonic() >= r.retry_at]
            for replica, found in self._ask(due).items():
                if isinstance(found, ReplicaDescription) and found.version is not None:
                    version = version or found.version
                    if found.version != version:
                        raise UserError(
                            f"{replica.name} serves weights {found.version}, not {version}; start "
                            "all replicas of a model alike, with weights that stay the same."
                        )
                    self._adopt(replica, found)
                    continue
                reason = "it loads its weights, or was started without --policy"
                if not isinstance(found, ReplicaDescription):
                    reason = self._refusal(replica, found)
                replica.set_aside(reason)
                self._report(replica.address, f"{replica.name} serves no weights: {reason}")
            if any(replica.version == version for replica in self._replicas) and version:
                return version
            if time.monotonic() > deadline:
                errors = "; ".join(f"{r.name}: {r.error}" for r in self._replicas)
                raise RuntimeError(f"no replica serves the weights ({errors}).")
            self._closed.wait(0.2)
        raise RuntimeError("the rollout client is closed.")

    def tensor_sums(self) -> list[TensorSum]:
        """Sums of the weights that the replicas hold which serve some.

        UserError, a line that says why: an engine cannot say, one does not answer, or two differ.
        """
        found: list[TensorSum] = []
        held = None
        for replica in [r for r in self._replicas if r.version] or self._replicas[:1]:
            try:
                found = replica.tensor_sums(self._waits.stall_timeout_s)
            except (grpc.RpcError, ValueError) as error:
                reason = describe_error(error) if isinstance(error, grpc.RpcError) else error
                raise UserError(
                    f"{replica.name} gives no checksums of its weights: {reason}"
                ) from error
            holds = {(each.name, each.dtype) for each in found}
            if held is not None and holds != held:
                raise UserError(
                    f"{replica.name} holds its weights otherwise than another replica, such as in "
                    "another dtype; start all replicas of a model alike."
                )
            held = holds
        return found

    def release(self, weights: bool = False) -> None:
        """Frees what a replica of this process keeps. Others keep it until new weights come.

        Args:
          weights: free these too; no call follows before the next `sync_weights`. With `in_turns`
            others free them as well; one that does not answer is set aside.

        UserError: a replica cannot sleep, or belongs to another run.
        """
        self._homes.clear()
        if self._local is not None:
            self._local.release(weights)
        elif weights and self._in_turns:
            with self._one_sync:
                self._sleep()

    def _sleep(self) -> None:
        """Makes all replicas sleep; the last update of weights has ended."""
        timeout_s = self._waits.stall_timeout_s
        for replica, found in self._of_each(
            self._replicas, lambda replica: replica.sleep(self._run_id, timeout_s)
        ).items():
            replica.version = None
            if isinstance(found, grpc.RpcError):
                if fatal := fatal_error(replica, found):
                    raise fatal from found
                self._set_aside(replica, describe_error(found))
            elif isinstance(found, Exception):
                raise found
            elif found:
                self._report(replica.address, f"{replica.name}: {found}")

    def _await_replica(self, replica: Replica, deadline: float) -> None:
        last_report = started = time.monotonic()
        while True:
            try:
                timeout_s = min(_PROBE_TIMEOUT_S, deadline - time.monotonic())
                return self._adopt(replica, self._describe(replica, timeout_s))
            except grpc.RpcError as error:
                if fatal := fatal_error(replica, error):
                    raise fatal from error
                now, reason = time.monotonic(), describe_error(error)
                if now >= deadline:
                    raise UserError(
                        f"{replica.name} cannot be reached within "
                        f"{self._waits.connect_timeout_s:g} s ({reason}); "
                        f"{way_out(reason, self._field)}."
                    ) from error
                if now - last_report >= self._waits.progress_every_s:
                    last_report = now
                    self._waits.progress(
                        f"waiting for {replica.name} of {self._field} ({now - started:.0f} s, "
                        f"{reason}; deadline in {deadline - now:.0f} s)"
                    )
            time.sleep(max(0.0, min(0.2, deadline - time.monotonic())))

    def _new_replica(self, address: str) -> RemoteReplica:
        load = self._loads.get(address)  # of one that was here before
        options = {"load": load, "field": self._field}
        return RemoteReplica(address, self._token, tls_ca=self._authority, **options)

    def _describe(self, replica: Replica, timeout_s: float) -> ReplicaDescription:
        memory = None if self._memory is None else self._memory.message()
        description = replica.describe(timeout_s, memory)
        for field, expected in self._expected.items():
            actual = getattr(description, field)
            if field == "tokenizer_hash" and not (actual and expected):
                continue
            if actual != expected:
                raise UserError(
                    f"{replica.name} has {field}={actual!r}, the trainer {expected!r}; start the "
                    "replica from the same model, tokenizer and release."
                )
        self._check(description)
        if (adapter := self._weights.adapter) and description.max_adapter_rank < adapter.rank:
            raise UserError(
                f"{replica.name} applies no adapter of rank {adapter.rank}, and the run sends one "
                "unmerged; start the replica from the run's config and release."
            )
        return description

    def _adopt(self, replica: Replica, description: ReplicaDescription) -> None:
        """Notes that the replica can be used, and its weights."""
        replica.version, replica.answers = description.version, True
        replica.base = description.base_digest
        replica.succeeded()

    def _note_weights(self, replica: Replica, version: WeightVersion, first: int) -> None:
        """Notes that it serves the weights, of which it was sent the tensors from `first` on."""
        replica.version, replica.base = version, self._weights.base
        replica.succeeded()
        num_bytes = sum(spec.num_bytes for spec in self._weights.specs[first:])
        self._counters.add(weight_bytes=num_bytes)

    def _ask(self, replicas: Sequence[Replica]) -> dict[Replica, ReplicaDescription | Exception]:
        """The description of each replica, or why there is none."""

        def ask(replica: Replica) -> ReplicaDescription:
            is_good = replica.description is not None and not replica.error
            timeout_s = self._waits.sync_wait_s if is_good else _PROBE_TIMEOUT_S
            return self._describe(replica, timeout_s)

        return self._of_each(replicas, ask)

    def _of_each(
        self, replicas: Sequence[Replica], ask: Callable[[Replica], T]
    ) -> dict[Replica, T | Exception]:
        """The answer of each replica, or why there is none; all are asked at once."""
        if not replicas:
            return {}
        threads = concurrent.futures.ThreadPoolExecutor(_NUM_PROBED, "ask")
        try:
            asked = {replica: threads.submit(ask, replica) for replica in replicas}
            return {r: future.exception() or future.result() for r, future in asked.items()}
        finally:
            threads.shutdown(wait=False, cancel_futures=True)  # a signal may have ended the wait

    def _answering_replicas(self) -> list[Replica]:
        """The replicas without those that failed earlier and still do not answer."""
        good = [r for r in self._replicas if r.description is not None and not r.error]
        now = time.monotonic()
        # One that did not answer may cost its whole timeout again. Its pauses grow.
        due = [r for r in self._replicas if r.answers or now >= r.retry_at or not good]
        # One that started again has lost the base of an adapter.
        known = [] if self._weights.adapter else good
        for replica, found in self._ask([r for r in due if r not in known]).items():
            good = [r for r in good if r is not replica]
            if isinstance(found, ReplicaDescription):
                self._adopt(replica, found)
                good.append(replica)
                continue
            reason = self._refusal(replica, found)
            replica.answers = not isinstance(found, grpc.RpcError)
            self._set_aside(replica, reason)
        return [replica for replica in self._replicas if replica in good]

    def _refusal(self, replica: Replica, error: Exception) -> str:
        """Why a replica cannot be used now; raises what is for good, without `find_addresses`."""
        is_rpc = isinstance(error, grpc.RpcError)
        if (fatal := fatal_error(replica, error) if is_rpc else error) is None:
            return describe_error(error)
        if self._find_addresses is None or not isinstance(fatal, UserError | ValueError):
            raise fatal from error
        return str(fatal)

    def _change_replicas(self) -> None:
        if self._find_addresses is None:
            return
        try:
            addresses = self._find_addresses()
        except UserError as error:
            self._report("", f"{error} The present replicas stay.")
            return
        self._reported = {a: text for a, text in self._reported.items() if a in ("", *addresses)}
        present = {replica.address: replica for replica in self._replicas}
        joined = self._joining([address for address in addresses if address not in present])
        known = present | {replica.address: replica for replica in joined}
        replicas = [known[address] for address in addresses if address in known]
        if not replicas:
            self._report("", "none of the replicas named can be used; the present ones stay.")
            return
        for replica in [r for r in self._leaving if not r.load.num_calls]:
            self._leaving.remove(replica)
            replica.close(self._run_id, self._attempt_id)
        for replica in [r for r in self._replicas if r not in replicas]:
            replica.is_leaving = True
            self._leaving.append(replica)  # until the next sync: it may still have a call
            self._waits.progress(f"{replica.name} leaves; {len(replicas)} are left")
        self._replicas = replicas
        self._reported.pop("", None)

    def _joining(self, addresses: Sequence[str]) -> list[Replica]:
        """New replicas. One that cannot be used is reported once, and tried again later."""
        new, now = [], time.monotonic()
        for address in addresses:
            if now < self._next_try.get(address, now):
                continue
            try:
                new.append(self._new_replica(address))
            except UserError as error:
                self._report(address, str(error))
        ids = {r.description.replica_id for r in self._replicas if r.description}
        joined = []
        for replica, found in self._ask(new).items():
            if isinstance(found, ReplicaDescription) and found.replica_id not in ids:
                ids.add(found.replica_id)
                self._adopt(replica, found)
                joined.append(replica)
                self._loads[replica.address] = replica.load
                self._reported.pop(replica.address, None)
                self._waits.progress(f"{replica.name} joins")
                continue
            if isinstance(found, ReplicaDescription):
                reason = f"another address leads to the same replica {found.replica_id!r}."
            else:
                reason = self._refusal(replica, found)
                if isinstance(found, grpc.RpcError):
                    self._next_try[replica.address] = time.monotonic() + _RETRY_S
            self._report(replica.address, f"{replica.name} cannot be used: {reason}")
            replica.close()
        return joined

    def _report(self, address: str, text: str) -> None:
        """Reports a problem with an address, or with all of them, unless it was the last one."""
        if self._reported.get(address) != text:
            self._reported[address] = text
            self._waits.progress(text)

    def _restore(
        self,
        version: WeightVersion,
        read: Callable[[], Iterable[np.ndarray]],
        replica: Replica,
        ended: threading.Event,
        reading: threading.Lock,
    ) -> None:
        """Gives one replica the weights of `version` again, or sets it aside."""
        deadline = time.monotonic() + self._waits.sync_timeout_s
        try:
            description = self._describe(replica, _PROBE_TIMEOUT_S)
            with reading, self._one_sync:
                if ended.is_set() or replica.version == version:  # as another call has done
                    return
                replica.answers, replica.base = True, description.base_digest
                if description.version == version:
                    self._adopt(replica, description)
                    return
                first = self._weights.missing(replica)
                found, failures = send_weights(
                    dataclasses.replace(version, digest=""),
                    self._weights,
                    0,
                    read(),
                    [replica],
                    memory=self._memory,
                    deadline=deadline,
                    waits=self._waits,
                    ended=ended,
                )
                error = failures.get(replica, "")
                if not error and found != version:
                    error = f"the weights read again have version {found}, not {version}"
                if error:
                    replica.version = None
                    replica.set_aside(error)
                else:
                    self._note_weights(replica, version, first)
                    self._waits.progress(f"{replica.name} has weights {version} again")
        except Ended:
            replica.version = None
        except Exception as error:  # other replicas go on
            is_rpc = isinstance(error, grpc.RpcError)
            replica.answers = not is_rpc
            replica.set_aside(describe_error(error) if is_rpc else str(error))

    def _set_aside(self, replica: Replica, error: str) -> None:
        if self._closed.is_set():  # which ended the call
            raise RuntimeError("the rollout client is closed.")
        replica.version = None
        replica.set_aside(error)
        self._counters.add(replica_failures=1)
        self._waits.progress(f"{replica.name} is set aside until the next sync of weights: {error}")
