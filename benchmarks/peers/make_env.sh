#!/usr/bin/env bash
# Makes the Python environment in which benchmarks/step.py, or a test of environments, runs another
# library.
#
#     benchmarks/peers/make_env.sh tunix|trl|openenv|verifiers|tinker [DIRECTORY]
#
# The default directory is .venv-NAME in the root of the repository. Running it again
# continues an interrupted installation. On a machine without a GPU, set PIP_EXTRA_INDEX_URL to
# PyTorch's index of CPU builds (pytorch.org names it); otherwise pip installs the CUDA build of torch,
# which is larger and as fast on a CPU.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
alone=()  # installed without what they need
case "${1:-}" in
  tunix) packages=(google-tunix==0.1.7) ;;
  # Without torchvision and torchaudio: transformers imports them if they are there, and this fails
  # if they were built for another torch.
  trl) packages=(torch==2.13.0 trl==1.16.0) ;;
  openenv) packages=(openenv==0.10.0 fastmcp==3.4.11 textarena==0.7.4) ;;
  verifiers) packages=(verifiers==0.4.0 -e "$root") ;;
  # The cookbook alone: its tml-renderers, for other models, is not on every index. The packages
  # after tinker are what it needs otherwise.
  tinker)
    packages=(
      torch==2.13.0 tinker==0.38.0 aiohttp blobfile chz cloudpickle datasets pillow pyrage safetensors
      termcolor tiktoken tqdm sympy pylatexenc math-verify
    )
    alone=(tinker-cookbook==0.6.1) ;;
  *) echo "usage: $0 tunix|trl|openenv|verifiers|tinker [DIRECTORY]" >&2; exit 2 ;;
esac
target=${2:-$root/.venv-$1}

python3 -m venv "$target"
"$target/bin/python" -m pip install -q "${packages[@]}"
if ((${#alone[@]})); then "$target/bin/python" -m pip install -q --no-deps "${alone[@]}"; fi
echo "done: $target has ${packages[*]} ${alone[*]}"
