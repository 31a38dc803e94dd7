"""A signal ends an interruptible block with Preempted."""

import hashlib
import os
import queue
import signal
import threading

import pytest

from semrl_jax.cluster.preemption import StopRequest
from semrl_jax.jobs import sample
from semrl_jax.support.errors import Preempted


@pytest.fixture
def stop():
    with StopRequest(60.0, 75).installed() as request:
        yield request


def terminate():
    os.kill(os.getpid(), signal.SIGTERM)


def test_signal_ends_a_wait(stop):
    timer = threading.Timer(0.05, terminate)
    with pytest.raises(Preempted, match="SIGTERM"), stop.interruptible():
        timer.start()
        queue.Queue().get()
    timer.join()


def test_process_ends_after_the_grace_time(monkeypatch, capsys):
    codes = queue.Queue()
    monkeypatch.setattr(os, "_exit", codes.put)
    with StopRequest(0.01, 75).installed():
        terminate()
        assert codes.get(timeout=10) == 75
    assert "no checkpoint within training.grace_s=0.01 s" in capsys.readouterr().err


def test_a_command_without_checkpoints_does_not_speak_of_them(monkeypatch, capsys):
    """Such as an evaluation, which continues with its finished calls."""
    codes = queue.Queue()
    monkeypatch.setattr(os, "_exit", codes.put)
    monkeypatch.setattr(sample, "GRACE_S", 0.01)

    def work(_reporter, _stop):
        terminate()
        assert codes.get(timeout=10) == 75

    assert sample.resumable(work, quiet=True) == 0
    assert capsys.readouterr().err == "SIGTERM: stopped; the same command continues\n"


def test_the_grace_time_runs_while_the_main_thread_is_in_a_call_of_c(monkeypatch):
    """Such as a compilation: no handler runs before its end."""
    codes = queue.Queue()
    monkeypatch.setattr(os, "_exit", codes.put)
    with StopRequest(0.01, 75).installed() as request:
        timer = threading.Timer(0.05, terminate)
        timer.start()
        hashlib.pbkdf2_hmac("sha256", b"", b"", 1_000_000)  # some tenths of a second
        assert codes.qsize() == 1
        with pytest.raises(Preempted, match="SIGTERM"):
            request.check()
    timer.join()


def test_an_interrupt_has_no_grace_time(monkeypatch):
    """Nobody kills the process after Ctrl-C, so its checkpoint may take as long as it needs."""
    codes = queue.Queue()
    monkeypatch.setattr(os, "_exit", codes.put)
    with StopRequest(0.01, 75).installed() as request:
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(queue.Empty):
            codes.get(timeout=0.3)
        with pytest.raises(Preempted, match="SIGINT"):
            request.check()


def test_sigterm_after_an_interrupt_has_the_grace_time(monkeypatch):
    """Then the scheduler ends the job, and does not wait for ever."""
    codes = queue.Queue()
    monkeypatch.setattr(os, "_exit", codes.put)
    with StopRequest(0.01, 75).installed():
        os.kill(os.getpid(), signal.SIGINT)
        terminate()
        assert codes.get(timeout=2) == 75
        terminate()  # the watchdog starts once


def test_a_signal_during_the_handler_of_another_changes_nothing(stop, monkeypatch):
    """Slurm signals a step again when it cancels the step."""
    names = signal.Signals

    def interrupted(number):
        monkeypatch.setattr(signal, "Signals", names)
        terminate()
        return names(number)

    monkeypatch.setattr(signal, "Signals", interrupted)
    terminate()
    with pytest.raises(Preempted, match="SIGTERM"):
        stop.check()


def test_another_thread_handles_no_signal():
    handler = signal.getsignal(signal.SIGTERM)
    found = []

    def work():
        with StopRequest(0.01, 75).installed():
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [handler]


def test_signal_outside_an_interruptible_block_is_deferred(stop):
    terminate()  # raises nothing here
    with pytest.raises(Preempted):
        stop.check()
    with pytest.raises(Preempted), stop.interruptible():
        raise AssertionError("the block must not begin")


def test_blocks_of_other_threads_leave_the_main_thread_interruptible(stop):
    """Two threads of `launch.evaluate` sample, and write what they have sampled."""
    writes, sampled = threading.Event(), threading.Event()

    def write():
        with stop.deferred():
            writes.set()
            sampled.wait()

    def sample():
        writes.wait()
        with stop.interruptible():
            sampled.set()
            threads[0].join()

    was_seen = True
    with pytest.raises(Preempted), stop.interruptible():
        threads = [threading.Thread(target=write), threading.Thread(target=sample)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        terminate()
        was_seen = False
    assert was_seen


def test_a_signal_waits_for_the_end_of_every_deferred_block(stop):
    reached = []
    with pytest.raises(Preempted), stop.interruptible():
        with stop.deferred():
            with stop.deferred():
                terminate()
                reached.append("inner")
            reached.append("outer")
        reached.append("after")
    assert reached == ["inner", "outer"]


def test_error_caused_by_a_signal_becomes_preempted(stop):
    """`Condition.wait` fails like this if the signal arrives before it has its lock again."""
    lock = threading.Lock()
    with pytest.raises(Preempted) as caught, stop.interruptible():
        try:
            terminate()
        finally:
            lock.release()
    assert "unlocked" in str(caught.value.__cause__)


def test_except_exception_does_not_catch_preempted(stop):
    with pytest.raises(Preempted), stop.interruptible():
        try:
            terminate()
        except Exception:
            raise AssertionError("swallowed") from None


def test_error_without_a_signal_is_not_changed(stop):
    with pytest.raises(KeyError), stop.interruptible():
        raise KeyError("x")


def test_second_sigint_raises_keyboard_interrupt(stop):
    with pytest.raises(Preempted), stop.interruptible():
        os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_message_names_what_was_not_saved_in_time(monkeypatch, capsys):
    codes = []
    monkeypatch.setattr(os, "_exit", codes.append)
    stop = StopRequest(0.0, 75)
    for saved, said in ((False, "no checkpoint within"), (True, "the checkpoint is saved")):
        if saved:
            stop.checkpoint_saved()
        stop._give_up(75)
        err = capsys.readouterr().err
        assert said in err and ("goes on from the one before" in err) != saved
    assert codes == [75, 75]
