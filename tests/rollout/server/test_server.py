"""Binding an address, TLS, and the start and end of embedded replicas."""

import os
import signal
import socket
import subprocess
import threading
import warnings

import pytest

from semrl_jax.rollout.client import RolloutClient
from semrl_jax.rollout.server import Http, serve
from semrl_jax.rollout.wire.auth import new_token
from semrl_jax.support.addresses import is_loopback
from semrl_jax.support.errors import UserError
from semrl_jax.types import SamplingParams
from tests.rollout.conftest import (
    FAKE,
    TOKEN,
    assert_sampled,
    make_arrays,
    make_requests,
    modules_of,
)
from tests.rollout.embedded import EmbeddedReplica
from tests.rollout.fake_engine import FAKE_SPECS, FakeEngine, FakeScript


def run_on_a_loop(coroutine):
    """Runs on the embedded replicas' event loop: grpc.aio needs one loop per process."""
    helper = EmbeddedReplica(FakeEngine())
    try:
        return helper._run(coroutine)
    finally:
        helper.close(0.0)


async def serve_and_close(**settings):
    server = await serve(FakeEngine(), **({"token": TOKEN} | settings))
    await server.close(0.0)
    return server.address


def make_certificate(folder):
    """A self-signed certificate of localhost, and its key."""
    command = [
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
        "-nodes", "-days", "2", "-subj", "/CN=localhost",
        "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
        "-keyout", folder / "key.pem", "-out", folder / "certificate.pem",
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    return {"tls_certificate": str(folder / "certificate.pem"), "tls_key": str(folder / "key.pem")}


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def other_authority(tmp_path_factory):
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.mark.slow
def test_a_replica_loads_nothing_of_the_trainer():
    modules = modules_of(
        "import semrl_jax.rollout.server, semrl_jax.metrics.measurer, "
        "semrl_jax.rollout.engines.jax, semrl_jax.rollout.engines.vllm"
    )
    rooms = {name.split(".")[1] for name in modules if name.startswith("semrl_jax.")}
    assert "rollout" in rooms
    # Only --http_port loads these.
    assert not {"prometheus_client", "starlette", "uvicorn", "pydantic"} & modules
    assert not rooms & {
        "algorithms", "evaluation", "rewards", "runs", "sampling", "shaping", "training",
    }  # fmt: skip


def test_taken_port_is_one_line():
    with EmbeddedReplica(FakeEngine()) as replica:
        port = int(replica.address.split(":")[1])
        with pytest.raises(UserError, match=f"127.0.0.1:{port}: Address already in use") as caught:
            run_on_a_loop(serve_and_close(port=port))
    assert "\n" not in str(caught.value)


def test_port_taken_between_the_check_and_the_binding(monkeypatch):
    monkeypatch.setattr("semrl_jax.rollout.server.server._check_port", lambda *_: None)
    with EmbeddedReplica(FakeEngine()) as replica:
        with pytest.raises(UserError, match=f"cannot listen on {replica.address}"):
            run_on_a_loop(serve_and_close(port=int(replica.address.split(":")[1])))


def test_port_can_be_taken_again_after_close():
    with EmbeddedReplica(FakeEngine()) as replica:
        port = int(replica.address.split(":")[1])
    assert run_on_a_loop(serve_and_close(port=port)) == f"127.0.0.1:{port}"


@pytest.mark.parametrize("port", [-1, 65_536])
def test_impossible_port(port):
    http = Http(port, "127.0.0.1", None, (), "")
    for name, settings in (("port", {"port": port}), ("http_port", {"http": http})):
        with pytest.raises(UserError, match=rf"^{name}={port} must be in \[0, 65535\]"):
            run_on_a_loop(serve_and_close(**settings))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1", "replica.example"])
def test_other_addresses_demand_tls(host):
    with pytest.raises(UserError, match="is not loopback and needs TLS"):
        run_on_a_loop(serve_and_close(host=host))


def test_address_of_another_machine(certificate):
    with pytest.raises(UserError, match=r"cannot listen on 192.0.2.1:0: Cannot assign"):
        run_on_a_loop(serve_and_close(host="192.0.2.1", **certificate))


def test_wildcard_address_serves_with_tls(certificate):
    assert run_on_a_loop(serve_and_close(host="0.0.0.0", **certificate)).startswith("0.0.0.0:")


def test_half_a_certificate(certificate):
    with pytest.raises(UserError, match="must be set together"):
        run_on_a_loop(serve_and_close(tls_certificate=certificate["tls_certificate"]))


def test_missing_key_file(certificate):
    with pytest.raises(UserError, match="tls_key='/nowhere' cannot be read: No such file"):
        run_on_a_loop(serve_and_close(**certificate | {"tls_key": "/nowhere"}))


@pytest.mark.parametrize(
    ("certificate_file", "key_file", "match"),
    [
        ("key", "certificate", "tls_certificate=.*must be a PEM file of certificates"),
        ("certificate", "certificate", "tls_key=.*must be a PEM file of a private key"),
        ("certificate", "other key", "tls_key=.*is not the key of tls_certificate="),
        ("certificate", "locked key", "tls_key=.*without a password"),
        ("no PEM", "key", "tls_certificate=.*BEGIN CERTIFICATE"),
        ("empty", "key", "tls_certificate=.*BEGIN CERTIFICATE"),
        ("certificate", "no PEM", "tls_key=.*BEGIN PRIVATE KEY"),
    ],
)
def test_files_of_tls_that_do_not_fit(
    certificate, other_authority, tmp_path, certificate_file, key_file, match
):
    (tmp_path / "no PEM").write_bytes(b"\x30\x82\xff")
    (tmp_path / "empty").touch()
    locked = ["openssl", "ec", "-in", certificate["tls_key"], "-aes256", "-passout", "pass:x"]
    if key_file == "locked key":
        subprocess.run([*locked, "-out", tmp_path / key_file], check=True, capture_output=True)
    files = {
        "certificate": certificate["tls_certificate"],
        "key": certificate["tls_key"],
        "other key": other_authority["tls_key"],
    }
    fields = {"tls_certificate": certificate_file, "tls_key": key_file}
    paths = {field: files.get(name, str(tmp_path / name)) for field, name in fields.items()}
    with pytest.raises(UserError, match=match) as caught:
        run_on_a_loop(serve_and_close(**paths))
    assert "\n" not in str(caught.value)


def test_authority_that_is_no_certificate(world, certificate):
    with pytest.raises(UserError, match=r"rollout\.tls_ca_file=.*must be a PEM file of certif"):
        world.client("192.0.2.1:1234", connect=False, tls_ca=certificate["tls_key"])


@pytest.mark.parametrize("token", ["", "two words", "tökén", "a\nb"])
def test_bad_token(token):
    with pytest.raises(UserError, match="one printable ASCII word"):
        run_on_a_loop(serve_and_close(token=token))
    with pytest.raises(UserError, match="one printable ASCII word"):
        EmbeddedReplica(FakeEngine(), token=token)


def test_tokens_differ():
    assert new_token() != new_token()
    assert len(new_token()) >= 43


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("localhost", True),
        ("::1", True),
        ("[::1]", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("localhost.example", False),
        ("127.0.0.1.example", False),
        ("", False),
    ],
)
def test_loopback(host, expected):
    assert is_loopback(host) is expected


