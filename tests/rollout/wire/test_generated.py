"""The committed protobuf code matches the .proto file, for any version of the generator."""

import pathlib

import pytest
from google.protobuf import descriptor_pb2
from grpc_tools import protoc

import semrl_jax
from semrl_jax.rollout.wire.proto import rollout_pb2
from semrl_jax.tinker.proto import tinker_pb2


def without_json_names(messages):
    """Generators differ in whether they write the derived JSON names."""
    for message in messages:
        for field in message.field:
            field.ClearField("json_name")
        without_json_names(message.nested_type)
    return list(messages)


@pytest.mark.parametrize("code", (rollout_pb2, tinker_pb2))
def test_committed_code_matches_the_proto_file(code, tmp_path):
    root = pathlib.Path(semrl_jax.__file__).parents[1]
    output = tmp_path / "descriptor"
    file = code.DESCRIPTOR.name
    assert protoc.main(["", f"-I{root}", f"--descriptor_set_out={output}", file]) == 0
    expected = descriptor_pb2.FileDescriptorSet.FromString(output.read_bytes()).file[0]
    actual = descriptor_pb2.FileDescriptorProto.FromString(code.DESCRIPTOR.serialized_pb)
    assert without_json_names(actual.message_type) == without_json_names(expected.message_type)
    assert list(actual.service) == list(expected.service)
