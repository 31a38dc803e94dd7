"""One GRPO + VERL step of the system against PyTorch and transformers, every intermediate."""

import dataclasses
import pathlib

import numpy as np
import pytest
import torch

from configs import quickstart
from tests.parity import reference, system
from tests.parity.models import EOS, disturbed, random_model

ROLLOUTS = pathlib.Path(__file__).parent / "rollouts.npz"
GROUP_SIZE = 4
INDICATORS = {
    "ERA": "effective_rank_acceleration",
    "ERV": "effective_rank_velocity",
    "ER": "effective_rank",
}
# Of (ERA, ERV, ER): the recorded responses lie on both sides of each.
BASELINES = (0.35, 1.6, 5.5)


@dataclasses.dataclass(frozen=True)
class Case:
    """One set of options for both sides; the defaults are those of the quickstart or the method."""

    tied: bool = False
    first_step: bool = False
    prompts_per_minibatch: int = 4
    micro_batch_size: int = 4
    stride: int = 4
    temperature: float = 1.0
    learning_rate: float = 2e-3  # float32 weights near 1 keep four digits of such a change
    warmup_steps: int = 1
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    off_policy: bool = False
    shaped: bool = True

    def config(self, **overrides):
        """Of the system: the quickstart with the sizes of the recorded rollouts."""
        config = quickstart.get_config()
        config.update_from_flattened_dict(
            {
                "data.prompts_per_step": 4,
                "rollout.group_size": GROUP_SIZE,
                "rollout.temperature": self.temperature,
                "metrics.stride": self.stride,
                "shaping.target": "advantage" if self.shaped else "none",
                "training.prompts_per_minibatch": self.prompts_per_minibatch,
                "training.micro_batch_size": self.micro_batch_size,
                "training.learning_rate": self.learning_rate,
                "training.learning_rate_warmup_steps": self.warmup_steps,
                "training.weight_decay": self.weight_decay,
                "training.max_grad_norm": self.max_grad_norm,
            }
            | overrides
        )
        return config

    def settings(self) -> reference.Settings:
        """Of the reference; the method's defaults in full, so that a changed one shows."""
        return reference.Settings(
            group_size=GROUP_SIZE,
            prompts_per_minibatch=self.prompts_per_minibatch,
            temperature=self.temperature,
            stride=self.stride,
            alpha=0.3,
            eta=1.0,
            gain=2.0,
            kappa=2.0,
            advantage_epsilon=1e-6,
            clip_epsilon=0.2,
            entropy_coefficient=0.001,
            kl_coefficient=0.001,
            learning_rate=self.learning_rate,
            warmup_steps=self.warmup_steps,
            betas=(0.9, 0.95),
            weight_decay=self.weight_decay,
            max_grad_norm=self.max_grad_norm,
            shaped=self.shaped,
        )

    @property
    def baselines(self) -> tuple[float, ...] | None:
        return None if self.first_step else BASELINES


BASE = Case()
CASES = {
    "base": BASE,
    "tied": Case(tied=True),
}


@dataclasses.dataclass(frozen=True)
class World:
    """What all cases share: both kinds of model on both sides, and the rollouts."""

    torch_models: dict
    models: dict
    scored: list

    @property
    def responses(self) -> list[reference.Response]:
        return [
            reference.Response(
                item.rollout.prompt_ids.tolist(),
                item.rollout.response_ids.tolist(),
                item.verdict.score,
            )
            for item in self.scored
        ]

    def old_shift(self, case: Case) -> list[np.ndarray] | None:
        """Log-ratios up to 0.5 on either side: a good third leaves [0.8, 1.2]."""
        if not case.off_policy:
            return None
        random = np.random.default_rng(0)
        return [
            random.uniform(-0.5, 0.5, len(item.rollout.response_ids)).astype(np.float32)
            for item in self.scored
        ]


@pytest.fixture(scope="module")
def world(tmp_path_factory) -> World:
    torch_models, models = {}, {}
    for tied in (False, True):
        policy = random_model(tied=tied)
        torch_models[tied] = policy, disturbed(policy)
        directories = [tmp_path_factory.mktemp(name) for name in ("policy", "reference")]
        for model, directory in zip(torch_models[tied], directories):
            model.save_pretrained(directory)
        models[tied] = system.Model.load(*directories)
    return World(torch_models, models, system.read_rollouts(ROLLOUTS, GROUP_SIZE))


def expected_step(world: World, case: Case) -> dict:
    """The reference's intermediates under the system's names."""
    policy, anchor = world.torch_models[case.tied]
    shift = world.old_shift(case)
    step = reference.train_step(
        policy,
        anchor,
        world.responses,
        None if case.baselines is None else torch.tensor(case.baselines),
        case.settings(),
        None if shift is None else [torch.tensor(values) for values in shift],
    )
    lengths = torch.tensor([len(scores.logprobs) for scores in step.old])
    expected = {
        "old_logprobs": torch.cat([scores.logprobs for scores in step.old]),
        "ref_logprobs": torch.cat(step.reference_logprobs),
        "states": torch.cat([scores.states for scores in step.old]),
        "advantages": step.advantages,
        "bonus": (step.shaped - step.advantages).repeat_interleave(lengths),
        "shaped_advantages": step.shaped.repeat_interleave(lengths),
        "baselines": step.baselines,
    }
    expected["mean_bonus"] = expected["bonus"].mean()
    for column, name in enumerate(reference.INDICATORS):
        expected[INDICATORS[name]] = step.metrics[:, column]
        expected[f"{INDICATORS[name]}_valid"] = step.defined[:, column]
    if step.shaping is not None:
        expected |= {
            "deviations": step.shaping.deviations,
            "beta": step.shaping.beta,
            "phi": step.shaping.phi,
        }
    for index, minibatch in enumerate(step.minibatches):
        expected |= {
            f"loss/{index}": minibatch.loss,
            f"pg_loss/{index}": minibatch.policy_gradient,
            f"entropy/{index}": minibatch.entropy,
            f"kl/{index}": minibatch.kl,
            f"clip_fraction/{index}": minibatch.clip_fraction,
            f"approx_kl/{index}": minibatch.approximate_kl,
            f"grad_norm/{index}": minibatch.grad_norm,
            f"mu/{index}": minibatch.first_moment,
            f"nu/{index}": minibatch.second_moment,
        }
    return expected | {"changes": step.changes}
