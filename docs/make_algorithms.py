"""Makes docs/algorithms.md from the docstrings: `python docs/make_algorithms.py`."""

import importlib
import inspect
import pathlib
import re

from semrl_jax.algorithms import SURROGATES
from semrl_jax.algorithms.algorithm import PARTS
from semrl_jax.choices import KL_ESTIMATORS
from semrl_jax.modules import module_names

PAGE = pathlib.Path(__file__).with_name("algorithms.md")
PACKAGE = "semrl_jax.algorithms"
HEAD = """# Algorithms

This page is made from the docstrings by `python docs/make_algorithms.py`; a test checks that it is
current. An algorithm of your own is one file: [extending.md](extending.md).

`--config.algorithms.name=NAME` chooses the advantages, `--config.algorithms.loss.surrogate=NAME`
the loss of a token. Any pair can be combined, and VERL's shaping acts on the advantages of each.
"""
CORRECTIONS = """## Corrections against the rollout engine

`--config.algorithms.importance.level=...` multiplies the advantages by weights from the ratio of
the policy's to the engine's probability. Row `policy/importance_weight/capped_fraction` (or
`masked_fraction`) of the log is the share of tokens that the bounds changed.

| | `level` | `outside` | `floor` | `cap` |
|---|---|---|---|---|
| truncated importance sampling by token | `token` | `truncate` | 0 | 2 |
| truncated importance sampling by response | `sequence` | `truncate` | 0 | 2 |
| masked importance sampling by response | `sequence` | `mask` | 0.5 | 2 |
| IcePop | `token` | `mask` | 0.5 | 2 or 5 |
| mask of responses by their geometric mean | `geometric` | `mask` | 0.99 | 1.01 |
| total-variation mask of tokens | `total_variation` | `mask` | 0 | 0.2 |

## Critic

An algorithm with a critic (`ppo`) trains a second model with a scalar head, on the same
mini-batches. `critic.path` is its Hugging Face directory: a language model, or a classifier with
one label whose head is kept, such as a reward model. If it is empty, the critic starts from the
policy's weights. A new head is 0. `critic.*` are the settings of its optimiser. In the first
`critic.warmup_steps` steps only the critic is trained. Shaping acts on the whitened advantages. The
returns that the critic learns are not shaped.

## KL in the reward

`algorithms.advantage.kl_reward_coefficient` (`ppo`, `reinforce_plus_plus`) subtracts the KL from
the reward of each token; `algorithms.loss.kl_coefficient` must be 0 then. With
`algorithms.advantage.kl_target` the coefficient is adaptive: after each step it is multiplied by
1 + clip(KL / kl_target - 1, -0.2, 0.2) * responses / kl_horizon (arXiv:1909.08593). It is part of
the checkpoints and logged as `algorithm/kl_coefficient`.

## Batch rules

`algorithms.batch_rules.overlong_tokens=N`: over the last N tokens before
`rollout.max_response_tokens` the reward falls by up to 1 (DAPO, arXiv:2503.14476, Eq. 13).
`algorithms.batch_rules.mask_truncated=True`: a response that was cut off is not trained on, but
counts in the statistics of its group.

## Aggregation

`--config.algorithms.aggregation=...`: `token_mean` weighs all tokens of the mini-batch equally,
`response_mean` all responses, and `constant_length` divides the sum over tokens by the number of
responses times `algorithms.constant_length` (Dr. GRPO). How a mini-batch is divided into
micro-batches or over devices changes nothing.
"""


def row(name: str, text: str) -> str:
    """Summary, equation and source of a docstring, as a row of a table."""
    paragraphs = [" ".join(part.split()) for part in inspect.cleandoc(text).split("\n\n")]
    (source,) = (part.removeprefix("Source: ") for part in paragraphs if "Source: " in part)
    before = [part for part in paragraphs if "Source: " not in part]
    equation = [
        part for part in before if re.match(r"(A|A_i|A_t|x_t|delta_t|low) = |high = ", part)
    ]
    rest = " ".join(part for part in before if part not in equation)
    cells = (f"`{name}`", rest, " ; ".join(equation), source)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def page() -> str:
    advantages = [
        row(name, importlib.import_module(f"{PACKAGE}.{name}").__doc__)
        for name in module_names(PACKAGE, PARTS)
    ]
    losses = [row(name, surrogate.loss.__doc__) for name, surrogate in SURROGATES.items()]
    lines = [
        HEAD,
        "## Advantages\n\n| `name` | | Equation | Source |\n|---|---|---|---|",
        *advantages,
        "\n## Losses\n\nr = exp(logprobs - old_logprobs), A the advantage; sg stops the gradient.",
        "",
        "| `loss.surrogate` | | Equation | Source |\n|---|---|---|---|",
        *losses,
        f"\n`--config.algorithms.loss.kl_estimator`: {', '.join(KL_ESTIMATORS)}.\n",
        CORRECTIONS,
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page())
