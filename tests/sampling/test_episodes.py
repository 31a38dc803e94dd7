"""The seam of a response: what an episode of two turns finds there, and what refuses it."""

import dataclasses

import numpy as np
import pytest

from semrl_jax import data
from semrl_jax.sampling.choosing_source import check_episodes
from semrl_jax.sampling.episodes import Episodes, SingleTurn
from semrl_jax.sampling.requests import Draw, stream_seed
from semrl_jax.sampling.weights import Weights
from semrl_jax.support.errors import UserError
from semrl_jax.types import Rollout, SampleRequest, VersionSpan, WeightVersion
from tests.sampling.parts import sampler_of
from tests.tiny import tiny_config

VERSION = WeightVersion("run", "attempt", 3, "digest")
REPLY = np.array([7, 8, 9], np.int32)  # what the environment writes
LIMIT = 16
LEAST = 12  # `min_tokens`, more than the room of a second turn


class TwoTurns:
    """Two turns of the policy with a reply of three tokens between them; the page's example."""

    is_divisible = False
    counters = {}  # noqa: RUF012 - has no events

    def play(self, draw, ask, clock):
        first = {rollout.sample_id: rollout for rollout in ask(draw.requests)}
        again = []
        for request in draw.requests:  # in the order of the draw, not of arrival
            said = first[request.sample_id].response_ids
            prompt_ids = np.concatenate([request.prompt_ids, said, REPLY])
            seed = stream_seed(request.seed, 1)
            again.append(dataclasses.replace(request, prompt_ids=prompt_ids, seed=seed))
        room = LIMIT - max(len(said.response_ids) for said in first.values()) - len(REPLY)
        requests = {request.sample_id: request for request in draw.requests}
        for second in ask(again, max_tokens=room):
            yield self.joined(requests[second.sample_id], first[second.sample_id], second)

    def joined(self, request, first, second):
        def between(name, dtype, fill):
            parts = getattr(first, name), np.full(len(REPLY), fill, dtype), getattr(second, name)
            return np.concatenate(parts)

        ids = np.concatenate([first.response_ids, REPLY, second.response_ids])
        return dataclasses.replace(
            second,
            prompt_ids=request.prompt_ids,
            response_ids=ids,
            rollout_logprobs=between("rollout_logprobs", np.float32, 0.0),
            response_mask=between("response_mask", bool, False),
            versions=(VersionSpan(VERSION, 0, len(ids)),),
            generate_s=first.generate_s + second.generate_s,
        )


class Engine:
    """Writes 4 tokens in a first turn and 5 in a second; the last response comes first."""

    def __init__(self):
        self.calls = []

    def release(self):
        pass

    def generate(self, requests, sampling, states, **options):
        assert sampling.min_tokens == min(LEAST, sampling.max_tokens)
        self.calls.append((requests, sampling.max_tokens, options["version"]))
        count = 4 if len(self.calls) == 1 else 5
        for request in reversed(requests):
            yield Rollout(
                **request.rollout_fields,
                response_ids=np.arange(20, 20 + count, dtype=np.int32),
                rollout_logprobs=np.full(count, -0.5, np.float32),
                rollout_raw_logprobs=None,
                finish_reason="stop",
                versions=(VersionSpan(options["version"], 0, count),),
                generate_s=1.0,
            )


def play(episodes):
    """A draw of two responses to one prompt, and the engine that was asked."""
    config, engine = tiny_config(), Engine()
    config.rollout.max_response_tokens = LIMIT
    sampler = sampler_of(
        config,
        client=engine,
        episodes=episodes,
        tokenizer=data.character_tokenizer(),
        end_token_ids=(1,),
        weights=Weights(3, lambda: iter(()), False, version=VERSION),
    )
    prompt = np.arange(5, dtype=np.int32)
    requests = [SampleRequest(f"train/3/0/{i}", 0, i, prompt, seed=i) for i in range(2)]
    options = {"temperature": 1.0, "min_tokens": LEAST, "arrived": lambda rollout: None}
    found = sampler.sample_here(Draw(requests, {0: "9"}, {}), **options)
    return [item.rollout for item in found], engine


def test_an_episode_of_two_turns_fits_the_seam():
    assert isinstance(TwoTurns(), Episodes)
    found, engine = play(TwoTurns())
    (first, limit, _), (second, room, version) = engine.calls
    # The numbers of the example in episodes.py.
    assert [len(request.prompt_ids) for request in (*first, *second)] == [5, 5, 12, 12]
    assert (limit, room, version) == (16, 9, VERSION)
    assert len({request.seed for request in (*first, *second)}) == 4
    for rollout in found:
        assert rollout.response_ids.tolist() == [20, 21, 22, 23, 7, 8, 9, 20, 21, 22, 23, 24]
        assert rollout.response_mask.tolist() == [True] * 4 + [False] * 3 + [True] * 5
        assert rollout.rollout_logprobs.tolist() == [-0.5] * 4 + [0.0] * 3 + [-0.5] * 5
        assert (rollout.num_policy_tokens, rollout.generate_s) == (9, 2.0)


def test_parts_refuse_episodes_of_several_turns():
    config = tiny_config()
    config.rollout.max_staleness = 2
    check_episodes(config, TwoTurns())
    config.rollout.in_flight = "keep"
    check_episodes(config, SingleTurn())
    with pytest.raises(UserError, match=r"in parts .* TwoTurns has turns .* in_flight='wait'"):
        check_episodes(config, TwoTurns())
