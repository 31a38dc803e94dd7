"""One GRPO + VERL training step in PyTorch and transformers, to hold the system against.

It follows the paper's definitions and shares no code with the package: one unpadded sequence at a
time, float32, gradients by autograd. Only the singular values are float64, since these are what the
float32 routes of the system are measured by.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Sequence

import torch
import transformers

INDICATORS = ("ERA", "ERV", "ER")
EXPLORE = torch.tensor([0.0, 0.0, 1.0])
EXPLOIT = torch.tensor([0.0, 1.0, 0.0])


@dataclasses.dataclass(frozen=True)
class Settings:
    """The numbers of one step; names as in the equations."""

    group_size: int
    prompts_per_minibatch: int
    temperature: float
    stride: int
    alpha: float  # rate of the baselines
    eta: float
    gain: float
    kappa: float
    advantage_epsilon: float
    clip_epsilon: float
    entropy_coefficient: float
    kl_coefficient: float
    learning_rate: float
    warmup_steps: int
    betas: tuple[float, float]
    weight_decay: float
    max_grad_norm: float
    shaped: bool = True


@dataclasses.dataclass(frozen=True)
class Response:
    """Token ids of a prompt and its response, and the response's reward."""

    prompt_ids: list[int]
    response_ids: list[int]
    reward: float


@dataclasses.dataclass(frozen=True)
class Scores:
    """Log-probabilities and entropies [T] in nats, and final-norm states [T, D], of a response."""

    logprobs: torch.Tensor
    entropy: torch.Tensor
    states: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Shaping:
    """Shaping of B responses by the K indicators, in the order of `INDICATORS`."""

    deviations: torch.Tensor  # [B, K]
    beta: torch.Tensor  # [B]
    phi: torch.Tensor  # [B]
    bonus: torch.Tensor  # [B]


@dataclasses.dataclass(frozen=True)
class MiniBatch:
    """What one optimiser step saw and did; parameters under their transformers names."""

    loss: float
    policy_gradient: float
    entropy: float
    kl: float
    clip_fraction: float
    approximate_kl: float
    grad_norm: float  # before the clip
    first_moment: dict[str, torch.Tensor]
    second_moment: dict[str, torch.Tensor]


@dataclasses.dataclass(frozen=True)
class Step:
    """Every intermediate of the step."""

    old: list[Scores]
    reference_logprobs: list[torch.Tensor]
    metrics: torch.Tensor  # [B, K], 0 where not defined
    defined: torch.Tensor  # [B, K]
    advantages: torch.Tensor  # [B], before shaping
    shaping: Shaping | None
    shaped: torch.Tensor  # [B]
    baselines: torch.Tensor  # [K], of the next step
    minibatches: list[MiniBatch]
    changes: dict[str, torch.Tensor]


def score_response(
    model: transformers.Qwen2ForCausalLM, response: Response, temperature: float
) -> Scores:
    """Runs prompt and response unpadded; the state before a token is the one that produced it."""
    ids = torch.tensor([response.prompt_ids + response.response_ids])
    states = model.model(input_ids=ids).last_hidden_state[0]
    first = len(response.prompt_ids) - 1
    states = states[first : first + len(response.response_ids)]
    log_p = torch.log_softmax(model.lm_head(states) / temperature, dim=-1)
    chosen = torch.tensor(response.response_ids)
    logprobs = log_p[torch.arange(len(chosen)), chosen]
    return Scores(logprobs, -(log_p.exp() * log_p).sum(-1), states)


def effective_rank(states: torch.Tensor) -> float:
    """exp of the entropy of the normalised singular values of the centred rows."""
    if len(states) < 2:
        return 0.0
    states = states.detach().double()
    sigma = torch.linalg.svdvals(states - states.mean(0))
    p = sigma / (sigma.sum() + 1e-8)
    return float(torch.exp(-(p * torch.log(p + 1e-8)).sum()))


def measure(states: torch.Tensor, stride: int) -> tuple[list[float], list[bool]]:
    """(ERA, ERV, ER) over prefixes of 1, 2, ... strides, and which of them are defined."""
    series = [effective_rank(states[:end]) for end in range(stride, len(states) + 1, stride)]
    delta = [series[j] - sum(series[:j]) / j for j in range(1, len(series))]
    jumps = [later - earlier for earlier, later in itertools.pairwise(delta)]
    erv = sum(delta) / len(delta) if delta else 0.0
    era = sum(jumps) / len(jumps) if jumps else 0.0
    return [era, erv, effective_rank(states)], [bool(jumps), bool(delta), len(states) >= 2]


def group_advantages(rewards: torch.Tensor, settings: Settings) -> torch.Tensor:
    """(R - mean) / (std + epsilon) within each group, sample standard deviation."""
    groups = rewards.reshape(-1, settings.group_size)
    centred = groups - groups.mean(1, keepdim=True)
    return (centred / (groups.std(1, keepdim=True) + settings.advantage_epsilon)).reshape(-1)


def shape(
    advantages: torch.Tensor,
    metrics: torch.Tensor,
    valid: torch.Tensor,
    baselines: torch.Tensor,
    settings: Settings,
) -> Shaping:
    """The bonus of every response; 0 where ERA, ERV or ER is not defined."""
    deviations = torch.clip((metrics - baselines) / (baselines.abs() + 1e-8), -5, 5)
    beta = torch.sigmoid(settings.gain * deviations[:, INDICATORS.index("ERA")])
    weights = beta[:, None] * EXPLORE + (1 - beta)[:, None] * EXPLOIT
    phi = settings.eta * (weights * torch.tanh(deviations)).sum(1)
    bonus = torch.minimum(phi.clamp(min=0), advantages.abs() / settings.kappa)
    return Shaping(deviations, beta, phi, torch.where(valid, bonus, 0.0))


