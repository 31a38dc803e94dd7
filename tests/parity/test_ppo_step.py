"""One PPO step of the system, critic included, against PyTorch and transformers."""

import copy
import pathlib

import jax
import numpy as np
import optax
import pytest
import torch
import transformers

from configs import quickstart
from semrl_jax import models
from semrl_jax.algorithms.credit import assign_credit
from semrl_jax.runs.setup import optimizer_of
from semrl_jax.sampling.batch_rewards import group_rewards
from semrl_jax.support.clock import Clock
from semrl_jax.training.learner import Critic
from semrl_jax.training.passes import credit_rules
from semrl_jax.training.rollout_batch import credited_tokens
from tests.parity import system
from tests.parity.models import disturbed, fill, random_model

ROLLOUTS = pathlib.Path(__file__).parent / "rollouts.npz"
GAMMA, LAMBDA, KL, VALUE_CLIP, CLIP, ENTROPY = 0.97, 0.9, 0.05, 0.1, 0.2, 0.001
RATE, CRITIC_RATE, BETAS, DECAY, MAX_NORM, CRITIC_NORM = 2e-3, 3e-3, (0.9, 0.95), 0.1, 0.6, 5.0
TOLERANCE = 1e-4  # both sides are float32 sums of the same terms in another order
CHANGE_TOLERANCE = 1e-3  # weights near 1 hold four digits of a change of 2e-3


def settings():
    config = quickstart.get_config()
    config.update_from_flattened_dict(
        {
            "data.prompts_per_step": 16,
            "rollout.group_size": 1,
            "shaping.target": "none",
            "algorithms.name": "ppo",
            "algorithms.advantage.gamma": GAMMA,
            "algorithms.advantage.gae_lambda": LAMBDA,
            "algorithms.advantage.kl_reward_coefficient": KL,
            "algorithms.loss.kl_coefficient": 0.0,
            "algorithms.loss.value_clip": VALUE_CLIP,
            "training.prompts_per_minibatch": 8,
            "training.micro_batch_size": 4,
            "training.learning_rate": RATE,
            "training.learning_rate_warmup_steps": 0,
            "training.weight_decay": DECAY,
            "training.max_grad_norm": MAX_NORM,
            "critic.learning_rate": CRITIC_RATE,
            "critic.adam_b2": BETAS[1],
            "critic.weight_decay": DECAY,
            "critic.max_grad_norm": CRITIC_NORM,
        }
    )
    return config


@pytest.fixture(scope="module")
def torch_models():
    policy = random_model(tied=False)
    critic = transformers.Qwen2ForTokenClassification(
        transformers.Qwen2Config(**policy.config.to_dict() | {"num_labels": 1})
    )
    critic = fill(critic.eval().float(), seed=2, mean_of_norms=0.6, std=0.2)
    return policy, disturbed(policy), critic


def shift(scored):
    """What is added to the critic's old values, so that some new ones leave the clip."""
    random, lengths = np.random.default_rng(0), [len(item.rollout.response_ids) for item in scored]
    return [random.uniform(-0.5, 0.5, length).astype(np.float32) for length in lengths]


def of_response(model, rollout):
    """What a model gives at the states that produced the response: [T, V] logits, or [T] values."""
    ids = torch.tensor([[*rollout.prompt_ids.tolist(), *rollout.response_ids.tolist()]])
    found = model(input_ids=ids).logits[0, len(rollout.prompt_ids) - 1 : -1]
    return found[:, 0] if found.shape[1] == 1 else found


def logprobs_of(model, rollout):
    log_p = torch.log_softmax(of_response(model, rollout), -1)
    chosen = torch.tensor(rollout.response_ids.tolist())
    return log_p[torch.arange(len(chosen)), chosen], -(log_p.exp() * log_p).sum(-1)


def torch_step(policy, anchor, critic, scored):
    """Every intermediate under the name of the system; tokens of all responses in a row."""
    policy, critic = copy.deepcopy(policy), copy.deepcopy(critic)
    policy.model.embed_tokens.padding_idx = critic.model.embed_tokens.padding_idx = None
    rollouts = [item.rollout for item in scored]
    with torch.no_grad():
        old, ref = ([logprobs_of(m, r)[0] for r in rollouts] for m in (policy, anchor))
        values = [
            of_response(critic, r) + torch.tensor(row) for r, row in zip(rollouts, shift(scored))
        ]
    estimates = []
    for item, old_row, ref_row, value in zip(scored, old, ref, values):
        rewards = -KL * (old_row - ref_row)
        rewards[-1] += item.verdict.score
        row, following, later = torch.zeros_like(value), 0.0, 0.0
        for t in reversed(range(len(value))):
            later = rewards[t] + GAMMA * following - value[t] + GAMMA * LAMBDA * later
            row[t], following = later, value[t]
        estimates.append(row)
    returns = [row + value for row, value in zip(estimates, values)]
    every = torch.cat(estimates)
    lengths = [len(row) for row in estimates]
    white = ((every - every.mean()) * torch.rsqrt(every.var() + 1e-8)).split(lengths)
    found = {
        "values": torch.cat(values), "returns": torch.cat(returns), "advantages": torch.cat(white),
    }  # fmt: skip
    starts = [
        {n: p.detach().clone() for n, p in model.named_parameters()} for model in (policy, critic)
    ]
    optimizers = [
        torch.optim.AdamW(model.parameters(), lr=rate, betas=BETAS, weight_decay=DECAY)
        for model, rate in ((policy, RATE), (critic, CRITIC_RATE))
    ]
    sums = dict.fromkeys(SCALARS, 0.0)
    for rows in (slice(0, 8), slice(8, 16)):
        new = [logprobs_of(policy, r) for r in rollouts[rows]]
        advantages = torch.cat(white[rows])
        ratio = torch.exp(torch.cat([row for row, _ in new]) - torch.cat(old[rows]))
        clipped = -advantages * ratio.clip(1 - CLIP, 1 + CLIP)
        pg_loss = torch.maximum(-advantages * ratio, clipped).mean()
        policy_loss = pg_loss - ENTROPY * torch.cat([entropy for _, entropy in new]).mean()
        value, before = (
            torch.cat([of_response(critic, r) for r in rollouts[rows]]), torch.cat(values[rows]),
        )  # fmt: skip
        error = (value - torch.cat(returns[rows])) ** 2
        bounded = torch.clip(value, before - VALUE_CLIP, before + VALUE_CLIP)
        bounded = (bounded - torch.cat(returns[rows])) ** 2
        value_loss = 0.5 * torch.maximum(error, bounded).mean()
        norms = []
        for model, optimizer, loss, norm in (
            (policy, optimizers[0], policy_loss, MAX_NORM),
            (critic, optimizers[1], value_loss, CRITIC_NORM),
        ):
            optimizer.zero_grad()
            loss.backward()
            norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), norm))
            optimizer.step()
        for name, scalar in zip(
            SCALARS, (policy_loss, pg_loss, norms[0], value_loss, (bounded > error).float().mean(),
                      norms[1]),
        ):  # fmt: skip
            sums[name] += float(scalar.detach()) / 2
    moved = [
        {n: p.detach() - start[n] for n, p in model.named_parameters()}
        for model, start in zip((policy, critic), starts)
    ]
    moments = [
        {n: optimizer.state[p]["exp_avg"] for n, p in model.named_parameters()}
        for model, optimizer in zip((policy, critic), optimizers)
    ]
    return found | sums, moved, moments


