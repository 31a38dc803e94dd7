"""What the processes of one save tell each other while it goes on in the background.

It goes through the key-value store of `jax.distributed`, which Orbax uses, too: no full disk stands
in its way, and `Peers.gather` is for main threads.
"""

from __future__ import annotations

import time

from jax._src import distributed  # there is no public way to the client of jax.distributed

from semrl_jax.cluster.peers import PeerFailed, Peers

POLL_S = 0.1


class JointSave:
    """One save as its processes see it; a single process has nothing to wait for.

    Args:
      name: of this save, the same in every process and never used before.
      peers: the processes.
    """

    def __init__(self, name: str, peers: Peers):
        self._name, self._peers = name, peers
        self._client = distributed.global_state.client if peers.count > 1 else None

    def fail(self, error: Exception) -> None:
        """Tells the others that this process could not do its part, so that none waits for it."""
        if self._client is not None:
            number = error.errno if isinstance(error, OSError) and error.errno else 0
            text = error.strerror if number else f"{type(error).__name__}: {error}"
            self._set("failed", f"{number} {text}")

    def arrive(self, point: str) -> None:
        if self._client is not None:
            self._set(point, "")

    def wait(self, point: str, timeout_s: float, *, whatever_failed: bool = False) -> None:
        """Arrives at a point and waits for all others to.

        Raises:
          OSError: what the disk of another process refused it with, unless `whatever_failed`.
          PeerFailed: likewise, if it failed for another reason.
          TimeoutError: if one has not arrived within `timeout_s`.
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
                    f"processes {missing} have not come to {point!r} of a checkpoint within "
                    f"{timeout_s:g} s"
                )
            time.sleep(POLL_S)

    def _set(self, point: str, value: str) -> None:
        key = f"{self._name}/{point}/{self._peers.index}"
        self._client.key_value_set(key, value, allow_overwrite=True)

    def _get(self, point: str) -> dict[int, str]:
        """What was set, by process."""
        entries = self._client.key_value_dir_get(f"{self._name}/{point}/")
        return {int(key.rpartition("/")[2]): value for key, value in entries}
