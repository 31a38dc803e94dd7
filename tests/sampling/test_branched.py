"""Responses that go on after a prefix of another one of their group."""

import dataclasses

import numpy as np
import pytest

from semrl_jax import data
from semrl_jax.rewards import Verdict
from semrl_jax.sampling.batch_scalars import batch_scalars
from semrl_jax.sampling.branched import Branched
from semrl_jax.sampling.branching import Place, Whole, find_rule
from semrl_jax.sampling.episodes import Episodes
from semrl_jax.sampling.exchange import pack_scored, unpack_scored
from semrl_jax.sampling.requests import Draw
from semrl_jax.sampling.scoring import Scored, num_sampled_tokens
from semrl_jax.sampling.weights import Weights
from semrl_jax.settings.rollout import longest_prompt
from semrl_jax.types import (
    HiddenStateParams,
    Rollout,
    SampleRequest,
    SamplingParams,
    VersionSpan,
    WeightVersion,
)
from tests.cases import refused
from tests.sampling.parts import sampler_of
from tests.tiny import tiny_config

VERSION = WeightVersion("run", "attempt", 3, "digest")
LIMIT = 16
PROMPT = np.arange(2, 7, dtype=np.int32)
LENGTHS = [8, 10]  # of the whole responses of a group
PEAKS = [3, 6]  # where their entropy is highest
ONE_TOKEN = "cure:branches=1:top_tokens=1:min_characters=1"


class Engine:
    """Whole responses have the tokens 10, 11, ...; branches have 12 tokens from 20 on.

    Log-probabilities and states can be told from the sample and the token. The last response comes
    first.
    """

    def __init__(self):
        self.calls = []

    def release(self):
        pass

    def generate(self, requests, sampling, states, *, entropies, **options):
        self.calls.append((requests, sampling.max_tokens, entropies))
        is_first = len(self.calls) == 1
        for request in reversed(requests):
            index = request.sample_index
            count = LENGTHS[index] if is_first else 12
            ids = np.arange(count, dtype=np.int32) + (10 if is_first else 20)
            by_token = (100 * index + np.arange(count)).astype(np.float32)
            at_peak = np.zeros(count, np.float32)
            if is_first:
                at_peak[PEAKS[index]] = 1
            yield Rollout(
                **request.rollout_fields,
                response_ids=ids,
                rollout_logprobs=-by_token,
                rollout_raw_logprobs=-2 * by_token,
                finish_reason="eos",
                versions=(VersionSpan(VERSION, 0, count),),
                hidden_states=by_token.reshape(-1, 1, 1),
                layers=(-1,),
                generate_s=1.0,
                entropies=at_peak if entropies else None,
            )


def play(entry, num_groups=1, stop_strings=()):
    """The rollouts of groups of 4 in their order, and the engine that was asked."""
    config, engine = tiny_config(), Engine()
    config.update_from_flattened_dict(
        {
            "rollout.max_response_tokens": LIMIT, "rollout.branching": entry,
            "rollout.group_size": 4, "rollout.stop_strings": stop_strings,
        }
    )  # fmt: skip
    tokenizer = data.character_tokenizer()
    sampler = sampler_of(
        config,
        client=engine,
        tokenizer=tokenizer,
        end_token_ids=(1,),
        weights=Weights(3, lambda: iter(()), False, version=VERSION),
    )
    requests = [
        SampleRequest(f"train/3/{group}/{i}", group, i, PROMPT, seed=10 * group + i)
        for group in range(num_groups)
        for i in range(4)
    ]
    episodes = Branched.of(config, tokenizer)
    assert isinstance(episodes, Episodes)
    draw = Draw(requests, dict.fromkeys(range(num_groups), "9"), {})
    options = {"temperature": 1.0, "arrived": lambda rollout: None, "episodes": episodes}
    return sampler.sample_here(draw, states=HiddenStateParams((-1,), "float32"), **options), engine


