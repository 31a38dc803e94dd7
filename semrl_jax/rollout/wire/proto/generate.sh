#!/usr/bin/env bash
# Regenerates the committed protobuf code; needs `pip install grpcio-tools`.
set -euo pipefail
cd "$(dirname "$0")/../../../.."
python -m grpc_tools.protoc -I. --python_out=. \
  semrl_jax/rollout/wire/proto/rollout.proto semrl_jax/tinker/proto/tinker.proto
