"""The messages of the protocol, byte for byte: patches of a release read and write the same ones.

The files under recorded/ change only with the protocol.
`python -m tests.rollout.wire.test_recorded DIRECTORY` writes the messages below.
"""

import dataclasses
import pathlib
import sys

import ml_dtypes
import numpy as np

from semrl_jax.metrics import Measurement, MetricKey
from semrl_jax.rollout.wire import bounds, codec
from semrl_jax.rollout.wire.codec import GenerateCall, RolloutDecoder
from semrl_jax.rollout.wire.proto import rollout_pb2 as pb
from semrl_jax.types import (
    Adapter,
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
    protocol_major=codec.PROTOCOL_MAJOR,
    protocol_minor=codec.PROTOCOL_MINOR,
    replica_id="host:1234:abcd",
    engine="vllm",
    engine_version="0.32.0",
    model_hash="m" * 64,
    tokenizer_hash="t" * 64,
    vocab_size=151_936,
    layers=(-1, 0, 24),
    layers_reason="the others stay inside",
    state_kinds=("decode", "prefill"),
    logprob_kinds=("sampling", "raw"),
    metric_kinds=("effective_rank",),
    sampling_kinds=("stop_strings",),
    max_prompts=4096,
    max_prompt_tokens=2048,
    max_response_tokens=8192,
    version=VERSION,
    reads_memory=True,
    is_deterministic=True,
    calls_at_once=4,
    compiling="decode_chunk for 12 s",
    max_adapter_rank=64,
    is_free=True,
    base_digest="b" * 64,
    routed_experts=(2, 2, 8),
)
SAMPLING = SamplingParams(
    max_tokens=1024,
    temperature=0.75,
    top_p=0.9375,
    top_k=50,
    eos_token_ids=(151_643,),
    stop_token_ids=(13, 198),
    stop_strings=("Question:", "\n答"),
    min_p=0.25,
)
PENALISED = SamplingParams(
    1024, presence_penalty=0.5, frequency_penalty=-0.25, repetition_penalty=1.25, min_tokens=3
)
STATES = HiddenStateParams((-1, 24), "bfloat16", ("prefill", "decode"))
REQUESTS = (
    SampleRequest("41/3/0", 2**40, 0, np.array([1, 151_935, 0], np.int32), 2**64 - 1),
    SampleRequest("41/3/1", 2**40, 1, np.array([1, 151_935, 0], np.int32), 5),
)
SMALL = Rollout(
    sample_id="41/3/0",
    group_id=2**40,
    sample_index=0,
    prompt_ids=REQUESTS[0].prompt_ids,
    response_ids=np.array([9, 8, 7, 151_643], np.int32),
    rollout_logprobs=np.array([-0.5, 0, 0, -1.25], np.float32),
    rollout_raw_logprobs=np.array([-0.75, 0, 0, -2.0], np.float32),
    response_mask=np.array([True, False, False, True]),
    finish_reason="eos",
    versions=(VersionSpan(VERSION, 0, 4),),
    hidden_states=np.arange(24).reshape(4, 2, 3).astype(ml_dtypes.bfloat16),
    prompt_states=np.arange(18).reshape(3, 2, 3).astype(ml_dtypes.bfloat16),
    layers=(-1, 24),
    generate_s=0.25,
    routed_experts=(np.arange(24, dtype=np.uint8) % 8).reshape(6, 2, 2),
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
    prompt_states=np.zeros((3, 2, 1024), ml_dtypes.bfloat16),
    routed_experts=np.full((302, 2, 2), 255, np.uint8),
)
PARAMS = MetricParams(("effective_rank",), 40, "release", "svd", "float32", 6)
MEASURED = dataclasses.replace(
    SMALL,
    hidden_states=None,
    prompt_states=None,
    layers=(),
    metrics={MetricKey("effective_rank"): Measurement(1.5, True)},
    mean_state=np.array([0.5, -2.0, 1e-30], np.float32),
    routed_experts=None,
    effective_ranks=np.array([1.5, 0.5], np.float32),
)
MEMORY = pb.SharedMemory(process=1234, file=7, name="0123456789abcdef" * 2)
SUMS = (TensorSum("model.norm.weight", "bfloat16", 2**32 - 1, 1.5),)
SPECS = (TensorSpec("model.norm.weight", (4,), "float32"), TensorSpec("scale", (), "bfloat16"))
CHECKSUMS = [bytes(range(32)), bytes(32)]
DIGEST = "78c8ab88f86dfe6e7eed3ddd1be4402a"  # its first half


