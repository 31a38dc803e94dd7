"""The JAX engine over the real wire: right numbers, the same numbers, and no waste.

The published implementation pairs the responses of a group with the wrong hidden states once G > 1
or lengths differ; every test of states here has both.
"""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import math
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import tokenizers
import transformers
from jax.extend.core import jaxprs_in_params

from semrl_jax import data, models
from semrl_jax.metrics import MetricKey
from semrl_jax.metrics.measurer import Measurer, join_layers
from semrl_jax.metrics.names import ORDERS
from semrl_jax.rollout.client import RolloutClient
from semrl_jax.rollout.engines import decoding
from semrl_jax.rollout.engines.jax import JaxEngine
from semrl_jax.rollout.wire.codec import GenerateCall
from semrl_jax.support.errors import UserError
from semrl_jax.types import HiddenStateParams, SampleRequest, SamplingParams, WeightVersion
from tests.oracles import metrics as oracle
from tests.rollout.caller import Caller
from tests.rollout.embedded import EmbeddedReplica
from tests.rollout.engines.responses import (
    as_bytes,
    full_forward,
    make_requests,
    processed_logprobs,
)

CONFIG = models.DecoderConfig(
    vocab_size=31, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=2,
    num_kv_heads=1, head_dim=32, tie_embeddings=True,
)  # fmt: skip
EOS, STOP = 1, 2
VERSION = WeightVersion("run", "attempt", 0, "digest")


@pytest.fixture(scope="module")
def policy():
    return models.Policy(CONFIG)


@pytest.fixture(scope="module")
def params(policy):
    # Larger logits than a new model's make some tokens likely, so that lengths vary.
    params = policy.init(jax.random.key(3))
    return jax.tree.map(lambda leaf: leaf * 1.5, params)


@contextlib.contextmanager
def synced_replicas(policy, params, count=1, *, dtype="float32", **options):
    """Embedded replicas that hold `params`, sent over the wire, and a client of them all."""
    with contextlib.ExitStack() as stack:
        replicas = [
            stack.enter_context(EmbeddedReplica(JaxEngine(policy, **options), token="a-token"))
            for _ in range(count)
        ]
        addresses = [replica.address for replica in replicas]
        client = stack.enter_context(
            RolloutClient(addresses, "a-token", run_id="run", attempt_id="attempt")
        )
        client.connect(model_hash=policy.config.hash, tokenizer_hash="", vocab_size=31)
        version = client.sync_weights(
            models.tensor_specs(policy.config, dtype),
            lambda: (a for _, a in models.iterate_hf_tensors(params, policy.config, dtype)),
            step=0,
        )
        yield replicas, client, version


@contextlib.contextmanager
def synced_client(policy, params, **options):
    """A client of one such replica."""
    with synced_replicas(policy, params, **options) as ((replica,), client, version):
        client.replica = replica
        yield client, version


def assert_raw_logprobs(policy, params, rollouts):
    """Raw log-probabilities equal what the full pass gives."""
    for rollout, _, raw in full_forward(policy, params, rollouts):
        np.testing.assert_allclose(rollout.rollout_raw_logprobs, raw, atol=5e-5)


def assert_same_samples(found, expected):
    """To the bit for tokens; sums in another order, or of other batches, for log-probabilities."""
    for name, rollout in expected.items():
        np.testing.assert_array_equal(found[name].response_ids, rollout.response_ids)
        np.testing.assert_allclose(
            found[name].rollout_logprobs, rollout.rollout_logprobs, atol=5e-5
        )


def spied_chunks(monkeypatch, seen):
    """A list of what `seen` returns for the slots of each call of `decode_chunk`."""
    found, real = [], decoding.decode_chunk

    def spy(params, slots, *arguments, **options):
        found.append(seen(slots))
        return real(params, slots, *arguments, **options)

    monkeypatch.setattr(decoding, "decode_chunk", spy)
    return found


@pytest.mark.parametrize("max_batch", [64, 8])
def test_logprobs_and_states_are_those_of_the_policy(policy, params, max_batch):
    """Ragged prompts and responses, G = 4; with 8 slots for 20 responses, slots are refilled."""
    sampling = SamplingParams(40, temperature=0.8, eos_token_ids=(EOS,), stop_token_ids=(STOP,))
    states = HiddenStateParams((-1,), "float32")
    requests = make_requests()
    with synced_client(policy, params, max_batch=max_batch, chunk=7) as (client, version):
        rollouts = list(client.generate(requests, sampling, states, version=version))
    assert sorted(r.sample_id for r in rollouts) == sorted(r.sample_id for r in requests)
    assert len({len(r.response_ids) for r in rollouts}) > 5
    assert {"eos", "stop", "length"} == {r.finish_reason for r in rollouts}
    by_id = {request.sample_id: request for request in requests}
    for rollout, expected_states, expected_logprobs in full_forward(
        policy, params, rollouts, temperature=0.8
    ):
        np.testing.assert_array_equal(rollout.prompt_ids, by_id[rollout.sample_id].prompt_ids)
        # Both sides are float32 and sum in another order: most tokens differ by about 5e-6. At one
        # token of these, each is 4e-5 from float64, on opposite sides.
        np.testing.assert_allclose(rollout.rollout_logprobs, expected_logprobs, atol=1e-4)
        scale = np.abs(expected_states).max()
        np.testing.assert_allclose(
            rollout.hidden_states[:, 0] / scale, expected_states / scale, atol=1e-5
        )
        ends = {"eos": [EOS], "stop": [STOP], "length": [*range(3, 31), 0]}[rollout.finish_reason]
        assert rollout.response_ids[-1] in ends
        assert not np.isin(rollout.response_ids[:-1], (EOS, STOP)).any()
        assert (len(rollout.response_ids) == 40) or rollout.finish_reason != "length"
        assert [s.version for s in rollout.versions] == [version]


