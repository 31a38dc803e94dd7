"""Which mismatch of engine and trainer their dtypes explain, and the warning above it."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import ml_collections

from semrl_jax.settings.rollout import weight_dtype

# Means over a step's tokens that the coarser dtype explains: of log-probabilities in nats, of final
# states relative to their norm. The largest of 20 random models and SmolLM2-135M, see
# benchmarks/results/mismatch.json. Other models round more: a warning begins at SLACK times them.
BUDGET = {
    "float32": {"logprob": 6.3e-6, "hidden_state": 1.2e-6},
    "bfloat16": {"logprob": 4.1e-2, "hidden_state": 1.9e-2},
    "fp8": {"logprob": 2.0e-1, "hidden_state": 1.3e-1},
}
SLACK = 3.0
OF_WIRE = {"bfloat16": 2.0**-9, "float32": 0.0}  # rounding of states that are sent


def coarsest_dtype(config: ml_collections.ConfigDict) -> str:
    """The key of BUDGET that a run's engine and trainer have."""
    if config.rollout.vllm_quantization:
        return "fp8"
    dtypes = {config.model.compute_dtype, weight_dtype(config)}
    if jax.default_backend() != "cpu":  # there, factors of float32 products are rounded
        return "bfloat16"
    return "bfloat16" if "bfloat16" in dtypes else "float32"


def mismatch_warning(
    config: ml_collections.ConfigDict, scalars: Mapping[str, float], run: object
) -> str:
    """A line if the mismatch of a step is above what dtypes explain; "" if not.

    Responses of older weights differ for another reason: such steps are not judged.
    """
    if scalars.get("rollout/staleness/max", scalars.get("rollout/staleness", 0.0)):
        return ""
    dtype = coarsest_dtype(config)
    for name, limit in BUDGET[dtype].items():
        limit = SLACK * limit
        if name == "hidden_state":
            limit += OF_WIRE[config.hidden_states.dtype]
        key = f"rollout/{name}_mismatch/mean"
        value = scalars.get(key, 0.0)
        if not value <= limit:
            return (
                f"warning: {key} is {value:.2g}, and {dtype} explains {limit:.2g}: engine and "
                f"trainer compute different numbers; python -m launch.mismatch --policy={run} "
                "names the layer and the cause"
            )
    return ""
