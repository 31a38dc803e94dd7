"""The server of HTTP: hostile clients, clients that leave, weights, TLS, and what is loaded."""

import asyncio
import contextlib
import json
import os
import pathlib
import random
import socket
import ssl
import threading
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import pytest

from semrl_jax.rollout.client import RolloutClient
from semrl_jax.rollout.http import app, guarding, server
from semrl_jax.rollout.server import Http
from semrl_jax.support.errors import UserError
from tests.rollout.conftest import FAKE, TOKEN, make_arrays
from tests.rollout.embedded import EmbeddedReplica
from tests.rollout.fake_engine import FAKE_SPECS, FakeEngine, FakeScript
from tests.rollout.http.conftest import MODEL, Served, ask
from tests.rollout.server.test_prometheus import free_port
from tests.rollout.server.test_server import certificate  # noqa: F401 - a fixture
from tests.running import wait_until

ROUTES = ("/v1/chat/completions", "/v1/completions", "/inference/v1/generate")
BODIES = (
    {"model": MODEL, "messages": [{"role": "user", "content": "fox"}], "max_tokens": 2, "n": 1},
    {"model": MODEL, "prompt": "fox", "max_tokens": 2, "top_k": 3, "logprobs": 0},
    {"model": MODEL, "token_ids": [5, 6], "sampling_params": {"max_tokens": 2, "seed": 1}},
)


@pytest.fixture
def fake(tokenizer):
    """Starts a replica of the fake engine, whose tokens have no meaning."""
    with contextlib.ExitStack() as stack:

        def start(script=None, weights=True, **settings):
            size = len(tokenizer)
            engine = FakeEngine(
                script=script or FakeScript(), vocab_size=size, max_response_tokens=64
            )
            served = Served(engine, tokenizer, stack, **settings)
            if weights:
                address = served.replica.address
                client = RolloutClient([address], TOKEN, run_id="run", attempt_id="attempt")
                with contextlib.closing(client):
                    client.connect(**{**FAKE, "vocab_size": size})
                    client.sync_weights(FAKE_SPECS, lambda: make_arrays(), step=0)
            return served

        yield start


def memory_bytes():
    return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def mutated(draw, body):
    """A body with something wrong in it: bytes, structure or values."""
    kind = draw.randrange(4)
    if kind == 0:
        data = bytearray(json.dumps(body).encode())
        for _ in range(draw.randint(1, 5)):
            data[draw.randrange(len(data))] = draw.randrange(256)
        return bytes(data)
    if kind == 1:
        data = json.dumps(body).encode()
        return data[: draw.randrange(len(data))]
    values = [None, -1, 1e308, float("nan"), "", "x" * 5000, [], {}, True, [[]], 2**70, {"a": [1]}]
    body = json.loads(json.dumps(body))
    target = body.get("sampling_params", body) if draw.random() < 0.5 else body
    target[draw.choice([*target, "temperature", "seed", "stop", "n"])] = draw.choice(values)
    if kind == 3:
        return b"[" * draw.randint(1, 100_000) + json.dumps(body).encode()
    return json.dumps(body).encode()


def check_mutations(served, count):
    draw = random.Random(0)
    statuses = []
    for index in range(count):
        route = index % 3
        answer = ask(served.url + ROUTES[route], mutated(draw, BODIES[route]), timeout_s=20)
        statuses.append(answer.status)
        found = json.loads(answer.text)
        if answer.status != 200:
            assert "\n" not in found["error"]["message"] and found["error"]["message"]
        if index == count // 10:
            before = memory_bytes()
    assert set(statuses) <= {200, 400, 404}, set(statuses)
    assert statuses.count(400) > count / 3
    assert memory_bytes() - before < 48 << 20
    for route, body in zip(ROUTES, BODIES):
        assert ask(served.url + route, body).status == 200


def test_mutated_requests(fake):
    check_mutations(fake(), 300)


@pytest.mark.soak
def test_thousands_of_mutated_requests(fake):
    check_mutations(fake(), 5000)


