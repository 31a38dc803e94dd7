"""One GRPO + VERL step of the system against PyTorch and transformers, every intermediate."""

import ast
import dataclasses
import functools
import pathlib

import numpy as np
import pytest
import torch

from configs import quickstart
from semrl_jax.algorithms.credit import Credit
from semrl_jax.sampling.scoring import Scored
from semrl_jax.training.learner import ForwardPasses
from semrl_jax.training.policy_update import TokenPass
from semrl_jax.training.train_state import init_state
from tests.parity import reference, system
from tests.parity.models import EOS, disturbed, random_model

ROLLOUTS = pathlib.Path(__file__).parent / "rollouts.npz"
GROUP_SIZE = 4
INDICATORS = {
    "ERA": "effective_rank_acceleration",
    "ERV": "effective_rank_velocity",
    "ER": "effective_rank",
}
BASELINES = (1.0, 4.0, 17.0)  # of ERA, ERV and ER: responses lie on both sides of each


@dataclasses.dataclass(frozen=True)
class Case:
    """One set of options for both sides; defaults are the quickstart's or the method's."""

    tied: bool = False
    baselines: tuple[float, ...] | None = BASELINES  # None: the first step, which is not shaped
    prompts_per_minibatch: int = 4
    micro_batch_size: int = 4
    stride: int = 4
    temperature: float = 1.0
    learning_rate: float = 2e-3
    warmup_steps: int = 1
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    off_policy: bool = False
    shaped: bool = True
    others: bool = False  # whether OTHERS have other values than their defaults

    def config(self):
        """The config of the system: the quickstart with the sizes of the recorded rollouts."""
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
            | (OTHERS if self.others else {})
        )
        return config

    def settings(self) -> reference.Settings:
        """The settings of the reference; all defaults are written out, so a changed one shows."""
        settings = reference.Settings(
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
        if not self.others:
            return settings
        found = {name.rpartition(".")[2]: value for name, value in OTHERS.items()}
        found["advantage_epsilon"] = found.pop("epsilon")
        found["betas"] = found.pop("adam_b1"), found.pop("adam_b2")
        return dataclasses.replace(settings, **found)


# Settings that have their defaults in the other cases.
OTHERS = {
    "algorithms.advantage.epsilon": 0.01, "algorithms.loss.clip_epsilon": 0.25,
    "algorithms.loss.entropy_coefficient": 0.01, "algorithms.loss.kl_coefficient": 0.02,
    "shaping.alpha": 0.5, "shaping.eta": 0.7, "shaping.gain": 1.5, "shaping.kappa": 3.0,
    "training.adam_b1": 0.8, "training.adam_b2": 0.9,
}  # fmt: skip
BASE = Case()
# Every case holds a group of equal rewards, truncated responses and one of a single token.
CASES = {
    "base": BASE,
    "micro-batch of one": Case(micro_batch_size=1),
    "tied, shorter stride": Case(tied=True, stride=2),
    "first step": Case(baselines=None),
    "clipped ratios": Case(off_policy=True, baselines=(-0.5, 4.0, 17.0)),
    "two mini-batches": Case(
        prompts_per_minibatch=2, temperature=0.8, warmup_steps=2, weight_decay=0.1,
        max_grad_norm=0.6,
    ),
    "everything": Case(  # the first baseline is so low that deviations are cut at 5
        tied=True, baselines=(0.1, 4.0, 17.0), prompts_per_minibatch=2, micro_batch_size=1,
        stride=2, weight_decay=0.1, max_grad_norm=0.3, off_policy=True, others=True,
    ),
}  # fmt: skip
TOLERANCE = 1e-4  # both sides are float32 sums of the same terms in another order
CHANGE_TOLERANCE = 1e-3  # weights near 1 hold four digits of a change of 2e-3
# Below this, in their own unit, values are compared absolutely: means of log-ratios that are 0
# before the first update, and clip fractions of 0.
SMALL = 1e-2


@dataclasses.dataclass(frozen=True, eq=False)
class World:
    """What all cases share: both kinds of model on both sides, and the rollouts."""

    torch_models: dict
    models: dict
    scored: list

    @functools.cache  # noqa: B019
    def expected(self, case: Case) -> dict:
        return expected_step(self, case)

    @functools.cache  # noqa: B019
    def found(self, case: Case) -> dict:
        prepared = self.prepare(case)
        return prepared.found | system.update(self.models[case.tied], prepared, case.config())

    def prepare(self, case: Case, scored: list | None = None) -> system.Prepared:
        """The system before its update, with `scored` for the recorded rollouts."""
        return system.prepare(
            self.models[case.tied],
            self.scored if scored is None else scored,
            case.baselines,
            case.config(),
            self.old_shift(case),
        )

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
    torch_models, loaded = {}, {}
    for tied in (False, True):
        policy = random_model(tied=tied)
        torch_models[tied] = policy, disturbed(policy)
        directories = [tmp_path_factory.mktemp(name) for name in ("policy", "reference")]
        for model, directory in zip(torch_models[tied], directories):
            model.save_pretrained(directory)
        loaded[tied] = system.Model.load(*directories)
    return World(torch_models, loaded, system.read_rollouts(ROLLOUTS, GROUP_SIZE))


def expected_step(world: World, case: Case, **changed) -> dict:
    """The reference's intermediates under the system's names, with some settings changed."""
    policy, anchor = world.torch_models[case.tied]
    shift = world.old_shift(case)
    step = reference.train_step(
        policy,
        anchor,
        world.responses,
        None if case.baselines is None else torch.tensor(case.baselines),
        dataclasses.replace(case.settings(), **changed),
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
        expected["deviations"] = step.shaping.deviations
        expected["beta"] = step.shaping.beta
        expected["phi"] = step.shaping.phi
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


def settled(second_moment: np.ndarray) -> np.ndarray:
    """Elements whose change does not hang on rounding: no gradient at all, or one far above 1e-8.

    Adam moves by g / (|g| + 1e-8) at first, so a g near 1e-8, of which float32 sums leave one
    digit, moves by about anything. There are a few such g in 90 000; their moments are compared.
    """
    left_out = (second_moment > 0) & (np.sqrt(second_moment) < 5e-8)
    assert left_out.sum() <= max(2, 2e-3 * left_out.size)
    return ~left_out


def errors(found: dict, expected: dict) -> dict[str, float]:
    """The error of every intermediate: the largest difference over the largest value.

    The error of tensors (moments, changes) is the norm of the difference over the norm, of the
    tensor for which this is largest. Deviations,
    beta and Phi count where the response is valid for shaping; elsewhere they have no meaning.
    """
    valid = np.asarray(expected[f"{INDICATORS['ERA']}_valid"])
    last = max(int(name.removeprefix("nu/")) for name in expected if name.startswith("nu/"))
    result = {}
    for name, want in expected.items():
        have = found.get(name)
        if have is None:  # broken before the update
            continue
        if isinstance(want, dict):
            assert have.keys() == want.keys()
            result[name] = 0.0
            for key, tensor in want.items():
                difference = have[key] - tensor.numpy()
                if name == "changes":
                    difference = difference[settled(expected[f"nu/{last}"][key].numpy())]
                error = np.linalg.norm(difference) / float(tensor.norm())
                result[name] = float(np.maximum(result[name], error))  # keeps NaN
            continue
        want, have = np.asarray(want, np.float64), np.asarray(have, np.float64)
        if name in ("deviations", "beta", "phi"):
            want, have = want[valid], have[valid]
        if want.shape != have.shape:
            result[name] = np.inf
            continue
        result[name] = float(np.abs(have - want).max() / max(np.abs(want).max(), SMALL))
    return result


def too_large(found: dict, expected: dict) -> dict[str, float]:
    """The errors beyond their tolerance."""
    return {
        name: error
        for name, error in errors(found, expected).items()
        if not error < (CHANGE_TOLERANCE if name == "changes" else TOLERANCE)
    }


# They share their programs; "everything" has every other option.
FAST = ("base", "first step", "clipped ratios")


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_every_intermediate_matches(world, name):
    found, expected = world.found(CASES[name]), world.expected(CASES[name])
    missing = expected.keys() - found.keys()
    assert not missing
    assert too_large(found, expected) == {}


def test_the_rollouts_hold_every_edge(world):
    lengths = np.array([len(item.rollout.response_ids) for item in world.scored]).reshape(4, 4)
    rewards = np.array([item.verdict.score for item in world.scored]).reshape(4, 4)
    reasons = [item.rollout.finish_reason for item in world.scored]
    assert rewards.std(1).tolist().count(0) == 1
    assert reasons.count("length") == 3
    truncated = [item for item, reason in zip(world.scored, reasons) if reason == "length"]
    assert all(EOS not in item.rollout.response_ids for item in truncated)
    assert (lengths == 1).sum() == 1
    assert len(np.unique(lengths)) == 12
    prompts = {len(item.rollout.prompt_ids) for item in world.scored}
    assert len(prompts) == 4


def test_the_cases_reach_what_they_are_for(world):
    """On the reference alone: a case that no longer provokes its branch would pass unseen."""
    base = world.expected(BASE)
    assert base["kl/0"] > 1e-3
    phi, advantages = np.asarray(base["phi"]), np.asarray(base["advantages"])
    valid = np.asarray(base[f"{INDICATORS['ERA']}_valid"]) & (advantages != 0)
    limit = np.abs(advantages) / 2
    assert (valid & (phi > limit)).any()
    assert (valid & (phi > 0) & (phi < limit)).any()
    shorter = world.expected(CASES["tied, shorter stride"])
    negative = (np.asarray(shorter["phi"]) < 0) & (advantages != 0)
    assert (negative & np.asarray(shorter[f"{INDICATORS['ERA']}_valid"])).any()
    assert not world.expected(CASES["first step"])["bonus"].any()
    assert 0.1 < world.expected(CASES["clipped ratios"])["clip_fraction/0"] < 0.5
    assert (world.expected(CASES["everything"])["deviations"] == 5).any()
    for name in ("two mini-batches", "everything"):
        case, expected = CASES[name], world.expected(CASES[name])
        assert expected["grad_norm/1"] > case.max_grad_norm
        assert abs(expected["approx_kl/1"]) > 1e-3
    assert world.expected(CASES["everything"])["grad_norm/0"] > 0.3


def test_the_response_of_one_token_gets_no_bonus(world):
    """Nor do those too short for an acceleration, nor a group of equal rewards."""
    found = world.found(BASE)
    lengths = [len(item.rollout.response_ids) for item in world.scored]
    bonus = [rows[0] for rows in np.split(found["bonus"], np.cumsum(lengths)[:-1])]
    advantages = found["advantages"]
    for length, advantage, value in zip(lengths, advantages, bonus):
        if length < 3 * BASE.stride or advantage == 0:
            assert value == 0
    assert advantages[lengths.index(1)] != 0
    assert not found["effective_rank_valid"][lengths.index(1)]


def test_shaping_acts(world):
    """Without it gradient and parameters are elsewhere, far beyond the tolerance."""
    unshaped = dataclasses.replace(BASE, shaped=False)
    found = world.found(unshaped)
    assert too_large(found, world.expected(unshaped)) == {}
    apart = errors(found, world.expected(BASE))
    assert apart["mu/0"] > 1000 * TOLERANCE
    assert apart["changes"] > 100 * CHANGE_TOLERANCE


@pytest.mark.slow
def test_the_run_cuts_mini_batches_the_same_way(world):
    """The update of a whole run, which slices the batch itself."""
    case = CASES["two mini-batches"]
    model, config, prepared = world.models[case.tied], case.config(), world.prepare(case)
    learner = system.learner(config, model)
    passes = ForwardPasses(TokenPass(prepared.old_logprobs, None, None), prepared.ref_logprobs)
    shaping = system.shaping_state(config, None)
    state = init_state(model.params, learner.optimizer, shaping, learner.mesh)
    state, scalars, _ = learner.update(state, prepared.batch, passes, Credit(prepared.shaped))
    before, after = model.tensors(model.params), model.tensors(state.params)
    changes = {name: after[name] - before[name] for name in before}
    expected = world.expected(case)
    assert too_large({"changes": changes}, expected) == {}
    mean_loss = (expected["loss/0"] + expected["loss/1"]) / 2
    assert abs(scalars["policy/loss"] - mean_loss) < TOLERANCE * abs(mean_loss)


# One setting of the reference wrong, most by a percent: (what must differ, what must not). It is
# wrong there, because another setting of the system would compile its programs anew.
WRONG_BEFORE_UPDATE = {
    "temperature=0.99": ("old_logprobs ref_logprobs", "states effective_rank"),
    "stride=5": (
        "effective_rank_velocity effective_rank_acceleration beta phi bonus",
        "effective_rank old_logprobs advantages",
    ),
    "advantage_epsilon=0.001": ("advantages shaped_advantages", "phi baselines"),
    "gain=1.99": ("beta phi", "deviations"),
    "eta=0.99": ("phi bonus", "beta deviations"),
    "kappa=2.01": ("bonus mean_bonus shaped_advantages", "phi advantages"),
    "alpha=0.299": ("baselines", "bonus"),
}
WRONG_IN_UPDATE = {
    "clip_epsilon=0.21": ("clip_fraction/0 pg_loss/0 mu/0", "kl/0 entropy/0"),
    "kl_coefficient=0.002": ("loss/0 mu/0", "kl/0 pg_loss/0"),
    "entropy_coefficient=0.002": ("loss/0 grad_norm/0 mu/0", "entropy/0"),
    "learning_rate=0.00201": ("changes", "mu/0 nu/0"),
    "weight_decay=0.1": ("changes", "mu/0 nu/0"),
    "betas=(0.91, 0.95)": ("mu/0", "nu/0 grad_norm/0"),
    "betas=(0.9, 0.951)": ("nu/0", "mu/0 grad_norm/0"),
    "max_grad_norm=0.25": ("mu/0 nu/0", "grad_norm/0"),
}


@pytest.mark.parametrize("wrong", WRONG_BEFORE_UPDATE | WRONG_IN_UPDATE)
def test_a_wrong_setting_shows(world, wrong):
    name, value = wrong.split("=")
    case = CASES["base" if wrong in WRONG_BEFORE_UPDATE else "clipped ratios"]
    off, kept = (WRONG_BEFORE_UPDATE | WRONG_IN_UPDATE)[wrong]
    expected = expected_step(world, case, **{name: ast.literal_eval(value)})
    shown = too_large(world.found(case), expected).keys()
    assert set(off.split()) <= shown
    assert not shown & set(kept.split())


def test_wrong_data_shows(world):
    """A prompt without its first token; the policy as its own reference; one other reward."""
    first = world.scored[0]
    rollout = dataclasses.replace(first.rollout, prompt_ids=first.rollout.prompt_ids[1:])
    changed = [dataclasses.replace(first, rollout=rollout), *world.scored[1:]]
    found = world.prepare(BASE, Scored(changed))
    assert {"states", "old_logprobs"} <= too_large(found.found, world.expected(BASE)).keys()

    verdict = dataclasses.replace(first.verdict, score=0.999)
    changed = [dataclasses.replace(first, verdict=verdict), *world.scored[1:]]
    found = world.prepare(BASE, Scored(changed))
    assert "advantages" in too_large(found.found, world.expected(BASE))

    model = world.models[False]
    own = dataclasses.replace(model, reference=model.params)
    found = system.prepare(own, world.scored, BASE.baselines, BASE.config())
    assert too_large(found.found, world.expected(BASE)).keys() == {"ref_logprobs"}