def test_branches_have_the_prefix_that_the_rule_says():
    """The example of `Branched`, whose prefixes are context."""
    scored, engine = play(ONE_TOKEN)
    found = [item.rollout for item in scored]
    (first, limit, asked), (second, room, asked_again) = engine.calls
    assert [request.sample_index for request in first] == [0, 1]
    assert [request.sample_index for request in second] == [2, 3]
    assert (limit, room, asked, asked_again) == (LIMIT, LIMIT, True, False)
    assert [request.seed for request in (*first, *second)] == [0, 1, 2, 3]
    assert second[0].prompt_ids.tolist() == [*range(2, 7), 10, 11, 12]
    assert second[1].prompt_ids.tolist() == [*range(2, 7), *range(10, 16)]
    assert [r.sample_index for r in found] == [0, 1, 2, 3]
    assert [(r.parent, r.num_prefix) for r in found] == [(-1, 0), (-1, 0), (0, 3), (1, 6)]
    assert found[2].response_ids.tolist() == [10, 11, 12, *range(20, 32)]
    assert found[3].response_ids.tolist() == [*range(10, 16), *range(20, 30)]  # 16 tokens
    assert [r.finish_reason for r in found] == ["eos", "eos", "eos", "length"]
    for rollout in found:
        assert rollout.prompt_ids.tolist() == PROMPT.tolist() and rollout.entropies is None
        assert rollout.versions == (VersionSpan(VERSION, 0, len(rollout.response_ids)),)
    for rollout, count in ((found[2], 12), (found[3], 10)):
        before, index = rollout.num_prefix, rollout.sample_index
        assert rollout.response_mask.tolist() == [False] * before + [True] * count
        own = (100 * index + np.arange(count)).astype(np.float32)
        assert rollout.rollout_logprobs.tolist() == [0.0] * before + (-own).tolist()
        assert rollout.rollout_raw_logprobs.tolist() == [0.0] * before + (-2 * own).tolist()
        np.testing.assert_array_equal(rollout.policy_states(-1)[:, 0], own)
    assert num_sampled_tokens(scored) == 8 + 10 + 12 + 10
    # The verifier reads prefix and branch.
    assert scored[2].response == data.character_tokenizer().decode(found[2].response_ids)


def test_a_prefix_that_is_trained_on_keeps_what_its_response_has():
    scored, _ = play(ONE_TOKEN + ":trains_prefix=1")
    found = [item.rollout for item in scored]
    for rollout in found[2:]:
        parent, count = found[rollout.parent], rollout.num_prefix
        assert rollout.response_mask.all() and count > 0
        for name in ("rollout_logprobs", "rollout_raw_logprobs", "hidden_states", "response_ids"):
            of_parent = getattr(parent, name)[:count]
            np.testing.assert_array_equal(getattr(rollout, name)[:count], of_parent, name)
        own = 100 * rollout.sample_index + np.arange(len(rollout.response_ids) - count)
        np.testing.assert_array_equal(rollout.rollout_logprobs[count:], -own)
        np.testing.assert_array_equal(rollout.hidden_states[count:, 0, 0], own)
    assert num_sampled_tokens(scored) == 8 + 10 + 12 + 10  # a prefix was sampled once


def test_a_branch_ends_at_a_stop_string_that_its_prefix_begins():
    tokenizer = data.character_tokenizer()
    text = tokenizer.decode([11, 12, 20, 21])
    scored, _ = play(ONE_TOKEN, stop_strings=(text,))
    branch = scored[2].rollout
    assert branch.response_ids.tolist() == [10, 11, 12, 20, 21]
    assert branch.finish_reason == "stop" and branch.num_policy_tokens == 2


def test_the_exchange_and_the_log_know_branches():
    scored, _ = play(ONE_TOKEN, num_groups=2)
    verdicts = [Verdict(1.0, i in (1, 2, 3), True, None) for i in range(8)]
    scored = Scored(
        [dataclasses.replace(item, verdict=v) for item, v in zip(scored, verdicts, strict=True)]
    )
    found = unpack_scored(pack_scored(scored))
    assert [(i.rollout.parent, i.rollout.num_prefix) for i in found] == [
        (i.rollout.parent, i.rollout.num_prefix) for i in scored
    ]
    scalars = batch_scalars(found, np.zeros((2, 4), np.float32))
    assert scalars["rollout/branches/fraction"] == 0.5
    assert scalars["rollout/branches/prefix_tokens/mean"] == 4.5
    # Two of the branches 2, 3, 6, 7 are correct, and one of their parents 0, 1, 4, 5.
    assert scalars["rollout/branches/correct"] == 0.5
    assert scalars["rollout/branches/parents_correct"] == 0.25
    assert found.columns()["parent"] == [-1, -1, 0, 1] * 2
    whole = found.take([0, 1, 4, 5])
    assert whole.columns()["parent"] == [-1] * 4
    of_branches = {k: v for k, v in batch_scalars(whole, np.zeros((2, 2))).items() if "branch" in k}
    assert of_branches == {"rollout/branches/fraction": 0.0}
    items = [
        dataclasses.replace(item, rollout=dataclasses.replace(item.rollout, parent=None))
        for item in whole
    ]
    assert "parent" not in Scored(items).columns()
    assert not any("branch" in name for name in batch_scalars(Scored(items), np.zeros((2, 2))))


