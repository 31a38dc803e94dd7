"""docs/log_keys.md: it leaves out no key of the reference implementation, and none of ours."""

import itertools
import json
import pathlib
import re

import jax.numpy as jnp
import numpy as np
import pytest

from semrl_jax import shaping
from semrl_jax.evaluation.evaluator import logged
from semrl_jax.evaluation.scores import greedy
from semrl_jax.runs import run, train
from semrl_jax.sampling.batch_scalars import batch_scalars
from semrl_jax.sampling.scoring import Scored
from tests.evaluation.making import make_sample
from tests.fixtures import make_scored, save_chat_model
from tests.shaping import by_name
from tests.tiny import tiny_config

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "log_keys.md").read_text()
# Every key the reference implementation writes in training and validation.
RELEASE = (
    "cal/{overall,correct,incorrect}/layer_1/<metric>/{mean,max,min}",
    "cal/.../<metric> {diff,diff 2}",
    "cal/base_v/<indicator>",
    "cal/num_correct",
    "cal/num_incorrect",
    "cal/accuracy",
    "train/layer_1/global/<metric>",
    "train/layer_1/cumulative/<metric> {diff,diff 2}",
    "val/<set>/layer_1/global/<metric>",
    "val/<set>/layer_1/cumulative/<metric> {diff,diff 2}",
    "val/cal_{overall,correct,incorrect}/...",
    "reward_manager/percentage_deviation_mean",
    "reward_manager/diff_2_tendency_mean",
    "reward_manager/performance_scaling_factor_mean",
    "reward_manager/weight_*_mean",
    "reward_manager/relative_deviation_*_mean",
    "critic/{score_0,score,rewards,advantages_0,advantages,returns,values}/{mean,max,min}",
    "critic/{kl,kl_coeff,vf_explained_var,vf_loss,vf_clipfrac,vpred_mean,grad_norm,lr}",
    "actor/{pg_loss,pg_clipfrac,ppo_kl,entropy_loss,kl_loss,kl_coef,grad_norm,lr}",
    "response_length/{overall,correct,incorrect}/{mean,max,min,clip_ratio}",
    "prompt_length/{mean,max,min,clip_ratio}",
    "val/test_score",
    "val/test_correctness",
    "val/test_{overall,correct,incorrect}_len",
    "timing_s/*",
    "timing_per_token_ms/*",
    "mfu/actor",
    "mfu/critic",
    "global_seqlen/*",
)


def expand(pattern):
    """All names of a pattern with {alternatives}."""
    parts = re.split(r"\{(.*?)\}", pattern)
    choices = [part.split(",") if k % 2 else [part] for k, part in enumerate(parts)]
    return ["".join(pieces) for pieces in itertools.product(*choices)]


def keys_of(cell):
    """Names in backticks that are log keys, alternatives written out."""
    quoted = re.findall(r"`([^`]+)`", cell)
    return [name for text in quoted if "/" in text for name in expand(text)]


def table(part):
    """Cells of the rows below the head."""
    lines = [line for line in part.splitlines() if line.startswith("|")][2:]
    return [re.split(r"(?<!\\)\|", line)[1:-1] for line in lines]


# Runs of tests/training/test_reward_model.py, and in tests/runs of test_given.py, test_hints.py and
# test_branching.py, have these.
OF_OTHER_RUNS = [
    "given/correct", "given/fraction", "policy/given_loss", "rollout/branches/correct",
    "rollout/branches/fraction", "rollout/branches/parents_correct",
    "rollout/branches/prefix_tokens/mean", "rollout/hints/correct", "rollout/hints/fraction",
    "time/reward_model_s",
]  # fmt: skip
_BESIDE, _OURS = PAGE.split("\n## Ours\n")
BESIDE, OURS = table(_BESIDE), table(_OURS.split("\n## ")[0])  # after it: columns of files
OUR_KEYS = {
    key for cell in [here for _, here in BESIDE] + [key for key, _ in OURS] for key in keys_of(cell)
}


def as_expression(key):
    return re.compile(re.sub(r"<\w+>", "[A-Za-z0-9_]+", re.escape(key)) + r"\Z")


def undocumented(keys):
    expressions = [as_expression(key) for key in OUR_KEYS]
    return sorted(key for key in keys if not any(e.match(key) for e in expressions))


def test_no_key_of_the_release_is_left_out():
    named = {key for row in BESIDE for key in keys_of(row[0])}
    missing = [key for pattern in RELEASE for key in expand(pattern) if key not in named]
    assert missing == []
    for release_key, here in BESIDE:
        assert keys_of(here) or here.strip().startswith("-: ") or "the same" in here, release_key