SCALARS = (
    "policy/loss", "policy/pg_loss", "policy/grad_norm", "critic/loss", "critic/clip_fraction",
    "critic/grad_norm",
)  # fmt: skip


def jax_step(directories, scored, config):
    """One step through the same calls as in the training loop."""
    policy, critic = (pathlib.Path(d) for d in (directories[0], directories[2]))
    model = system.Model.load(policy, directories[1])
    value_model = models.ValueModel.of(models.Policy(models.load_config(critic)))
    learner = system.learner(
        config, model, jax.device_put(model.reference),
        Critic(value_model, optimizer_of(config, "critic")),
    )  # fmt: skip
    start = models.load_value_params(critic, value_model)
    state = learner.first_state(model.params, start)
    start = jax.device_get(state.critic.params)
    batch = learner.batch([item.rollout for item in scored])
    mask, passes = batch.response_mask, learner.passes(state, batch, Clock())
    added = np.zeros(mask.shape, np.float32)
    added[mask] = np.concatenate(shift(scored))
    passes = passes._replace(values=passes.values + added)
    rewards = group_rewards(scored, config, 0)
    tokens = credited_tokens(batch, scored)
    rules = credit_rules(learner.algorithm, config, learner.plan)
    credit = assign_credit(rules, rewards, {}, passes.arrays(), tokens, state.memory)
    tokens = {
        "values": passes.values, "returns": credit.returns, "advantages": credit.advantages,
    }  # fmt: skip
    found = {name: np.asarray(array)[mask] for name, array in tokens.items()}
    state, losses, _ = learner.update(state, batch, passes, credit)

    def named(params):
        """Under the names of transformers."""
        head = params["value_head"]
        names = {"score.weight": head["kernel"][None], "score.bias": head["bias"][None]}
        decoder = {name: part for name, part in params.items() if name != "value_head"}
        pairs = models.iterate_hf_tensors(decoder, value_model.decoder.config, "float32")
        return {spec.name: array for spec, array in pairs} | jax.device_get(names)

    after, before = model.tensors(state.params), model.tensors(model.params)
    moved = [{name: after[name] - before[name] for name in after}]
    moved.append(jax.tree.map(np.subtract, named(state.critic.params), named(start)))
    moments = [
        model.tensors(optax.tree.get(state.optimizer, "mu")),
        named(optax.tree.get(state.critic.optimizer, "mu")),
    ]
    return found | credit.scalars | losses, moved, moments


@pytest.mark.slow
def test_a_ppo_step_is_that_of_torch(torch_models, tmp_path):
    directories = [tmp_path / name for name in ("policy", "reference", "critic")]
    for model, directory in zip(torch_models, directories):
        model.save_pretrained(directory)
    scored = system.read_rollouts(ROLLOUTS, 1)
    wanted, *wanted_trees = torch_step(*torch_models, scored)
    found, *found_trees = jax_step(directories, scored, settings())
    assert 0.05 < wanted["critic/clip_fraction"] < 0.95  # otherwise the clip is not tested
    for name, want in wanted.items():
        want = np.asarray(want, np.float64)
        error = np.abs(np.asarray(found[name]) - want).max() / np.abs(want).max()
        assert error < TOLERANCE, name
    values, returns = (np.asarray(wanted[name], np.float64) for name in ("values", "returns"))
    explained = 1 - np.var(returns - values) / np.var(returns)
    assert abs(found["critic/explained_variance"] - explained) < TOLERANCE * abs(explained)
    for tolerance, found_tree, wanted_tree in zip(
        (CHANGE_TOLERANCE, TOLERANCE), found_trees, wanted_trees
    ):
        for model, own, want in zip(("policy", "critic"), found_tree, wanted_tree):
            assert own.keys() == want.keys()
            for name, tensor in want.items():
                error = np.linalg.norm(own[name] - tensor.numpy()) / float(tensor.norm())
                assert error < tolerance, f"{model} {name}"
