"""Records are the same after the wire, bit for bit; inconsistent messages are refused."""

import dataclasses

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from semrl_jax.metrics import Measurement, MetricKey
from semrl_jax.metrics.names import METHODS, ORDERS, WINDOWS
from semrl_jax.metrics.names import METRICS as KINDS
from semrl_jax.rollout.wire import codec
from semrl_jax.rollout.wire.bounds import request_readers
from semrl_jax.rollout.wire.codec import GenerateCall, RolloutDecoder
from semrl_jax.rollout.wire.proto import rollout_pb2 as pb
from semrl_jax.types import (
    FINISH_REASONS,
    MAX_STOP_CHARACTERS,
    MAX_STOP_STRINGS,
    HiddenStateParams,
    MetricParams,
    Rollout,
    SampleRequest,
    SamplingParams,
    TensorSpec,
    VersionSpan,
    WeightVersion,
)
from tests.cases import raised
from tests.rollout.fake_engine import FakeEngine

VERSION = WeightVersion("run", "attempt", 3, "ab" * 32)
LIMITS = FakeEngine(max_prompts=4, max_prompt_tokens=8, max_response_tokens=32).describe()
SPECS = (TensorSpec("a", (2, 3), "float32"), TensorSpec("b", (4,), "bfloat16"))

names = st.text(st.characters(codec="utf-8", exclude_categories=("Cs",)), min_size=1, max_size=20)
float32s = st.floats(width=32, allow_nan=False, allow_infinity=False)
keys = st.builds(
    MetricKey, st.sampled_from(KINDS), st.sampled_from(list(ORDERS)), st.integers(-1, 99)
)
measurements = st.builds(Measurement, float32s, st.booleans())


def wire(message):
    """Serialises and parses the message, as gRPC does."""
    if isinstance(message, bytes):  # a chunk, of a reply to Generate
        return pb.GenerateResponse.FromString(message)
    return type(message).FromString(message.SerializeToString())


def make_call(max_tokens=8, states=None, num_samples=1):
    request = SampleRequest("s", 5, 0, np.array([1, 2], np.int32), 7)
    requests = [dataclasses.replace(request, sample_id=f"s{i}") for i in range(num_samples)]
    return GenerateCall(
        tuple(requests), SamplingParams(max_tokens), states or HiddenStateParams(), VERSION
    )


def make_rollout(num_tokens=3, states=None, **changes):
    rollout = Rollout(
        sample_id="s0",
        group_id=5,
        sample_index=0,
        prompt_ids=np.array([1, 2], np.int32),
        response_ids=np.arange(num_tokens, dtype=np.int32),
        rollout_logprobs=np.full(num_tokens, -0.5, np.float32),
        rollout_raw_logprobs=None,
        finish_reason="length",
        versions=(VersionSpan(VERSION, 0, num_tokens),),
        hidden_states=states,
        layers=() if states is None else tuple(range(states.shape[1])),
    )
    return dataclasses.replace(rollout, **changes)


def decode(call, rollout, change=None, drop=(), routed=()):
    """Encodes, applies `change` to each message, and decodes all but the dropped ones."""
    decoder = RolloutDecoder(call, vocab_size=101, routed_experts=routed)
    done = []
    for i, message in enumerate(codec.encode_rollout(rollout)):
        message = wire(message)
        if change:
            change(message)
        if i not in drop and (decoded := decoder.feed(message)) is not None:
            done.append(decoded)
    decoder.finish()
    return done


def assert_same(actual, expected):
    for field in dataclasses.fields(expected):
        a, b = getattr(actual, field.name), getattr(expected, field.name)
        if isinstance(b, np.ndarray):
            assert a.dtype == b.dtype and a.shape == b.shape, field.name
            assert a.tobytes() == b.tobytes(), field.name
        else:
            assert a == b, field.name


