#!/usr/bin/env bash
# Makes the environment of vLLM rollout replicas, with vLLM, this repository and the plugin beside:
#
#     third_party/vllm_patch/make_env.sh [cpu|cuda] [DIRECTORY]
#
# cuda where there is an NVIDIA driver, else cpu; .venv-vllm in the root of the repository. Run again,
# it mends what is there. The trainer has an environment of its own and needs nothing of this one.
# The CPU build's torch is in PyTorch's index of CPU builds, which is asked beside PyPI unless pip's own
# settings (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, pip.conf) name indexes.
set -euo pipefail
CPU_INDEX=https://download.pytorch.org/whl/cpu
root=$(cd "$(dirname "$0")/../.." && pwd)
if command -v nvidia-smi > /dev/null; then kind=cuda; else kind=cpu; fi
kind=${1:-$kind}
target=${2:-$root/.venv-vllm}
case $kind in cpu | cuda) ;; *) echo "$0: '$kind' must be cpu or cuda" >&2; exit 2 ;; esac

python3 -m venv "$target"
pip=("$target/bin/python" -m pip)
index=() hint=""
if [ "$kind" = cpu ]; then
  case $("${pip[@]}" config list) in
    *index-url*) hint=" The CPU build takes its torch from $CPU_INDEX: an index of pip's settings must have it." ;;
    *) index=(--extra-index-url "$CPU_INDEX") ;;
  esac
fi
"${pip[@]}" install -q "${index[@]}" -e "$root/third_party/vllm_patch[$kind]" || {
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