def test_a_given_response_takes_the_place_of_a_branch():
    """A draw has fewer requests for such a group; the branches that are left are dealt out."""
    config, tokenizer, engine = tiny_config(), data.character_tokenizer(), Engine()
    config.rollout.branching, config.rollout.max_response_tokens = ONE_TOKEN, LIMIT
    episodes = Branched.of(config, tokenizer)
    requests = [SampleRequest(f"{i}", 0, i, PROMPT, seed=i) for i in range(3)]

    def ask(requests, *, max_tokens=0, entropies=False):
        return engine.generate(requests, SamplingParams(LIMIT), None, entropies=entropies)

    found = {r.sample_index: r.parent for r in episodes.play(Draw(requests, {}, {}), ask, None)}
    assert found == {0: -1, 1: -1, 2: 0}


def random_group(seed):
    random = np.random.default_rng(seed)
    texts = ["", "a", " ab", "abc", " ", "\n\n", "x "]
    return [
        Whole(
            np.arange(length),
            [str(text) for text in random.choice(texts, length)],
            random.random(length).astype(np.float32),
        )
        for length in random.integers(1, 60, 3)
    ]


def allowed(whole, min_characters):
    """The oracle: positions with a text that is long enough, as the published code says."""
    found = []
    for position in range(1, len(whole.texts)):
        text = whole.texts[position]
        if text != "" and len(text.strip()) >= min_characters:
            found.append(position)
    return found


@pytest.mark.parametrize("seed", range(20))
def test_cure_branches_at_one_of_the_tokens_of_highest_entropy(seed):
    group, top = random_group(seed), 5
    rule = find_rule(f"cure:top_tokens={top}")
    places = rule.places(group, 9, seed)
    assert [place.response for place in places] == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    for number, whole in enumerate(group):
        own = {place.position for place in places if place.response == number}
        assert len(own) == 1  # the branches of a response share their prefix
        candidates = allowed(whole, 2)
        higher = [sum(whole.entropies[c] > whole.entropies[t] for c in candidates) for t in own]
        assert (own <= set(candidates) and higher[0] < top) if candidates else own == {0}
    assert places == rule.places(group, 9, seed)


def test_cure_differs_from_a_random_token_and_by_its_options():
    group = random_group(0)
    group = [w._replace(texts=["abc"] * 50, entropies=np.arange(50) / 50.0) for w in group]
    group = [w._replace(token_ids=np.arange(50)) for w in group]

    def drawn(entry, group=group):
        rule = find_rule(entry)
        places = (rule.places(group, 3, seed) for seed in range(200))
        return {place.position for found in places for place in found}

    assert drawn("cure") == set(range(30, 50))  # the 20 of the paper's code
    assert drawn("cure:top_tokens=3") == {47, 48, 49}
    assert drawn("random_token") == set(range(1, 50))
    assert drawn("cure:min_characters=4") == drawn("random_token:min_characters=4") == {0}
    special = [whole._replace(texts=[""] * 48 + ["a", ""]) for whole in group]
    assert drawn("cure:min_characters=0", special) == {48}


def test_rules_of_a_user_and_wrong_entries(tmp_path, monkeypatch):
    (tmp_path / "branch_at.py").write_text(
        "import dataclasses\n"
        "from semrl_jax.sampling.branching import BranchOptions, Place\n"
        "NEEDS_ENTROPIES = False\n"
        "@dataclasses.dataclass(frozen=True)\n"
        "class Options(BranchOptions):\n"
        "    position: int = 1\n"
        "def places(group, num_branches, options, random):\n"
        "    return [Place(0, options.position)] * num_branches\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import sys

    monkeypatch.setitem(sys.modules, "users", type(sys)("users"))
    sys.modules["users"].__path__ = [str(tmp_path)]
    group = [Whole(np.arange(4), ["a"] * 4, None)]
    rule = find_rule("users.branch_at:position=3:branches=2")
    assert rule.places(group, 2, 0) == [Place(0, 3)] * 2
    assert rule.num_whole(9) == 3
    beyond = find_rule("users.branch_at:position=4")
    refused("places must be within the responses", beyond.places, group, 2, 0)
    for entry, message in (
        ("cue", "did you mean 'cure'"),
        ("cure:branches=0", "branches=0 must be at least 1"),
        ("cure:top_tokens=2.5", "top_tokens='2.5' must be a whole number"),
        ("cure:temperature=1", "OPTION=VALUE with an option of 'cure': branches, trains_prefix"),
    ):
        refused(message, find_rule, entry)
    assert find_rule("") is None


def test_the_longest_prompt_ends_with_a_prefix():
    config = tiny_config()
    assert longest_prompt(config) == config.rollout.max_prompt_tokens
    config.rollout.branching = "cure"
    expected = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens - 1
    assert longest_prompt(config) == expected
