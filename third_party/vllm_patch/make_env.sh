#!/usr/bin/env bash
# Makes the environment of vLLM rollout replicas, with vLLM, this repository and the plugin beside:
#
#     third_party/vllm_patch/make_env.sh [cpu|cuda] [DIRECTORY]
#
# cuda where there is an NVIDIA driver, else cpu; .venv-vllm in the root of the repository. Run again,
# it mends what is there. The trainer has an environment of its own and needs nothing of this one.
# The CPU build's torch is in PyTorch's index of CPU builds, which pip's settings have to name: set
# PIP_EXTRA_INDEX_URL to it, as pytorch.org does for its CPU builds of Linux.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
if command -v nvidia-smi > /dev/null; then kind=cuda; else kind=cpu; fi
kind=${1:-$kind}
target=${2:-$root/.venv-vllm}
case $kind in cpu | cuda) ;; *) echo "$0: '$kind' must be cpu or cuda" >&2; exit 2 ;; esac

python3 -m venv "$target"
pip=("$target/bin/python" -m pip)
hint=""
if [ "$kind" = cpu ]; then
  hint=" The CPU build takes its torch from PyTorch's index of CPU builds: set PIP_EXTRA_INDEX_URL to it"
  hint+=" (pytorch.org names it) and run this again."
fi
"${pip[@]}" install -q -e "$root/third_party/vllm_patch[$kind]" || {
  echo "$0: vLLM could not be installed, see above.$hint" >&2
  exit 1
}
# Where they came as CUDA builds beside a CPU torch, importing vLLM fails on them; text needs none.
for extra in torchvision torchaudio torchcodec; do
  "$target/bin/python" -c "import $extra" 2> /dev/null || "${pip[@]}" uninstall -q -y $extra
done
"${pip[@]}" install -q -e "$root"
"$target/bin/python" - <<'CHECK'
import semrl_vllm
from vllm.v1.engine.async_llm import AsyncLLM  # noqa: F401 - breaks where the packages do not fit

print(f"vLLM {semrl_vllm.vllm_version()} with semrl_vllm: use this environment's python for")
print("    python -m launch.rollout --engine=vllm --config=... --port=...")
CHECK
