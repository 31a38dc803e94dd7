"""Groups that fail answer again, with a longer and longer part of a solution in their prompt."""

import dataclasses

import numpy as np
import pytest

from semrl_jax import data
from semrl_jax.data import arithmetic
from semrl_jax.metrics import Measurement, MetricKey
from semrl_jax.rewards import Verdict
from semrl_jax.sampling.batch_scalars import batch_scalars
from semrl_jax.sampling.hints import Hints
from semrl_jax.sampling.prompt_sources import training_prompts
from semrl_jax.sampling.requests import training_draw
from semrl_jax.sampling.scoring import Scored, ScoredRollout, num_sampled_tokens
from tests.cases import refused
from tests.fixtures import make_scored
from tests.tiny import tiny_config

KEY = MetricKey("effective_rank")
SIZE = 4


@pytest.fixture
def config():
    config = tiny_config()
    config.rollout.hint_rounds, config.rollout.max_prompt_tokens = 3, 64
    config.data.hint_input = "{input}{hint}"
    return config


def answers(requests, correct):
    """Scored responses with a metric; the groups `correct` have one that is right."""
    items = []
    for request in requests:
        item = make_scored(0)
        fields = {**request.rollout_fields, "response_ids": np.array([5, 1], np.int32)}
        rollout = dataclasses.replace(item.rollout, **fields)
        is_right = request.group_id in correct and request.sample_index == 1
        items.append(
            ScoredRollout(rollout, "", "7", Verdict(float(is_right), is_right, True, None))
        )
    values = np.array([request.seed % 97 for request in requests], np.float32)
    return Scored(items, {KEY: Measurement(values, np.ones(len(items), bool))})


def played(config, solved_in, num_prompts=3):
    """Answers again until the round in which a group is solved; 0: without a hint."""
    tokenizer = data.character_tokenizer()
    prompts = training_prompts(config, tokenizer, lambda line: None)
    examples = prompts.examples[:num_prompts]
    draw = training_draw(config, 2, 0, examples)
    groups, calls = list(draw.references), []

    def sample(requests):
        calls.append(requests)
        number = len(calls)
        return answers(requests, {g for g, n in zip(groups, solved_in) if n == number})

    first = answers(draw.requests, {g for g, n in zip(groups, solved_in) if n == 0})
    by_group = dict(zip(groups, examples, strict=True))
    found = Hints(config, tokenizer).answered(first, draw, by_group, sample)
    return found, calls, draw, examples, tokenizer


def test_failed_groups_read_a_quarter_a_half_and_three_quarters_of_the_solution(config):
    found, calls, draw, examples, tokenizer = played(config, [0, 2, 9])
    groups = list(draw.references)
    asked = [sorted({request.group_id for request in call}) for call in calls]
    assert asked == [groups[1:], groups[1:], groups[2:]]
    solutions = [
        arithmetic.worked_response(problem)
        for problem in arithmetic.training_problems(config.seed, config.data.num_prompts)
    ]
    for number, call in enumerate(calls, 1):
        for request in call:
            example = examples[groups.index(request.group_id)]
            solution = solutions[example.index]
            text = example.prompt + solution[: round(len(solution) * number / 4)]
            assert tokenizer.decode(request.prompt_ids) == text
    seeds = [request.seed for call in (draw.requests, *calls) for request in call]
    assert len(set(seeds)) == len(seeds)
    keys = [(item.rollout.group_id, item.rollout.sample_index) for item in found]
    assert keys == [(group, sample) for group in groups for sample in range(SIZE)]
    assert [item.rollout.hint for item in found] == [0.0] * 4 + [0.5] * 4 + [0.75] * 4
    # Two groups were sampled once more than is trained on, and the last group twice more.
    of_response = len(found[0].rollout.response_ids)
    assert num_sampled_tokens(found) == (12 + 8 + 8 + 4) * of_response
    by_key = {(r.group_id, r.sample_index): r for r in (*draw.requests, *calls[1], *calls[2])}
    for item, value in zip(found, found.metrics[KEY].value, strict=True):
        request = by_key[item.rollout.group_id, item.rollout.sample_index]
        assert item.rollout.prompt_ids.tolist() == request.prompt_ids.tolist()
        assert value == request.seed % 97  # the metrics are of these responses
    scalars = batch_scalars(found, np.zeros((3, SIZE), np.float32))
    assert scalars["rollout/hints/fraction"] == 2 / 3
    assert scalars["rollout/hints/correct"] == 1 / 8
    assert set(found.columns()["hint"]) == {0.0, 0.5, 0.75}


def test_without_a_failed_group_or_a_short_hint_nothing_is_sampled_again(config):
    found, calls, draw, *_ = played(config, [0, 0, 0])
    assert calls == [] and set(found.columns()["hint"]) == {0.0}
    scalars = batch_scalars(found, np.zeros((3, SIZE)))
    assert {n: x for n, x in scalars.items() if "hints" in n} == {"rollout/hints/fraction": 0.0}
    longest = max(len(request.prompt_ids) for request in draw.requests)
    config.rollout.max_prompt_tokens = longest  # no room for a hint
    _, calls, *_ = played(config, [9, 9, 9])
    assert calls == []
    config.rollout.max_prompt_tokens = longest + 14  # room for the shortest
    _, calls, *_ = played(config, [9, 9, 9])
    assert len(calls) == 1


def test_a_prompt_without_a_solution_and_the_text_of_the_paper():
    config = tiny_config()
    config.rollout.hint_rounds, config.rollout.max_prompt_tokens = 3, 400
    tokenizer = data.train_tokenizer(["The following text is the answer: 1 + 2"], 300)
    hints = Hints(config, tokenizer)
    given = (np.array(tokenizer.encode("First add. Then {hint}."), np.int32),)
    example = data.PromptExample(
        "ignored", np.array([1], np.int32), "3", "", 0, question="1 + 2 {hint}?", given=given,
        template="direct",
    )  # fmt: skip
    text = tokenizer.decode(hints.prompts({7: example}, 0.5)[7])
    assert text == (
        "Question: 1 + 2 {hint}?\n The following text is the beginning part of the answer, which "
        "you can refer to for solving the problem:\nFirst add. T\nAnswer: "
    )
    assert hints.prompts({7: dataclasses.replace(example, given=())}, 0.5) == {}
    hints.check([example])
    config.rollout.max_prompt_tokens = 40
    refused(
        r"hint_rounds=3: the first 1 prompts have \d+ to \d+ tokens with their first hint, more "
        "than rollout.max_prompt_tokens=40; raise it",
        hints.check,
        [example],
    )
