"""References that are models of their own: on replicas, and of single data sources."""

import contextlib
import dataclasses

import jax
import numpy as np
import pytest

from semrl_jax import models
from semrl_jax.models.of_config import build_policy
from semrl_jax.rollout.building import jax_engine
from semrl_jax.runs import train
from semrl_jax.types import WeightVersion
from tests.fixtures import read_rows, stable
from tests.rollout.embedded import EmbeddedReplica

TOKEN = "a-token-for-tests"


@pytest.fixture
def teacher(config, tmp_path):
    """Writes a teacher with the policy's tokenizer, a size of its own, and a vocabulary with more
    tokens; returns the config of its replicas.
    """

    def make(seed=3, name="teacher", **sizes):
        policy, tokenizer = build_policy(config)
        sizes = {
            "hidden_size": 48,
            "num_layers": 2,
            "head_dim": 24,
            "tie_embeddings": False,
        } | sizes
        own = dataclasses.replace(policy.config, vocab_size=policy.config.vocab_size + 5, **sizes)
        params = models.Policy(own).init(jax.random.key(seed))
        models.save_directory(tmp_path / name, params, own, tokenizer)
        served = config.copy_and_resolve_references()
        served.model.path = str(tmp_path / name)
        served.rollout.max_prompt_tokens = 600
        return served

    return make


@pytest.fixture
def serve(monkeypatch):
    """Starts a JAX replica of a config, with the weights of its model."""
    monkeypatch.setenv("SEMRL_ROLLOUT_TOKEN", TOKEN)
    with contextlib.ExitStack() as stack:

        def start(served, path="", **place):
            policy, tokenizer = build_policy(served)
            replica = EmbeddedReplica(jax_engine(served, policy, tokenizer), token=TOKEN, **place)
            stack.callback(replica.close, 0.0)
            params = models.load_params(path or served.model.path, policy.config)
            replica._run(
                replica._server.load(
                    WeightVersion("teacher", "served", 0, ""),
                    lambda dtype: models.iterate_hf_tensors(params, policy.config, dtype),
                )
            )
            return replica

        yield start


@pytest.mark.slow
def test_replicas_compute_what_the_trainer_does(config, teacher, serve, tmp_path, rewarded):
    """With one replica or two, in one run or in two parts, the numbers are the same."""
    served = teacher()
    config.training.num_steps = 2
    config.update_from_flattened_dict(
        {
            "algorithms.name": "distillation", "model.reference_path": served.model.path,
            "rollout.temperature": 0.7,
        }
    )  # fmt: skip
    assert train(config, str(tmp_path / "here")) == 0
    config.model.reference_addresses = (serve(served).address,)
    assert train(config, str(tmp_path / "one")) == 0
    config.model.reference_addresses = (serve(served).address, serve(served).address)
    assert train(config, str(tmp_path / "two")) == 0
    config.training.num_steps = 1
    assert train(config, str(tmp_path / "parts")) == 0
    config.training.num_steps = 2
    assert train(config, str(tmp_path / "parts")) == 0
    here, one, two, parts = (read_rows(tmp_path / p) for p in ("here", "one", "two", "parts"))
    assert stable(one) == stable(two) and stable(parts[1:2]) == stable(one[1:2])
    for r,o in zip(here,one): print([(r[k],o[k]) for k in ("advantage/mean", "advantage/min", "policy/kl", "policy/grad_norm")])
    for row, other in zip(here, one, strict=True):
        for key in ("advantage/mean", "advantage/min", "policy/kl", "policy/grad_norm"):
            np.testing.assert_allclose(other[key], row[key], rtol=1e-4)
