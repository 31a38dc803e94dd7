"""Which prompts a curriculum draws, and runs with one."""

import dataclasses
import sys
import types

import numpy as np
import pytest

from semrl_jax.data.curricula import PARTS, Curriculum, PromptHistory, Prompts, find_curriculum
from semrl_jax.data.prompts import Position, advanced, next_rows
from semrl_jax.runs import train
from semrl_jax.support.errors import UserError
from semrl_jax.support.modules import module_names
from tests.cases import refused
from tests.data.test_prompts import numbered
from tests.fixtures import read_rows, stable
from tests.launch.comparison import restore_on_host

SOURCES = ("easy",) * 4 + ("hard",) * 2
RATES = np.array([0.0, 0.125, 0.5, 1.0, 0.0, 0.0], np.float32)
VISITS = np.array([1, 2, 1, 3, 0, 1], np.int32)
WEIGHTS = {
    "learnability": [0.02, 0.125 * 0.875, 0.25, 0.02, 0.25, 0.02],
    "learnability:floor=0": [0, 0.125 * 0.875, 0.25, 0, 0.25, 0],
    "window": [0.05, 1, 1, 0.05, 1, 0.05],
    "window:low=0.5:high=1:outside=0": [0, 0, 1, 1, 1, 0],
    "replay": [1, 4, 1, 1, 1, 1],
    "replay:rate=0.5:boost=2": [1, 2, 2, 1, 1, 1],
    "mixture:share=easy,3:share=hard,1": [0.75, 0.75, 0.75, 0.75, 0.5, 0.5],
    "mixture:share=hard,1": [0, 0, 0, 0, 0.5, 0.5],
    "lessons": [1, 1, 1, 1, 0, 0],  # the easy ones have a mean of 0.41
    "lessons:learned=0.4": [0.2, 0.2, 0.2, 0.2, 1, 1],
    "lessons:learned=0.4:visits=2:review=0": [0, 0, 0, 0, 1, 1],
    "lessons:learned=0": [0.2, 0.2, 0.2, 0.2, 1, 1],  # one of two hard ones was never visited
}


def weights(entry, visits=VISITS):
    found = find_curriculum(entry)
    return found.module.weights(Prompts(RATES, visits, SOURCES), found.options)


@pytest.mark.parametrize("entry", WEIGHTS)
def test_weights(entry):
    np.testing.assert_allclose(weights(entry), WEIGHTS[entry], rtol=1e-12)


def test_every_curriculum_is_here_and_learned_lessons_count_alike():
    assert {entry.partition(":")[0] for entry in WEIGHTS} == set(
        module_names("semrl_jax.data.curricula", PARTS)
    )
    np.testing.assert_array_equal(weights("lessons:learned=0", VISITS + 1), 1)


def test_draws_follow_the_weights():
    """20,000 draws: six standard deviations of a share are at most 0.021."""
    found = find_curriculum("mixture:share=easy,3:share=hard,1")
    prompts = Prompts(RATES, VISITS, SOURCES)
    drawn = np.array([found.draw(prompts, (7, n), 3) for n in range(20_000)])
    assert (np.sort(drawn, axis=1)[:, 1:] > np.sort(drawn, axis=1)[:, :-1]).all()  # none twice
    shares = np.bincount(drawn[:, 0], minlength=6) / len(drawn)
    np.testing.assert_allclose(shares, np.array([0.75] * 4 + [0.5] * 2) / 4, atol=0.021)
    np.testing.assert_array_equal(drawn[5], found.draw(prompts, (7, 5), 3))


def test_prompts_without_weight_come_last():
    found = find_curriculum("mixture:share=hard,1")
    drawn = found.draw(Prompts(RATES, VISITS, SOURCES), (0, 0), 8)
    assert set(drawn[:2]) == {4, 5} and set(drawn[:6]) == set(range(6))
    np.testing.assert_array_equal(drawn[6:], drawn[:2])  # fewer prompts than a step has


