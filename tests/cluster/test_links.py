"""Connections over IPv4 and IPv6; unknown callers and stopped processes do not block others."""

import concurrent.futures
import multiprocessing
import socket
import threading
import time
import types

import pytest

from semrl_jax.cluster import links, peers
from semrl_jax.cluster.links import FLUSH_TIMEOUT_S, Link, Listener, call, flush
from semrl_jax.cluster.peers import Peers
from semrl_jax.support.errors import UserError
from tests.cases import refused

KEY = b"secret of the test"


class Ended(BaseException):
    """Raised in these tests in place of os._exit."""


def connect(listener, count, address=None, timeout_s=10.0):
    """Makes the peers of one run, each in its own thread; returns each, or its error message."""

    def make(index):
        try:
            return Peers(
                index, count, listener=None if index else listener,
                address=address or listener.address, key=KEY, connect_timeout_s=timeout_s,
            )  # fmt: skip
        except UserError as error:
            return str(error)

    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        return list(pool.map(make, range(count)))


@pytest.mark.parametrize("host", ["::1", "127.0.0.1", "localhost", "node.of.a.cluster"])
def test_ipv4_and_ipv6(host):
    listener = Listener(host, KEY)
    reached = "::1" if host == "node.of.a.cluster" else host  # there it listens on all addresses
    first, second = connect(listener, 2, (reached, listener.address[1]))
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda one: one.gather("where", one.index), (first, second)))
    assert found == [[0, 1], [0, 1]]
    first.close(), second.close()


def test_silent_unknown_callers_do_not_block_peers():
    listener = Listener("127.0.0.1", KEY)
    strangers = [socket.create_connection(listener.address) for _ in range(3)]
    made = connect(listener, 2)
    assert all(isinstance(one, Peers) for one in made)
    for one in (*made, *strangers):
        one.close()


def test_caller_without_the_secret_is_refused():
    listener, came = Listener("127.0.0.1", KEY), []
    threading.Thread(target=listener.accept, args=(came.append,), daemon=True).start()
    with pytest.raises(UserError, match=r"cannot connect to process 0 at 127\.0\.0\.1 port"):
        call(listener.address, b"another", {"hello": 1, "name": "host:1"}, 10.0)
    listener.close()
    assert not came


def test_connecting_to_a_silent_port_has_a_deadline(monkeypatch):
    """A full backlog drops packets, as a firewall does."""
    monkeypatch.setattr(links, "HANDSHAKE_TIMEOUT_S", 1.0)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(1)
        began = time.monotonic()
        with pytest.raises(UserError, match="open all ports between the nodes of a job"):
            call(silent.getsockname(), KEY, {"hello": 3, "name": "host:1"}, 1.0)
    assert time.monotonic() - began < 8


def test_connected_processes_report_the_missing_one(monkeypatch, capsys):
    """A permanent mistake is not reported as a lost process, which would cause a restart."""
    codes = []

    def end(code):
        codes.append(code)
        raise Ended

    monkeypatch.setattr(peers.os, "_exit", end)
    monkeypatch.setattr(threading, "excepthook", lambda arguments: None)
    listener = Listener("127.0.0.1", KEY)

    def make(index):
        return Peers(
            index, 3, listener=None if index else listener, address=listener.address, key=KEY,
            connect_timeout_s=2.0,
        )  # fmt: skip

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        came = pool.submit(make, 1)
        refused("process 2 did not connect to process 0 at port", pool.submit(make, 0).result)
        first = came.result()
    deadline = time.monotonic() + 5
    while not codes and time.monotonic() < deadline:
        time.sleep(0.01)
    assert codes == [2]
    first.close()  # os._exit did not end it, so stop its watch of process 0
    assert "process 0 failed: process 2 did not connect" in capsys.readouterr().err


def test_process_that_reads_nothing_does_not_block_the_sender():
    """Sends more than a connection's buffers can hold to a process that does not read."""
    ours, theirs = multiprocessing.Pipe()
    link = Link(1, "stopped", ours)
    began = time.monotonic()
    for _ in range(3):
        link.send({"value": "x" * 2**22})
    assert time.monotonic() - began < 5
    flush([link])
    assert time.monotonic() - began < FLUSH_TIMEOUT_S + 5
    received = []
    reader = threading.Thread(target=lambda: received.extend(theirs.recv_bytes() for _ in range(3)))
    reader.start()
    reader.join(10)
    assert len(received) == 3  # the messages arrive complete when it reads again
    link.send({"last": 1})
    flush([link])
    assert theirs.poll(0) and theirs.recv_bytes() == b'{"last": 1}'


def test_a_message_to_all_is_encoded_once():
    """Process 0 sends what all have gathered, tens of megabytes, to hundreds of processes."""
    sent, peers = [], Peers()
    connection = types.SimpleNamespace(send_bytes=sent.append)
    peers._links = {index: Link(index, "fake", connection) for index in (1, 2, 3)}
    peers._send_all({"round": 1}, but=2)
    flush(peers._links.values())
    assert sent == [b'{"round": 1}'] * 2 and sent[0] is sent[1]
