"""Scores of a reward model: those of transformers' classifiers, in every layout of the rows."""

import dataclasses
import json
import threading

import jax
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import transformers
from safetensors.numpy import load_file, save_file

from semrl_jax import data, models
from semrl_jax.cluster.peers import Peers
from semrl_jax.runs import train
from semrl_jax.sampling.scoring import Scored
from semrl_jax.settings.rewards import reward_functions
from semrl_jax.support.errors import UserError
from semrl_jax.training.packing import RowPlan
from semrl_jax.training.reward_model import (
    RewardModel,
    Scorer,
    batch_scores,
    find_reward_model,
    last_tokens,
)
from tests.fixtures import make_scored, read_rows
from tests.models.conftest import make_pair
from tests.training.test_packing import batch_of, mesh_of, with_equal_prompts

LENGTHS = [(3, 4), (7, 1), (2, 9), (5, 5), (1, 2), (4, 7)]
# Float32 in both, sums in another order: 3 layers of width 64, scores of about 8.
TOLERANCE = {"atol": 1e-4}


def classifier(directory, family="qwen2", tokenizer=None, **sizes):
    """A random sequence classifier with one label, saved by transformers with the tokenizer."""
    tokenizer = tokenizer or data.character_tokenizer()
    make_pair(directory, family, **{"vocab_size": len(tokenizer), **sizes})
    torch.manual_seed(1)
    kind = transformers.AutoModelForSequenceClassification
    model = kind.from_pretrained(directory, num_labels=1, dtype=torch.float32).eval()
    with torch.no_grad():
        model.score.weight.normal_()
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return model


def scores_of_transformers(model, sequences):
    """Right-padded to one width; the classifier pools the last token that is not padding."""
    width = max(map(len, sequences)) + 2
    ids = torch.full((len(sequences), width), model.config.pad_token_id)
    for row, sequence in zip(ids, sequences):
        assert model.config.pad_token_id not in sequence
        row[: len(sequence)] = torch.tensor(np.asarray(sequence))
    with torch.no_grad():
        return model(ids, attention_mask=(ids != 0).long()).logits[:, 0].numpy()


def sequences_of(batch, vocab_size=34):
    """The batch with ids of the vocabulary, without 0, and its sequences without padding."""
    tokens = batch.segment_ids == 1
    ids = np.where(tokens, batch.token_ids % (vocab_size - 1) + 1, 0)
    return batch._replace(token_ids=ids), [row[own] for row, own in zip(ids, tokens)]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models") / "judge"
    return classifier(directory), directory


def load(directory, mesh, dtype="float32"):
    policy = models.Policy(models.load_config(directory), mesh=mesh)
    model = models.ValueModel.of(policy)
    shardings = models.parameter_shardings(model.shapes(), mesh)
    params = models.load_value_params(directory, model, shardings)
    return model, jax.tree.map(lambda leaf: leaf.astype(dtype), params)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"micro_batch_size": 4}, {"micro_batch_tokens": 24, "pack_sequences": True}],
    ids=["rows", "packed"],
)
def test_scores_are_those_of_transformers_in_every_layout(saved, options):
    theirs, directory = saved
    # The last token is context in the first response.
    masks = [np.array([True, True, False, False]), *[None] * (len(LENGTHS) - 1)]
    batch, sequences = sequences_of(batch_of(LENGTHS, masks))
    mesh = mesh_of(2)
    model, params = load(directory, mesh)
    found = batch_scores(params, batch, model=model, plan=RowPlan(mesh, **options))
    assert found.dtype == np.float32 and np.ptp(found) > 1
    np.testing.assert_allclose(found, scores_of_transformers(theirs, sequences), **TOLERANCE)


