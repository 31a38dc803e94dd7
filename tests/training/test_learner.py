"""The mini-batches of a step, and what it computes."""

import types

import numpy as np
import pytest

from configs.default import get_config
from semrl_jax.models import DecoderConfig, Lora
from semrl_jax.training.learner import ForwardPasses, Learner
from semrl_jax.training.passes import NONE, PASS, UPDATE
from semrl_jax.training.references import References
from semrl_jax.types import RolloutBatch


def rows_of(step, ppo_epochs):
    """Rows of the mini-batches of 12 groups of 3 responses, 6 groups each."""
    config = get_config()
    config.rollout.group_size, config.training.ppo_epochs = 3, ppo_epochs
    holder = types.SimpleNamespace(config=config)
    found = Learner._minibatches(holder, num_rows=36, size=18, step=step)
    return [np.arange(36)[rows].tolist() for rows in found]


def test_later_passes_have_other_whole_groups():
    in_order = [list(range(18)), list(range(18, 36))]
    assert rows_of(0, ppo_epochs=1) == in_order
    passes = [rows_of(step, ppo_epochs=3) for step in range(4)]
    assert [found[:2] for found in passes] == [in_order] * 4
    later = [found[start] + found[start + 1] for found in passes for start in (2, 4)]
    for rows in later:
        assert sorted(rows) == list(range(36))
        for start in range(0, 36, 3):
            assert rows[start : start + 3] == list(range(rows[start], rows[start] + 3))
    assert len(set(map(tuple, later))) == 8  # each pass of each step has an order of its own
    assert rows_of(3, ppo_epochs=3) == passes[3]


MODEL = DecoderConfig(
    vocab_size=100, hidden_size=8, intermediate_size=16, num_layers=3, num_heads=2, num_kv_heads=1,
    head_dim=4,
)  # fmt: skip
# Two sequences: a prompt of 2 with a response of 5; and one of 1 with two conversations, of which
# 3 tokens are sampled.
SEGMENTS = np.array([[1, 1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 2, 2, 0]])
MASK = np.array([[True] * 5, [True, False, True, True, False]])
KERNELS = 3 * (8 * 8 * 2 + 8 * 4 * 2 + 3 * 8 * 16)
LAYERS, HEAD = 2 * (7 + 3 + 2) * KERNELS, 2 * 8 * 8 * 100
ATTENTION = 3 * 2 * 8 * (7 * 7 + 3 * 3 + 2 * 2)  # 2 products of half of the pairs, 2 heads of 4
FORWARD = LAYERS + ATTENTION + HEAD
CRITIC = LAYERS + ATTENTION
ADAPTERS = 2 * 12 * (2 * 3 * (8 + 8))  # rank 2 on the queries


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 3 * FORWARD),
        ({"old": True}, 4 * FORWARD),
        ({"reference": PASS, "ppo_epochs": 2}, FORWARD + 6 * FORWARD),
        ({"reference": UPDATE, "ppo_epochs": 2}, 8 * FORWARD),
        ({"critic": True, "old": True}, 4 * FORWARD + 4 * CRITIC),
        ({"critic": True, "updated": {"critic"}}, 4 * CRITIC),
        ({"critic": True, "updated": {"critic"}, "reference": UPDATE}, 4 * CRITIC),
        (
            {"lora": Lora(("query",), 2, 4.0, False), "reference": UPDATE},
            2 * (LAYERS + HEAD) + 3 * ATTENTION + 3 * ADAPTERS + FORWARD,
        ),
    ],
)
def test_operations_of_a_step_worked_by_hand(settings, expected):
    known = {"old": False, "reference": NONE, "ppo_epochs": 1, "critic": False, "lora": None}
    case = types.SimpleNamespace(**known | {"updated": {"policy"}} | settings)
    config = get_config()
    config.training.ppo_epochs = case.ppo_epochs
    model = types.SimpleNamespace(config=MODEL)
    holder = types.SimpleNamespace(
        config=config, policy=model, reference_policy=None, lora=case.lora,
        plan=types.SimpleNamespace(own_teacher=False, reference=case.reference),
        references=References(),
        critic=types.SimpleNamespace(model=model) if case.critic else None,
    )  # fmt: skip
    batch = RolloutBatch(SEGMENTS, SEGMENTS, SEGMENTS, MASK, MASK.astype(np.float32))
    passes = ForwardPasses(MASK if case.old else None, None, MASK if case.critic else None)
    assert Learner.flops(holder, batch, passes, case.updated) == expected
