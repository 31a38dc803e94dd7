"""Messages recorded when the protocol was at version 1.0 to 2.7 must stay readable.

The files under recorded/ are never written again: a later protocol adds a directory of its own, of
the messages that are new in it.
`python -m tests.rollout.wire.test_recorded DIRECTORY` writes the messages below.
"""

import dataclasses
import pathlib
import sys

import ml_dtypes
import numpy as np
import pytest

from semrl_jax.metrics import Measurement, MetricKey
from semrl_jax.rollout.wire import bounds, codec
from semrl_jax.rollout.wire.codec import GenerateCall, RolloutDecoder
from semrl_jax.rollout.wire.proto import rollout_pb2 as pb
from semrl_jax.types import (
    HiddenStateParams,
    MetricParams,
    ReplicaDescription,
    Rollout,
    SampleRequest,
    SamplingParams,
    TensorSpec,
    TensorSum,
    VersionSpan,
    WeightVersion,
    manifest_digest,
)
from tests.rollout.wire.test_codec import assert_same

RECORDED = pathlib.Path(__file__).with_name("recorded")

VERSION = WeightVersion("run-7", "attempt-2", 41, "0123456789abcdef" * 4)
DESCRIPTION = ReplicaDescription(
    protocol_major=1,
    protocol_minor=0,
    replica_id="host:1234:abcd",
    engine="vllm",
    engine_version="0.32.0",
    model_hash="m" * 64,
    tokenizer_hash="t" * 64,
    vocab_size=151_936,
    layers=(-1, 0, 24),
    state_kinds=("decode",),
    logprob_kinds=("sampling", "raw"),
    metric_kinds=("effective_rank",),
    max_prompts=4096,
    max_prompt_tokens=2048,
    max_response_tokens=8192,
    version=VERSION,
)
SAMPLING = SamplingParams(
    max_tokens=1024,
    temperature=0.75,
    top_p=0.9375,
    top_k=50,
    eos_token_ids=(151_643,),
    stop_token_ids=(13, 198),
)
STATES = HiddenStateParams((-1, 24), "bfloat16")
REQUESTS = (
    SampleRequest("41/3/0", 2**40, 0, np.array([1, 151_935, 0], np.int32), 2**64 - 1),
    SampleRequest("41/3/1", 2**40, 1, np.array([1, 151_935, 0], np.int32), 5),
)
SMALL = Rollout(
    sample_id="41/3/0",
    group_id=2**40,
    sample_index=0,
    prompt_ids=REQUESTS[0].prompt_ids,
    response_ids=np.array([9, 151_643], np.int32),
    rollout_logprobs=np.array([-0.5, -1.25], np.float32),
    rollout_raw_logprobs=np.array([-0.75, -2.0], np.float32),
    finish_reason="eos",
    versions=(VersionSpan(VERSION, 0, 2),),
    hidden_states=np.arange(-6, 6).reshape(2, 2, 3).astype(ml_dtypes.bfloat16),
    layers=(-1, 24),
    metrics={MetricKey("effective_rank"): Measurement(1.5, True)},
    generate_s=0.25,
)
LARGE = dataclasses.replace(  # in chunks: 300 x 2 x 1024 x 2 bytes
    SMALL,
    sample_id="41/3/1",
    sample_index=1,
    response_ids=np.arange(300, dtype=np.int32),
    rollout_logprobs=np.full(300, -0.125, np.float32),
    rollout_raw_logprobs=None,
    response_mask=np.ones(300, bool),
    finish_reason="length",
    versions=(VersionSpan(VERSION, 0, 300),),
    hidden_states=np.zeros((300, 2, 1024), ml_dtypes.bfloat16),
    metrics={},
)
PARAMS = MetricParams(("effective_rank",), 40, "release", "svd", "float32", 6)  # 1.1
MEASURED = dataclasses.replace(
    SMALL,
    hidden_states=None,
    layers=(),
    metrics={MetricKey("effective_rank"): Measurement(1.5, True)},
    mean_state=np.array([0.5, -2.0, 1e-30], np.float32),
)
ALL_STATES = HiddenStateParams((-1, 24), "bfloat16", ("prefill", "decode"))  # 1.2
WHOLE = dataclasses.replace(
    SMALL, prompt_states=np.arange(18).reshape(3, 2, 3).astype(ml_dtypes.bfloat16)
)
WITH_CONTEXT = dataclasses.replace(  # 1.3
    SMALL,
    response_ids=np.array([9, 8, 7, 151_643], np.int32),
    rollout_logprobs=np.array([-0.5, 0, 0, -1.25], np.float32),
    rollout_raw_logprobs=np.array([-0.75, 0, 0, -2.0], np.float32),
    response_mask=np.array([True, False, False, True]),
    versions=(VersionSpan(VERSION, 0, 4),),
    hidden_states=np.arange(24).reshape(4, 2, 3).astype(ml_dtypes.bfloat16),
)
FINAL_ONLY = dataclasses.replace(
    DESCRIPTION,
    protocol_minor=2,
    layers=(-1, 24),
    state_kinds=("decode", "prefill"),
    layers_reason="the others stay inside",
)
STOPPED = dataclasses.replace(SAMPLING, stop_strings=("Question:", "\n答"))  # 1.5
MIN_P = dataclasses.replace(SAMPLING, min_p=0.25)  # 2.4
PENALISED = dataclasses.replace(  # 2.5
    SAMPLING, presence_penalty=0.5, frequency_penalty=-0.25, repetition_penalty=1.25, min_tokens=3
)
STOPS = dataclasses.replace(
    DESCRIPTION, protocol_minor=5, sampling_kinds=("annealed", "stop_strings")
)
READS = dataclasses.replace(STOPS, protocol_minor=6, reads_memory=True)  # 1.6
MEMORY = pb.SharedMemory(process=1234, file=7, name="0123456789abcdef" * 2)
SCHEDULED = dataclasses.replace(  # 1.7
    READS, protocol_minor=7, is_deterministic=True, calls_at_once=4
)
COMPILES = dataclasses.replace(  # 2.1
    SCHEDULED, protocol_major=2, protocol_minor=1, compiling="decode_chunk for 12 s"
)
SUMS = (TensorSum("model.norm.weight", "bfloat16", 2**32 - 1, 1.5),)  # 2.6
SPECS = (TensorSpec("model.norm.weight", (4,), "float32"), TensorSpec("scale", (), "bfloat16"))
CHECKSUMS = [bytes(range(32)), bytes(32)]
DIGEST = "78c8ab88f86dfe6e7eed3ddd1be4402a"  # its first half


