"""Passes, steps and directories of adapters, without a server."""

import contextlib
import dataclasses
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from semrl_jax import models
from semrl_jax.models.of_config import starting_params
from semrl_jax.runs.policies import find_policies
from semrl_jax.support.errors import UserError
from semrl_jax.tinker import work
from semrl_jax.tinker.futures import Futures, Request
from semrl_jax.tinker.losses import LOSSES
from semrl_jax.tinker.messages import Example, Pass
from semrl_jax.tinker.requests import AdamParams, LoraConfig
from semrl_jax.tinker.training import Trainer
from tests.tinker.conftest import encoded

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trainer(model_directory):
    policy = models.Policy(models.load_config(model_directory))
    mesh = models.make_mesh({"fsdp": 1}, jax.devices()[:1])
    base = starting_params(model_directory, policy, mesh)
    return Trainer(policy, base, model_directory, mesh, max_tokens=256)


@pytest.fixture
def trained(trainer):
    found = trainer.create(trainer.lora(LoraConfig(rank=4)), seed=1)
    # B is 0 at first, and then A has no gradient.
    noise = jax.random.normal(jax.random.key(0), (2, 4, 1))
    for pair in found.adapter["layers"].values():
        pair["lora_b"] = pair["lora_b"] + 0.1 * noise
    return found


def examples(lengths, loss, seed=0):
    random = np.random.default_rng(seed)
    return tuple(
        Example(
            random.integers(0, 250, length).astype(np.int32),
            random.integers(0, 250, length),
            {name: random.normal(size=length).astype(np.float32) for name in LOSSES[loss].inputs},
        )
        for length in lengths
    )


def a_pass(lengths, loss="importance_sampling", seed=0, is_backward=True):
    options = LOSSES[loss].options
    return Pass("m", 1, examples(lengths, loss, seed), loss, options, is_backward)


def expected_of(trainer, trained, job):
    """Loss, log-probabilities and gradient, one example after the other, without padding."""
    frozen = trained.lora.base(trainer.base)
    options = {name: jnp.float32(value) for name, value in job.options.items()}

    def total(adapter):
        params, loss, found = models.adapted(adapter, frozen), 0.0, []
        for example in job.examples:
            ids = jnp.asarray(example.token_ids)[None]
            positions = jnp.arange(ids.shape[1])[None]
            states = trainer.policy.final_states(params, ids, positions, jnp.ones_like(positions))
            logits = trainer.policy.logits(params, states[0])
            p = jax.nn.log_softmax(logits)[jnp.arange(len(logits)), example.targets][None]
            inputs = {name: jnp.float32(values)[None] for name, values in example.inputs.items()}
            loss += LOSSES[job.loss].terms(p, inputs, options).sum()
            found.append(p[0])
        return loss, found

    (loss, found), gradient = jax.value_and_grad(total, has_aux=True)(trained.adapter)
    return loss, found, gradient


def assert_trees_close(actual, expected, **tolerance):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **tolerance), actual, expected)


@pytest.mark.parametrize("loss", ("cross_entropy", "importance_sampling", "dro"))
def test_passes_match_unpadded_sequences(trainer, trained, loss):
    # Several micro-batches: at most 256 tokens with padding.
    job = a_pass((3, 70, 41, 5, 33, 64, 1, 17, 90), loss)
    expected_loss, logprobs, gradient = expected_of(trainer, trained, job)
    (output,) = trainer.passes([(trained, job)])
    np.testing.assert_allclose(output.loss, expected_loss, rtol=1e-4)
    assert_trees_close(output.logprobs, logprobs, rtol=1e-4, atol=1e-4)
    assert_trees_close(trained.gradient, gradient, rtol=1e-3, atol=2e-3)
    before = trained.gradient
    trainer.passes([(trained, job)])
    assert_trees_close(trained.gradient, jax.tree.map(lambda x: 2 * x, before), rtol=1e-5)


def test_models_together_get_what_each_gets_alone(trainer, trained):
    others = [dataclasses.replace(trained) for _ in range(2)]
    fresh = trainer.create(trained.lora, seed=2)
    jobs = [
        (trained, a_pass((5, 40))),
        (fresh, a_pass((33, 9, 12), seed=4)),
        (others[0], a_pass((7,), seed=5)),
    ]
    alone = []
    for model, job in jobs:
        copy = dataclasses.replace(model)
        alone.append((trainer.passes([(copy, job)])[0], copy.gradient))
    together = trainer.passes(jobs)
    for output, (model, _), (expected, gradient) in zip(together, jobs, alone):
        np.testing.assert_allclose(output.loss, expected.loss, rtol=1e-4)
        assert_trees_close(output.logprobs, expected.logprobs, rtol=1e-4, atol=1e-4)
        assert_trees_close(model.gradient, gradient, rtol=1e-3, atol=2e-3)


