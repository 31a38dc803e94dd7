"""The capabilities of a replica are compared with the requests of a run."""

import dataclasses
import json
import pathlib
import sys

import numpy as np
import pytest

from semrl_jax import data
from semrl_jax.models.of_config import build_policy
from semrl_jax.rollout import building
from semrl_jax.rollout.client import RolloutClient
from semrl_jax.rollout.client.child import ChildReplica
from semrl_jax.runs import train
from semrl_jax.sampling import replicas
from semrl_jax.settings import rollout as rollout_settings
from semrl_jax.support.errors import Preempted, UserError
from tests.cases import refused
from tests.rollout.embedded import EmbeddedReplica
from tests.rollout.fake_engine import FAKE_SPECS, FakeEngine

ROOT = pathlib.Path(__file__).parents[2]


def test_a_replica_that_sends_no_experts_is_refused_if_they_are_replayed(config):
    replica = FakeEngine(max_prompts=64, max_response_tokens=64).describe()
    config.rollout.router_replay = True
    able = dataclasses.replace(replica, routed_experts=(2, 2, 8))
    replicas._check_limits(able, config)
    refused("does not send the experts that", replicas._check_limits, replica, config)


def test_a_replica_that_cannot_measure_is_refused_before_training(config):
    """For example, a replica of an earlier release, which reports no metrics."""
    old = dataclasses.replace(FakeEngine(max_prompts=64, max_response_tokens=64).describe())
    assert old.metric_kinds == ()
    replicas._check_limits(old, config)
    config.metrics.placement = "rollout"
    with pytest.raises(UserError, match=r"measures \[\], but metrics.names has 'effective_rank'"):
        replicas._check_limits(old, config)
    config.metrics.names = ("effective_rank", "curvature")
    able = dataclasses.replace(old, metric_kinds=("curvature", "effective_rank"))
    replicas._check_limits(able, config)
    partly = dataclasses.replace(old, metric_kinds=("effective_rank",))
    refused("has 'curvature'; start the replica with this", replicas._check_limits, partly, config)


@pytest.mark.parametrize("setting", ["rollout.stop_strings", "evaluation.stop_strings"])
def test_a_replica_that_lacks_stop_strings_is_refused_before_training(config, setting):
    config.update_from_flattened_dict({setting: ("user",)})
    replica = FakeEngine(max_prompts=64, max_response_tokens=64).describe()
    with pytest.raises(UserError, match=rf"\(fake engine\) lacks .* that {setting} asks"):
        replicas._check_limits(replica, config)
    able = dataclasses.replace(replica, sampling_kinds=("stop_strings",))
    replicas._check_limits(able, config)


def test_a_replica_without_a_layer_is_refused_before_training(config):
    config.metrics.layers = (-1, 1)
    replica = FakeEngine(max_prompts=64, max_response_tokens=64).describe()
    replicas._check_limits(replica, config)
    final_only = dataclasses.replace(replica, layers=(-1, 2), layers_reason="the others stay")
    with pytest.raises(UserError, match=r"\[-1, 2\] \(the others stay\), but .* has 1") as caught:
        replicas._check_limits(final_only, config)
    assert "\n" not in str(caught.value)


def test_the_limit_of_a_replica_is_compared_with_the_actual_number_of_problems(config):
    """Not with evaluation.num_problems, which is a limit per file."""
    replica = FakeEngine(max_prompts=64, max_response_tokens=64).describe()
    assert config.training.responses_per_step <= 64
    config.evaluation.num_problems = 10_000
    replicas._check_limits(replica, config, num_problems=64)
    config.evaluation.num_problems = 40  # of each of two files
    with pytest.raises(UserError, match=r"max_prompts=64, .* asks for 80; lower evaluation.num_p"):
        replicas._check_limits(replica, config, num_problems=80)
    # Each of two processes requests its share.
    replicas._check_limits(replica, config, num_problems=80, num_processes=2)
    with pytest.raises(UserError, match="asks for 65"):
        replicas._check_limits(replica, config, num_problems=129, num_processes=2)