@given(
    num_tokens=st.integers(1, 40),
    num_layers=st.integers(0, 3),
    width=st.integers(1, 9),
    dtype=st.sampled_from(["bfloat16", "float32"]),
    seed=st.integers(0, 2**32 - 1),
    raw=st.booleans(),
    sample_id=names,
    reason=st.sampled_from(FINISH_REASONS),
    metrics=st.dictionaries(keys, measurements, max_size=3),
    kinds=st.sampled_from([("decode",), ("prefill",), ("decode", "prefill")]),
    context=st.booleans(),
)
def test_rollout_round_trip(
    num_tokens, num_layers, width, dtype, seed, raw, sample_id, reason, metrics, kinds, context
):
    rng = np.random.default_rng(seed)

    def states(kind, count):
        if num_layers == 0 or kind not in kinds:
            return None
        bits = rng.integers(0, 256, (count, num_layers, width * 4), np.uint8)
        return bits.view(codec.STATE_DTYPES[dtype])  # any bits at all, NaN included

    layers = tuple(range(num_layers))
    request = SampleRequest(sample_id, seed, 3, np.array([4, 5], np.int32), 2**64 - 1)
    sampling = SamplingParams(max_tokens=40)
    call = GenerateCall((request,), sampling, HiddenStateParams(layers, dtype, kinds), VERSION)
    mask = rng.random(num_tokens) < (0.5 if context else 1)
    mask[rng.integers(num_tokens)] = True
    logprobs = np.where(mask, -rng.random(num_tokens, np.float32), np.float32(0))
    rollout = make_rollout(
        num_tokens,
        sample_id=sample_id,
        group_id=seed,
        sample_index=3,
        prompt_ids=request.prompt_ids,
        response_ids=rng.integers(0, 101, num_tokens).astype(np.int32),
        rollout_logprobs=logprobs,
        rollout_raw_logprobs=logprobs * 2 if raw else None,
        response_mask=mask,
        finish_reason=reason,
        metrics=metrics,
        layers=layers,
        hidden_states=states("decode", num_tokens),
        prompt_states=states("prefill", 2),
        generate_s=1.5,
    )
    (decoded,) = decode(call, rollout)
    assert_same(decoded, rollout)


@given(
    lengths=st.lists(st.integers(1, 8), min_size=1, max_size=4),
    temperature=st.floats(0, 100, width=32),
    top_p=st.floats(0, 1, width=32, exclude_min=True),
    top_k=st.integers(0, 101),
    min_p=st.floats(0, 1, width=32),
    presence=st.floats(-2, 2, width=32),
    repetition=st.floats(0.0078125, 1000, width=32),
    min_tokens=st.integers(0, 8),
    seed=st.integers(0, 2**64 - 1),
    group_id=st.integers(-(2**63), 2**63 - 1),
    layers=st.lists(st.sampled_from(LIMITS.layers), unique=True),
    kinds=st.permutations(["decode", "prefill"]),
    step=st.integers(0, 2**63 - 1),
)
def test_request_round_trip(
    lengths, temperature, top_p, top_k, min_p, presence, repetition, min_tokens, seed, group_id,
    layers, kinds, step,
):  # fmt: skip
    version = dataclasses.replace(VERSION, step=step)
    sampling = SamplingParams(
        8, temperature, top_p, top_k, (100,), (0, 7), min_p=min_p, min_tokens=min_tokens,
        presence_penalty=presence, frequency_penalty=-presence, repetition_penalty=repetition,
    )  # fmt: skip
    kinds = tuple(kinds[: 1 + seed % 2])
    states = HiddenStateParams(tuple(layers), "float32", kinds) if layers else HiddenStateParams()
    requests = [
        SampleRequest(str(i), group_id, i, np.arange(length, dtype=np.int32), seed)
        for i, length in enumerate(lengths)
    ]
    message = codec.encode_request(GenerateCall(tuple(requests), sampling, states, version))
    assert len(message.prompts) == len(set(lengths))  # a shared prompt is sent once
    call = request_readers(LIMITS, ())["Generate"].read(message.SerializeToString())
    assert (call.sampling, call.hidden_states, call.version) == (sampling, states, version)
    for actual, expected in zip(call.requests, requests, strict=True):
        assert_same(actual, expected)


