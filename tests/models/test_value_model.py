"""Value models: the same values as transformers' classifiers, from their directories."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from semrl_jax import models
from semrl_jax.models.value_model import VALUE_HEAD
from tests.cases import refused
from tests.models.conftest import make_pair

IDS = np.random.default_rng(0).integers(2, 90, (2, 9))


def load(directory):
    model = models.ValueModel.of(models.Policy(models.load_config(directory)))
    return model, models.load_value_params(directory, model)


def values(model, params):
    positions = jnp.broadcast_to(jnp.arange(IDS.shape[1]), IDS.shape)
    states = model.final_states(params, jnp.asarray(IDS), positions, jnp.ones_like(positions))
    return np.asarray(model.values(params, states))


def classifier(directory, kind):
    """A random classifier with one label, saved by transformers over a random decoder."""
    make_pair(directory)
    torch.manual_seed(1)
    model = kind.from_pretrained(directory, num_labels=1, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.score.parameters():
            parameter.normal_()
    model.save_pretrained(directory)
    return model


def test_a_token_classifier_has_the_values_of_transformers(tmp_path):
    theirs = classifier(tmp_path, transformers.AutoModelForTokenClassification)
    with torch.no_grad():
        expected = theirs(torch.tensor(IDS)).logits[..., 0].numpy()
    # Float32 in both, sums in another order: 3 layers of width 64, values of about 8.
    np.testing.assert_allclose(values(*load(tmp_path)), expected, atol=1e-4)


def test_a_sequence_classifier_scores_the_last_token(tmp_path):
    theirs = classifier(tmp_path, transformers.AutoModelForSequenceClassification)
    with torch.no_grad():
        expected = theirs(torch.tensor(IDS)).logits[:, 0].numpy()
    np.testing.assert_allclose(values(*load(tmp_path))[:, -1], expected, atol=1e-4)


@pytest.mark.parametrize("tied", [True, False])
def test_a_language_model_gets_a_head_of_zeros(tmp_path, tied):
    pair = make_pair(tmp_path, tie_word_embeddings=tied)
    model, params = load(tmp_path)
    assert not models.read_head(tmp_path, model)
    assert not values(model, params).any()
    policy = {name: part for name, part in pair.params.items() if name != "head"}
    decoder = {name: part for name, part in params.items() if name != VALUE_HEAD}
    jax.tree.map(np.testing.assert_array_equal, decoder, policy)
    shapes = jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), params)
    assert shapes == jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), model.shapes())
    of_policy = models.with_head(pair.params)  # a critic begins with the parameters of the policy
    assert jax.tree.structure(of_policy) == jax.tree.structure(params)


def test_a_classifier_of_several_labels_is_refused(tmp_path):
    classifier(tmp_path, transformers.AutoModelForTokenClassification)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"score.weight": np.zeros((2, 64), np.float32)}, file)
    refused(r"score.weight has shape \(2, 64\), not \(1, 64\)", load, tmp_path)


@pytest.mark.slow
def test_loaded_onto_a_mesh_it_lies_as_the_table_says(tmp_path):
    classifier(tmp_path, transformers.AutoModelForTokenClassification)
    model, params = load(tmp_path)
    mesh = models.make_mesh({"replica": 1, "fsdp": -1, "sequence": 1, "tensor": 1})
    shardings = models.parameter_shardings(model.shapes(), mesh)
    loaded = models.load_value_params(tmp_path, model, shardings)
    assert jax.tree.map(lambda leaf: leaf.sharding, loaded) == shardings
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
