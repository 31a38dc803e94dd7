"""Settings of `config.hidden_states`."""

from __future__ import annotations

import dataclasses

from semrl_jax.support.fields import setting


@dataclasses.dataclass(frozen=True)
class HiddenStates:
    source: str = setting(
        "rollout",
        "Who computes the states that are measured: rollout, policy or none",
        choices=("rollout", "policy", "none"),
    )
    dtype: str = setting(
        "bfloat16",
        "dtype of states on the wire: bfloat16 or float32",
        choices=("bfloat16", "float32"),
    )
    compare_every: int = setting(
        0, "how often both sources are compared; 0: never", "steps", at_least=0
    )