@pytest.mark.slow
def test_a_replica_of_another_run_is_refused_before_a_warm_start(config, tmp_path, monkeypatch):
    """It would refuse the weights, but only after the warm start."""
    policy, tokenizer = build_policy(config)
    hashes = {
        "model_hash": policy.config.hash,
        "tokenizer_hash": data.tokenizer_hash(tokenizer),
        "vocab_size": policy.config.vocab_size,
    }
    arrays = [np.zeros(spec.shape, spec.dtype) for spec in FAKE_SPECS]
    with EmbeddedReplica(FakeEngine(**hashes)) as replica:
        monkeypatch.setenv("SEMRL_ROLLOUT_TOKEN", replica.token)
        config.rollout.addresses = (replica.address,)
        config.rewards.num_workers = 1
        with RolloutClient(
            (replica.address,), replica.token, run_id="other", attempt_id="1"
        ) as client:
            client.connect(**hashes)
            client.sync_weights(FAKE_SPECS, lambda: iter(arrays), step=0)
            message = r"belongs to run 'other', and this run is '\w+'; wait for the end"
            with pytest.raises(UserError, match=message):
                train(config, str(tmp_path / "runs" / "mine"))
    assert list(tmp_path.iterdir()) == []


def test_an_address_that_is_named_twice_is_refused(config, tmp_path):
    """Two processes could get one entry each and both use the replica."""
    replicas.check_addresses(("127.0.0.1:1", "127.0.0.1:2"))
    config.rollout.addresses = ("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:1")
    refused(r"names '127\.0\.0\.1:1' more than once", train, config, str(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_addresses_come_from_a_file(config, tmp_path):
    file = tmp_path / "replicas"
    file.write_text("# two replicas\n127.0.0.1:1\n\n  host.of.b:2  # the fast one\n")
    config.rollout.addresses_file = str(file)
    replicas.take_addresses(config)
    assert config.rollout.addresses == ("127.0.0.1:1", "host.of.b:2")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "cannot be read .No such file or directory.; name a file"),
        (b"\xff", "cannot be read .it is not UTF-8."),
        (b"# nothing\n", "has no address"),
        (b"127.0.0.1:1\nhost\n", "line 2='host' must be host:port"),
        (b"127.0.0.1:65536\n", "line 1='127.0.0.1:65536' must be host:port"),
        (b"a:1\nb:1\na:1\n", "names 'a:1' more than once"),
        (b"#" * (1 << 21), "has more than 1048576 bytes"),
    ],
)
def test_a_file_of_addresses_that_cannot_be_used(tmp_path, content, expected):
    file = tmp_path / "replicas"
    if content is not None:
        file.write_bytes(content)
    refused(f"rollout.addresses_file=.*{expected}", replicas.read_addresses, str(file))


def test_a_file_and_a_list_of_addresses_exclude_each_other(config):
    config.rollout.addresses, config.rollout.addresses_file = ("127.0.0.1:1",), "replicas"
    with pytest.raises(UserError, match=r"rollout.addresses_file and rollout.addresses both name"):
        rollout_settings.check(config.rollout)


class NotStarted(ChildReplica):
    """Records the arguments of a child process, but starts none."""

    def __init__(self, command, **options):
        self.directory = options["directory"]


def test_a_child_process_finds_a_model_with_a_relative_path(config, tmp_path, monkeypatch):
    """The child runs in the directory of the code, with its own token. Hub ids do not change."""
    monkeypatch.setattr(building, "ChildReplica", NotStarted)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "mine").mkdir(parents=True)
    config.rollout.vllm_python = sys.executable
    config.rollout.token_file = "token"
    for given, expected in (
        ("models/mine", str(tmp_path / "models" / "mine")), ("owner/name", "owner/name"), ("", ""),
    ):  # fmt: skip
        config.model.path = given
        child = building.vllm_child(config, tmp_path / "replica0", print)
        settings = json.loads((tmp_path / "replica0" / "config.json").read_text())["config"]
        assert settings["model"]["path"] == expected
        assert settings["rollout"]["token_file"] == "" and child.directory == ROOT


def test_a_signal_while_jax_replicas_start_ends_them(config, tmp_path, monkeypatch):
    started = []

    def interrupted(self):
        raise Preempted("SIGTERM")

    class Silent(ChildReplica):
        def __init__(self, _command, **options):
            super().__init__(["sleep", "60"], **options)
            started.append(self)

    monkeypatch.setattr(ChildReplica, "await_listening", interrupted)
    monkeypatch.setattr(building, "ChildReplica", Silent)
    config.rollout.jax_processes = 2
    with pytest.raises(Preempted):
        building.jax_children(config, tmp_path / "replica0", print, "token" * 8)
    assert len(started) == 2 and all(child._process.poll() is not None for child in started)
