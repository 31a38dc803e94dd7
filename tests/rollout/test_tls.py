"""The TLS files of docs/security.md, with real replicas and clients."""

import pathlib
import re
import stat
import subprocess
import time

import pytest

from semrl_jax.support.errors import UserError
from semrl_jax.types import SamplingParams
from tests.rollout.conftest import FAKE, TOKEN, assert_sampled, make_arrays, make_requests
from tests.rollout.embedded import EmbeddedReplica
from tests.rollout.fake_engine import FAKE_SPECS, FakeEngine

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "security.md"
SECTION = re.search(r"^## TLS\n.*?^## ", PAGE.read_text(), re.DOTALL | re.MULTILINE)[0]
COMMANDS = "".join(re.findall(r"^```bash\n(.*?)^```", SECTION, re.DOTALL | re.MULTILINE))


def shell(commands, folder):
    subprocess.run(["bash", "-ec", commands], cwd=folder, check=True, capture_output=True)


def make_files(folder):
    """Runs the commands of the page; returns the directory that they make."""
    shell(COMMANDS, folder)
    return folder / "certs"


def tls_of(made, name="replica-gpu7"):
    return {"tls_certificate": f"{made}/{name}.pem", "tls_key": f"{made}/{name}.key"}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make_files(tmp_path_factory.mktemp("tls"))


def test_keys_are_private(made):
    assert stat.S_IMODE(made.stat().st_mode) == 0o700
    keys = list(made.glob("*.key"))
    assert len(keys) == 2
    assert {stat.S_IMODE(key.stat().st_mode) for key in keys} == {0o600}


def test_a_replica_and_a_client_use_them(made, world):
    with EmbeddedReplica(FakeEngine(), token=TOKEN, **tls_of(made)) as replica:
        client = world.client(replica, tls_ca=f"{made}/authority.pem")
        version = client.sync_weights(FAKE_SPECS, make_arrays, step=0)
        requests, sampling = make_requests(), SamplingParams(16)
        assert_sampled(client, requests, sampling, version=version)


def test_trainers_trust_a_replica_that_is_added_later(made, world):
    again = "openssl" + COMMANDS.rpartition("\nopenssl")[2].replace("gpu7", "gpu8")
    shell(again.replace("IP:127.0.0.1", "IP:127.0.0.3"), made.parent)
    tls = tls_of(made, "replica-gpu8")
    with EmbeddedReplica(FakeEngine(), token=TOKEN, host="127.0.0.3", **tls) as replica:
        world.client(replica, tls_ca=f"{made}/authority.pem")


def test_a_replicas_certificate_is_no_authority(made, tmp_path):
    check = f"openssl verify -purpose sslserver -CAfile {made}/authority.pem"
    shell(f"{check} {made}/replica-gpu7.pem", tmp_path)
    signer = f"-CA {made}/replica-gpu7.pem -CAkey {made}/replica-gpu7.key"
    new = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=x"
    shell(f"{new} {signer} -keyout key -out false.pem", tmp_path)
    with pytest.raises(subprocess.CalledProcessError):
        shell(f"{check} -untrusted {made}/replica-gpu7.pem false.pem", tmp_path)


@pytest.fixture(scope="module")
def expired(made, tmp_path_factory):
    """A certificate of the same authority, and its key; it was valid for one second."""
    folder = tmp_path_factory.mktemp("expired")
    shell(
        "openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=expired "
        "  -addext subjectAltName=IP:127.0.0.1 -keyout expired.key -out request; "
        f"openssl x509 -req -in request -CA {made}/authority.pem -CAkey {made}/authority.key "
        "  -days 0 -copy_extensions copy -out expired.pem; sleep 1",
        folder,
    )
    return tls_of(folder, "expired")


FAILURES = {
    "wrong name": r"Hostname Verification Check failed.*is for other names: correct rollout\.addr",
    "expired": r"; its certificate has expired: start it with a new one \(docs/security\.md\)",
    "another authority": r"not of the authority in rollout\.tls_ca_file: correct that",
    "plaintext to TLS": r"if it has TLS, set rollout\.tls_ca_file",
    "TLS to plaintext": r"it has no TLS: give the replica --tls_certificate",
    "wrong token": r"refuses the token; give trainer and replica the same one",
}


@pytest.mark.parametrize("name", FAILURES)
def test_what_does_not_fit_is_one_line_within_the_limit(made, expired, world, name, tmp_path):
    server = {} if name == "TLS to plaintext" else expired if name == "expired" else tls_of(made)
    host = "127.0.0.2" if name == "wrong name" else "127.0.0.1"
    tls_ca = "" if name == "plaintext to TLS" else f"{made}/authority.pem"
    if name == "another authority":
        tls_ca = f"{make_files(tmp_path)}/authority.pem"
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