@pytest.fixture(scope="module")
def of_layers(policy, params):
    """Responses with states of the indices 0, 1, 2 and -1."""
    states = HiddenStateParams((0, 1, 2, -1), "float32")
    with synced_client(policy, params) as (client, version):
        return list(client.generate(make_requests(), SamplingParams(20), states, version=version))


@pytest.mark.slow
def test_inner_layers_are_those_of_the_full_pass(policy, params, of_layers):
    """Index i is the input of layer i; index 0 is the embedding of the previous token."""
    table = np.asarray(params["embed"]["embedding"])
    for rollout, final_states, _ in full_forward(policy, params, of_layers):
        assert rollout.layers == (0, 1, 2, -1)
        read = np.concatenate([rollout.prompt_ids[-1:], rollout.response_ids[:-1]])
        np.testing.assert_array_equal(rollout.hidden_states[:, 0], table[read])
        assert not np.allclose(rollout.hidden_states[:, 1], rollout.hidden_states[:, 0])
        for plane in (2, 3):  # 2 is the number of layers: the final state, as -1
            np.testing.assert_allclose(
                rollout.hidden_states[:, plane], final_states, rtol=1e-4, atol=1e-4
            )


@pytest.mark.slow
def test_metrics_of_each_layer_are_those_of_its_states(policy, params, of_layers):
    """Compared in float64 with embeddings and states of the full pass."""
    layers = (-1, 0)
    options = {"stride": 4, "method": "svd", "names": ("effective_rank", "curvature")}
    with Measurer(max_tokens=20, num_threads=1, layers=layers, **options) as measurer:
        futures = [
            {i: measurer.submit(r.hidden_states[:, r.layers.index(i)]) for i in layers}
            for r in of_layers
        ]
        measurer.flush()
        measured = {
            rollout.sample_id: join_layers({layer: f.result() for layer, f in found.items()})
            for rollout, found in zip(of_layers, futures)
        }
    table = np.asarray(params["embed"]["embedding"])
    for rollout, final_states, _ in full_forward(policy, params, of_layers):
        read = np.concatenate([rollout.prompt_ids[-1:], rollout.response_ids[:-1]])
        found = measured[rollout.sample_id]
        assert len(found.metrics) == 2 * len(layers) * len(ORDERS)
        for layer, rows, mean in zip(layers, (final_states, table[read]), found.mean_states):
            np.testing.assert_allclose(mean, rows.mean(axis=0), rtol=1e-4, atol=1e-4)
            for name in options["names"]:
                metric = oracle.METRICS[name]
                series = oracle.series(metric, rows, 4, "exact")
                for order, expected in zip(ORDERS, (metric(rows), *oracle.orders(series))):
                    actual = found.metrics[MetricKey(name, order, layer)]
                    # Differences of ranks up to 20, of states that agree to 1e-4.
                    np.testing.assert_allclose(actual.value, expected or 0.0, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "max_bytes", [pytest.param(decoding.MAX_PROMPT_STATE_BYTES, marks=pytest.mark.slow), 1]
)
def test_states_of_prompts_are_those_of_their_prefixes(policy, params, max_bytes, monkeypatch):
    """Row p equals the first state of a response to the first p + 1 tokens, in every layer."""
    monkeypatch.setattr(decoding, "MAX_PROMPT_STATE_BYTES", max_bytes)  # 1: a prompt at a time
    prefill, num_prefills = decoding.prefill_and_insert, 0

    def counted(*arguments, **options):
        nonlocal num_prefills
        num_prefills += 1
        return prefill(*arguments, **options)

    monkeypatch.setattr(decoding, "prefill_and_insert", counted)
    both = HiddenStateParams((0, 1, -1), "float32", ("decode", "prefill"))
    one = SamplingParams(1)
    with synced_client(policy, params, max_batch=8) as (client, version):  # slots are refilled
        rollouts = list(client.generate(make_requests(), one, both, version=version))
        assert num_prefills == (5 if max_bytes == 1 else 3)  # of one group, or of eight slots
        longest = max(rollouts, key=lambda rollout: len(rollout.prompt_ids))
        prompts = [longest.prompt_ids[: end + 1] for end in range(len(longest.prompt_ids))]
        requests = [SampleRequest(str(i), i, 0, ids, 0) for i, ids in enumerate(prompts)]
        of_prefix = {
            rollout.group_id: rollout.hidden_states[0]
            for rollout in client.generate(
                requests, one, HiddenStateParams((0, 1, -1), "float32"), version=version
            )
        }
        alone = HiddenStateParams((-1,), "bfloat16", ("prefill",))
        rounded = list(client.generate(make_requests(), one, alone, version=version))
    table = np.asarray(params["embed"]["embedding"])
    by_id = {rollout.sample_id: rollout for rollout in rollouts}
    assert len(of_prefix) > 10
    for rollout in rollouts:
        assert rollout.prompt_states.shape == (len(rollout.prompt_ids), 3, 64)
        np.testing.assert_array_equal(rollout.prompt_states[:, 0], table[rollout.prompt_ids])
        np.testing.assert_allclose(
            rollout.prompt_states[-1], rollout.hidden_states[0], rtol=1e-5, atol=1e-5
        )
    for row, expected in of_prefix.items():
        np.testing.assert_allclose(longest.prompt_states[row], expected, rtol=1e-4, atol=1e-4)
    for rollout in rounded:
        assert rollout.hidden_states is None and rollout.layers == (-1,)
        exact = by_id[rollout.sample_id].prompt_states[:, 2:]
        np.testing.assert_array_equal(rollout.prompt_states, exact.astype(jnp.bfloat16))


@pytest.mark.slow
def test_bfloat16_states_are_the_float32_ones_rounded(policy, params):
    with synced_client(policy, params) as (client, version):
        exact, rounded = (
            {
                r.sample_id: r.hidden_states
                for r in client.generate(
                    make_requests(),
                    SamplingParams(12),
                    HiddenStateParams((-1,), dtype),
                    version=version,
                )
            }
            for dtype in ("float32", "bfloat16")
        )
    for name, states in exact.items():
        np.testing.assert_array_equal(rounded[name], states.astype(jnp.bfloat16))