@pytest.mark.parametrize("version", [None, VERSION])
@pytest.mark.parametrize("experts", [(), (2, 4, 60)])
def test_description_round_trip(version, experts):
    fields = {"protocol_major": 1, "version": version, "routed_experts": experts}
    description = dataclasses.replace(LIMITS, **fields)
    assert codec.decode_description(wire(codec.encode_description(description))) == description


@pytest.mark.parametrize("experts", [(2,), (2, 4), (2, 4, 60, 1), (0, 4, 60), (2, 4, -60)])
def test_numbers_of_experts_are_three_and_positive(experts):
    description = dataclasses.replace(LIMITS, protocol_major=1, routed_experts=experts)
    with pytest.raises(ValueError, match=r"routed_experts=\[.*\] must be three numbers above 0"):
        codec.decode_description(wire(codec.encode_description(description)))


def test_specs_round_trip_in_the_senders_order():
    sent = (SPECS[1], dataclasses.replace(SPECS[0], dtype="bfloat16"))
    assert codec.decode_specs(codec.encode_specs(sent), SPECS) == sent


@pytest.mark.parametrize("with_prompt", [False, True])
@pytest.mark.parametrize("num_tokens", [1, 300, 585])  # 585 x 3584 bfloat16 is 4 chunks
def test_large_states_travel_in_chunks(num_tokens, with_prompt):
    rng = np.random.default_rng(0)

    def states(count):
        return rng.integers(0, 2**16, (count, 1, 3584), np.uint16).view(ml_dtypes.bfloat16)

    prompt_ids = np.arange(200, dtype=np.int32) % 101
    arrays = [states(num_tokens), states(200) if with_prompt else None]  # these are 2 chunks
    rollout = make_rollout(
        num_tokens,
        arrays[0],
        response_ids=np.zeros(num_tokens, np.int32),
        prompt_ids=prompt_ids,
        prompt_states=arrays[1],
    )
    messages = [wire(message) for message in codec.encode_rollout(rollout)]
    sizes = [x.nbytes for x in arrays if x is not None and len(x) > 1]
    assert len(messages) == 1 + sum(-(-size // codec.CHUNK_BYTES) for size in sizes)
    assert max(len(m.state_chunk.data) for m in messages) <= codec.CHUNK_BYTES
    call = make_call(1000, HiddenStateParams((0,), kinds=("prefill", "decode")[not with_prompt :]))
    requests = [dataclasses.replace(r, prompt_ids=prompt_ids) for r in call.requests]
    (decoded,) = decode(call._replace(requests=tuple(requests)), rollout)
    assert_same(decoded, rollout)


def test_states_of_an_aborted_response_may_be_empty():
    rollout = make_rollout(
        0, np.zeros((0, 1, 4), ml_dtypes.bfloat16), finish_reason="aborted", versions=()
    )
    (decoded,) = decode(make_call(8, HiddenStateParams((0,))), rollout)
    assert decoded.hidden_states.shape == (0, 1, 4)
    # It may have been aborted in the middle of its prompt.
    rollout = dataclasses.replace(rollout, prompt_states=rollout.hidden_states)
    states = HiddenStateParams((0,), kinds=("decode", "prefill"))
    (decoded,) = decode(make_call(8, states), rollout)
    assert decoded.prompt_states.shape == (0, 1, 4)


def set_field(path, value):
    """A change of the message's response: 'a.b' is set, or extended where it is repeated."""
    *parents, name = path.split(".")

    def change(message):
        for parent in ["response", *parents]:
            message = getattr(message, parent)
        if isinstance(value, list):
            del getattr(message, name)[:]
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)

    return change


STATES = np.zeros((3, 1, 4), ml_dtypes.bfloat16)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (set_field("sample_id", "other"), "not asked for"),
        (set_field("group_id", 6), "group 6"),
        (set_field("sample_index", 1), "index 1"),
        (set_field("finish_reason", "tired"), "tired"),
        (set_field("token_ids", []), "0 tokens; 1 to 8"),
        (set_field("token_ids", [1] * 9), "9 tokens; 1 to 8"),
        (set_field("token_ids", [1, 2, 101]), r"token id 101; ids must be in \[0, 101\)"),
        (set_field("token_ids", [1, 2, -1]), "token id -1"),
        (set_field("logprobs", b"\0" * 11), "11 bytes for 3 tokens"),
        (set_field("raw_logprobs", b"\0" * 8), "raw_logprobs has 8 bytes"),
        (set_field("logprobs", np.float32([0, np.nan, 0]).tobytes()), "not finite"),
        (set_field("raw_logprobs", np.float32([0, 0, -np.inf]).tobytes()), "not finite"),
        (set_field("response_mask", b"\1\1"), "2 bytes for 3 tokens of 1"),
        (set_field("response_mask", b"\1\2\1"), "response_mask has a byte 2; it must be 0 or 1"),
        (set_field("response_mask", b"\0\0\0"), "the policy sampled nothing"),
        (set_field("response_mask", b"\1\0\1"), "rollout_logprobs must be 0 where response_mask"),
        (set_field("versions", []), "cover 0 of 3"),
        (lambda m: setattr(m.response.versions[0], "end", 2), "cover 2 of 3"),
        (lambda m: setattr(m.response.versions[0], "start", 1), r"\[1, 3\)"),
        (lambda m: setattr(m.response.versions[0].version, "step", 4), "attempt/4.*attempt/3"),
        (lambda m: m.response.ClearField("hidden_states"), "hidden_states are missing"),
        (set_field("hidden_states.shape", [3, 4]), r"shape \[3, 4\]"),
        (set_field("hidden_states.shape", [2, 1, 4]), "for 3 tokens"),
        (set_field("hidden_states.shape", [3, 1, 5]), "24 bytes of states"),
        (set_field("hidden_states.shape", [3, 1, -4]), "shape"),
        (set_field("hidden_states.shape", [3, 1, 2**40]), "shape"),
        (set_field("hidden_states.dtype", "float32"), "float32 states"),
        (set_field("layers", [7]), r"layers \[7\]"),
        (lambda m: m.ClearField("response"), "neither"),
        (lambda m: m.state_chunk.SetInParent(), "out of turn"),
    ],
)
def test_inconsistent_response_is_refused(change, match):
    call = make_call(8, HiddenStateParams((0,)))
    assert decode(call, make_rollout(3, STATES))
    raised(ValueError, match, decode, call, make_rollout(3, STATES), change)


