"""What a replica says of itself, beside what a run is going to ask it for."""

import dataclasses
import json
import sys

import pytest

from semrl_jax import models
from semrl_jax.errors import UserError
from semrl_jax.rollout.child import ChildReplica
from semrl_jax.rollout.engines.fake import FakeEngine
from semrl_jax.training import replicas
from semrl_jax.training.opening import sampling_processes


def test_a_replica_that_cannot_measure_is_refused_before_training(config):
    """As one of an earlier release, which says nothing of metrics and would send none."""
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
    with pytest.raises(UserError, match="has 'curvature'; start the replica from this") as caught:
        replicas._check_limits(partly, config)
    assert "\n" not in str(caught.value)


def test_an_address_named_twice_is_refused_by_every_process(config):
    """Of several processes each would have it once, and each take it for its own."""
    mesh = models.make_mesh({"replica": 1, "fsdp": 8, "sequence": 1, "tensor": 1})
    config.rollout.addresses = ("127.0.0.1:1", "127.0.0.1:2")
    assert sampling_processes(config, mesh) == (0,)
    config.rollout.addresses = ("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:1")
    with pytest.raises(UserError, match=r"names '127\.0\.0\.1:1' more than once"):
        sampling_processes(config, mesh)


class NotStarted(ChildReplica):
    """What a child is started with, but none is."""

    def __init__(self, command, **options):
        self.directory = options["directory"]


def test_a_child_finds_a_model_of_a_relative_path(config, tmp_path, monkeypatch):
    """It runs in the directory of the code. A name on the hub stays one; its token is the child's
    own."""
    monkeypatch.setattr(replicas, "ChildReplica", NotStarted)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models" / "mine").mkdir(parents=True)
    config.rollout.vllm_python = sys.executable
    config.rollout.token_file = "token"
    for given, expected in (
        ("models/mine", str(tmp_path / "models" / "mine")), ("owner/name", "owner/name"), ("", ""),
    ):  # fmt: skip
        config.model.path = given
        child = replicas.vllm_child(config, tmp_path / "replica0", print)
        settings = json.loads((tmp_path / "replica0" / "config.json").read_text())["config"]
        assert settings["model"]["path"] == expected
        assert settings["rollout"]["token_file"] == "" and child.directory != tmp_path