def test_truncated_sampling_reports_the_truncated_distribution(policy, params):
    sampling = SamplingParams(30, temperature=1.3, top_k=6, top_p=0.8)
    with synced_client(policy, params) as (client, version):
        rollouts = list(client.generate(make_requests(), sampling, version=version))
    for rollout, _, raw in full_forward(policy, params, rollouts):
        np.testing.assert_allclose(rollout.rollout_raw_logprobs, raw, atol=5e-5)
        assert rollout.hidden_states is None
        # Renormalised over at most six tokens.
        assert (rollout.rollout_logprobs <= 1e-6).all()
    above = np.concatenate([r.rollout_logprobs - r.rollout_raw_logprobs for r in rollouts])
    assert above.mean() > 0.1


PENALISED = SamplingParams(
    40, 0.8, min_p=0.02, presence_penalty=0.7, frequency_penalty=-0.3, repetition_penalty=1.4,
    min_tokens=12, eos_token_ids=(EOS,), stop_token_ids=(STOP,),
)  # fmt: skip


def assert_penalised(policy, params, rollouts, sampling=PENALISED):
    """Both log-probabilities are right; greedy sampling took the likeliest token."""
    embedding = np.asarray(params["embed"]["embedding"], np.float64)
    for rollout, states, _ in full_forward(policy, params, rollouts):
        tokens = np.arange(len(rollout.response_ids)), rollout.response_ids
        logits = states @ embedding.T
        expected = processed_logprobs(logits, sampling, rollout)
        np.testing.assert_allclose(rollout.rollout_logprobs, expected[tokens], atol=1e-4)
        raw = processed_logprobs(logits, SamplingParams(1))[tokens]
        np.testing.assert_allclose(rollout.rollout_raw_logprobs, raw, atol=1e-4)
        assert sampling.temperature or (expected.max(1) - expected[tokens]).max() < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.8, 0.0])
def test_penalties_are_those_of_the_oracle(policy, params, temperature):
    """Prompts that are shared, slots that are used again, and the tokens of any other batch."""
    sampling = dataclasses.replace(PENALISED, temperature=temperature)
    found = []
    for max_batch, chunk in ((8, 7), (64, 4)):
        with synced_client(policy, params, max_batch=max_batch, chunk=chunk) as (client, version):
            rollouts = list(client.generate(make_requests(), sampling, version=version))
        found.append({rollout.sample_id: rollout for rollout in rollouts})
    assert_penalised(policy, params, rollouts, sampling)
    assert_same_samples(*found)
    lengths = {r.finish_reason: len(r.response_ids) for r in rollouts}
    assert min(len(r.response_ids) for r in rollouts) > sampling.min_tokens
    assert {"eos", "stop"} & lengths.keys()


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(12, temperature=1.3, top_k=6, top_p=0.8, eos_token_ids=(EOS,)),
        pytest.param(dataclasses.replace(PENALISED, max_tokens=20), marks=pytest.mark.slow),
    ],
)
def test_entropies_are_those_of_the_distribution_sampled_from(policy, params, sampling):
    embedding = np.asarray(params["embed"]["embedding"], np.float64)
    with synced_client(policy, params) as (client, version):
        requests = make_requests(2)
        rollouts = list(client.generate(requests, sampling, version=version, entropies=True))
        plain = list(client.generate(requests, sampling, version=version))
    for rollout, states, _ in full_forward(policy, params, rollouts):
        logprobs = processed_logprobs(states @ embedding.T, sampling, rollout)
        expected = [-sum(np.exp(x) * x for x in row if x > -np.inf) for row in logprobs]
        np.testing.assert_allclose(rollout.entropies, expected, atol=1e-4)
    assert as_bytes(plain) == as_bytes(rollouts)
    assert all(rollout.entropies is None for rollout in plain)


def test_without_penalties_no_token_is_counted(policy, params):
    call = make_call(policy, params, make_requests(1, 4), SamplingParams(8, min_tokens=2))
    call.step()
    assert call._slots.counts is None
    call = make_call(policy, params, make_requests(1, 4), PENALISED)
    call.step()
    assert call._slots.counts.shape == (4, 31)


@pytest.fixture(scope="module")
def tokenizer():
    """31 tokens: two special ones, letters, pieces of words, and the bytes of a character."""
    names = ["<pad>", "<eos>", "c", *"abdefgh", *(x + y for x in "abd" for y in "abd")]
    names += ["äĲ", "Ĺ", "Ġ", "Ċ", "abdab", *"ijklmno"]  # the first two are the bytes of 中
    assert len(names) == 31
    vocabulary = {name: i for i, name in enumerate(names)}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    backend.decoder = tokenizers.decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token=None
    )


def up_to_stop(tokenizer, rollout, sampling):
    """The length and the finish reason, by decoding every prefix."""
    for count in range(1, len(rollout.response_ids) + 1):
        text = tokenizer.decode(rollout.response_ids[:count], skip_special_tokens=True)
        if any(stop_string in text for stop_string in sampling.stop_strings):
            return count, "eos" if rollout.response_ids[count - 1] == EOS else "stop"
    return len(rollout.response_ids), rollout.finish_reason


