"""Messages between processes during one background save of a checkpoint.

They use the key-value store of `jax.distributed`, as Orbax does. It works with a full disk, and in
background threads. `Peers.gather` is for main threads only.
"""

from __future__ import annotations

import time

from jax._src import distributed  # jax.distributed has no public access to its client

from semrl_jax.cluster.peers import PeerFailed, Peers

POLL_S = 0.1


class JointSave:
    """One save by several processes, with a name that is new and equal in all; see `wait`."""

    def __init__(self, name: str, peers: Peers):
        self._name, self._peers = name, peers
        self._client = distributed.global_state.client if peers.count > 1 else None

    def fail(self, error: Exception) -> None:
        """Tells the others that this process failed, so that none waits for it."""
        number = error.errno if isinstance(error, OSError) and error.errno else 0
        text = error.strerror if number else f"{type(error).__name__}: {error}"
        self._set("failed", f"{number} {text}")

    def arrive(self, point: str) -> None:
        self._set(point, "")

    def wait(self, point: str, timeout_s: float, *, whatever_failed: bool = False) -> None:
        """Arrives at a point and waits until all others have arrived.

        Raises:
          OSError: the disk error of another process, unless `whatever_failed`.
          PeerFailed: if another process failed for another reason, unless `whatever_failed`.
          TimeoutError: if a process has not arrived within `timeout_s`.
        """
        if self._client is None:
            return
        self.arrive(point)
        deadline = time.monotonic() + timeout_s
        while len(arrived := self._get(point)) < self._peers.count:
            for process, said in () if whatever_failed else self._get("failed").items():
                number, _, text = said.partition(" ")
                if process == self._peers.index:
                    continue
                if int(number):
                    raise OSError(int(number), text)
                raise PeerFailed(f"process {process} could not save its part: {text}")
            if time.monotonic() > deadline:
                missing = sorted(set(range(self._peers.count)) - arrived.keys())
                raise TimeoutError(
                    f"processes {missing} have not reached {point!r} within {timeout_s:g} s"
                )
            time.sleep(POLL_S)

    def _set(self, point: str, value: str) -> None:
        if self._client is not None:
            key = f"{self._name}/{point}/{self._peers.index}"
            self._client.key_value_set(key, value, allow_overwrite=True)

    def _get(self, point: str) -> dict[int, str]:
        """The values that were set, by process."""
        entries = self._client.key_value_dir_get(f"{self._name}/{point}/")
        return {int(key.rpartition("/")[2]): value for key, value in entries}
