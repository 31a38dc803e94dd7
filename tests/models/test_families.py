"""Every family against its class in transformers: states, logits, gradients, cached decoding.

Sequences of 96 tokens: three times the original context of the scaled rotary embedding, twelve
times the sliding window.
"""

import jax
import numpy as np
import pytest
import torch

from semrl_jax import models
from tests.models.caches import widened
from tests.models.conftest import by_file_name, make_pair, padded_rows
from tests.models.test_policy import mean_logprob, relative_error, torch_outputs

LENGTH = 96
FAST = [
    ("qwen2-window", True), ("llama", False), ("mistral", False), ("qwen3", True), ("gemma3", True),
]  # fmt: skip
SLOW = [
    ("llama-linear", True), ("mistral-whole", False), ("qwen3-window", True), ("qwen3-moe", True),
    ("qwen3-moe-mixed", True), ("gemma", True), ("mixtral", False), ("gemma2", True),
    ("phi3", False),
]  # fmt: skip


def assert_close(actual, expected):
    """Within 5e-5; where values exceed 5, as of Gemma, within 1.5e-5 of the largest."""
    largest = np.abs(expected).max()
    atol = 5e-5 if largest < 5.0 else 1.5e-5 * largest  # 1.03e-5 is seen on one processor
    np.testing.assert_allclose(actual, expected, rtol=0, atol=atol)


PLAIN = [("qwen2", True), ("qwen2", False)]
WINDOWED = [pair for pair in FAST if pair[0] in ("qwen2-window", "mistral")]


def parameters(fast, slow=()):
    return [
        pytest.param(pair, id=f"{pair[0]}-{'tied' if pair[1] else 'untied'}", marks=marks)
        for some, marks in ((fast, ()), (slow, pytest.mark.slow))
        for pair in some
    ]


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """Makes each model once."""
    made = {}

    def get(family, tied):
        if (family, tied) not in made:
            directory = tmp_path_factory.mktemp(family)
            made[family, tied] = make_pair(directory, family, tie_word_embeddings=tied)
        return made[family, tied]

    return get


@pytest.fixture(scope="module")
def long_padded():
    """Rows of [left padding | tokens | right padding]."""
    token_ids = np.random.default_rng(0).integers(2, 97, (4, LENGTH)).astype(np.int32)
    return padded_rows(token_ids, [(0, LENGTH), (13, LENGTH), (0, 50), (30, 71)])


@pytest.mark.parametrize(
    "family", parameters([PLAIN[0], *FAST[:2], FAST[4]], [PLAIN[1], *FAST[2:4], *SLOW])
)
def test_states_logits_and_gradients_match_transformers(pairs, long_padded, family):
    pair, valid = pairs(*family), long_padded.valid

    def loss(params):
        inputs = long_padded.token_ids, long_padded.positions, long_padded.segment_ids
        states = pair.policy.final_states(params, *inputs)
        logits = pair.policy.logits(params, states.reshape(-1, 64)).reshape(4, LENGTH, 97)
        return mean_logprob(pair.policy, params, long_padded), (states, logits)

    # One program for all three: most of this test's time is compilation.
    gradient, (states, logits) = jax.jit(jax.grad(loss, has_aux=True))(pair.params)
    expected = torch_outputs(pair, long_padded)
    hidden = expected.hidden_states[-1].numpy()
    # 5e-5 on values up to 5: a hundred float32 roundings (6e-8 of the value each) of the same sums
    # in another order, and of angles at positions up to 95; 1e-5 is what is seen.
    assert_close(np.asarray(states)[valid], hidden[valid])
    assert_close(np.asarray(logits)[valid], expected.logits.numpy()[valid])
    model = pair.torch_model
    model.zero_grad()
    arguments = long_padded.torch_arguments()
    logprobs = torch.log_softmax(model(**arguments).logits[:, :-1], -1)
    chosen = logprobs.gather(-1, arguments["input_ids"][:, 1:].long()[..., None])[..., 0]
    counted = torch.tensor(valid[:, 1:] & valid[:, :-1])
    (chosen * counted).sum().div(counted.sum()).backward()
    theirs = by_file_name({name: p.grad.numpy() for name, p in model.named_parameters()})
    for spec, actual in models.iterate_hf_tensors(gradient, pair.policy.config, "float32"):
        # 1e-4 of the tensor's largest entry: sums over 250 tokens through three layers, in which
        # terms above the sum cancel; 3e-6 is what is seen.
        assert relative_error(actual, theirs[spec.name]) < 1e-4, spec.name


