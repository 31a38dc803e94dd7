"""What two processes of a save tell each other, over a store that both see."""

import errno
import threading

import pytest

from semrl_jax.cluster.peers import PeerFailed, Peers
from semrl_jax.runs import joint_save
from semrl_jax.runs.joint_save import JointSave


class Store:
    """As much of the client of jax.distributed as is called."""

    def __init__(self):
        self._values = {}

    def key_value_set(self, key, value, allow_overwrite=False):
        assert allow_overwrite or key not in self._values
        self._values[key] = value

    def key_value_dir_get(self, directory):
        return [item for item in list(self._values.items()) if item[0].startswith(directory)]


@pytest.fixture
def processes(monkeypatch):
    """The same save as processes 0 and 1 see it."""
    monkeypatch.setattr(joint_save.distributed.global_state, "client", Store())
    monkeypatch.setattr(joint_save, "POLL_S", 0.01)
    found = []
    for index in range(2):
        peers = Peers()
        peers.index, peers.count = index, 2
        found.append(JointSave("run/1", peers))
    return found


def test_each_waits_until_the_other_has_come(processes):
    first, second = processes
    waiting = threading.Thread(target=first.wait, args=("written", 10.0))
    waiting.start()
    second.arrive("another point")
    waiting.join(0.1)
    assert waiting.is_alive()
    second.wait("written", 10.0)
    waiting.join(5.0)
    assert not waiting.is_alive()


def test_what_one_was_refused_ends_the_others_wait(processes):
    first, second = processes
    second.fail(OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(OSError, match="No space left on device") as caught:
        first.wait("written", 10.0)
    assert caught.value.errno == errno.ENOSPC
    second.arrive("ended")
    first.wait("ended", 10.0, whatever_failed=True)


def test_a_defect_of_one_is_none_of_the_disks(processes):
    first, second = processes
    second.fail(TypeError("no such shape"))
    with pytest.raises(PeerFailed, match=r"process 1 could not save .* TypeError: no such shape"):
        first.wait("written", 10.0)


def test_one_that_does_not_come_is_named(processes):
    with pytest.raises(TimeoutError, match=r"processes \[1\] have not reached 'written'"):
        processes[0].wait("written", 0.05)


def test_one_process_alone_waits_for_nothing():
    alone = JointSave("run/1", Peers())
    alone.fail(TypeError("unheard"))
    alone.wait("written", 0.0)
