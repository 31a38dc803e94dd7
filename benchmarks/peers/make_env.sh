#!/usr/bin/env bash
# Makes the Python environment in which benchmarks/step.py runs another library.
#
#     benchmarks/peers/make_env.sh tunix|trl [DIRECTORY]
#
# The default directory is .venv-tunix or .venv-trl in the root of the repository. Running it again
# continues an interrupted installation. On a machine without a GPU, set PIP_EXTRA_INDEX_URL to
# PyTorch's index of CPU builds (pytorch.org names it); otherwise pip installs the CUDA build of torch,
# which is larger and as fast on a CPU.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
case "${1:-}" in
  tunix) packages=(google-tunix==0.1.7) ;;
  # Without torchvision and torchaudio: transformers imports them if they are there, and this fails
  # if they were built for another torch.
  trl) packages=(torch==2.13.0 trl==1.16.0) ;;
  *) echo "usage: $0 tunix|trl [DIRECTORY]" >&2; exit 2 ;;
esac
target=${2:-$root/.venv-$1}

python3 -m venv "$target"
"$target/bin/python" -m pip install -q "${packages[@]}"
echo "done: $target has ${packages[*]}"
