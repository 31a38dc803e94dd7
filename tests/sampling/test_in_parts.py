"""Responses that are sampled in parts."""

import dataclasses
import types

import numpy as np
import pytest

from semrl_jax import data
from semrl_jax.sampling.in_parts import InParts, _Batch, continued
from semrl_jax.sampling.requests import Draw
from semrl_jax.sampling.splicing import cut, joined, with_context
from semrl_jax.settings.rollout import longest_prompt, num_parts, part_tokens
from semrl_jax.types import Rollout, SampleRequest, VersionSpan, WeightVersion
from tests.sampling.parts import made, sampler_of
from tests.tiny import tiny_config

OLD, NEW = (WeightVersion("run", "attempt", step, "digest") for step in (3, 4))
PROMPT = np.array([3, 4], np.int32)


def part(first, count, version, finish_reason="length"):
    """Tokens first, first + 1, ...; every array can be told from the token."""
    ids = np.arange(first, first + count, dtype=np.int32)
    return Rollout(
        sample_id="a",
        group_id=0,
        sample_index=0,
        prompt_ids=PROMPT if first == 10 else np.concatenate([PROMPT, np.arange(10, first)]),
        response_ids=ids,
        rollout_logprobs=-ids.astype(np.float32),
        rollout_raw_logprobs=None,
        finish_reason=finish_reason,
        versions=(VersionSpan(version, 0, count),),
        hidden_states=np.full((count, 1, 2), ids[:, None, None], np.float32),
        layers=(-1,),
        generate_s=1.5,
    )


def test_the_parts_of_a_response_become_one():
    whole = joined(joined(part(10, 4, OLD), part(14, 4, OLD)), part(18, 2, NEW, "eos"))
    np.testing.assert_array_equal(whole.response_ids, np.arange(10, 20))
    np.testing.assert_array_equal(whole.rollout_logprobs, -np.arange(10, 20))
    np.testing.assert_array_equal(whole.hidden_states[:, 0, 1], np.arange(10, 20))
    np.testing.assert_array_equal(whole.prompt_ids, PROMPT)
    assert whole.versions == (VersionSpan(OLD, 0, 8), VersionSpan(NEW, 8, 10))
    assert whole.response_mask.tolist() == [True] * 10
    assert (whole.finish_reason, whole.generate_s) == ("eos", 4.5)
    assert whole.rollout_raw_logprobs is None


def routed(rollout, mark=0):
    """With the experts of all tokens but the last: their ids, plus `mark`."""
    ids = np.concatenate([rollout.prompt_ids, rollout.response_ids])[:-1] + mark
    return dataclasses.replace(rollout, routed_experts=ids.astype(np.uint8).reshape(-1, 1, 1))


def test_each_token_keeps_the_experts_that_it_was_sampled_with():
    """Later parts compute earlier tokens again, perhaps with other experts."""

    def experts(rollout):
        return rollout.routed_experts.reshape(-1).tolist()

    first = routed(part(10, 4, OLD))
    assert experts(first) == [3, 4, 10, 11, 12]
    whole = joined(first, routed(part(14, 2, NEW), 100))
    # Only the second part computed token 13.
    assert experts(whole) == [3, 4, 10, 11, 12, 113, 114]
    assert experts(cut(whole, 3, "stop")) == [3, 4, 10, 11]
    told = with_context(first, np.array([14, 15], np.int32))
    assert experts(told) == experts(first)
    assert experts(joined(told, routed(part(16, 2, NEW), 100)))[5:] == [113, 114, 115, 116]
    other = dataclasses.replace(part(16, 6, NEW), prompt_ids=PROMPT)  # another conversation
    assert experts(joined(told, routed(other, 100))) == experts(first)
    unknown = dataclasses.replace(part(14, 2, NEW), routed_experts=None)
    assert experts(joined(first, unknown)) == experts(first)


def test_what_the_engine_of_one_part_does_not_send_is_left_out():
    """The replicas of a run may have several engines."""
    own, other = part(10, 4, OLD), part(14, 4, NEW)
    own = dataclasses.replace(own, rollout_raw_logprobs=own.rollout_logprobs)
    for whole in (joined(own, other), joined(other, own)):
        assert whole.rollout_raw_logprobs is None and len(whole.rollout_logprobs) == 8


def test_the_next_part_begins_after_the_tokens_before_with_other_random_numbers():
    request = SampleRequest("a", 0, 0, PROMPT, seed=7)
    parts = [request, *(continued(request, part(10, 3, OLD), number) for number in (1, 2))]
    assert parts[1].prompt_ids.tolist() == [3, 4, 10, 11, 12]
    assert len({each.seed for each in parts}) == 3
    assert {each.sample_id for each in parts} == {"a"}


def test_a_stopped_response_loses_its_later_tokens():
    whole = joined(part(10, 4, OLD), part(14, 4, NEW))
    within, at_once = cut(whole, 6, "stop"), cut(whole, 3, "stop")
    assert within.response_ids.tolist() == [10, 11, 12, 13, 14, 15]
    assert within.versions == (VersionSpan(OLD, 0, 4), VersionSpan(NEW, 4, 6))
    assert at_once.versions == (VersionSpan(OLD, 0, 3),)
    assert {within.finish_reason, at_once.finish_reason} == {"stop"}
    assert len(within.hidden_states) == len(within.rollout_logprobs) == 6
    ended = dataclasses.replace(whole, finish_reason="eos")
    assert cut(ended, 8, "stop") is ended
    assert cut(whole, 8, "stop").finish_reason == "stop"


def test_a_stop_string_may_span_two_parts():
    config = tiny_config()
    config.rollout.stop_strings = ("12+3",)
    tokenizer = data.character_tokenizer()
    batches = made(InParts, config=config, sampler=sampler_of(tokenizer=tokenizer))
    ids = np.array(tokenizer.encode("4=12+3-5"), np.int32)
    found = batches._ended(dataclasses.replace(part(10, len(ids), OLD), response_ids=ids))
    assert tokenizer.decode(found.response_ids) == "4=12+3"
    assert found.finish_reason == "stop"


def test_the_least_length_of_a_response_counts_its_earlier_parts():
    config, asked = tiny_config(), []
    config.rollout.update(in_flight="keep", max_staleness=2, max_response_tokens=10, min_tokens=7)

    def generate(requests, **options):
        asked.append((options["max_tokens"], options["min_tokens"]))
        yield from ()

    sampler = types.SimpleNamespace(generate=generate)
    batches = made(InParts, config=config, sampler=sampler, measurer=None)
    draw = Draw([SampleRequest("a", 0, 0, PROMPT, seed=7)], {}, {})
    batch = _Batch(0, draw, None, {"a": part(10, 5, OLD)})
    for newest in (0, 1):
        batches._part(batch, newest, print)
    assert asked == [(5, 7), (5, 2)]  # the sampler lowers 7 to 5


@pytest.mark.parametrize(
    ("in_flight", "lag", "expected"),
    [("wait", 3, (1, 10, 12)), ("keep", 3, (3, 4, 20)), ("keep", 0, (1, 10, 12))],
)
def test_the_parts_and_the_longest_prompt(in_flight, lag, expected):
    config = tiny_config()
    rollout = config.rollout
    rollout.update(
        in_flight=in_flight, max_staleness=lag, max_prompt_tokens=12, max_response_tokens=10
    )
    assert (num_parts(rollout), part_tokens(rollout), longest_prompt(config)) == expected