def test_responses_of_one_token_to_the_same_prompt_have_their_own_scores(saved):
    mesh = mesh_of(1)
    model, params = load(saved[1], mesh)
    lengths = [(16, 4), (16, 1), (16, 1), (16, 3)]
    batch = with_equal_prompts(batch_of(lengths), slice(0, 4))
    batch = batch._replace(token_ids=batch.token_ids % 34)
    found = batch_scores(params, batch, model=model, plan=RowPlan(mesh, micro_batch_size=4))
    alone = []
    for row in range(4):
        one = jax.tree.map(lambda leaf, row=row: leaf[row : row + 1], batch)
        plan = RowPlan(mesh, micro_batch_size=1)
        alone.append(batch_scores(params, one, model=model, plan=plan)[0])
    np.testing.assert_allclose(found, alone, rtol=1e-4, atol=1e-5)


def test_the_last_token_of_a_response_by_hand():
    masks = [np.array([True, False, True, False]), None, np.array([False, True])]
    batch = batch_of([(2, 4), (3, 1), (1, 2)], masks)
    expected = np.zeros(batch.response_mask.shape, bool)
    expected[[0, 1, 2], [3, 0, 1]] = True
    np.testing.assert_array_equal(last_tokens(batch), expected)


def reward_model(entries, params, model, mesh):
    functions = reward_functions(entries)
    function = next(f for f in functions if f.function == "model")
    scorer = Scorer(model, params, RowPlan(mesh, micro_batch_size=4))
    lock = threading.Lock()
    return RewardModel(scorer, function, len(functions) > 1, Peers(0, 1), lock)


def test_the_score_joins_or_replaces_that_of_the_verifiers(saved):
    _, directory = saved
    batch, _ = sequences_of(batch_of(LENGTHS))
    mesh = mesh_of(2)
    model, params = load(directory, mesh)
    scores = batch_scores(params, batch, model=model, plan=RowPlan(mesh, micro_batch_size=4))
    parts = [{"math": float(i)} for i in range(len(LENGTHS))]
    items = [make_scored(i, score=float(i), parts=found) for i, found in enumerate(parts)]
    scored = Scored(items)
    joined = reward_model(("math", "model:weight=-0.5"), params, model, mesh).judged(scored, batch)
    alone = reward_model(("model:name=judge",), params, model, mesh).judged(scored, batch)
    for i, score in enumerate(scores.tolist()):
        assert joined[i].verdict == dataclasses.replace(
            scored[i].verdict, score=i - 0.5 * score, parts={"math": float(i), "model": score}
        )
        assert alone[i].verdict.score == alone[i].verdict.parts["judge"] == score
        assert alone[i].verdict.correct == scored[i].verdict.correct  # by the verifier
    for bias in (np.nan, np.inf, 2e9):
        head = params["value_head"] | {"bias": np.float32(bias)}
        broken = reward_model(("model",), params | {"value_head": head}, model, mesh)
        message = rf"score of rewards\.model for response 0 is {bias:.0f}.*, but must be a number"
        with pytest.raises(RuntimeError, match=message):
            broken.judged(scored, batch)


def find(config, *others):
    """The reward model of `rewards.model.path`."""
    return find_reward_model("rewards.model.path", config.rewards.model.path, config, *others)


@pytest.fixture
def inputs(config, saved):
    """What `find` gets from a run with this reward model."""
    _, directory = saved
    config.rewards.functions = ("model",)
    config.rewards.model.path = str(directory)
    tokenizer = data.character_tokenizer()
    architecture = dataclasses.replace(models.load_config(directory), hidden_size=32)
    return config, models.Policy(architecture, "bfloat16"), tokenizer, mesh_of(2)


def test_the_model_computes_as_the_policy_does(inputs, saved):
    model, directory, _ = find(*inputs)
    assert directory == saved[1] and model.decoder.compute_dtype == "bfloat16"
    assert model.decoder.config.hidden_size == 64 and model.decoder.mesh == mesh_of(2)
    inputs[0].rewards.model.path = ""
    assert find(*inputs) is None


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_held_in_their_dtype(inputs, dtype):
    inputs[0].rewards.model.dtype = dtype
    scorer = Scorer.load(find(*inputs), inputs[0], inputs[-1])
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(scorer.params)} == {dtype}