@pytest.mark.soak
def test_many_connections_many_choices_and_a_slow_reader(served):
    url, before = served.url + ROUTES[1], memory_bytes()
    long = {**BODIES[1], "n": 1024, "max_tokens": 48, "ignore_eos": True, "stream": True}
    data = json.dumps(long).encode()
    with connected(served) as (slow, _), ThreadPoolExecutor(300) as pool:
        slow.settimeout(300)
        slow.sendall(head(ROUTES[1], len(data)) + data)
        bodies = [{**BODIES[1], "seed": seed} for seed in range(300)]
        answers = list(pool.map(lambda body: ask(url, body, timeout_s=300), bodies))
        assert {answer.status for answer in answers} == {200}
        many = ask(url, {**BODIES[1], "n": 1024}, timeout_s=300)
        assert len(json.loads(many.text)["choices"]) == 1024
        assert ask(url, {**BODIES[1], "n": 1025}).status == 400
        read = b""
        while not read.endswith(b"0\r\n\r\n"):
            read += slow.recv(8192)
            time.sleep(0.001)
    assert read.count(b'"finish_reason": "length"') == 1024 and b"[DONE]" in read
    assert memory_bytes() - before < 256 << 20


def test_bodies_that_are_too_long_or_too_slow(fake, monkeypatch):
    served = fake()
    monkeypatch.setattr(guarding, "BODY_S", 0.5)
    assert ask(served.url + ROUTES[1], b" " * (app.MAX_BODY_BYTES + 1)).status == 413
    with connected(served) as (sock, answer):
        sock.sendall(head(ROUTES[1], length=100) + b'{"model":')
        assert b"408" in answer()
    with connected(served) as (sock, answer):
        for number in range(2000):
            try:
                sock.sendall(
                    b"GET /v1/models HTTP/1.1\r\n" if not number else b"X: %b\r\n" % (b"y" * 100)
                )
            except OSError:
                break
        with contextlib.suppress(OSError):
            assert b"400" in answer() or b"431" in answer()
    assert ask(served.url + ROUTES[1], BODIES[1]).status == 200


@contextlib.contextmanager
def connected(served):
    port = int(served.url.rsplit(":", 1)[1])
    with socket.create_connection(("127.0.0.1", port), timeout=10) as sock:
        yield sock, lambda: sock.recv(4096).split(b"\r\n")[0]


def head(path, length):
    return (
        f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {length}\r\n\r\n"
    ).encode()


def test_a_body_is_not_read_before_the_token(fake):
    served = fake()
    with connected(served) as (sock, answer):
        sock.sendall(head(ROUTES[1], 10**9).replace(TOKEN.encode(), b"wrong"))
        assert b"401" in answer()
    for token in ("", "wrong"):
        assert ask(served.url + "/v1/models", token=token).status == 401
    assert ask(served.url + "/health", token="").status == 200
    assert "semrl_rollout_responses_total" in ask(served.url + "/metrics", token="").text


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_its_response(fake, stream):
    served = fake(FakeScript(hang_after=0))
    data = json.dumps({**BODIES[1], "stream": stream}).encode()
    with connected(served) as (sock, _):
        sock.sendall(head(ROUTES[1], len(data)) + data)
        wait_until(lambda: served.engine.num_hung == 1)
    wait_until(lambda: served.engine.num_closed == 1)


def test_a_stream_does_not_run_ahead_of_a_slow_client():
    made = []

    async def pieces(job):
        for piece in range(1000):
            made.append(piece)
            yield piece

    async def read():
        async with contextlib.aclosing(app._merged([0, 1], pieces)) as merged:
            first = await anext(merged)
            await asyncio.sleep(0.05)
            return first

    assert asyncio.run(read()) == (0, 0)
    assert len(made) < 2 * app.MAX_PIECES


def test_an_aborted_response_is_an_error_that_clients_retry(fake):
    served = fake(FakeScript(hang_after=0))
    answers = []
    thread = threading.Thread(target=lambda: answers.append(ask(served.url + ROUTES[1], BODIES[1])))
    thread.start()
    wait_until(lambda: served.engine.num_hung == 1)
    served.replica._run(served.engine.abort())
    thread.join(10)
    assert answers[0].status == 503 and "aborted" in answers[0].text


