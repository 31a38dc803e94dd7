"""Allowed values of settings, for the check of a config and the rooms that use them; no JAX."""

# Indicator -> the field with it, in the result of the pass that computes `old_logprobs`.
TOKEN_INDICATORS = {"avg_log_probs": "logprobs", "avg_logits_entropy": "entropies"}

DTYPES = ("float32", "bfloat16")
ATTENTION_KERNELS = ("auto", "xla", "splash", "triton")
TOKEN_IDS = "token_ids"  # the role of a message whose content is token ids, a list in JSON
SCHEDULES = ("constant", "linear", "cosine")
OFFLOADED = ("optimizer", "parameters", "reference")
REMAT_POLICIES = ("none", "full", "dots")
KL_ESTIMATORS = ("kl", "abs", "mse", "low_var_kl", "low_var_kl+")
OBJECTIVE_KL = (*KL_ESTIMATORS, "exact")  # the last needs no estimate
TEACHERS = ("reference", "policy")
REC_RANGES = ("one_side", "two_side", "ring")
AGGREGATIONS = ("token_mean", "response_mean", "constant_length")
IMPORTANCE_LEVELS = ("token", "sequence", "geometric", "total_variation")
CREDITS = ("episode", "turn")
KEEP_GROUPS_BY = ("reward", "correctness")
IMPORTANCE_OUTSIDE = ("truncate", "mask")
