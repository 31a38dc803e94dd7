"""What settings may be, by name: shared by the rooms that read them and the check of a config.

Loads no JAX, so that a wrong setting is refused before anything that takes seconds.
"""

from __future__ import annotations

# Of a metric: what is measured, how, and on which prefixes of a response.
METRICS = (
    "effective_rank",
    "log_effective_rank",
    "traditional_rank",
    "response_entropy",
    "curvature",
)
METHODS = ("gram", "svd")
WINDOWS = ("exact", "release", "later")
RELEASE_TOKENS = 512
# Indicators that the pass behind `old_logprobs` gives, and where it has them.
TOKEN_INDICATORS = {"avg_log_probs": "logprobs", "avg_logits_entropy": "entropies"}

DTYPES = ("float32", "bfloat16")
REMAT_POLICIES = ("none", "full", "dots")
KL_ESTIMATORS = ("kl", "abs", "mse", "low_var_kl")
IMPORTANCE_LEVELS = ("token", "sequence")


def count_windows(num_tokens: int, stride: int, window: str) -> int:
    """The number of windows K of a response of so many tokens, as `PrefixDynamics` counts them."""
    if window == "exact":
        return num_tokens // stride
    if window == "release":
        num_tokens = min(num_tokens, RELEASE_TOKENS)
    if num_tokens < 2 * stride:
        return 0
    return (num_tokens - 1) // stride + (window == "later")