@pytest.mark.parametrize("num_tokens", [0, 3])
def test_entropies_come_if_they_are_asked_for_and_only_then(num_tokens):
    ended = {} if num_tokens else {"finish_reason": "aborted", "versions": ()}
    values = np.arange(num_tokens, dtype=np.float32) if num_tokens else None
    rollout, call = make_rollout(num_tokens, entropies=values, **ended), make_call()
    (decoded,) = decode(call._replace(entropies=True), rollout)
    assert_same(decoded, rollout)
    wire_call = wire(codec.encode_request(call._replace(entropies=True)))
    has = dataclasses.replace(LIMITS, logprob_kinds=("sampling", "entropy"))
    assert codec.decode_request(wire_call, has).entropies
    lacks = dataclasses.replace(LIMITS, logprob_kinds=("sampling",))
    raised(codec.NotOffered, "entrop", codec.decode_request, wire_call, lacks)
    if num_tokens:
        raised(ValueError, "only then", decode, call, rollout)
        silent = dataclasses.replace(rollout, entropies=None)
        raised(ValueError, "must come", decode, call._replace(entropies=True), silent)


@pytest.mark.parametrize("num_experts", [8, 255, 256])
@pytest.mark.parametrize("num_tokens", [0, 1, 700])  # the last in chunks
def test_experts_round_trip(num_experts, num_tokens):
    random, dtype = np.random.default_rng(0), np.uint8 if num_experts < 256 else np.uint16
    count = num_tokens + 1 if num_tokens else 0  # the prompt has two, and the last has none
    experts = random.integers(0, num_experts, (count, 40, 40)).astype(dtype)
    experts[::5, 3] = np.iinfo(dtype).max
    ended = {} if num_tokens else {"finish_reason": "aborted", "versions": ()}
    ids = np.zeros(num_tokens, np.int32)
    rollout = make_rollout(num_tokens, response_ids=ids, routed_experts=experts, **ended)
    call = make_call(700)._replace(routed_experts=True)
    (decoded,) = decode(call, rollout, routed=(40, 40, num_experts))
    assert_same(decoded, rollout)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda m: m.response.ClearField("routed_experts"), "routed_experts are missing"),
        (set_field("routed_experts.shape", [4, 2]), r"routed_experts of shape \[4, 2\]; uint8 of"),
        (set_field("routed_experts.shape", [5, 2, 2]), r"uint8 of \[4, 2, 2\] were asked for"),
        (set_field("routed_experts.shape", [4, 2, 2**40]), "were asked for"),
        (set_field("routed_experts.dtype", "uint16"), "uint16 routed_experts"),
        (set_field("routed_experts.data", bytes(15)), "15 bytes of experts"),
        (set_field("routed_experts.data", bytes([*15 * [0], 8])), "has 8; there are 8 experts"),
        (set_field("routed_experts.data", bytes([254, *15 * [255]])), "has 254; there are 8"),
    ],
)
def test_wrong_experts_are_refused(change, match):
    rollout = make_rollout(3, routed_experts=np.zeros((4, 2, 2), np.uint8))
    call = make_call()._replace(routed_experts=True)
    assert decode(call, rollout, routed=(2, 2, 8))
    raised(ValueError, match, decode, call, rollout, change, routed=(2, 2, 8))
    raised(ValueError, "routed_experts are sent", decode, make_call(), rollout, routed=(2, 2, 8))


