"""Messages between two processes of a save, over a key-value store."""

import errno
import threading

import pytest

from semrl_jax.cluster.peers import PeerFailed, Peers
from semrl_jax.runs import joint_save
from semrl_jax.runs.joint_save import JointSave


class Store:
    """The methods of the client of jax.distributed that are used."""

    def __init__(self):
        self._values = {}

    def key_value_set(self, key, value, allow_overwrite=False):
        assert allow_overwrite or key not in self._values
        self._values[key] = value

    def key_value_dir_get(self, directory):
        return [item for item in list(self._values.items()) if item[0].startswith(directory)]


@pytest.fixture
def processes(monkeypatch):
    """One save in processes 0 and 1."""
    monkeypatch.setattr(joint_save.distributed.global_state, "client", Store())
    monkeypatch.setattr(joint_save, "POLL_S", 0.01)
    found = []
    for index in range(2):
        peers = Peers()
        peers.index, peers.count = index, 2
        found.append(JointSave("run/1", peers))
    return found


def test_each_process_waits_for_the_other(processes):
    first, second = processes
    waiting = threading.Thread(target=first.wait, args=("written", 10.0))
    waiting.start()
    second.arrive("another point")
    waiting.join(0.1)
    assert waiting.is_alive()
    second.wait("written", 10.0)
    waiting.join(5.0)
    assert not waiting.is_alive()


def test_a_disk_error_of_one_process_ends_the_wait_of_the_other(processes):
    first, second = processes
    second.fail(OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(OSError, match="No space left on device") as caught:
        first.wait("written", 10.0)
    assert caught.value.errno == errno.ENOSPC
    second.arrive("ended")
    first.wait("ended", 10.0, whatever_failed=True)


def test_another_error_of_one_process_is_not_reported_as_a_disk_error(processes):
    first, second = processes
    second.fail(TypeError("no such shape"))
    with pytest.raises(PeerFailed, match=r"process 1 could not save .* TypeError: no such shape"):
        first.wait("written", 10.0)


def test_a_missing_process_is_named(processes):
    with pytest.raises(TimeoutError, match=r"processes \[1\] have not reached 'written'"):
        processes[0].wait("written", 0.05)


def test_a_single_process_does_not_wait():
    alone = JointSave("run/1", Peers())
    alone.fail(TypeError("unheard"))
    alone.wait("written", 0.0)
