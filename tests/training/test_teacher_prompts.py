"""The prompts of a teacher that reads the reference answer."""

import dataclasses

import numpy as np

from configs.default import get_config
from semrl_jax.data import arithmetic_prompts, character_tokenizer
from semrl_jax.data.arithmetic import training_problems
from semrl_jax.training.rollout_batch import pad_batch
from semrl_jax.training.teacher_prompts import TeacherPrompts
from tests.cases import refused
from tests.fixtures import make_scored
from tests.training.test_conversations import CONFIG


def batch_of(prompts, responses):
    rollouts = []
    for prompt, (ids, mask) in zip(prompts, responses, strict=True):
        values = np.array(ids, np.int32), np.array(mask, bool)
        scored = make_scored(response_ids=values[0], response_mask=values[1])
        rollouts.append(dataclasses.replace(scored.rollout, prompt_ids=prompt))
    return pad_batch(rollouts, pad_token_id=9, max_prompt_tokens=16, max_response_tokens=16)


def test_a_batch_has_the_same_responses_after_other_prompts():
    prompts = [np.array(ids, np.int32) for ids in ([1, 2], [3], [1, 2])]
    others = [np.array(ids, np.int32) for ids in ([4, 1, 2, 5], [7, 8, 3], [4, 1, 2, 5])]
    responses = [([1, 2, 3], [1, 1, 1]), ([4, 5, 6], [1, 0, 1]), ([2], [1])]
    teacher = TeacherPrompts({a.tobytes(): b for a, b in zip(prompts, others)}, 4, 9)
    given = batch_of(prompts, responses)
    found, wanted = teacher.batch(given), batch_of(others, responses)
    for name, values in wanted._asdict().items():
        ours = getattr(found, name)
        if values is None:
            assert ours is None
            continue
        assert ours.dtype == values.dtype, name
        # The bucket of the prompts may be smaller: compare what counts.
        width = min(ours.shape[1], values.shape[1])
        np.testing.assert_array_equal(ours[:, -width:], values[:, -width:])
        if name == "segment_ids":
            assert ours.sum() == values.sum()


def test_the_answer_is_in_the_prompt():
    config, tokenizer = get_config(), character_tokenizer()
    config.data.teacher_input = "{answer}\n{input}"
    architecture = dataclasses.replace(CONFIG, max_position_embeddings=1600)
    given = tokenizer, arithmetic_prompts(tokenizer, training_problems(0, 4)), architecture
    found = TeacherPrompts.of(config, *given)
    for example in given[1].examples:
        ids = found.prompts[example.prompt_ids.tobytes()]
        assert tokenizer.decode(ids) == f"{example.answer}\n{example.prompt}"
    config.training.micro_batch_tokens = 20
    refused("data.teacher_input makes a prompt", TeacherPrompts.of, config, *given)
    config.data.teacher_input = ""
    assert TeacherPrompts.of(config, *given) is None