def test_what_is_computed_a_step_is_on_the_page():
    names = ("effective_rank", "effective_rank_velocity", "effective_rank_acceleration")
    values = by_name.records(dict.fromkeys(names, 1.0))
    parts = {"math": 1.0, "short": 0.5}
    scored = [make_scored(i, score=float(i % 2), metrics=values, parts=parts) for i in range(4)]
    keys = set(batch_scalars(Scored.of(scored), np.zeros((1, 4), np.float32)))
    figures = greedy.per_problem([[make_sample(correct=i == 0)] for i in range(2)], tiny_config())
    keys |= {f"eval/a_set/{name}" for name in logged(figures)}
    found = {name: np.ones(4, np.float32) for name in (*names, "curvature")}
    state = shaping.init_shaping_state(guidance="curvature")
    mask = jnp.ones((4, 2), bool)
    _, report = by_name.shape_advantages(jnp.ones((4, 2)), found, mask, state, guidance="curvature")
    assert "shaping/deviation/curvature/mean" in report  # a guidance that is no indicator
    assert undocumented(keys | set(report)) == []
    assert undocumented({"shaping/odd", "metrics/effective_rank/odd"}) != []


@pytest.mark.slow
def test_a_run_writes_what_the_page_says_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "peak_flops", lambda kind: 1e12)  # this device has no known one
    config = tiny_config()
    config.shaping.target = "both"
    config.metrics.names = ("effective_rank", "curvature")
    config.metrics.of_groups = ("elliptical_novelty", "log_determinant", "lidar")
    config.metrics.drift_every = 1
    config.shaping.indicators += ("elliptical_novelty",)
    config.shaping.explore_weights += (1.0,)
    config.shaping.exploit_weights += (1.0,)
    config.metrics.dataset_stride = 2
    config.evaluation.metrics = True
    config.hidden_states.compare_every = 1
    config.algorithms.importance.level = "token"
    config.algorithms.batch_rules.max_sampling_rounds = 3
    config.rewards.function = "tests.verifiers:by_parity"  # equal rewards would all be dropped
    config.data.curriculum = "learnability"
    config.rollout.in_turns = True
    keys = keys_of_run(config, tmp_path / "run")
    config.update_from_flattened_dict(
        {
            "algorithms.name": "ppo",
            "algorithms.advantage.kl_reward_coefficient": 0.1,
            "algorithms.advantage.kl_target": 0.1,
            "algorithms.loss.kl_coefficient": 0.0,
            "algorithms.batch_rules.max_sampling_rounds": 0,
            "data.curriculum": "",
            "training.num_steps": 3,
            "hidden_states.compare_every": 0,
            "rollout.in_turns": False,
            "rollout.max_staleness": 2,
            "rollout.in_flight": "keep",
            "rollout.jax_processes": 2,
            "rollout.groups_per_call": 1,
            "evaluation.every_steps": 0,
        }
    )
    keys |= keys_of_run(config, tmp_path / "ppo")
    save_chat_model(tmp_path / "model")
    with_turns = tiny_config()
    with_turns.update_from_flattened_dict(
        {
            "model.path": str(tmp_path / "model"),
            "data.task": "environment",
            "environment.name": "tests.environments.users:Vowels",
            "rollout.stop_token_ids": tuple(range(0, 280, 7)),  # an untrained policy never ends
            "rollout.max_prompt_tokens": 64,
            "rollout.max_response_tokens": 96,
            "training.num_steps": 1,
        }
    )
    keys |= keys_of_run(with_turns, tmp_path / "turns")
    with_steps = tiny_config()
    with_steps.update_from_flattened_dict(
        {
            "algorithms.name": "prof",
            "algorithms.advantage.num_removed": 2,
            "rewards.function": "tests.verifiers:of_steps",
            "training.num_steps": 1,
            "evaluation.every_steps": 0,
        }
    )
    keys |= keys_of_run(with_steps, tmp_path / "steps")
    assert undocumented(keys) == []
    unwritten = [key for key in OUR_KEYS if not any(as_expression(key).match(k) for k in keys)]
    assert sorted(unwritten) == OF_OTHER_RUNS, unwritten


def keys_of_run(config, workdir):
    """The keys of all rows that a run writes."""
    assert train(config, str(workdir)) == 0
    lines = (workdir / "metrics.jsonl").read_text().splitlines()
    return {key for line in lines for key in json.loads(line)} - {"step"}
