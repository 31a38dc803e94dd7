"""The commands: `python -m launch.<name>`."""

import os

# This runs before any command imports JAX or NumPy. BLAS threads in addition to XLA's have given
# wrong products (jax#38056). XLA's own thread pool uses the cores anyway.
for _name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_name, "1")
# Without PyTorch, transformers would print advice to install it in every command.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
# Metrics of hidden states are computed on the host, which is a device of JAX: "cuda" would leave it
# out. The first one stays the default.
_platforms = os.environ.get("JAX_PLATFORMS", "")
if _platforms and "cpu" not in _platforms.split(","):
    os.environ["JAX_PLATFORMS"] = f"{_platforms},cpu"