def messages():
    """The messages that this code writes, by the protocol that had them first, and file name."""
    large = codec.encode_rollout(LARGE)
    version = codec.encode_version(VERSION)
    begin = pb.BeginUpdate(
        run_id="run-7", attempt_id="attempt-2", step=41, tensors=codec.encode_specs(SPECS)
    )
    chunk = pb.TensorChunk(tensor_index=1, data=b"\x80\x3f")
    commit = pb.CommitUpdate(checksums=CHECKSUMS, digest=manifest_digest(SPECS, CHECKSUMS))
    begin_memory = pb.UpdateWeightsRequest(begin=begin)
    begin_memory.begin.memory.CopyFrom(MEMORY)

    def request(sampling=SAMPLING, states=STATES, metrics=None, **options):
        call = GenerateCall(REQUESTS, sampling, states, VERSION, metrics, **options)
        return codec.encode_request(call)

    def response(rollout):
        """Without the validity of its metric, which the recorded messages lack."""
        (message,) = codec.encode_rollout(rollout)
        del message.response.metrics["effective_rank_valid"]
        return message

    found = {
        "1.0": {
            "describe_response": codec.encode_description(DESCRIPTION),
            "generate_request": request(),
            "generate_response_inline": response(SMALL),
            "generate_response_chunked": next(large),
            "update_begin": pb.UpdateWeightsRequest(begin=begin),
            "update_chunk": pb.UpdateWeightsRequest(chunk=chunk),
            "update_commit": pb.UpdateWeightsRequest(commit=commit),
            "update_response": pb.UpdateWeightsResponse(version=version),
            "pause_response": pb.PauseResponse(version=version),
            "resume_response": pb.ResumeResponse(version=version),
            "abort_response": pb.AbortResponse(num_aborted=6, version=version),
        },
        "1.1": {"generate_response_measured": next(codec.encode_rollout(MEASURED))},
        "1.2": {
            "describe_response_final_only": codec.encode_description(FINAL_ONLY),
            "generate_request_all_states": request(states=ALL_STATES),
            "generate_response_all_states": response(WHOLE),
        },
        "1.3": {"generate_response_with_context": response(WITH_CONTEXT)},
        "1.5": {
            "describe_response_stops": codec.encode_description(STOPS),
            "generate_request_stopped": request(STOPPED),
        },
        "1.6": {
            "describe_request_memory": pb.DescribeRequest(memory=MEMORY),
            "describe_response_memory": codec.encode_description(READS),
            "update_begin_memory": begin_memory,
            "update_chunk_memory": pb.UpdateWeightsRequest(chunk=pb.TensorChunk(tensor_index=1)),
        },
        "1.7": {"describe_response_scheduled": codec.encode_description(SCHEDULED)},
        "2.1": {"describe_response_compiling": codec.encode_description(COMPILES)},
        "2.2": {"generate_request_measured": request(states=HiddenStateParams(), metrics=PARAMS)},
        "2.3": {"generate_request_kept": request(keep=True)},
        "2.4": {"generate_request_min_p": request(MIN_P)},
        "2.5": {"generate_request_penalised": request(PENALISED)},
        "2.6": {"tensor_sums_response": codec.encode_sums(VERSION, SUMS)},
        "2.7": {
            "sleep_request": pb.SleepRequest(run_id="run-7"),
            "sleep_response": pb.SleepResponse(remark="it frees nothing"),
        },
    }
    for i, chunk_bytes in enumerate(large):
        state_chunk = pb.GenerateResponse.FromString(chunk_bytes)
        state_chunk.state_chunk.data = state_chunk.state_chunk.data[:16]  # the files stay small
        found["1.0"][f"state_chunk_{i}"] = state_chunk
    return found