@pytest.mark.parametrize(
    ("max_batch", "chunk"),
    [
        (8, 7),
        *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in [(64, 1), (8, 3), (64, 40)]),
    ],
)
def test_stop_strings_end_responses_whatever_the_chunk(
    policy, params, tokenizer, max_batch, chunk, monkeypatch
):
    """What is kept are the tokens, log-probabilities and states of the call without them."""
    monkeypatch.setattr(decoding, "MIN_BATCH", max_batch)  # one size, so the same programs
    sampling = SamplingParams(20, temperature=0.8, eos_token_ids=(EOS,), stop_token_ids=(STOP,))
    states = HiddenStateParams((-1,), "float32")
    options = {"max_batch": max_batch, "chunk": chunk, "tokens": data.TokenBytes(tokenizer)}
    stopping = dataclasses.replace(sampling, stop_strings=("bad", "中", "ab d", "i", "o\n"))
    with synced_client(policy, params, **options) as (client, version):
        whole = list(client.generate(make_requests(), sampling, states, version=version))
        before = decoding.decode_chunk._cache_size()
        found = list(client.generate(make_requests(), stopping, states, version=version))
        again = list(client.generate(make_requests(), stopping, states, version=version))
        assert decoding.decode_chunk._cache_size() == before  # stops compile nothing
    assert as_bytes(found) == as_bytes(again)
    found = {rollout.sample_id: rollout for rollout in found}
    ends = []
    for expected in whole:
        actual = found[expected.sample_id]
        length, reason = up_to_stop(tokenizer, expected, stopping)
        ends.append((length < len(expected.response_ids), reason, length % chunk))
        assert actual.finish_reason == reason
        np.testing.assert_array_equal(actual.response_ids, expected.response_ids[:length])
        for field in ("rollout_logprobs", "rollout_raw_logprobs", "hidden_states"):
            values = getattr(expected, field)[:length]
            # Slots that become free earlier give other batches, and sums in another order.
            np.testing.assert_allclose(getattr(actual, field), values, rtol=1e-5, atol=1e-5)
        assert [(span.start, span.end) for span in actual.versions] == [(0, length)]
    assert sum(is_cut for is_cut, *_ in ends) > 5
    assert {reason for _, reason, _ in ends} == {"eos", "stop", "length"}
    assert chunk == 1 or len({place for is_cut, _, place in ends if is_cut}) > 2


@pytest.mark.slow
def test_a_slot_that_a_stop_string_freed_is_inactive(policy, params, tokenizer):
    """Otherwise the device would go on with a response that nobody reads."""
    sampling = SamplingParams(64, eos_token_ids=(EOS,))  # programs of the test below
    call = make_call(policy, params, make_requests(8, 4), sampling)
    call._new_matcher = lambda: data.StopMatcher(data.TokenBytes(tokenizer), ("a", "b", "c"))
    num_stopped = 0
    while not call.done:
        num_stopped += sum(rollout.finish_reason == "stop" for rollout in call.step())
        if not call.done:  # then it has no slots any more
            assert [bool(r) for r in call._running] == np.asarray(call._slots.active).tolist()
    assert num_stopped > 20


def test_an_engine_without_tokenizer_takes_no_stop_strings(policy, params):
    with synced_client(policy, params) as (client, version):
        stopping = SamplingParams(4, stop_strings=("a",))
        with pytest.raises(UserError, match="sampling has 'stop_strings'; the replica has "):
            list(client.generate(make_requests(1, 1), stopping, version=version))


def test_a_call_repeats_bit_for_bit_whatever_ran_before(policy, params):
    sampling = SamplingParams(40, eos_token_ids=(EOS,))
    states = HiddenStateParams((-1,), "float32")  # programs of tests above
    with synced_client(policy, params, max_batch=8, chunk=7) as (client, version):
        first = as_bytes(client.generate(make_requests(), sampling, states, version=version))
        list(client.generate(make_requests(3, 2, seed=9), sampling, states, version=version))
        again = as_bytes(client.generate(make_requests(), sampling, states, version=version))
        other = as_bytes(client.generate(make_requests(seed=1), sampling, states, version=version))
    assert first == again
    assert first != other
    with synced_client(policy, params, max_batch=8, chunk=7) as (client, version):
        assert first == as_bytes(
            client.generate(make_requests(), sampling, states, version=version)
        )


@pytest.mark.slow
def test_new_weights_over_the_wire_change_what_is_sampled(policy, params):
    """bfloat16 on the wire: the replica samples with the rounded weights."""
    rounded = jax.tree.map(lambda a: a.astype(jnp.bfloat16).astype(jnp.float32), params)
    with synced_client(policy, params, dtype="bfloat16") as (client, version):
        rollouts = list(client.generate(make_requests(), SamplingParams(10), version=version))
    assert_raw_logprobs(policy, rounded, rollouts)
    differences = [
        np.abs(rollout.rollout_raw_logprobs - raw).max()
        for rollout, _, raw in full_forward(policy, params, rollouts)
    ]
    assert max(differences) > 1e-3


