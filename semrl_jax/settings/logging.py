"""Settings of `config.logging`."""

from __future__ import annotations

import dataclasses

from semrl_jax.support.fields import setting


@dataclasses.dataclass(frozen=True)
class Logging:
    rollouts_every_steps: int = setting(
        10,
        "between recorded responses, in addition to the last step and evaluations; 0: none at all",
        at_least=0,
    )
    plot_every_steps: int = setting(
        10,
        "between drawings of the report, or more: they take at most a tenth of the time; 0: only "
        "at the end",
        at_least=0,
    )
    replay_every: int = setting(
        0, "between records for launch.replay; 0: none. docs/replay.md", "steps", at_least=0
    )
    wandb: str = setting("", "Weights & Biases project; needs `pip install wandb`")
    trackio: str = setting("", "Trackio project; needs `pip install trackio`")
    mlflow: str = setting("", "MLflow experiment; needs `pip install mlflow`")