def messages():
    """The messages that this code writes, by file name."""
    version = codec.encode_version(VERSION)
    begin = pb.BeginUpdate(
        run_id="run-7", attempt_id="attempt-2", step=41, tensors=codec.encode_specs(SPECS)
    )
    chunk = pb.TensorChunk(tensor_index=1, data=b"\x80\x3f")
    commit = pb.CommitUpdate(checksums=CHECKSUMS, digest=manifest_digest(SPECS, CHECKSUMS))
    begin_memory = pb.UpdateWeightsRequest(begin=begin)
    begin_memory.begin.memory.CopyFrom(MEMORY)

    of_adapter = pb.UpdateWeightsRequest(begin=begin)
    of_adapter.begin.adapter.CopyFrom(pb.Adapter(rank=8, modules=["mlp.up_proj"]))
    of_adapter.begin.base_digest = "b" * 64

    def request(*arguments, **others):
        return codec.encode_request(GenerateCall(REQUESTS, *arguments, **others))

    found = {
        "describe_request": pb.DescribeRequest(memory=MEMORY),
        "describe_response": codec.encode_description(DESCRIPTION),
        "generate_request": request(SAMPLING, STATES, VERSION, routed_experts=True),
        "generate_request_measured": request(PENALISED, HiddenStateParams(), VERSION, PARAMS, True),
        "update_begin": pb.UpdateWeightsRequest(begin=begin),
        "update_begin_memory": begin_memory,
        "update_begin_adapter": of_adapter,
        "update_chunk": pb.UpdateWeightsRequest(chunk=chunk),
        "update_chunk_memory": pb.UpdateWeightsRequest(chunk=pb.TensorChunk(tensor_index=1)),
        "update_commit": pb.UpdateWeightsRequest(commit=commit),
        "update_response": pb.UpdateWeightsResponse(version=version),
        "pause_response": pb.PauseResponse(version=version),
        "resume_response": pb.ResumeResponse(version=version),
        "abort_response": pb.AbortResponse(num_aborted=6, version=version),
        "tensor_sums_response": codec.encode_sums(VERSION, SUMS),
        "sleep_request": pb.SleepRequest(run_id="run-7"),
        "sleep_response": pb.SleepResponse(remark="it frees nothing"),
        "hand_over_request": pb.HandOverRequest(run_id="run-7", attempt_id="attempt-2"),
    }
    for name, rollout in (("inline", SMALL), ("chunked", LARGE), ("measured", MEASURED)):
        found[f"generate_response_{name}"], *chunks = codec.encode_rollout(rollout)
        for i, chunk_bytes in enumerate(chunks):
            state_chunk = pb.GenerateResponse.FromString(chunk_bytes)
            state_chunk.state_chunk.data = state_chunk.state_chunk.data[:16]  # the files are small
            found[f"state_chunk_{i}"] = state_chunk
    return found


def recorded(name):
    return (RECORDED / f"{name}.bin").read_bytes()


def test_what_is_written_today_equals_the_record():  # as messages: fields may change their order
    found = messages()
    assert {file.stem for file in RECORDED.iterdir()} == found.keys()
    for name, message in found.items():
        assert type(message).FromString(recorded(name)) == message, name