def test_token_never_leaves_the_machine_in_the_clear(world):
    with pytest.raises(UserError, match=r"not loopback.*tls_ca"):
        world.client("192.0.2.1:1234", connect=False)
    with pytest.raises(UserError, match="tls_ca_file='/nowhere' cannot be read"):
        world.client("192.0.2.1:1234", connect=False, tls_ca="/nowhere")


def test_sigterm_ends_the_process_cleanly(start_process):
    process, address = start_process()
    assert address
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=10)
    assert (process.returncode, errors) == (0, "")


def test_dead_engine_ends_the_process(world, start_process):
    process, address = start_process(script={"die_after": 2})
    client = world.client(address, generate_timeout_s=1.0)
    version = client.sync_weights(FAKE_SPECS, make_arrays, step=0)
    with pytest.raises(RuntimeError, match="did not come within 1 s"):
        list(client.generate(make_requests(), SamplingParams(16), version=version))
    _, errors = process.communicate(timeout=10)
    assert process.returncode == 1
    assert "EngineDeadError" in errors


def test_embedded_replica_leaves_nothing_behind(capfd):
    before = set(threading.enumerate())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):  # two at a time, and again after all were closed
            with EmbeddedReplica(FakeEngine()) as one, EmbeddedReplica(FakeEngine()) as two:
                assert one.address != two.address and one.token != two.token
                for replica in (one, two):
                    with RolloutClient(
                        [replica.address], replica.token, run_id="r", attempt_id="a"
                    ) as client:
                        client.connect(**FAKE)
                        version = client.sync_weights(FAKE_SPECS, make_arrays, step=0)
                        requests, sampling = make_requests(), SamplingParams(16)
                        assert_sampled(client, requests, sampling, version=version)
            one.close()  # a second close has no effect
    assert set(threading.enumerate()) <= before
    captured = capfd.readouterr()
    assert captured.err == "" and captured.out == ""


def test_close_ends_running_calls(world):
    replica = world.replica(FakeScript(hang_after=1))
    client = world.client(replica, generate_timeout_s=1.0)
    version = client.sync_weights(FAKE_SPECS, make_arrays, step=0)
    rollouts = client.generate(make_requests(), SamplingParams(16), version=version)
    next(rollouts)
    replica.close(0.1)
    assert replica.engine.num_closed == 1
    with pytest.raises(RuntimeError, match="within 1 s"):
        next(rollouts)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(replica.address.split(":")[1])), 1.0)


def test_embedded_replica_that_cannot_start_leaves_no_thread():
    before = set(threading.enumerate())
    with pytest.raises(UserError):
        EmbeddedReplica(FakeEngine(), token="")
    assert set(threading.enumerate()) <= before


def test_proxies_of_the_environment_are_ignored(start_process, world, monkeypatch):
    monkeypatch.setitem(os.environ, "http_proxy", "http://127.0.0.1:9")
    _, address = start_process()
    (description,) = world.client(address, connect=False).connect(**FAKE)
    assert description.engine == "fake"