def test_a_position_counts_prompts_and_keeps_what_was_seen():
    curriculum = find_curriculum("learnability:floor=0")
    dataset = dataclasses.replace(numbered(5), curriculum=curriculum)
    seen = PromptHistory.nothing(5).after([0, 1, 2], np.array([[1, 1], [0, 0], [1, 0]], bool))
    np.testing.assert_array_equal(seen.rates, np.float32([1, 0, 0.5, 0, 0]))
    np.testing.assert_array_equal(seen.visits, [1, 1, 1, 0, 0])
    start = Position(1, 4, seen)
    position = advanced(dataset, start, 3)
    assert set(next_rows(dataset, 7, start, 3)) == {2, 3, 4}
    assert position[:2] == (2, 2) and position.seen is seen


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ("learning", r"data.curriculum='learning' is unknown; did you mean 'learnability'"),
        ("window:lowest=0", r"'lowest=0' must be OPTION=VALUE with an option of 'window': low, "),
        ("window:low", "'low' must be OPTION=VALUE"),
        ("window:low=a", "low='a' must be a number"),
        ("window:low=0:low=1", "low is set twice"),
        ("window:low=2", r"low=2.0 must be .*\[0, 1\]"),
        ("window:low=0.8:high=0.2", "low=0.8 must be at most high=0.2"),
        ("learnability:floor=nan", "floor=nan must be"),
        ("mixture", "mixture needs :share=SOURCE,NUMBER"),
        ("mixture:share=easy", "share='easy' must be SOURCE,NUMBER above 0"),
        ("mixture:share=easy,1:share=easy,3", "'easy' has two shares; keep one"),
        ("lessons:visits=0", "visits=0.0 must be at least 1"),
        ("replay:boost=inf", "boost=inf must be"),
        ("mixture:share=easy,-1", "share='easy,-1' must be SOURCE,NUMBER above 0"),
    ],
)
def test_a_wrong_entry_is_named(entry, message):
    assert refused(message, find_curriculum, entry).count("data.curriculum") == 1


def test_wrong_options_of_a_users_curriculum_are_named(monkeypatch):
    module = types.ModuleType("users.order")
    module.Options, module.weights = int, None
    monkeypatch.setitem(sys.modules, "users", types.ModuleType("users"))
    monkeypatch.setitem(sys.modules, "users.order", module)
    refused(r"'users.order': Options must be a frozen dataclass", find_curriculum, "users.order")


def test_weights_that_are_none_are_named():
    module = types.ModuleType("mine")
    module.weights = lambda prompts, options: np.full(6, np.nan)
    with pytest.raises(UserError, match=r"data.curriculum: weights of mine failed .*one finite"):
        Curriculum(module, None).draw(Prompts(RATES, VISITS, SOURCES), (0,), 1)


def test_a_source_that_no_prompt_has_is_named(config, tmp_path):
    config.data.curriculum = "mixture:share=gsm8k,1"
    with pytest.raises(UserError, match="no prompt is of 'gsm8k'; the sources are arithmetic"):
        train(config, str(tmp_path / "run"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({}, id="now"),
        pytest.param({"rollout.max_staleness": 1}, id="ahead", marks=pytest.mark.soak),
    ],
)
@pytest.mark.usefixtures("reports_where_looked_at")
def test_a_run_resumes_with_the_same_prompts(fields, config, tmp_path):
    config.rewards.function = "tests.verifiers:by_parity"
    config.evaluation.every_steps = 0
    config.data.curriculum = "learnability"
    config.data.num_prompts = 12
    config.update_from_flattened_dict(fields)
    for num_steps, name in ((3, "straight"), (2, "resumed"), (3, "resumed")):
        config.training.num_steps = num_steps
        assert train(config, str(tmp_path / name)) == 0
    straight, resumed = (stable(read_rows(tmp_path / name)) for name in ("straight", "resumed"))
    for row, expected in zip(resumed[:3], straight[:3], strict=True):
        assert {key: row[key] for key in expected} == expected
    fractions = [row["curriculum/visited_fraction"] for row in straight[:3]]
    assert fractions == sorted(fractions) and fractions[0] > 0
    for step in range(3):
        name = f"rollouts/step_{step:06d}.parquet"
        expected = (tmp_path / "straight" / name).read_bytes()
        assert (tmp_path / "resumed" / name).read_bytes() == expected
    seen = restore_on_host(tmp_path / "straight" / "checkpoints" / "3" / "state")["seen"]
    assert seen["visits"].sum() == 3 * config.data.prompts_per_step
    assert 0 < seen["rates"].mean() < 1