def updated_baselines(
    baselines: torch.Tensor | None, metrics: torch.Tensor, valid: torch.Tensor, alpha: float
) -> torch.Tensor:
    """Moves towards the mean over valid responses; the first batch sets it."""
    mean = metrics[valid].mean(0)
    return mean if baselines is None else (1 - alpha) * baselines + alpha * mean


def optimise(
    model: transformers.Qwen2ForCausalLM,
    optimizer: torch.optim.Optimizer,
    responses: Sequence[Response],
    old: Sequence[torch.Tensor],
    reference: Sequence[torch.Tensor],
    advantages: torch.Tensor,
    settings: Settings,
) -> MiniBatch:
    """One AdamW step on the token mean over all response tokens of the mini-batch."""
    scores = [score_response(model, response, settings.temperature) for response in responses]
    logprobs = torch.cat([s.logprobs for s in scores])
    old, reference = torch.cat(list(old)), torch.cat(list(reference))
    lengths = torch.tensor([len(response.response_ids) for response in responses])
    advantages = advantages.repeat_interleave(lengths)
    ratio = torch.exp(logprobs - old)
    low, high = 1 - settings.clip_epsilon, 1 + settings.clip_epsilon
    unclipped, clipped = -advantages * ratio, -advantages * ratio.clip(low, high)
    policy_gradient = torch.maximum(unclipped, clipped).mean()
    entropy = torch.cat([s.entropy for s in scores]).mean()
    x = logprobs - reference
    kl = torch.clip(torch.exp(-x) + x - 1, -10, 10).mean()
    loss = policy_gradient - settings.entropy_coefficient * entropy + settings.kl_coefficient * kl
    optimizer.zero_grad()
    loss.backward()
    parameters = dict(model.named_parameters())
    grad_norm = torch.nn.utils.clip_grad_norm_(parameters.values(), settings.max_grad_norm)
    optimizer.step()

    def moment(name: str) -> dict[str, torch.Tensor]:
        return {key: optimizer.state[p][name].clone() for key, p in parameters.items()}

    return MiniBatch(
        loss=loss.item(),
        policy_gradient=policy_gradient.item(),
        entropy=entropy.item(),
        kl=kl.item(),
        clip_fraction=(clipped > unclipped).float().mean().item(),
        approximate_kl=(old - logprobs).mean().item(),
        grad_norm=grad_norm.item(),
        first_moment=moment("exp_avg"),
        second_moment=moment("exp_avg_sq"),
    )


def train_step(
    model: transformers.Qwen2ForCausalLM,
    reference: transformers.Qwen2ForCausalLM,
    responses: Sequence[Response],
    baselines: torch.Tensor | None,
    settings: Settings,
    old_shift: Sequence[torch.Tensor] | None = None,
) -> Step:
    """One step on responses in (group, sample) order; `model` is left as it was.

    Args:
      model: the policy.
      reference: the anchor of the KL term.
      responses: `settings.group_size` a group.
      baselines: of the indicators [K]; None at the first step, which is not shaped.
      settings: all numbers.
      old_shift: added to the old log-probabilities of each response, to leave the trust region.
    """
    model = copy.deepcopy(model)
    # transformers would give the pad id no gradient; here it may stand for itself in a response.
    model.model.embed_tokens.padding_idx = None
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    with torch.no_grad():
        old = [score_response(model, r, settings.temperature) for r in responses]
        anchor = [score_response(reference, r, settings.temperature).logprobs for r in responses]
    old_logprobs = [scores.logprobs for scores in old]
    if old_shift is not None:
        old_logprobs = [a + b for a, b in zip(old_logprobs, old_shift, strict=True)]
    measured = [measure(scores.states, settings.stride) for scores in old]
    metrics = torch.tensor([values for values, _ in measured])
    defined = torch.tensor([flags for _, flags in measured])
    valid = defined.all(1)
    advantages = group_advantages(torch.tensor([r.reward for r in responses]), settings)
    shaping, shaped = None, advantages
    if settings.shaped and baselines is not None:
        shaping = shape(advantages, metrics, valid, baselines, settings)
        shaped = advantages + shaping.bonus
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=0.0, betas=settings.betas, weight_decay=settings.weight_decay
    )
    size = settings.prompts_per_minibatch * settings.group_size
    minibatches = []
    for index, first in enumerate(range(0, len(responses), size)):
        warmed = min((index + 1) / max(settings.warmup_steps, 1), 1.0)
        optimizer.param_groups[0]["lr"] = settings.learning_rate * warmed
        rows = slice(first, first + size)
        minibatches.append(
            optimise(
                model, optimizer, responses[rows], old_logprobs[rows], anchor[rows],
                shaped[rows], settings,
            )
        )  # fmt: skip
    return Step(
        old=old,
        reference_logprobs=anchor,
        metrics=metrics,
        defined=defined,
        advantages=advantages,
        shaping=shaping,
        shaped=shaped,
        baselines=updated_baselines(baselines, metrics, valid, settings.alpha),
        minibatches=minibatches,
        changes={name: p.detach() - start[name] for name, p in model.named_parameters()},
    )