def test_without_weights_and_with_a_dead_engine(fake):
    served = fake(weights=False)
    answer = ask(served.url + ROUTES[1], BODIES[1])
    assert answer.status == 503 and "has no weights yet" in answer.text
    served.replica._run(set_event(served.replica._server._service.dead))
    assert ask(served.url + "/health").status == 503


async def set_event(event):
    event.set()


def test_an_engine_that_fails_is_a_500_of_one_line(fake):
    served = fake(FakeScript(fail_after=0))
    answer = ask(served.url + ROUTES[1], BODIES[1])
    assert answer.status == 500 and "\n" not in json.loads(answer.text)["error"]["message"]
    served.engine.script.die_after = served.engine.num_yielded
    served.engine.script.fail_after = None
    assert ask(served.url + ROUTES[1], BODIES[1]).status == 503
    assert ask(served.url + "/health").status == 503


def test_unknown_paths_and_methods(fake):
    served = fake()
    assert ask(served.url + "/v1/embeddings", {}).status == 404
    assert ask(served.url + "/v1/models", {}).status == 405


def test_tls(certificate, tokenizer):  # noqa: F811
    http = Http(free_port(), "0.0.0.0", tokenizer, (1,), MODEL)
    with pytest.raises(UserError, match=r"http_host='0\.0\.0\.0' is not loopback and needs TLS"):
        EmbeddedReplica(FakeEngine(), token=TOKEN, http=http)
    with EmbeddedReplica(FakeEngine(), token=TOKEN, http=http, **certificate):
        context = ssl.create_default_context(cafile=certificate["tls_certificate"])
        context.check_hostname = False
        url = f"https://127.0.0.1:{http.port}/health"
        with urllib.request.urlopen(url, timeout=5, context=context) as answer:
            assert answer.status == 200


def test_a_taken_port_is_one_line(tokenizer):
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        http = Http(port, "127.0.0.1", tokenizer, (1,), MODEL)
        with pytest.raises(UserError, match=f"127.0.0.1:{port}.*another http_port, or 0 for none"):
            EmbeddedReplica(FakeEngine(), token=TOKEN, http=http)


def test_an_answer_does_not_wait_for_an_acknowledgement(fake, monkeypatch):
    accepted, accept = [], socket.socket.accept

    def recorded(self):
        connection, address = accept(self)
        accepted.append(connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        return connection, address

    monkeypatch.setattr(socket.socket, "accept", recorded)
    with urllib.request.urlopen(f"{fake().url}/health", timeout=10):
        pass
    assert accepted and all(accepted)


def test_a_connection_without_a_request_is_closed(monkeypatch):
    """Else a client without a token could hold all connections that the server takes."""
    monkeypatch.setattr(server, "KEEP_ALIVE_S", 0.4)

    async def answer(scope, receive, send):
        await asyncio.sleep(1.0 if scope["path"] == "/slow" else 0.0)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"done"})

    async def ended(port, *sent):
        """What the server sent until it closed the connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for data in sent:
            writer.write(data)
            await asyncio.sleep(0.1)
        found = await asyncio.wait_for(reader.read(), 10)
        writer.close()
        return found

    async def run():
        served = server.HttpServer(answer, "127.0.0.1", 0)
        request, slow = (
            f"GET {path} HTTP/1.1\r\nHost: a\r\n\r\n".encode() for path in ("/", "/slow")
        )
        try:
            cases = [(), (b"GET /",), (request, b"G"), (slow,), (request, slow)]
            return await asyncio.gather(*(ended(served.port, *case) for case in cases))
        finally:
            await served.close(0.1)

    assert [found.count(b"done") for found in asyncio.run(run())] == [0, 0, 1, 1, 2]


def test_the_port_is_free_after_close(fake):
    served = fake()
    port = int(served.url.rsplit(":", 1)[1])
    served.replica.close(0.0)
    time.sleep(0.1)
    with contextlib.closing(socket.create_server(("127.0.0.1", port))):
        pass