def respell(directory):
    file = directory / "tokenizer.json"
    content = json.loads(file.read_text())
    vocabulary = content["model"]["vocab"]
    a, b = sorted(vocabulary)[-2:]
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    file.write_text(json.dumps(content))


def change_config(directory, **fields):
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def remove_head(directory):
    file = directory / "model.safetensors"
    save_file({k: v for k, v in load_file(file).items() if "score" not in k}, file)


MISTAKES = {
    "missing": (lambda path: [f.unlink() for f in path.iterdir()], "config.json"),
    "no head": (remove_head, "has no score.weight; name a sequence classifier with one label"),
    "tokenizer": (respell, "has another tokenizer than the policy: the token "),
    "context": (lambda path: change_config(path, max_position_embeddings=8), "context of 8 tokens"),
    "unsupported": (lambda path: change_config(path, model_type="mamba"), "'mamba' is not support"),
    "misshapen": (lambda path: change_config(path, hidden_size=32), "has shape"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_model_that_cannot_judge_is_refused_by_name(inputs, saved, tmp_path, mistake):
    spoil, message = MISTAKES[mistake]
    for file in saved[1].iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    spoil(tmp_path)
    inputs[0].rewards.model.path = str(tmp_path)
    with pytest.raises(UserError, match=message) as caught:
        find(*inputs)
    assert str(caught.value).startswith("rewards.model.path=") and "\n" not in str(caught.value)


def test_a_policy_of_more_tokens_is_refused(inputs):
    config, policy, *rest = inputs
    larger = dataclasses.replace(policy.config, vocab_size=35)
    with pytest.raises(UserError, match="vocab_size=34, but the policy may sample each of 35"):
        find(config, dataclasses.replace(policy, config=larger), *rest)


@pytest.mark.slow
def test_a_run_is_rewarded_as_transformers_scores_its_responses(config, saved, tmp_path):
    theirs, directory = saved
    config.training.num_steps = 1
    config.evaluation.every_steps = 0
    config.rewards.model.path = str(directory)
    config.rewards.functions = ("math", "model:weight=0.5")
    assert train(config, str(tmp_path / "joined")) == 0
    row = read_rows(tmp_path / "joined")[0]
    table = pq.read_table(tmp_path / "joined" / "rollouts" / "step_000000.parquet").to_pydict()
    pairs = zip(table["prompt_ids"], table["response_ids"])
    expected = [
        # One at a time: the end token has the id of padding in no batch.
        theirs(torch.tensor([[*prompt, *response]])).logits.item()
        for prompt, response in pairs
    ]
    np.testing.assert_allclose(table["score/model"], expected, **TOLERANCE)
    total = np.array(table["score/math"]) + 0.5 * np.array(table["score/model"])
    np.testing.assert_allclose(table["score"], total, rtol=1e-12)  # both in float64
    np.testing.assert_allclose(row["reward/mean"], total.mean(), rtol=1e-5)  # float32 rewards
    np.testing.assert_allclose(row["reward/model/mean"], np.mean(expected), **TOLERANCE)
    assert row["time/reward_model_s"] > 0
    config.rewards.functions = ("model",)
    config.rollout.in_turns = True  # the reward model is on the host while responses are sampled
    assert train(config, str(tmp_path / "alone")) == 0
    alone = read_rows(tmp_path / "alone")[0]
    assert alone["reward/mean"] == pytest.approx(row["reward/model/mean"], rel=1e-5)
    assert alone["reward/correct"] == row["reward/correct"]  # by the verifier
    assert "reward/math/mean" not in alone
    weights = load_file(directory / "model.safetensors")
    save_file(weights | {"score.weight": -weights["score.weight"]}, directory / "model.safetensors")
    config.training.num_steps = 2
    with pytest.raises(UserError, match="began with other reward model"):
        train(config, str(tmp_path / "alone"))