def test_chunks_of_wrong_experts_are_refused():
    rollout = make_rollout(
        700, response_ids=np.zeros(700, np.int32), routed_experts=np.zeros((701, 40, 40), np.uint8)
    )

    def change(message):
        if message.WhichOneof("payload") == "state_chunk":
            message.state_chunk.data = bytes(len(message.state_chunk.data) - 1) + b"\x09"

    call = make_call(700)._replace(routed_experts=True)
    raised(ValueError, "there are 8", decode, call, rollout, change, routed=(40, 40, 8))


def test_states_not_asked_for_are_refused():
    raised(ValueError, "hidden_states are sent", decode, make_call(), make_rollout(3, STATES))
    both = make_call(8, HiddenStateParams((0,), kinds=("decode", "prefill")))
    with pytest.raises(ValueError, match=r"prompt_states are missing; .*'prefill'"):
        decode(both, make_rollout(3, STATES))
    prompt_states = STATES[:1]  # of two tokens
    with pytest.raises(ValueError, match=r"prompt_states of shape .* for 2 tokens"):
        decode(both, make_rollout(3, STATES, prompt_states=prompt_states))

    def narrower(message):
        array = message.response.prompt_states
        array.shape[-1], array.data = 2, array.data[:8]

    with pytest.raises(ValueError, match="not equally wide"):
        decode(both, make_rollout(3, STATES, prompt_states=STATES[:2]), narrower)


def test_chunks_that_do_not_fill_the_states_are_refused():
    states = np.zeros((600, 1, 3584), ml_dtypes.bfloat16)
    rollout = make_rollout(600, states, response_ids=np.zeros(600, np.int32))
    call = make_call(600, HiddenStateParams((0,)))

    def resize(size):
        def change(message):
            if message.WhichOneof("payload") == "state_chunk":
                message.state_chunk.data = bytes(size)

        return change

    raised(ValueError, "ended 106496 bytes before", decode, call, rollout, drop=(5,))
    with pytest.raises(ValueError, match="1048576 bytes, 106496 bytes before the end"):
        decode(call, rollout, resize(codec.CHUNK_BYTES))
    raised(ValueError, "a chunk of 0 bytes", decode, call, rollout, resize(0))
    raised(ValueError, "out of turn", decode, call, rollout, drop=(0,))


