"""Fine-tuning: loss and gradient are those of transformers, however conversations are laid out."""

import math
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from configs.default import get_config
from semrl_jax import data, models
from semrl_jax.cluster.peers import Peers
from semrl_jax.runs.optimizers import optimizer_of
from semrl_jax.shaping import init_shaping_state
from semrl_jax.training.fine_tuning import FineTuner, batch_order, conversation_batch
from semrl_jax.training.optimizer import Optimizer
from semrl_jax.training.packing import RowPlan
from semrl_jax.training.train_state import init_state
from semrl_jax.training.trainee import NonFiniteUpdates
from tests.cases import raised

TEMPLATE = "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}<eos>{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}a:{% endif %}"
MAX_TOKENS = 48

# Keeps the gradient as its state and moves nothing.
KEEP_GRADIENT = Optimizer(
    init=lambda params: jax.tree.map(jnp.zeros_like, params),
    update=lambda gradient, state, params: (jax.tree.map(jnp.zeros_like, gradient), gradient),
)


def turns(*texts):
    roles = ("user", "assistant") * 3
    return [{"role": role, "content": text} for role, text in zip(roles, texts)]


CHATS = [
    turns("12+34", "46"),
    turns("1+1?", "2", "and 2+2?", "it is 4", "3*3", "9"),
    turns("((1+2)*3, 4)", "the sum of all is 9 and 4"),
    turns("5", "5-5"),
    turns("7*8-9?", "is 47", "ok?", "yes (47)"),
]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """A tiny Qwen2 directory with random weights whose conversations use all its parts."""
    import tokenizers
    import transformers

    alphabet = sorted({c for chat in CHATS for m in chat for c in m["content"]} | set("ua:"))
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<eos>", *alphabet])}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>"
    )
    tokenizer.chat_template = TEMPLATE
    config = models.DecoderConfig(
        vocab_size=len(vocabulary), hidden_size=16, intermediate_size=24, num_layers=2, num_heads=2,
        num_kv_heads=1, head_dim=8, max_position_embeddings=64, tie_embeddings=True,
    )  # fmt: skip
    params = models.Policy(config).init(jax.random.key(3))
    # Larger than usual, so that a wrong position or neighbour changes the loss visibly.
    params = jax.tree.map(lambda leaf: leaf * 2 if leaf.ndim > 2 else leaf, params)
    path = tmp_path_factory.mktemp("model") / "model"
    models.save_directory(path, params, config, tokenizer)
    return path, tokenizer, config


@pytest.fixture(scope="module")
def conversations(directory, tmp_path_factory):
    import json

    file = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    file.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in CHATS))
    reader = data.conversation_reader(directory[1])
    return data.load_conversations(
        [file], directory[1], reader, max_tokens=MAX_TOKENS
    ).conversations


def learned_by_hand(chat):
    """Ids as text, and labels: each assistant message and its end, written out by hand."""
    symbols, labels = [], []
    for message in chat:
        head = [message["role"][0], ":"]
        body = [*message["content"], "<eos>"]
        symbols += head + body
        labels += [False] * len(head) + [message["role"] == "assistant"] * len(body)
    return symbols, labels


@pytest.fixture(scope="module")
def expected(directory):
    """Loss and gradients by float64 transformers, one conversation at a time."""
    path, tokenizer, _ = directory
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64)
    total, count = 0.0, 0
    for chat in CHATS:
        symbols, learned = learned_by_hand(chat)
        ids = torch.tensor([tokenizer.convert_tokens_to_ids(symbols)])
        labels = torch.where(torch.tensor([learned]), ids, -100)
        num_learned = sum(learned)
        total = total + model(ids, labels=labels).loss * num_learned
        count += num_learned
    loss = total / count
    loss.backward()
    gradients = {name: p.grad.numpy() for name, p in model.named_parameters()}
    return loss.item(), gradients, count


def make_tuner(directory, **plan):
    path, _, config = directory
    mesh = models.make_mesh({}, jax.devices()[:1])
    plan = RowPlan(mesh, **plan)
    tuner = FineTuner(models.Policy(config), KEEP_GRADIENT, plan, MAX_TOKENS, 2, Peers())
    params = models.load_params(path, config)
    return tuner, init_state(params, KEEP_GRADIENT, init_shaping_state(), mesh)