def recorded(name, kind, version="1.0"):
    return kind.FromString((RECORDED / version / f"{name}.bin").read_bytes())


@pytest.mark.parametrize(
    ("version", "name", "expected"),
    [
        ("1.0", "", DESCRIPTION),
        ("1.2", "_final_only", FINAL_ONLY),
        ("1.5", "_stops", STOPS),
        ("1.6", "_memory", READS),
        ("1.7", "_scheduled", SCHEDULED),
        ("2.1", "_compiling", COMPILES),
    ],
)
def test_description(version, name, expected):
    message = recorded(f"describe_response{name}", pb.DescribeResponse, version)
    assert codec.decode_description(message) == expected


def test_generate_request():
    call = codec.decode_request(recorded("generate_request", pb.GenerateRequest), DESCRIPTION)
    assert (call.sampling, call.hidden_states, call.version) == (SAMPLING, STATES, VERSION)
    assert call.metrics is None and not call.keep
    for actual, expected in zip(call.requests, REQUESTS, strict=True):
        assert_same(actual, expected)


def test_generate_responses():
    call = GenerateCall(REQUESTS, SAMPLING, STATES, VERSION)
    decoder = RolloutDecoder(call, vocab_size=DESCRIPTION.vocab_size)
    inline = recorded("generate_response_inline", pb.GenerateResponse)
    assert_same(decoder.feed(inline), SMALL)
    assert decoder.feed(recorded("generate_response_chunked", pb.GenerateResponse)) is None
    chunks = [recorded(f"state_chunk_{i}", pb.GenerateResponse) for i in range(2)]
    assert [chunk.state_chunk.sample_id for chunk in chunks] == ["41/3/1"] * 2
    sizes = (codec.CHUNK_BYTES, LARGE.hidden_states.nbytes - codec.CHUNK_BYTES)
    rollout = None
    for chunk, size in zip(chunks, sizes):
        assert chunk.state_chunk.data == bytes(16)
        chunk.state_chunk.data = bytes(size)
        rollout = decoder.feed(chunk)
    assert_same(rollout, LARGE)


@pytest.mark.parametrize(
    ("version", "request_", "limits", "states", "metrics", "reply", "expected"),
    [
        ("1.1", "1.1/generate_request_measured", DESCRIPTION, HiddenStateParams(), PARAMS,
         "generate_response_measured", MEASURED),
        ("1.2", "1.2/generate_request_all_states", FINAL_ONLY, ALL_STATES, None,
         "generate_response_all_states", WHOLE),
        ("1.3", "1.0/generate_request", DESCRIPTION, STATES, None,
         "generate_response_with_context", WITH_CONTEXT),
    ],
)  # fmt: skip
def test_later_responses(version, request_, limits, states, metrics, reply, expected):
    request_ = recorded(request_.split("/")[1], pb.GenerateRequest, request_.split("/")[0])
    call = codec.decode_request(request_, limits)
    assert (call.hidden_states, call.metrics) == (states, metrics)
    decoder = RolloutDecoder(call, vocab_size=DESCRIPTION.vocab_size)
    assert_same(decoder.feed(recorded(reply, pb.GenerateResponse, version)), expected)


