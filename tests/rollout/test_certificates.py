"""The TLS files that `launch.rollout --make_certs` makes, with real replicas and clients."""

import datetime
import importlib
import shlex
import stat
import sys
import time

import pytest

from semrl_jax.errors import UserError
from semrl_jax.rollout.certificates import AUTHORITY_DAYS, make_certificates
from semrl_jax.rollout.client.embedded import EmbeddedReplica
from semrl_jax.types import SamplingParams
from tests.launch.conftest import TINY, read_until, run, start
from tests.rollout.conftest import FAKE, TOKEN, assert_complete, make_arrays, make_requests
from tests.rollout.fake_engine import FAKE_SPECS, FakeEngine
from tests.rollout.server.test_prometheus import free_port

DAY = datetime.timedelta(days=1)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_certificates(tmp_path_factory.mktemp("tls") / "new", ["GPU7.example", "[::1]"])


def tls_of(made):
    return {"tls_certificate": str(made.certificate), "tls_key": str(made.key)}


def test_files_are_private_and_valid_as_long_as_stated(made):
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in made.key.parent.iterdir()}
    assert {name for name, mode in modes.items() if mode == 0o600} == {
        "authority.key",
        "replica-gpu7.example.key",
    }
    assert len(modes) == 4
    assert stat.S_IMODE(made.key.parent.stat().st_mode) == 0o700
    assert made.names == ("gpu7.example", "::1", "localhost", "127.0.0.1")
    now = datetime.datetime.now(datetime.UTC)
    assert abs(made.valid_until - now - 365 * DAY) < DAY / 24
    assert abs(made.authority_until - now - AUTHORITY_DAYS * DAY) < DAY / 24


def test_nothing_is_overwritten_and_the_authority_is_used_again(made, world):
    before = {path: path.read_bytes() for path in made.key.parent.iterdir()}
    with pytest.raises(UserError, match=r"replica-gpu7.*is there already, and no file is overwri"):
        make_certificates(made.key.parent, ["gpu7.example"])
    assert {path: path.read_bytes() for path in made.key.parent.iterdir()} == before
    added = make_certificates(made.key.parent, ["127.0.0.3"], days=3)
    assert added.authority == made.authority and added.authority_until == made.authority_until
    assert made.authority.read_bytes() == before[made.authority]
    with EmbeddedReplica(FakeEngine(), token=TOKEN, host="127.0.0.3", **tls_of(added)) as replica:
        world.client(replica, tls_ca=str(made.authority))  # which it had before


def test_no_certificate_outlives_its_authority(tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr("semrl_jax.rollout.certificates.AUTHORITY_DAYS", 10)
        make_certificates(tmp_path, ["one"], days=10)
    with pytest.raises(UserError, match=r"the authority there ends on .* smaller --valid_days"):
        make_certificates(tmp_path, ["two"], days=11)


@pytest.mark.parametrize(
    ("left", "match"),
    [
        (("authority.pem",), "authority.pem is there already"),
        (("authority.key",), "authority.key is there already"),
        (("authority.pem", "authority.key"), "cannot be used .*must be a PEM file"),
    ],
)
def test_remains_are_named(tmp_path, left, match):
    for name in left:
        (tmp_path / name).touch()
    with pytest.raises(UserError, match=match):
        make_certificates(tmp_path, ["localhost"])
    assert {path.name for path in tmp_path.iterdir()} == set(left)


def test_a_replicas_certificate_is_no_authority(made, tmp_path):
    (tmp_path / "authority.pem").write_bytes(made.certificate.read_bytes())
    (tmp_path / "authority.key").write_bytes(made.key.read_bytes())
    with pytest.raises(UserError, match="its certificate is not that of an authority"):
        make_certificates(tmp_path, ["localhost"])


@pytest.mark.parametrize(
    ("hosts", "match"),
    [
        (["two words"], "'two words', which is neither a host name nor an IP address"),
        ([""], "'', which is neither"),
        (["10.0.0.256"], r"'10\.0\.0\.256', which is neither"),
        (["../escape"], "'../escape', which is neither"),
        (["-dash"], "'-dash', which is neither"),
        (["ok", "a\nb"], "which is neither"),
        (["0.0.0.0"], r"--host=0\.0\.0\.0: a certificate is not for all addresses"),
        (["::"], "a certificate is not for all addresses"),
    ],
)
def test_hosts_that_no_certificate_can_have(tmp_path, hosts, match):
    with pytest.raises(UserError, match=match):
        make_certificates(tmp_path / "new", hosts)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("days", [0, -1, AUTHORITY_DAYS + 1])
def test_validity_is_limited(tmp_path, days):
    with pytest.raises(UserError, match=rf"--valid_days={days} must be in \[1, {AUTHORITY_DAYS}\]"):
        make_certificates(tmp_path / "new", ["localhost"], days=days)


def test_a_directory_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"file/new cannot be written: .*Not a directory"):
        make_certificates(tmp_path / "file" / "new", ["localhost"])