def test_what_was_recorded_is_read():
    message = pb.DescribeResponse.FromString(recorded("describe_response"))
    assert codec.decode_description(message) == DESCRIPTION
    readers = bounds.request_readers(DESCRIPTION, SPECS)
    call = readers["Generate"].read(recorded("generate_request"))
    assert (call.sampling, call.hidden_states, call.version) == (SAMPLING, STATES, VERSION)
    assert call.metrics is None and not call.keep and call.routed_experts
    for actual, expected in zip(call.requests, REQUESTS, strict=True):
        assert_same(actual, expected)
    sizes = {"vocab_size": DESCRIPTION.vocab_size, "routed_experts": DESCRIPTION.routed_experts}
    decoder = RolloutDecoder(call, **sizes)
    reply = bounds.parse_generate_reply(recorded("generate_response_inline"))
    assert_same(decoder.feed(reply), SMALL)
    call = readers["Generate"].read(recorded("generate_request_measured"))
    assert (call.sampling, call.metrics, call.keep) == (PENALISED, PARAMS, True)
    decoder = RolloutDecoder(call, **sizes)
    reply = bounds.parse_generate_reply(recorded("generate_response_measured"))
    assert_same(decoder.feed(reply), MEASURED)
    message = pb.TensorSumsResponse.FromString(recorded("tensor_sums_response"))
    assert tuple(codec.decode_sums(message)) == SUMS
    assert readers["Sleep"].read(recorded("sleep_request")).run_id == "run-7"
    assert readers["HandOver"].read(recorded("hand_over_request")).attempt_id == "attempt-2"


def test_a_weight_update_is_read():
    readers = bounds.request_readers(DESCRIPTION, SPECS)
    assert readers["Describe"].read(recorded("describe_request")).memory == MEMORY
    update = readers["UpdateWeights"]
    kind, begin = update.read(recorded("update_begin_memory"))
    assert (kind, begin.memory) == ("begin", MEMORY)
    assert (begin.run_id, begin.attempt_id, begin.step) == ("run-7", "attempt-2", 41)
    assert codec.decode_specs(begin.tensors, SPECS) == SPECS
    _, begin = update.read(recorded("update_begin_adapter"))
    found = codec.decode_adapter(begin.adapter, ["mlp.up_proj"], 8)
    assert (found, begin.base_digest) == (Adapter(8, ("mlp.up_proj",)), "b" * 64)
    assert update.read(recorded("update_chunk_memory")) == ("chunk", codec.Chunk(b"", 1))
    kind, commit = update.read(recorded("update_commit"))
    assert (kind, list(commit.checksums)) == ("commit", CHECKSUMS)
    # The digest is part of the protocol: both sides compute it.
    assert commit.digest == manifest_digest(SPECS, CHECKSUMS)
    assert commit.digest.startswith(DIGEST)


def test_chunks_are_read_and_written_without_protobuf():
    data = recorded("update_chunk")  # by protobuf, as the next one
    kind, chunk = bounds.request_readers(DESCRIPTION, SPECS)["UpdateWeights"].read(data)
    assert isinstance(chunk.data, memoryview)
    assert (kind, chunk.tensor_index, bytes(chunk.data)) == ("chunk", 1, b"\x80\x3f")
    written = codec.encode_chunk(pb.TensorChunk(tensor_index=1), np.array([0x80, 0x3F], np.uint8))
    assert pb.UpdateWeightsRequest.FromString(written) == pb.UpdateWeightsRequest.FromString(data)
    chunk = bounds.parse_generate_reply(recorded("state_chunk_0"))
    assert isinstance(chunk.data, memoryview)
    assert (chunk.sample_id, bytes(chunk.data)) == ("41/3/1", bytes(16))


if __name__ == "__main__":
    folder = pathlib.Path(sys.argv[1])
    folder.mkdir(parents=True)
    for name, message in messages().items():
        (folder / f"{name}.bin").write_bytes(message.SerializeToString(deterministic=True))
