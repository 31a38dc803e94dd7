"""Settings of `config.logging`."""

from __future__ import annotations

import dataclasses

from semrl_jax.support.fields import setting


@dataclasses.dataclass(frozen=True)
class Logging:
    rollouts_every_steps: int = setting(
        10,
        "How often responses are recorded, in addition to the last step and every "
        "evaluation. 0: no response is recorded",
        at_least=0,
    )
    plot_every_steps: int = setting(
        10, "steps between two drawings of the report; 0: only at the end", at_least=0
    )
    replay_every: int = setting(
        0,
        "How often a step is recorded for launch.replay: tokens, log-probabilities, verdicts, "
        "advantages, and checksums of gradients and weights. 0: never. docs/replay.md",
        "steps",
        at_least=0,
    )
    wandb: str = setting(
        "",
        "Weights & Biases project that gets the rows too; empty: none. Needs `pip install wandb`",
    )
    trackio: str = setting(
        "", "Trackio project that gets the rows too; empty: none. Needs `pip install trackio`"
    )
    mlflow: str = setting(
        "", "MLflow experiment that gets the rows too; empty: none. Needs `pip install mlflow`"
    )