@pytest.mark.slow
@pytest.mark.parametrize("family", [("qwen3-moe-mixed", True), ("mixtral", False)], ids=str)
def test_tokens_go_to_the_experts_of_transformers(pairs, family):
    pair = pairs(*family)
    ids = np.random.default_rng(4).integers(2, 97, (2, 24)).astype(np.int32)
    positions = np.broadcast_to(np.arange(24, dtype=np.int32), ids.shape)
    found = jax.jit(pair.policy.prefill)(pair.params, ids, positions, np.ones_like(ids))
    with torch.no_grad():
        logits = pair.torch_model(torch.tensor(ids), output_router_logits=True).router_logits
    num_layers, per_token, num_experts = pair.policy.config.routed_experts
    assert found.experts.shape == (2, 24, num_layers, per_token)
    for layer, of_layer in enumerate(logits):
        wanted = of_layer.reshape(2, 24, num_experts).topk(per_token, dim=-1).indices
        np.testing.assert_array_equal(found.experts[:, :, layer], wanted)


@pytest.mark.parametrize("family", parameters([*PLAIN, *FAST[:2]], [*FAST[2:], *SLOW]))
def test_prefill_and_decode_equal_the_full_pass(pairs, family):
    """Left-padded prompts of 3 to 11 tokens, then 12 tokens across the border of the window.

    Tokens are written to the cache's columns in any order: positions decide what is seen.
    """
    pair, random = pairs(*family), np.random.default_rng(1)
    policy, columns, num_new = pair.policy, 11, 12
    lengths = np.array([11, 3, 7])
    prompts, segments = np.zeros((2, 3, columns), np.int32)
    for row, length in enumerate(lengths):
        prompts[row, -length:] = random.integers(2, 97, length)
        segments[row, -length:] = 1
    new = random.integers(2, 97, (3, num_new)).astype(np.int32)
    where = columns + random.permutation(num_new).astype(np.int32)
    positions = np.maximum(np.cumsum(segments, axis=1) - 1, 0)
    state, inputs, cache, *_ = jax.jit(policy.prefill)(pair.params, prompts, positions, segments)
    cache = widened(cache, num_new)
    states, layer_inputs = [state], [inputs]
    decode = jax.jit(policy.decode)
    for index in range(num_new):
        step = new[:, index], lengths + index, where[index], cache
        state, inputs, cache, *_ = decode(pair.params, *step)
        states.append(state)
        layer_inputs.append(inputs)
    for row, length in enumerate(lengths):
        whole = np.concatenate([prompts[row, -length:], new[row]])[None]
        with torch.no_grad():
            expected = pair.torch_model(torch.tensor(whole), output_hidden_states=True)
        got = np.stack([np.asarray(s[row]) for s in states])
        # The tolerance of the test above; these sums are over fewer tokens.
        assert_close(got, expected.hidden_states[-1][0, length - 1 :].numpy())
        for layer in range(policy.config.num_layers):
            got = np.stack([np.asarray(i[row, layer]) for i in layer_inputs])
            assert_close(got, expected.hidden_states[layer][0, length - 1 :].numpy())


@pytest.mark.parametrize("family", parameters([*PLAIN, *WINDOWED], [("qwen3-window", True)]))
def test_window_counts_within_the_segment(pairs, family):
    """Three sequences packed in one row give transformers' states of each alone."""
    pair, random = pairs(*family), np.random.default_rng(2)
    lengths = (21, 5, 30)
    sequences = [random.integers(2, 97, length).astype(np.int32) for length in lengths]
    inputs = [
        np.concatenate(sequences)[None],
        np.concatenate([np.arange(length, dtype=np.int32) for length in lengths])[None],
        np.repeat(np.arange(1, 4, dtype=np.int32), lengths)[None],
    ]
    states = jax.jit(pair.policy.final_states)(pair.params, *inputs)
    for ids, got in zip(sequences, np.split(np.asarray(states)[0], np.cumsum(lengths)[:-1])):
        with torch.no_grad():
            expected = pair.torch_model(torch.tensor(ids)[None], output_hidden_states=True)
        assert_close(got, expected.hidden_states[-1][0].numpy())


def test_last_token_in_the_window_is_seen_and_the_one_before_is_not(pairs):
    """One sliding layer, window 8: the state of token 20 depends on token 13, not on token 12."""
    config = models.DecoderConfig(
        vocab_size=97, hidden_size=32, intermediate_size=32, num_layers=1, num_heads=2,
        num_kv_heads=1, head_dim=16, model_type="mistral", sliding_window=8,
    )  # fmt: skip
    policy = models.Policy(config)
    params = policy.init(jax.random.key(0))
    ids = np.full((3, 21), 5, np.int32)
    ids[1, 12], ids[2, 13] = 6, 6
    positions = np.broadcast_to(np.arange(21, dtype=np.int32), ids.shape)
    final_states = jax.jit(policy.final_states)
    states = np.asarray(final_states(params, ids, positions, np.ones_like(ids)))[:, 20]
    np.testing.assert_array_equal(states[1], states[0])
    assert np.abs(states[2] - states[0]).max() > 1e-3