def test_tokens_of_other_weights_are_refused():
    later = dataclasses.replace(VERSION, step=VERSION.step + 1)
    spans = (VersionSpan(VERSION, 0, 2), VersionSpan(later, 2, 3))
    rollout = make_rollout(3, None, response_ids=np.zeros(3, np.int32), versions=spans)
    call = make_call(3, HiddenStateParams(()))
    (message,) = codec.encode_rollout(rollout)
    with pytest.raises(ValueError, match=r"was sampled with weights .*, not with"):
        RolloutDecoder(call, vocab_size=101).feed(message)


def test_response_inside_another_is_refused():
    states = np.zeros((600, 1, 3584), ml_dtypes.bfloat16)
    rollout = make_rollout(600, states, response_ids=np.zeros(600, np.int32))
    call = make_call(600, HiddenStateParams((0,)), num_samples=2)
    decoder = RolloutDecoder(call, vocab_size=101)
    assert decoder.feed(next(codec.encode_rollout(rollout))) is None
    with pytest.raises(ValueError, match="'s0' ended 4300800 bytes before"):
        decoder.feed(next(codec.encode_rollout(dataclasses.replace(rollout, sample_id="s1"))))


def change_request(change, **settings):
    message = codec.encode_request(make_call(states=HiddenStateParams((0,)), num_samples=2))
    change(message)
    return codec.decode_request(message, dataclasses.replace(LIMITS, **settings))


def sampling(field, value):
    """A change of a request."""
    return lambda message: setattr(message.sampling, field, value)


BAD_REQUESTS = [
    (lambda m: m.version.ClearField("run_id"), ValueError, "version.run_id"),
    (lambda m: m.ClearField("version"), ValueError, "version.run_id has 0 characters"),
    (lambda m: setattr(m.version, "digest", "x" * 300), ValueError, "digest has 300"),
    (lambda m: setattr(m.version, "step", -1), ValueError, "version.step=-1"),
    (lambda m: m.ClearField("samples"), ValueError, "samples is empty"),
    (lambda m: [m.samples.add() for _ in range(3)], codec.LimitExceeded, "5 samples.*4 a call"),
    (lambda m: [m.prompts.add() for _ in range(2)], ValueError, "3 prompts for 2 samples"),
    (lambda m: m.prompts[0].ClearField("token_ids"), ValueError, r"prompts\[0\] is empty"),
    (lambda m: m.prompts[0].token_ids.extend([1] * 7), codec.LimitExceeded, "9 tokens.*takes 8"),
    (lambda m: m.prompts[0].token_ids.append(101), ValueError, r"token id 101.*\[0, 101\)"),
    (lambda m: m.prompts[0].token_ids.append(-1), ValueError, "token id -1"),
    (lambda m: setattr(m.samples[1], "sample_id", "s0"), ValueError, "'s0' is not unique"),
    (lambda m: setattr(m.samples[1], "sample_id", ""), ValueError, r"samples\[1\].sample_id has 0"),
    (lambda m: setattr(m.samples[1], "prompt_index", 1), ValueError, r"=1 must be in \[0, 1\)"),
    (lambda m: setattr(m.samples[1], "prompt_index", -1), ValueError, "prompt_index=-1"),
    (lambda m: setattr(m.samples[1], "sample_index", -1), ValueError, "sample_index=-1"),
    (sampling("max_tokens", 0), ValueError, r"=0 must be in \[1, 32\]"),
    (sampling("max_tokens", 33), ValueError, "max_tokens=33"),
    (sampling("temperature", -1), ValueError, "temperature=-1"),
    (sampling("temperature", np.nan), ValueError, "temperature=nan"),
    (sampling("top_p", 0), ValueError, r"top_p=0.0 must be in \(0, 1\]"),
    (sampling("top_p", 1.5), ValueError, "top_p=1.5"),
    (sampling("top_p", np.nan), ValueError, "top_p=nan"),
    (sampling("top_k", -1), ValueError, "top_k=-1"),
    (sampling("top_k", 102), ValueError, "top_k=102"),
    (sampling("min_p", 1.5), ValueError, "min_p=1.5"),
    (sampling("min_p", float("nan")), ValueError, "min_p=nan"),
    (sampling("presence_penalty", 2.5), ValueError, r"presence_penalty=2.5 must be in \[-2, 2\]"),
    (sampling("frequency_penalty", np.nan), ValueError, "frequency_penalty=nan"),
    (
        sampling("repetition_penalty", -1),
        ValueError,
        r"repetition_penalty=-1.0 must be in \[0.001, 1000\]",
    ),
    (sampling("repetition_penalty", np.inf), ValueError, "penalty=inf"),
    (sampling("min_tokens", 17), ValueError, r"=17 must be in \[0, (8|16)\]"),
    (lambda m: m.sampling.eos_token_ids.append(101), ValueError, "eos_token_ids has token id 101"),
    (lambda m: m.sampling.stop_token_ids.append(-2), ValueError, "stop_token_ids has token id -2"),
    (
        lambda m: m.sampling.stop_token_ids.extend([1] * 2000),
        codec.LimitExceeded,
        "stop_token_ids has 2000 ids",
    ),
    (
        lambda m: m.hidden_states.layers.append(9),
        codec.NotOffered,
        r"has 9; the replica has \[-1, 0",
    ),
    (lambda m: m.hidden_states.layers.append(0), ValueError, "has an entry twice"),
    (lambda m: setattr(m.hidden_states, "dtype", "int4"), ValueError, "dtype='int4'"),
    (lambda m: m.hidden_states.ClearField("kinds"), ValueError, "hidden_states.kinds is empty"),
    (lambda m: m.hidden_states.kinds.append("later"), codec.NotOffered, "kinds has 'later'"),
    (lambda m: m.hidden_states.kinds.extend(["decode"] * 2), ValueError, "has an entry twice"),
]


