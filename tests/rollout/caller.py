"""Calls of a replica without the client: what the client never sends, and replies it refuses."""

import types

import grpc
from google.protobuf.message_factory import GetMessageClass

from semrl_jax.rollout.wire import codec
from semrl_jax.rollout.wire.auth import token_metadata
from semrl_jax.rollout.wire.codec import GenerateCall, RolloutDecoder
from semrl_jax.rollout.wire.proto import rollout_pb2 as pb
from semrl_jax.types import HiddenStateParams


def make_stub(channel):
    """The methods of a replica, as attributes, which take and return messages."""
    methods = types.SimpleNamespace()
    for method in pb.DESCRIPTOR.services_by_name["RolloutService"].methods:
        ends = method.client_streaming, method.server_streaming
        multi_callable = getattr(channel, "_".join("stream" if e else "unary" for e in ends))
        call = multi_callable(
            f"/{codec.SERVICE_NAME}/{method.name}",
            GetMessageClass(method.input_type).SerializeToString,
            GetMessageClass(method.output_type).FromString,
        )
        setattr(methods, method.name, call)
    return methods


class AnyVersionDecoder(RolloutDecoder):
    """Also decodes tokens that were sampled with other weights than those asked for."""

    def _check_versions(self, name, spans, num_tokens):
        pass


class Caller:
    """The stub of one replica; every call has a deadline of a minute. Use it in a `with`."""

    def __init__(self, address, token):
        self._channel = grpc.insecure_channel(address)
        self._stub = make_stub(self._channel)
        self._options = {"timeout": 60.0, "metadata": token_metadata(token)}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._channel.close()

    def describe(self):
        return codec.decode_description(self._stub.Describe(pb.DescribeRequest(), **self._options))

    def pause(self):
        self._stub.Pause(pb.PauseRequest(), **self._options)

    def resume(self):
        self._stub.Resume(pb.ResumeRequest(), **self._options)

    def abort(self):
        """How many responses were aborted."""
        return self._stub.Abort(pb.AbortRequest(), **self._options).num_aborted

    def generate(self, requests, sampling, states=None, *, version, metrics=None):
        """Yields all responses, aborted ones and those of several versions included."""
        call = GenerateCall(
            tuple(requests), sampling, states or HiddenStateParams(), version, metrics
        )
        decoder = AnyVersionDecoder(call, vocab_size=self.describe().vocab_size)
        for message in self._stub.Generate(codec.encode_request(call), **self._options):
            if (rollout := decoder.feed(message)) is not None:
                yield rollout
        decoder.finish()