def test_request_with_stop_strings():
    request = recorded("generate_request_stopped", pb.GenerateRequest, "1.5")
    assert codec.decode_request(request, STOPS).sampling == STOPPED


def test_request_that_is_kept():
    request = recorded("generate_request_kept", pb.GenerateRequest, "2.3")
    assert codec.decode_request(request, DESCRIPTION).keep


def test_request_with_min_p():
    request = recorded("generate_request_min_p", pb.GenerateRequest, "2.4")
    assert codec.decode_request(request, DESCRIPTION).sampling == MIN_P


def test_request_with_penalties():
    request = recorded("generate_request_penalised", pb.GenerateRequest, "2.5")
    assert codec.decode_request(request, DESCRIPTION).sampling == PENALISED


def test_sums_of_tensors():
    reply = recorded("tensor_sums_response", pb.TensorSumsResponse, "2.6")
    assert tuple(codec.decode_sums(reply)) == SUMS


def test_sleep():
    data = (RECORDED / "2.7" / "sleep_request.bin").read_bytes()
    assert bounds.request_readers(READS, SPECS)["Sleep"].read(data).run_id == "run-7"
    assert recorded("sleep_response", pb.SleepResponse, "2.7").remark == "it frees nothing"


def test_weight_update_through_memory():
    readers = bounds.request_readers(READS, SPECS)
    data = (RECORDED / "1.6" / "describe_request_memory.bin").read_bytes()
    assert readers["Describe"].read(data).memory == MEMORY
    data = (RECORDED / "1.6" / "update_begin_memory.bin").read_bytes()
    kind, begin = readers["UpdateWeights"].read(data)
    assert (kind, begin.memory) == ("begin", MEMORY)
    data = (RECORDED / "1.6" / "update_chunk_memory.bin").read_bytes()
    assert readers["UpdateWeights"].read(data) == ("chunk", codec.Chunk(b"", tensor_index=1))


def test_chunks_are_read_and_written_without_protobuf():
    # The chunks of 1.0 were written by protobuf.
    readers = bounds.request_readers(DESCRIPTION, SPECS)
    data = (RECORDED / "1.0" / "update_chunk.bin").read_bytes()
    kind, chunk = readers["UpdateWeights"].read(data)
    assert isinstance(chunk.data, memoryview)
    assert (kind, chunk.tensor_index, bytes(chunk.data)) == ("chunk", 1, b"\x80\x3f")
    written = codec.encode_chunk(pb.TensorChunk(tensor_index=1), np.array([0x80, 0x3F], np.uint8))
    assert pb.UpdateWeightsRequest.FromString(written) == pb.UpdateWeightsRequest.FromString(data)
    data = (RECORDED / "1.0" / "state_chunk_0.bin").read_bytes()
    chunk = bounds.parse_generate_reply(data)
    assert isinstance(chunk.data, memoryview)
    assert (chunk.sample_id, bytes(chunk.data)) == ("41/3/1", bytes(16))


def test_weight_update():
    begin = recorded("update_begin", pb.UpdateWeightsRequest).begin
    assert (begin.run_id, begin.attempt_id, begin.step) == ("run-7", "attempt-2", 41)
    assert codec.decode_specs(begin.tensors, SPECS) == SPECS
    chunk = recorded("update_chunk", pb.UpdateWeightsRequest).chunk
    assert (chunk.tensor_index, chunk.data) == (1, b"\x80\x3f")
    commit = recorded("update_commit", pb.UpdateWeightsRequest).commit
    assert list(commit.checksums) == CHECKSUMS
    # The digest is part of the protocol: both sides compute it.
    assert commit.digest == manifest_digest(SPECS, CHECKSUMS)
    assert commit.digest.startswith(DIGEST)


@pytest.mark.parametrize("name", ["update", "pause", "resume", "abort"])
def test_replies_carry_the_version(name):
    kind = {
        "update": pb.UpdateWeightsResponse,
        "pause": pb.PauseResponse,
        "resume": pb.ResumeResponse,
        "abort": pb.AbortResponse,
    }[name]
    reply = recorded(f"{name}_response", kind)
    assert codec.decode_version(reply.version) == VERSION
    assert name != "abort" or reply.num_aborted == 6


def test_what_is_written_today_equals_the_record():  # as messages: fields may change their order
    for version, known in messages().items():
        for name, message in known.items():
            assert recorded(name, type(message), version) == message, name


if __name__ == "__main__":
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True)
    for known in messages().values():
        for name, message in known.items():
            (folder / f"{name}.bin").write_bytes(message.SerializeToString(deterministic=True))