def test_layer_that_the_engine_has_not_is_refused_with_its_reason():
    with pytest.raises(ValueError, match=r"has 9; the replica has \[.*\]: a reason\."):
        change_request(lambda m: m.hidden_states.layers.append(9), layers_reason="a reason")


def with_stop_strings(strings):
    """The stop strings of a request as a replica decodes them."""
    call = make_call()
    sampling = dataclasses.replace(call.sampling, stop_strings=tuple(strings))
    limits = dataclasses.replace(LIMITS, sampling_kinds=("stop_strings",))
    data = codec.encode_request(call._replace(sampling=sampling)).SerializeToString()
    return request_readers(limits, ())["Generate"].read(data).sampling.stop_strings


@given(
    strings=st.lists(
        st.text(
            st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"),
            min_size=1, max_size=MAX_STOP_CHARACTERS,
        ),
        unique=True, max_size=MAX_STOP_STRINGS,
    )
)  # fmt: skip
def test_stop_strings_round_trip(strings):
    assert with_stop_strings(strings) == tuple(strings)


def test_the_longest_stop_strings_are_taken():
    longest = [chr(0x1F600 + i) * MAX_STOP_CHARACTERS for i in range(MAX_STOP_STRINGS)]
    assert with_stop_strings(longest) == tuple(longest)


@pytest.mark.parametrize(
    ("strings", "match"),
    [
        (map(str, range(65)), "sampling.stop_strings has 65 texts; at most 64"),
        (map(str, range(5000)), "stop_strings has 5000 entries; at most 4096"),
        (["a", ""], "has '' of 0 characters; each has 1 to 128"),
        (["a" * 129], "of 129 characters; each has 1 to 128"),
        (["a\ufffd"], "contains U.FFFD"),
        (["a", "b", "a"], "has an entry twice"),
    ],
)
def test_bad_stop_strings_are_refused(strings, match):
    with pytest.raises(ValueError, match=match) as caught:
        with_stop_strings(strings)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


METRICS = MetricParams(("curvature", "effective_rank"), 40, "later", "svd", "float32", 3)