def test_a_failed_write_leaves_no_file(tmp_path, monkeypatch):
    module = importlib.import_module("semrl_jax.rollout.certificates")
    opened = module.os.open

    def full(path, *args):
        if "replica" in str(path):
            raise OSError(28, "No space left on device", str(path))
        return opened(path, *args)

    monkeypatch.setattr(module.os, "open", full)
    with pytest.raises(UserError, match="No space left on device"):
        make_certificates(tmp_path / "new", ["localhost"])
    assert not list((tmp_path / "new").iterdir())


def test_without_the_package_the_way_out_is_named(tmp_path, monkeypatch):
    monkeypatch.delitem(sys.modules, "semrl_jax.rollout.x509", raising=False)
    monkeypatch.delattr("semrl_jax.rollout.x509", raising=False)
    for name in [name for name in sys.modules if name.partition(".")[0] == "cryptography"]:
        monkeypatch.delitem(sys.modules, name)

    class Missing:
        def find_spec(self, name, *_):
            if name == "cryptography":
                raise ModuleNotFoundError("No module named 'cryptography'", name=name)

    monkeypatch.setattr(sys, "meta_path", [Missing(), *sys.meta_path])
    with pytest.raises(UserError, match=r"pip install 'semrl_jax\[tls\]'"):
        make_certificates(tmp_path / "new", ["localhost"])


def test_a_replica_and_a_client_use_them(made, world):
    with EmbeddedReplica(FakeEngine(), token=TOKEN, host="::1", **tls_of(made)) as replica:
        client = world.client(replica, tls_ca=str(made.authority))
        version = client.sync_weights(FAKE_SPECS, make_arrays, step=0)
        requests, sampling = make_requests(), SamplingParams(16)
        rollouts = list(client.generate(requests, sampling, version=version))
        assert_complete(rollouts, requests, sampling, version=version)


@pytest.fixture(scope="module")
def expired(made, tmp_path_factory):
    """A certificate of the same authority, and its key; it ended yesterday."""
    from semrl_jax.rollout import x509

    issuer = x509.read_authority(made.authority.read_bytes(), made.authority_key.read_bytes())
    now = datetime.datetime.now(datetime.UTC)
    pair = x509.new_server(issuer, ["127.0.0.1"], now - 2 * DAY, now - DAY)
    folder = tmp_path_factory.mktemp("expired")
    (folder / "certificate").write_bytes(pair.certificate_pem())
    (folder / "key").write_bytes(pair.key_pem())
    return {"tls_certificate": str(folder / "certificate"), "tls_key": str(folder / "key")}


FAILURES = {
    "wrong name": r"Hostname Verification Check failed.*is for other names: correct rollout\.addr",
    "expired": r"; its certificate has expired: start it with one that `.* --make_certs` makes",
    "another authority": r"not of the authority in rollout\.tls_ca_file: correct that",
    "plaintext to TLS": r"if it has TLS, set rollout\.tls_ca_file",
    "TLS to plaintext": r"it has no TLS: give the replica --tls_certificate",
    "wrong token": r"refuses the token; give trainer and replica the same one",
}


@pytest.mark.parametrize("name", FAILURES)
def test_what_does_not_fit_is_one_line_within_the_limit(made, expired, world, name, tmp_path):
    server = {} if name == "TLS to plaintext" else expired if name == "expired" else tls_of(made)
    host = "127.0.0.2" if name == "wrong name" else "127.0.0.1"
    tls_ca = "" if name == "plaintext to TLS" else str(made.authority)
    if name == "another authority":
        tls_ca = str(make_certificates(tmp_path, ["localhost"]).authority)
    token = "another" if name == "wrong token" else TOKEN
    with EmbeddedReplica(FakeEngine(), token=token, host=host, **server) as replica:
        client = world.client(replica, connect=False, tls_ca=tls_ca, connect_timeout_s=0.5)
        began = time.monotonic()
        with pytest.raises(UserError, match=FAILURES[name]) as caught:
            client.connect(**FAKE)
        # A probe ends with the limit; five seconds are for a busy machine.
        assert time.monotonic() - began < 0.5 + 5
    message = str(caught.value)
    assert replica.address in message and "\n" not in message and TOKEN not in message


@pytest.mark.soak
def test_the_printed_commands_work(tmp_path):
    port = free_port()
    folder = tmp_path / "private files"
    result = run("launch.rollout", f"--make_certs={folder}", "--host=127.0.0.1", f"--port={port}")
    assert (result.returncode, result.stderr) == (0, "")
    commands = [shlex.split(line) for line in result.stdout.splitlines() if line[:7] == "python "]
    own = {"--config": TINY, "--workdir": tmp_path / "run"}
    (replica, trainer) = (
        [f"{flag}={own.get(flag, value)}" for flag, _, value in (a.partition("=") for a in rest)]
        for (_, _, _, *rest) in commands
    )
    process = start("launch.rollout", *replica)
    try:
        read_until(process, f"listens on 127.0.0.1:{port}")
        few = ("--config.training.num_steps=1", "--config.warm_start.num_steps=1")
        result = run("launch.train", *trainer, *few, timeout=200)
        assert result.returncode == 0, result.stderr
    finally:
        process.terminate()
        process.communicate(timeout=30)
    assert process.returncode == 0
    again = run("launch.rollout", f"--make_certs={folder}", "--host=127.0.0.1")
    assert again.returncode == 2 and "is there already" in again.stderr
    assert len(again.stderr.splitlines()) == 1