@pytest.mark.parametrize("family", ["qwen2", "mixtral"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_sums_of_tensors_are_those_of_the_weights_that_were_sent(family, dtype):
    """Their names and layout are Hugging Face's; the engine has cast them, but not the norms."""
    sizes = dataclasses.asdict(CONFIG)
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads",
             "num_kv_heads", "head_dim", "max_position_embeddings")  # fmt: skip
    config = models.random_config(family, **{name: sizes[name] for name in names})
    policy = models.Policy(config, compute_dtype=dtype)
    params = policy.init(jax.random.key(0))
    with synced_client(policy, params) as (client, _):
        sums = {each.name: each for each in client.tensor_sums()}
    sent = dict(models.iterate_hf_tensors(params, policy.config, "float32"))
    assert list(sums) == [spec.name for spec in sent]
    for spec, array in sent.items():
        held = sums[spec.name]
        assert held.dtype == ("float32" if spec.name.endswith("norm.weight") else dtype)
        bits = array.astype(held.dtype).ravel().view(f"u{2 if held.dtype == 'bfloat16' else 4}")
        places = np.arange(bits.size, dtype=np.uint64)
        expected = np.sum(bits.astype(np.uint64) * (2 * places + 1)) % 2**32
        assert held.checksum == expected, spec.name
        np.testing.assert_allclose(held.norm, np.linalg.norm(array), rtol=1e-2)


def make_call(policy, params, requests, sampling, **options):
    call = GenerateCall(tuple(requests), sampling, HiddenStateParams(), VERSION)
    options = {"max_batch": 64, "chunk": 4} | options
    return decoding.DecodingCall(policy, jax.device_put(params), call, **options)


def finished(call):
    """All rollouts of a call, by sample id."""
    rollouts = {}
    while not call.done:
        rollouts |= {rollout.sample_id: rollout for rollout in call.step()}
    return rollouts


def test_log_probabilities_of_a_long_prompt_need_no_logits_of_all_its_tokens(policy, params):
    def intermediates(jaxpr):
        for equation in jaxpr.eqns:
            yield from (math.prod(out.aval.shape) for out in equation.outvars)
            for inner in jaxprs_in_params(equation.params):
                yield from intermediates(inner)

    def traced(policy, params, num_columns):
        inputs = ((2, num_columns, 1, CONFIG.hidden_size), "f4"), ((2, num_columns), "i4")
        shapes = [jax.ShapeDtypeStruct(*each) for each in inputs]
        return decoding.prompt_logprobs.trace(params, *shapes, policy=policy)

    wide = models.Policy(dataclasses.replace(CONFIG, vocab_size=256_000))
    jaxpr = traced(wide, jax.eval_shape(wide.init, jax.random.key(0)), 32_768).jaxpr
    assert max(intermediates(jaxpr.jaxpr)) < 256_000 * 256  # not times 32,768
    random = np.random.default_rng(0)
    states = random.normal(size=(2, 9, 1, CONFIG.hidden_size)).astype(np.float32)
    ids = random.integers(0, 31, (2, 9)).astype(np.int32)
    found = decoding.prompt_logprobs(params, states, ids, policy=policy)
    logits = np.stack([policy.logits(params, jnp.asarray(row)) for row in states[:, :-1, 0]])
    logprobs = scipy.special.log_softmax(logits, axis=-1)
    expected = np.take_along_axis(logprobs, ids[:, 1:, None], axis=-1)[..., 0]
    np.testing.assert_allclose(found[:, 1:], expected, atol=1e-5)
    assert not found[:, 0].any()


def test_a_long_response_holds_no_states_of_others(policy, params):
    """The states of 64 responses of 32,768 tokens and width 3584 take 15 GB on the host."""
    states = HiddenStateParams((-1,), "float32")
    call = GenerateCall(tuple(make_requests()), SamplingParams(8), states, VERSION)
    call = decoding.DecodingCall(policy, jax.device_put(params), call, max_batch=64, chunk=4)
    call.step()
    for response in filter(None, call._running):
        (piece,) = response.pieces
        assert piece[4].shape == (4, 1, CONFIG.hidden_size) and piece[4].base is None


def test_a_prefill_has_few_tokens_and_all_slots_are_filled(policy, params, monkeypatch):
    """The features of 64 prompts of 32,768 tokens at once would take 79 GB each with 7B."""
    shapes, real = [], decoding.prefill_and_insert

    def spy(params, slots, token_ids, *arguments, **options):
        shapes.append(token_ids.shape)
        return real(params, slots, token_ids, *arguments, **options)

    monkeypatch.setattr(decoding, "prefill_and_insert", spy)
    num_active = spied_chunks(monkeypatch, lambda slots: int(slots.active.sum()))
    sampling = SamplingParams(8, temperature=1.0)

    def sample():
        call = make_call(policy, params, make_requests(12, 1), sampling, max_batch=8)
        return finished(call)

    expected, whole = sample(), list(num_active)
    assert max(shapes) == (8, 16)
    shapes.clear(), num_active.clear()
    monkeypatch.setattr(decoding, "MAX_PREFILL_TOKENS", 2 * 16 + 5)
    monkeypatch.setattr(type(policy), "tokens_per_read", 200)  # as on an accelerator
    found = sample()
    assert set(shapes) == {(2, 16)} and len(shapes) == 6
    assert num_active == whole
    assert_same_samples(found, expected)


@pytest.mark.slow
def test_finished_responses_stop_costing(policy, params, monkeypatch):
    """The decode batch shrinks with the running responses, which changes no token."""
    batches = spied_chunks(monkeypatch, lambda slots: slots.active.shape[0])
    sampling = SamplingParams(64, temperature=1.0, eos_token_ids=(EOS,), stop_token_ids=(STOP,))

    def sample():
        batches.clear()
        return finished(make_call(policy, params, make_requests(8, 4), sampling))

    found = sample()
    assert batches[0] == 32 and batches[-1] == 4
    assert batches == sorted(batches, reverse=True)
    lengths = [len(r.response_ids) for r in found.values()]
    for chunk, batch in enumerate(batches):
        num_running = sum(length > 4 * chunk for length in lengths)
        # The batch is halved as soon as that leaves room, above the least batch.
        assert num_running <= batch < max(2 * num_running + 2, 5)
    assert 4 * len(batches) < max(lengths) + 4  # no step after the last response
    monkeypatch.setattr(decoding, "MIN_BATCH", 32)
    expected = sample()
    assert set(batches) == {32}
    assert_same_samples(found, expected)


@pytest.mark.slow
def test_an_accelerator_compiles_few_sizes(policy, params, monkeypatch):
    """Where reading the weights takes the time of a step, fewer slots would save none of it."""
    shapes = {"prefill_and_insert": [], "decode_chunk": []}

    def spy(name):
        real = getattr(decoding, name)

        def called(params, slots, *arguments, **options):
            shapes[name].append(arguments[0].shape or slots.active.shape)
            return real(params, slots, *arguments, **options)

        monkeypatch.setattr(decoding, name, called)

    for name in shapes:
        spy(name)
    sampling = SamplingParams(64, temperature=1.0, eos_token_ids=(EOS,), stop_token_ids=(STOP,))

    def sample():
        for found in shapes.values():
            found.clear()
        call = make_call(policy, params, make_requests(41, 1), sampling, max_batch=32)
        return finished(call), {name: set(found) for name, found in shapes.items()}

    expected, on_cpu = sample()
    monkeypatch.setattr(type(policy), "tokens_per_read", 200)
    found, sizes = sample()
    assert len(on_cpu["decode_chunk"]) > 2 and sizes["decode_chunk"] == {(32,)}
    assert {rows for rows, _ in sizes["prefill_and_insert"]} <= {8, 16, 32}
    assert min(rows for rows, _ in on_cpu["prefill_and_insert"]) < 8
    for name, rollout in expected.items():
        np.testing.assert_array_equal(found[name].response_ids, rollout.response_ids)


@pytest.mark.slow
def test_a_prompt_is_kept_once_for_its_responses(policy, params, monkeypatch):
    """8, 8, 7 and 3 responses to 4 prompts share 4 caches of prompts; alone each has its own."""
    shapes = spied_chunks(
        monkeypatch, lambda slots: (len(slots.prompts.positions), len(slots.active))
    )
    requests = make_requests(4, 8, shortest=5)
    requests = requests[:23] + requests[24:27]
    sampling = SamplingParams(64, eos_token_ids=(EOS,), stop_token_ids=(STOP,))

    def sample():
        shapes.clear()
        return finished(make_call(policy, params, requests, sampling))

    shared = sample()
    assert shapes[0] == (4, 32)
    # Later rows have fewer slots, and prompts with many running responses have several rows.
    assert len({slots // rows for rows, slots in shapes}) > 1
    one_each = decoding.DecodingCall._cheapest
    monkeypatch.setattr(
        decoding.DecodingCall, "_cheapest", lambda self, found, group: one_each(self, found, 1)
    )
    alone = sample()
    assert all(rows == slots for rows, slots in shapes)
    assert len(shared) == len(alone) == len(requests)
    assert_same_samples(shared, alone)


def test_no_response_waits_in_the_larger_parts(policy):
    """128 responses and slots on 3 cores; parts in which responses wait do not share prompts."""
    engine = JaxEngine(policy, max_batch=128)
    engine._params, engine._parallel = {}, 3
    requests = tuple(make_requests(16, 8))
    call = GenerateCall(requests, SamplingParams(64), HiddenStateParams(), VERSION)
    calls = engine._start(call)
    engine.close()
    assert [call.num_slots for call in calls] == [42, 43, 43]
    assert [call._arrangement for call in calls] == [(6, 8)] * 3


@pytest.mark.slow
def test_no_new_program_inside_a_bucket(policy, params, monkeypatch):
    """Other prompts of 9 to 13 tokens (one bucket) and other keys."""
    monkeypatch.setattr(decoding, "MIN_BATCH", 8)  # for any number of running responses

    def run(seed, limit):
        requests = make_requests(2, 4, seed, shortest=9)
        finished(make_call(policy, params, requests, SamplingParams(limit, eos_token_ids=(EOS,))))

    def num_programs():
        return decoding.decode_chunk._cache_size(), decoding.prefill_and_insert._cache_size()

    decoding.decode_chunk.clear_cache()  # other tests have wider programs
    decoding.prefill_and_insert.clear_cache()
    run(0, 80)
    before = num_programs()
    for seed in range(1, 4):
        run(seed, 80)
    assert num_programs() == before
    run(1, 200)  # a wider cache is another bucket
    assert num_programs() != before


@pytest.mark.slow
def test_sampling_settings_compile_no_new_programs(policy, params):
    """All truncating settings with up to eight end tokens share a program."""
    before = decoding.decode_chunk._cache_size()
    for settings in [
        (4, 1.0, 0.9), (3, 0.7, 0.2, 5), (2, 2.5, 1.0, 2, (1, 3)), (4, 1.0, 0.5, 0, (1,), (2, 3)),
    ]:  # fmt: skip
        call = make_call(policy, params, make_requests(2, 4, shortest=9), SamplingParams(*settings))
        call._response_columns = 64
        call._columns_for = lambda num_tokens: 64
        call.step()
    assert decoding.decode_chunk._cache_size() == before + 1


def test_programs_are_dropped_beyond_a_bound(policy, params, monkeypatch):
    """Each token limit below 64 gives a cache of another width, and so another program."""

    def allocate(*, policy, rows, group, num_prompt_columns, columns, counted):
        return jnp.zeros((rows * group, columns))

    def prefill(call):
        raise StopAsyncIteration

    monkeypatch.setattr(decoding.DecodingCall, "_prefill", prefill)
    names = "policy", "rows", "group", "num_prompt_columns", "columns", "counted"
    monkeypatch.setattr(decoding, "MAX_PROGRAMS", 3)
    monkeypatch.setattr(decoding, "empty_slots", jax.jit(allocate, static_argnames=names))
    monkeypatch.setattr(decoding, "_JITTED", (decoding.empty_slots,))
    client = jax.devices()[0].client
    num_loaded = len(client.live_executables())
    sizes = []
    for limit in range(1, 9):
        with pytest.raises(StopAsyncIteration):
            make_call(policy, params, make_requests(1, 1), SamplingParams(limit)).step()
        sizes.append(decoding.empty_slots._cache_size())
    assert sizes == [1, 2, 3, 4, 1, 2, 3, 4]
    assert len(client.live_executables()) <= num_loaded + 4


@pytest.mark.slow
def test_long_responses_widen_the_cache(policy, params):
    """Past 128 response columns the cache grows; log-probabilities still equal the full pass."""
    with synced_client(policy, params, chunk=16) as (client, version):
        rollouts = list(client.generate(make_requests(2, 2), SamplingParams(150), version=version))
    assert {len(r.response_ids) for r in rollouts} == {150}
    assert_raw_logprobs(policy, params, rollouts)


@pytest.mark.slow
def test_a_ring_that_wraps_grows_and_shrinks_changes_no_token(policy, params, monkeypatch):
    """20 ragged responses in 8 slots: rings of 16 to 48 columns compared with one ring for all."""
    sampling = SamplingParams(48, temperature=0.8, eos_token_ids=(EOS,))

    def sample(first_columns):
        monkeypatch.setattr(decoding, "FIRST_RESPONSE_COLUMNS", first_columns)
        call = make_call(policy, params, make_requests(), sampling, max_batch=8, chunk=8)
        rollouts, rings = {}, []
        while not call.done:
            before = call._next_column
            rollouts |= {rollout.sample_id: rollout for rollout in call.step()}
            rings.append((call._response_columns, call._next_column < before))
        return rollouts, rings

    (expected, one), (found, several) = sample(64), sample(16)
    assert {columns for columns, _ in one} == {48} and any(wrapped for _, wrapped in one)
    changes = np.diff([columns for columns, _ in several])
    assert (changes > 0).any() and (changes < 0).any()
    assert_same_samples(found, expected)


@pytest.mark.slow
def test_parts_of_a_call_give_the_tokens_of_the_whole(policy, params):
    sampling = SamplingParams(40, eos_token_ids=(EOS,))
    states = HiddenStateParams((-1,), "float32")
    engine = JaxEngine(policy)
    buffers = engine.begin_weight_update(models.tensor_specs(CONFIG, "float32"))
    for spec, array in models.iterate_hf_tensors(params, CONFIG, "float32"):
        buffers[spec.name][:] = array.reshape(-1).view(np.uint8)
    asyncio.run(engine.commit_weight_update(VERSION))

    async def sample():
        call = GenerateCall(tuple(make_requests(10, 4)), sampling, states, VERSION)
        return [rollout async for rollout in engine.generate(call)]

    def sampled_in(num_parts):
        engine._parallel = num_parts
        engine._parts = concurrent.futures.ThreadPoolExecutor(num_parts)
        return asyncio.run(sample())

    whole, parts, again = (sampled_in(count) for count in (1, 2, 2))
    engine.close()
    assert [r.sample_id for r in parts] == [r.sample_id for r in again]  # for any timing
    assert as_bytes(parts) == as_bytes(again)
    parts = {rollout.sample_id: rollout for rollout in parts}
    assert len(parts) == len(whole) == 40
    for rollout in whole:
        found = parts[rollout.sample_id]
        np.testing.assert_array_equal(found.response_ids, rollout.response_ids)
        # Products of other numbers of rows, some with the kernel on the left: sums in another
        # order, 3.4e-5 apart.
        for field in ("rollout_logprobs", "hidden_states"):
            np.testing.assert_allclose(
                getattr(found, field), getattr(rollout, field), rtol=1e-4, atol=5e-5
            )


@pytest.mark.slow
def test_responses_that_wait_begin_in_a_part_of_their_own(policy, params, monkeypatch):
    """Its cache has the columns that its own responses need; the tokens are those of one part."""
    monkeypatch.setattr("semrl_jax.rollout.engines.jax.MIN_PART", 4)
    engine = JaxEngine(policy, max_batch=16, chunk=4)
    engine._params = models.unstacked(jax.device_put(params), policy.config)
    shapes = spied_chunks(monkeypatch, lambda slots: slots.cache.positions.shape)
    monkeypatch.setattr(decoding, "FIRST_RESPONSE_COLUMNS", 8)
    call = GenerateCall(
        tuple(make_requests(10, 4)),
        SamplingParams(40, eos_token_ids=(EOS,), stop_token_ids=(STOP,)),
        HiddenStateParams((-1,), "float32"),
        VERSION,
    )

    async def sample():
        return [rollout async for rollout in engine.generate(call)]

    def sampled_in(num_cores):
        engine._parallel, engine._in_parts = num_cores, num_cores > 0
        engine._parts = concurrent.futures.ThreadPoolExecutor(max(num_cores, 1))
        shapes.clear()
        return asyncio.run(sample())

    refilled = sampled_in(0)
    assert max(rows for rows, _ in shapes) == 16
    one, two, again = (sampled_in(count) for count in (1, 2, 2))
    assert max(rows for rows, _ in shapes) == 8
    assert [columns for _, columns in shapes].count(8) >= 5  # each of the 5 parts begins so
    engine.close()
    assert [r.sample_id for r in two] == [r.sample_id for r in again]  # for any timing
    assert as_bytes(one) == as_bytes(two) == as_bytes(again)
    assert len(two) == 40
    assert {r.sample_id: r.response_ids.tolist() for r in two} == {
        r.sample_id: r.response_ids.tolist() for r in refilled
    }


@pytest.mark.slow
def test_windowed_model_samples_as_its_full_pass():
    """Window 8, prompts of 1 to 13 tokens and 40 sampled ones; slots are refilled and regrouped."""
    config = models.DecoderConfig(
        vocab_size=31, hidden_size=64, intermediate_size=96, num_layers=2, num_heads=2,
        num_kv_heads=1, head_dim=32, model_type="qwen3", sliding_window=8,
        full_attention_layers=(0,), rope_scaling=models.RopeScaling("llama3", 4.0, 1.0, 4.0, 16),
    )  # fmt: skip
    policy = models.Policy(config)
    params = jax.tree.map(lambda leaf: leaf * 1.5, policy.init(jax.random.key(3)))
    sampling = SamplingParams(40, eos_token_ids=(EOS,))
    with synced_client(policy, params, max_batch=8, chunk=7) as (client, version):
        rollouts = list(client.generate(make_requests(), sampling, version=version))
    assert max(len(r.response_ids) for r in rollouts) == 40
    assert len({len(r.response_ids) for r in rollouts}) > 3
    assert_raw_logprobs(policy, params, rollouts)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen3_moe", "gemma3_text"])
def test_families_with_options_of_their_own_sample_as_their_full_pass(family):
    """Weights come over the wire, expert by expert. A window of 32, 40 sampled tokens."""
    config = models.random_config(
        family, vocab_size=31, hidden_size=32, intermediate_size=48, num_layers=3, num_heads=2,
        num_kv_heads=1, head_dim=16, tie_embeddings=family == "gemma3_text",
    )  # fmt: skip
    if config.experts:
        config = dataclasses.replace(
            config, experts=dataclasses.replace(config.experts, dense_layers=(1,))
        )
    policy = models.Policy(config)
    params = jax.tree.map(lambda leaf: leaf * 1.5, policy.init(jax.random.key(3)))
    with synced_client(policy, params, max_batch=8, chunk=20) as (client, version):
        rollouts = list(client.generate(make_requests(5, 1), SamplingParams(40), version=version))
    assert max(len(r.response_ids) for r in rollouts) == 40
    assert_raw_logprobs(policy, params, rollouts)


@pytest.mark.slow
def test_abort_returns_what_was_sampled(policy, params):
    call = make_call(policy, params, make_requests(20, 1), SamplingParams(50), max_batch=8)
    call.step()
    rollouts = call.abort()
    assert call.done
    assert len(rollouts) == 20 and {r.finish_reason for r in rollouts} == {"aborted"}
    assert sorted(len(r.response_ids) for r in rollouts) == [0] * 12 + [4] * 8
    assert_raw_logprobs(policy, params, [r for r in rollouts if len(r.response_ids)])


@pytest.mark.slow
def test_abort_over_the_wire_ends_running_and_waiting_calls(policy, params):
    """Both calls ask for 4000 tokens; the second waits for the engine behind the first."""
    call = make_requests(2, 2), SamplingParams(4000)
    with (
        synced_client(policy, params, chunk=4, max_response_tokens=4000) as (client, version),
        Caller(client.replica.address, client.replica.token) as caller,
    ):
        with concurrent.futures.ThreadPoolExecutor(2) as threads:
            calls = [
                threads.submit(lambda: list(caller.generate(*call, version=version)))
                for _ in range(2)
            ]
            time.sleep(1.0)  # both have reached the replica
            caller.abort()
            rollouts = [rollout for call in calls for rollout in call.result(timeout=60)]
    assert len(rollouts) == 8 and {r.finish_reason for r in rollouts} == {"aborted"}
    assert max(len(r.response_ids) for r in rollouts) < 4000


@pytest.mark.slow
def test_closing_the_stream_ends_the_work(policy, params, monkeypatch):
    """400 responses, 8 at a time, take 50 steps; it is closed after the first few."""
    step, num_steps = decoding.DecodingCall.step, 0

    def counted(call):
        nonlocal num_steps
        num_steps += 1
        return step(call)

    monkeypatch.setattr(decoding.DecodingCall, "step", counted)
    sampling = SamplingParams(4)
    with synced_client(policy, params, max_batch=8, chunk=4) as (client, version):
        with contextlib.closing(
            client.generate(make_requests(100, 4), sampling, version=version)
        ) as stream:
            next(stream)
        assert len(list(client.generate(make_requests(2, 2), sampling, version=version))) == 4
    assert num_steps < 25


@pytest.mark.slow
def test_half_an_update_leaves_the_old_weights(policy, params):
    engine = JaxEngine(policy)
    arrays = {
        spec.name: array for spec, array in models.iterate_hf_tensors(params, CONFIG, "float32")
    }

    def stage(value):
        buffers = engine.begin_weight_update(models.tensor_specs(CONFIG, "float32"))
        for name, array in arrays.items():
            buffers[name][:] = (array * value).reshape(-1).view(np.uint8)
            engine.load_tensors([name])

    async def sample():
        requests = tuple(make_requests(2, 2))
        call = GenerateCall(requests, SamplingParams(8), HiddenStateParams(), VERSION)
        return as_bytes([rollout async for rollout in engine.generate(call)])

    stage(1.0)
    asyncio.run(engine.commit_weight_update(VERSION))
    before = asyncio.run(sample())
    stage(2.0)
    engine.abort_weight_update()
    assert asyncio.run(sample()) == before
    stage(2.0)
    asyncio.run(engine.commit_weight_update(VERSION))
    assert asyncio.run(sample()) != before
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("groups_per_call", [1, pytest.param(2, marks=pytest.mark.soak)])
def test_responses_do_not_depend_on_the_replicas_or_their_failures(groups_per_call):
    """To the bit: with calls of whole groups, and of whole calls again after a failure.

    With this width, calls of fewer than 12 responses are rounded differently from larger ones.
    """
    policy = models.Policy(dataclasses.replace(CONFIG, hidden_size=256, intermediate_size=512))
    params = jax.tree.map(lambda leaf: leaf * 1.5, policy.init(jax.random.key(3)))
    requests = make_requests(num_groups=6, group_size=24, seed=1)
    sampling = SamplingParams(24, eos_token_ids=(EOS,), stop_token_ids=(STOP,))
    states = HiddenStateParams((-1,), "float32")
    found, num_failures = [], 0
    for count, killed in ((1, None), (2, None), (3, None), (2, 0), (2, 1), (3, 1)):
        with synced_replicas(policy, params, count, chunk=2) as (replicas, client, version):
            ids = [Caller(r.address, "a-token").describe().replica_id for r in replicas]
            rollouts = []
            for rollout in client.generate(
                requests, sampling, states, version=version, groups_per_call=groups_per_call
            ):
                rollouts.append(rollout)
                num_sent = sum(r.replica_id == ids[killed or 0] for r in rollouts)
                if killed is not None and num_sent == 12 * groups_per_call:
                    replicas[killed].close(0.0)
                    killed = None
            assert len(rollouts) == len(requests)
            num_failures += client.counters["replica_failures"]
            found.append(as_bytes(rollouts))
    assert (
        num_failures > 0
    )  # in some cases, all responses had been sent when the replica was closed
    for actual in found[1:]:
        assert actual == found[0]
