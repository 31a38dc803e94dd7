"""What settings may be, by name: shared by the rooms that read them and the check of a config.

Loads no JAX, so that a wrong setting is refused before anything that takes seconds.
"""

from __future__ import annotations

# Indicators that the pass behind `old_logprobs` gives, and where it has them.
TOKEN_INDICATORS = {"avg_log_probs": "logprobs", "avg_logits_entropy": "entropies"}

DTYPES = ("float32", "bfloat16")
REMAT_POLICIES = ("none", "full", "dots")
KL_ESTIMATORS = ("kl", "abs", "mse", "low_var_kl")
IMPORTANCE_LEVELS = ("token", "sequence")