def test_a_forward_pass_changes_nothing(trainer, trained):
    (output,) = trainer.passes([(trained, a_pass((5, 40), is_backward=False))])
    assert trained.gradient is None and [len(each) for each in output.logprobs] == [5, 40]


def test_steps_match_torch(trainer, trained):
    adam = AdamParams(
        learning_rate=0.01, beta1=0.8, beta2=0.9, eps=1e-6, weight_decay=0.1, grad_clip_norm=3.0
    )
    leaves, tree = jax.tree.flatten(trained.adapter)
    tensors = [torch.tensor(np.asarray(leaf), dtype=torch.float64) for leaf in leaves]
    optimizer = torch.optim.AdamW(tensors, lr=0.01, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.1)
    for seed in range(3):
        random = np.random.default_rng(seed)
        gradients = [0.1**seed * random.normal(size=leaf.shape) for leaf in leaves]
        trained.gradient = jax.tree.unflatten(tree, [jnp.float32(each) for each in gradients])
        norm = trainer.step(trained, adam)["grad_norm"]
        for tensor, gradient in zip(tensors, gradients):
            tensor.grad = torch.tensor(gradient)
        expected = torch.nn.utils.clip_grad_norm_(tensors, 3.0)
        optimizer.step()
        np.testing.assert_allclose(norm, expected, rtol=1e-5)
    assert trained.gradient is None
    for leaf, tensor in zip(jax.tree.leaves(trained.adapter), tensors):
        np.testing.assert_allclose(leaf, tensor, rtol=1e-4, atol=1e-6)


def test_a_gradient_that_is_not_finite_changes_nothing(trainer, trained):
    before = trained.adapter
    trained.gradient = jax.tree.map(lambda leaf: leaf * np.float32(np.nan), before)
    with pytest.raises(ValueError, match="the gradient is not finite, so the model"):
        trainer.step(trained, AdamParams())
    assert trained.adapter is before and trained.gradient is None


def test_a_directory_gives_the_model_back(trainer, trained, tmp_path):
    trainer.passes([(trained, a_pass((5, 40)))])
    trainer.step(trained, AdamParams())
    trained.seq = 7
    trainer.save(trained, tmp_path / "saved")
    found = trainer.load(tmp_path / "saved", optimizer=True)
    assert (found.lora, found.seq, int(found.moments.count)) == (trained.lora, 7, 1)
    jax.tree.map(np.testing.assert_array_equal, found.adapter, trained.adapter)
    jax.tree.map(np.testing.assert_array_equal, found.moments.mu, trained.moments.mu)
    (source,) = find_policies(str(tmp_path / "saved"), None)  # as launch.evaluate does
    source.check(trainer.policy)
    trainer.save(trained, tmp_path / "sampler", optimizer=False)
    with pytest.raises(UserError, match="saved for sampling, without the optimizer"):
        trainer.load(tmp_path / "sampler", optimizer=True)


def in_turns(trainer, directory, datum=(([5, 6, 7], [6, 7, 8], {}),)):
    """Trains two models in turns, as a server does; returns their last passes."""
    directory.mkdir()
    with contextlib.closing(Futures(directory / "futures.sqlite3")) as futures:
        doing = work.Work(futures, trainer, types.SimpleNamespace(limits=None), directory)

        def do(kind, seq, content):
            for model in ("s:train:0", "s:train:1"):
                body = content if isinstance(content, bytes) else json.dumps(content).encode()
                request = Request(f"{model}:{seq}", kind, body, model, seq)
                futures.add(request)
                (end,) = doing._ends([request])
                futures.end(request, end)
                yield end.result

        lora = {"lora_config": {"rank": 2, "seed": 1}}
        list(do("create_model", 0, {"session_id": "s", "model_seq_id": 0, "base_model": ""} | lora))
        for seq in (1, 3, 5):  # the other model is used between a pass and its step
            found = list(do("forward_backward", seq, encoded("m", seq, datum)))
            adam = {"learning_rate": 0.01}
            list(do("optim_step", seq + 1, {"model_id": "m", "adam_params": adam}))
        return found, len(doing._models)


def test_models_beyond_the_limit_are_read_again(trainer, tmp_path, monkeypatch):
    found, count = in_turns(trainer, tmp_path / "both")
    monkeypatch.setattr(work, "MAX_MODELS", 1)
    assert (count, (found, 1)) == (2, in_turns(trainer, tmp_path / "one"))
    assert found[0] == found[1] and len(found[0]) > 20


def test_what_cannot_be_trained_is_refused(trainer):
    with pytest.raises(UserError, match="output matrix only"):
        trainer.lora(LoraConfig(rank=2, train_mlp=False, train_attn=False))
    assert set(trainer.lora(LoraConfig(rank=2, train_mlp=False)).modules) == {
        "query", "key", "value", "output"
    }  # fmt: skip