def change_metrics(change, metrics=METRICS, **states):
    states = HiddenStateParams(**states)
    call = make_call(states=states)
    message = codec.encode_request(call._replace(metrics=metrics))
    change(message.metrics)
    limits = dataclasses.replace(LIMITS, metric_kinds=("effective_rank", "curvature"))
    return codec.decode_request(wire(message), limits).metrics


@given(
    stride=st.integers(1, 2**31 - 1),
    window=st.sampled_from(WINDOWS),
    method=st.sampled_from(METHODS),
    dtype=st.sampled_from(["bfloat16", "float32"]),
    threads=st.integers(1, 1024),
)
def test_metric_options_round_trip(stride, window, method, dtype, threads):
    metrics = MetricParams(("curvature",), stride, window, method, dtype, threads)
    assert change_metrics(lambda m: None, metrics) == metrics
    assert change_metrics(lambda m: None, metrics, layers=(0, -1), dtype=dtype) == metrics


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda m: m.ClearField("names"), "metrics.names is empty"),
        (lambda m: m.names.append("luck"), "has 'luck'; the replica has"),
        (lambda m: m.names.append("curvature"), "has an entry twice"),
        (lambda m: setattr(m, "stride", 0), "metrics.stride=0 must be at least 1"),
        (lambda m: setattr(m, "window", "last"), "metrics.window='last' must be one of"),
        (lambda m: setattr(m, "method", ""), "metrics.method='' must be one of"),
        (lambda m: setattr(m, "dtype", "int8"), "metrics.dtype='int8' must be one of"),
        (lambda m: setattr(m, "num_threads", 0), "metrics.num_threads=0 must be at least 1"),
    ],
)
def test_bad_metric_options_are_refused(change, match):
    with pytest.raises(ValueError, match=match) as caught:
        change_metrics(change)
    assert "\n" not in str(caught.value)


def test_states_that_travel_are_those_that_are_measured():
    for states in ({"layers": (0,), "dtype": "float32"}, {"layers": (-1,), "dtype": "bfloat16"}):
        with pytest.raises(ValueError, match="metrics are of float32 states of layer -1"):
            change_metrics(lambda m: None, **states)


MEASURED = {
    MetricKey("curvature"): Measurement(1.0, True),
    MetricKey("effective_rank"): Measurement(0.0, False),
}


def test_measured_response_round_trip():
    call = make_call()._replace(metrics=METRICS)
    mean = np.array([0.5, -1e-30, np.inf], np.float32)
    more = {MetricKey("effective_rank", "velocity", 3): Measurement(0.5, True)}
    ranks = np.array([1.5, 0.0], np.float32)  # fewer than tokens
    rollout = make_rollout(metrics=more | MEASURED, mean_state=mean, effective_ranks=ranks)
    (decoded,) = decode(call, rollout)
    assert decoded.effective_ranks.tobytes() == ranks.tobytes()
    assert decoded.mean_state.tobytes() == mean.tobytes()
    assert decoded.metrics == rollout.metrics
    assert list(decoded.metrics) == list(MEASURED | more)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda m: m.response.metrics.pop("curvature"), "without 'curvature', a metric asked"),
        (lambda m: m.response.metrics.pop("effective_rank_valid"), "'effective_rank_valid'"),
        (set_field("effective_ranks", bytes(6)), "effective_ranks has 6 bytes"),
        (set_field("effective_ranks", bytes(400)), "effective_ranks has 400 bytes"),
        (set_field("mean_state", b""), "a mean state of 0 bytes"),
        (set_field("mean_state", bytes(7)), "a mean state of 7 bytes"),
        (set_field("mean_state", bytes(4 * codec.MAX_HIDDEN_WIDTH + 4)), "of 262148 bytes"),
    ],
)
def test_inconsistent_measurement_is_refused(change, match):
    call = make_call()._replace(metrics=METRICS)
    rollout = make_rollout(metrics=MEASURED, mean_state=np.zeros(4, np.float32))
    assert decode(call, rollout)
    raised(ValueError, match, decode, call, rollout, change)
    raised(ValueError, "nothing was to be measured", decode, make_call(), rollout)