LAYOUTS = {
    "packed": {"pack_sequences": True, "micro_batch_tokens": MAX_TOKENS},
    "single": {"micro_batch_size": 2},
}


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_loss_and_gradient_are_those_of_transformers(directory, conversations, expected, layout):
    tuner, state = make_tuner(directory, **LAYOUTS[layout])
    loss, gradients, count = expected
    assert sum(int(one.loss_mask.sum()) for one in conversations) == count
    held_out = tuner.loss(state.params, conversations, 3)
    state, scalars = tuner.update(state, conversations)
    # float32 against float64: rounding of sums over tens of terms, far below any wrong token.
    np.testing.assert_allclose(scalars["sft/loss"], loss, rtol=2e-6)
    np.testing.assert_allclose(held_out, loss, rtol=2e-6)
    found = models.iterate_hf_tensors(state.optimizer, directory[2], "float32")
    found = {spec.name: array for spec, array in found}
    assert found.keys() == gradients.keys()
    largest = max(np.abs(gradient).max() for gradient in gradients.values())
    # transformers in float32 departs by up to 2e-5 of the largest, at the embedding: its small
    # values are divided by their norm. Any wrong token or neighbour changes far more.
    for name, gradient in gradients.items():
        np.testing.assert_allclose(found[name], gradient, rtol=0, atol=5e-5 * largest)
    norm = math.sqrt(sum(np.sum(np.square(gradient)) for gradient in gradients.values()))
    np.testing.assert_allclose(scalars["policy/grad_norm"], norm, rtol=1e-5)


@pytest.mark.slow
def test_updates_that_are_not_finite_end_the_training(directory, conversations):
    tuner, state = make_tuner(directory, **LAYOUTS["packed"])
    state.params["final_norm"]["scale"] *= np.float32("nan")
    state, scalars = tuner.update(state, conversations)
    assert scalars["policy/update_skipped"] == 1.0 and int(state.skipped_in_row) == 1
    raised(NonFiniteUpdates, "2 updates in a row", tuner.update, state, conversations)


def test_a_batch_by_hand():
    ids, mask = np.array([5, 6, 7, 8], np.int32), np.array([False, False, True, True])
    batch = conversation_batch([data.Conversation(ids, mask)], 20)
    assert batch.token_ids.shape == (1, 17) and batch.response_mask.shape == (1, 16)
    assert batch.token_ids[0, :5].tolist() == [5, 6, 7, 8, 0]
    assert batch.positions[0, :5].tolist() == [0, 1, 2, 3, 0]
    assert batch.segment_ids[0, :5].tolist() == [1, 1, 1, 1, 0]
    # Column t of the mask belongs to token t + 1: the first token is the prompt.
    assert np.flatnonzero(batch.response_mask[0]).tolist() == [1, 2]
    assert batch.response_ids[0, 1:3].tolist() == [7, 8]


lengths = st.lists(st.integers(2, 9), min_size=1, max_size=12)


@given(lengths=lengths, size=st.integers(1, 7), num_epochs=st.integers(1, 3))
def test_an_epoch_has_each_conversation_once(lengths, size, num_epochs):
    options = {"seed": 1, "num_epochs": num_epochs}
    found = batch_order(lengths, **options, num_steps=0, batch_size=size, batch_tokens=0)
    assert [len(batch) for batch in found[:-1]] == [size] * (len(found) - 1)
    assert 1 <= len(found[-1]) <= size
    order = np.concatenate(found)
    for epoch in range(num_epochs):
        part = order[epoch * len(lengths) : (epoch + 1) * len(lengths)]
        assert sorted(part) == list(range(len(lengths)))
    limited = batch_order(lengths, **options, num_steps=0, batch_size=1, batch_tokens=8 + size)
    assert np.concatenate(limited).tolist() == order.tolist()  # the same order, other borders
    sizes = [sum(lengths[i] for i in batch) for batch in limited]
    assert max(sizes) <= 8 + size
    for batch, following in zip(sizes, limited[1:]):
        assert batch + lengths[following[0]] > 8 + size  # full


def test_a_number_of_steps_replaces_epochs():
    options = {"seed": 0, "num_epochs": 1, "batch_size": 3, "batch_tokens": 0}
    found = batch_order([4] * 5, num_steps=7, **options)
    assert [len(batch) for batch in found] == [3] * 7
    counts = Counter(np.concatenate(found).tolist())
    assert sorted(counts.values()) == [4, 4, 4, 4, 5]  # 21 conversations of 5
    other = batch_order([4] * 5, num_steps=7, **options | {"seed": 1})
    assert np.concatenate(found).tolist() != np.concatenate(other).tolist()


def test_the_optimizer_of_a_config_has_its_schedule():
    config = get_config()
    config.sft.update(
        {"learning_rate": 2.0, "schedule": "linear", "warmup_fraction": 0.11, "final_fraction": 0.1}
    )
    rate = optimizer_of(config, "sft", 10).rate
    # The rise takes ceil(1.1) steps.
    np.testing.assert_allclose([rate(i) for i in (0, 1, 2, 6, 10)], [1, 2, 2, 1.1, 0.2], rtol=1e-6)
