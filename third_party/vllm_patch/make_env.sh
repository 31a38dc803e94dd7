#!/usr/bin/env bash
# Makes the Python environment of vLLM rollout replicas: vLLM, the plugin and this repository.
#
#     third_party/vllm_patch/make_env.sh [cpu|cuda] [DIRECTORY]
#
# The default is cuda if there is an NVIDIA driver, else cpu, in .venv-vllm in the root of the
# repository. Running it again repairs the environment. The trainer has a separate environment.
# The CPU build of vLLM needs torch from PyTorch's index of CPU builds: set PIP_EXTRA_INDEX_URL to it
# (pytorch.org names it for CPU builds on Linux).
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
# CUDA builds of these packages beside a CPU build of torch make importing vLLM fail. Text models do
# not need them.
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
