#!/bin/bash
# Makes the environment in which benchmarks/step.py runs another library:
#
#     benchmarks/peers/make_env.sh tunix DIR
#     benchmarks/peers/make_env.sh trl DIR
#
# PYTHON names the interpreter (3.11 or newer); the default is python3. A second call continues an
# interrupted installation. With other versions, the figures are of those versions.
set -euo pipefail

case "${1:-}" in
  tunix) packages=(google-tunix==0.1.7) ;;
  # No torchvision or torchaudio: transformers imports them if they exist, and other builds of
  # torch cannot load them.
  trl) packages=(torch==2.13.0 trl==1.16.0) ;;
  *) echo "usage: $0 tunix|trl DIR" >&2; exit 2 ;;
esac
directory="${2:?usage: $0 tunix|trl DIR}"

"${PYTHON:-python3}" -m venv "$directory"
"$directory/bin/python" -m pip install --quiet "${packages[@]}"
"$directory/bin/python" -m pip list --format=freeze > "$directory/versions.txt"
echo "done: $directory has ${packages[*]}"
