"""Episodes with an environment: which tokens, whose, and when they end."""

import contextlib
import dataclasses

import numpy as np
import pytest

from semrl_jax import data
from semrl_jax.data.turns import ChatTurns
from semrl_jax.environments.pool import EnvironmentPools
from semrl_jax.rewards.verdict import episode_verdict
from semrl_jax.sampling import multi_turn
from semrl_jax.sampling.environment_tasks import first_answers, held_out_tasks, training_tasks
from semrl_jax.sampling.episodes import Episodes
from semrl_jax.sampling.multi_turn import MultiTurn
from semrl_jax.sampling.requests import Draw, stream_seed
from semrl_jax.support.clock import Clock
from semrl_jax.support.errors import UserError
from semrl_jax.types import Rollout, SampleRequest, VersionSpan, WeightVersion
from tests.environments.test_pool import section
from tests.tiny import tiny_config

VERSION = WeightVersion("run", "attempt", 3, "digest")
LIMIT = 400
HOSTILE = "tests.environments.users:Hostile"


@pytest.fixture(scope="module")
def tokenizer():
    return data.train_tokenizer(["Write about. Say something. user assistant system"], 270)


@pytest.fixture(scope="module")
def obey():
    fields = {"timeout_s": 30.0, "max_observation_chars": 200}
    with EnvironmentPools(section(HOSTILE, **fields), [HOSTILE]) as environments:
        yield environments


@pytest.fixture(scope="module")
def examples(obey, tokenizer):
    config = tiny_config()
    config.data.update(num_prompts=2, prompts_per_step=2)
    config.evaluation.num_problems = 1
    config.rollout.max_prompt_tokens = 100
    return training_tasks(config, tokenizer, obey[HOSTILE], print).examples


def test_tasks_that_are_too_long_are_named_with_their_length(obey, tokenizer):
    config = tiny_config()
    config.data.update(num_prompts=2, prompts_per_step=2)
    config.evaluation.num_problems = 1
    config.rollout.max_prompt_tokens = 3
    lines = []
    with pytest.raises(UserError, match=r"=3 tokens \(at least \d\d, with the desc.*; data"):
        training_tasks(config, tokenizer, obey[HOSTILE], lines.append)
    held_out_tasks(obey[HOSTILE], 1, tokenizer, lines.append)
    assert lines == [
        "2 tasks of environment Hostile to train on", "1 held-out tasks of environment Hostile",
    ]  # fmt: skip


class Policy:
    """Says what the script has for each episode, turn by turn."""

    def __init__(self, tokenizer, *scripts, reverse=False, states=False):
        self.tokenizer, self.reverse, self.states = tokenizer, reverse, states
        self.left = {str(i): list(script) for i, script in enumerate(scripts)}
        self.calls, self.keeps = [], []

    def _ids(self, text):
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def __call__(self, requests, *, max_tokens=0, keep=False):
        self.calls.append(list(requests))
        self.keeps.append(keep)
        order = reversed(requests) if self.reverse else requests
        for request in list(order):
            ids = np.array(self._ids(self.left[request.sample_id].pop(0)), np.int32)
            reason = "eos" if ids[-1] == self.tokenizer.eos_token_id else "length"
            if len(ids) > max_tokens:
                ids, reason = ids[:max_tokens], "length"
            states = np.full((len(ids), 1, 2), 7.0, np.float32) if self.states else None
            yield Rollout(
                **request.rollout_fields,
                response_ids=ids,
                rollout_logprobs=-1.0 - np.arange(len(ids), dtype=np.float32),
                rollout_raw_logprobs=None,
                finish_reason=reason,
                versions=(VersionSpan(VERSION, 0, len(ids)),),
                hidden_states=states,
                layers=(-1,) * self.states,
                generate_s=1.0,
            )


def ended(*texts):
    return [f"{text}<|im_end|>" for text in texts]


def draw_of(examples, count):
    """Groups of two, each to one prompt."""
    requests = [
        SampleRequest(str(i), i // 2, i % 2, examples[i // 2].prompt_ids, seed=i)
        for i in range(count)
    ]
    return Draw(requests, {}, {group: example.columns for group, example in enumerate(examples)})


def episodes_of(obey, tokenizer, max_turns=8, max_tokens=LIMIT, **lanes):
    ends = (tokenizer.eos_token_id,)
    turns = dict.fromkeys(obey, ChatTurns(tokenizer, ends))
    return MultiTurn(obey, turns, tokenizer, frozenset(ends), max_turns, max_tokens, **lanes)


def play(obey, examples, tokenizer, policy, **options):
    """The rollouts by sample id."""
    draw = draw_of(examples, len(policy.left))
    found = episodes_of(obey, tokenizer, **options).play(draw, policy, Clock())
    return {rollout.sample_id: rollout for rollout in found}


def test_others_text_stands_between_the_policys_own_tokens(obey, examples, tokenizer):
    assert isinstance(episodes_of(obey, tokenizer), Episodes)
    policy = Policy(tokenizer, ended("one", "two", "end"), ended("end"), states=True)
    found = play(obey, examples[:1], tokenizer, policy)
    whole = found["0"]
    between = "\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
    text = "one<|im_end|>" + between.format("one") + "two<|im_end|>" + between.format("two")
    assert tokenizer.decode(whole.response_ids) == text + "end<|im_end|>"
    own = [tokenizer.encode(part) for part in ended("one", "two", "end")]
    others = [tokenizer.encode(between.format(part)) for part in ("one", "two")]
    expected = [*own[0], *others[0], *own[1], *others[1], *own[2]]
    assert whole.response_ids.tolist() == expected
    lengths = [len(part) for part in (own[0], others[0], own[1], others[1], own[2])]
    mask = np.repeat([True, False, True, False, True], lengths)
    assert whole.response_mask.tolist() == mask.tolist()
    assert (whole.rollout_logprobs[~mask] == 0).all() and (whole.rollout_logprobs[mask] < 0).all()
    assert (whole.hidden_states[mask] == 7).all() and (whole.hidden_states[~mask] == 0).all()
    assert whole.versions == (VersionSpan(VERSION, 0, len(expected)),)
    assert (whole.finish_reason, whole.generate_s) == ("eos", 3.0)
    assert whole.turn_rewards.tolist() == [1.0, 1.0, 1.0] and whole.environment_error == ""
    assert whole.prompt_ids is examples[0].prompt_ids
    assert found["1"].turn_rewards.tolist() == [1.0] and found["1"].response_mask.all()
    # A call has the open episodes alone, each with all tokens so far and random numbers of its own.
    assert [[r.sample_id for r in call] for call in policy.calls] == [["0", "1"], ["0"], ["0"]]
    starts = np.cumsum([0, *lengths])
    for turn, (call, start) in enumerate(zip(policy.calls, starts[::2])):
        prompt = np.concatenate([examples[0].prompt_ids, whole.response_ids[:start]])
        np.testing.assert_array_equal(call[0].prompt_ids, prompt)
        assert call[0].seed == (0 if turn == 0 else stream_seed(0, turn))


def test_the_order_of_arrival_changes_nothing(obey, examples, tokenizer):
    scripts = ended("a", "b", "end"), ended("c", "end"), ended("end"), ended("d", "e", "f", "end")
    found, calls = [], []
    for reverse in (False, True):
        policy = Policy(tokenizer, *scripts, reverse=reverse)
        found.append(play(obey, examples, tokenizer, policy))
        calls.append([[request.sample_id for request in call] for call in policy.calls])
    assert calls[0] == calls[1] == [["0", "1", "2", "3"], ["0", "1", "3"], ["0", "3"], ["3"]]
    for name, rollout in found[0].items():
        np.testing.assert_array_equal(rollout.response_ids, found[1][name].response_ids)
        assert rollout.turn_rewards.tolist() == found[1][name].turn_rewards.tolist()


@pytest.mark.parametrize(
    "lanes, calls",
    [
        ({}, ["012345", "0135", "05", "5"]),
        ({"num_lanes": 2}, ["0123", "45", "013", "5", "0", "5", "5"]),
        ({"num_lanes": 2, "max_open": 4}, ["01", "23", "01", "3", "0", "45", "5", "5", "5"]),
        ({"num_lanes": 9}, ["01", "23", "45", "01", "3", "5", "0", "5", "5"]),
        ({"max_open": 4}, ["0123", "013", "0", "45", "5", "5", "5"]),
        ({"max_open": 1}, ["01", "01", "0", "23", "3", "45", "5", "5", "5"]),
    ],
)
def test_lanes_take_turns(obey, examples, tokenizer, lanes, calls):
    """Three groups of two, and two prompts; the order of arrival changes no call."""
    scripts = ["abE", "cE", "E", "dE", "E", "efgE"]
    scripts = [ended(*("end" if letter == "E" else letter for letter in text)) for text in scripts]
    draw = draw_of([*examples, examples[0]], 6)
    found = []
    for reverse in (False, True):
        policy = Policy(tokenizer, *scripts, reverse=reverse)
        rollouts = list(episodes_of(obey, tokenizer, **lanes).play(draw, policy, Clock()))
        assert ["".join(r.sample_id for r in call) for call in policy.calls] == calls
        found.append({r.sample_id: r.response_ids.tolist() for r in rollouts})
    assert found[0] == found[1] and len(found[0]) == 6


def test_environments_of_a_lane_answer_during_the_turn_of_another(obey, examples, tokenizer):
    """A policy that waits until the environments of the other lane have answered."""
    policy = Policy(tokenizer, *[ended("a", "end")] * 4)
    episodes = episodes_of(obey, tokenizer, num_lanes=2)
    asked, step = [], multi_turn.Episode.step

    def ask(requests, **options):
        if len(policy.calls) == 1:  # of the second lane
            assert len(asked) == 2
            for answer in asked:
                answer.result(timeout=30)
        yield from policy(requests, **options)

    def spied(self, message):
        asked.append(step(self, message))
        return asked[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multi_turn.Episode, "step", spied)
        assert len(list(episodes.play(draw_of(examples, 4), ask, Clock()))) == 4


def test_caches_are_kept_for_all_turns_but_the_last(obey, examples, tokenizer):
    policy = Policy(tokenizer, ended("a", "b", "end"))
    play(obey, examples, tokenizer, policy, max_turns=3)
    assert policy.keeps == [True, True, False]


def test_the_last_turn_is_rewarded_and_its_answer_left_out(obey, examples, tokenizer):
    policy, before = Policy(tokenizer, ended("a", "b", "c")), obey.counters["num_out_of_turns"]
    whole = play(obey, examples, tokenizer, policy, max_turns=2)["0"]
    assert obey.counters["num_out_of_turns"] == before + 1
    assert tokenizer.decode(whole.response_ids).endswith("b<|im_end|>")
    assert whole.turn_rewards.tolist() == [1.0, 1.0] and whole.finish_reason == "eos"


def test_the_environment_gets_no_truncated_message(obey, examples, tokenizer):
    before = obey.counters["num_turns"]
    policy = Policy(tokenizer, ["no end"], [*ended("a"), "b" * LIMIT])
    found = play(obey, examples, tokenizer, policy)
    assert obey.counters["num_turns"] == before + 1
    assert [found[name].finish_reason for name in "01"] == ["length", "length"]
    assert [found[name].turn_rewards.tolist() for name in "01"] == [[0.0], [1.0, 0.0]]
    assert len(found["1"].response_ids) == LIMIT
    assert not found["0"].environment_error


def test_a_turn_has_the_room_of_its_own_episode(obey, examples, tokenizer):
    """Calls have one limit for all: what is too long for an episode is cut."""
    policy = Policy(tokenizer, [*ended("a" * 150), "b" * 300], ended("c", "c" * 300, "end"))
    found = play(obey, examples, tokenizer, policy, max_tokens=LIMIT)
    assert len(found["0"].response_ids) == LIMIT and found["0"].finish_reason == "length"
    assert found["0"].versions[-1].end == len(found["0"].rollout_logprobs) == LIMIT


def test_a_full_context_ends_the_episode_before_the_answer(obey, examples, tokenizer):
    policy = Policy(tokenizer, ended("x" * 200), ended("y", "end"))
    found = play(obey, examples, tokenizer, policy, max_tokens=260)
    assert found["0"].finish_reason == "length" and found["0"].response_mask.all()
    assert found["0"].turn_rewards.tolist() == [1.0]
    assert found["1"].finish_reason == "eos" and len(found["1"].turn_rewards) == 2


def test_a_failure_ends_the_episode_with_its_score(obey, examples, tokenizer):
    policy = Policy(tokenizer, ended("a", "raise", "b"), ended("a", "end"))
    found = play(obey, examples, tokenizer, policy)
    assert found["0"].environment_error.startswith("exception: KeyError")
    assert found["0"].turn_rewards.tolist() == [1.0, 0.0]
    given = found["0"].turn_rewards.tolist(), found["0"].environment_error
    verdict = episode_verdict(*given, failure_score=-0.5)
    assert (verdict.score, verdict.correct, verdict.error_kind) == (-0.5, False, "exception")
    assert not found["1"].environment_error
    assert not episode_verdict([0.9], "", failure_score=-0.5).correct
    assert episode_verdict([0.1] * 10, "", failure_score=-0.5).correct
    verdict = episode_verdict([1.0, 1.0], "", failure_score=-0.5)
    assert (verdict.score, verdict.correct, verdict.error) == (2.0, True, "")


def test_the_end_may_reward_earlier_turns(obey, examples, tokenizer):
    policy = Policy(tokenizer, ended("a", "b", "both"), ended("both"))
    found = play(obey, examples, tokenizer, policy)
    assert found["0"].turn_rewards.tolist() == [1.0, -1.0, 1.0]
    assert found["1"].turn_rewards.tolist() == [0.0]
    error = found["1"].environment_error
    assert error.startswith("invalid: reward has 2 values, more than the 1 turns")


def test_an_opponents_messages_are_context(obey, examples, tokenizer):
    policy = Policy(tokenizer, ended("opponent", "theirs", "end"), ["opponent<|im_end|>", "cut"])
    found = play(obey, examples, tokenizer, policy)
    first, truncated = found["0"], found["1"]
    own = tokenizer.decode(first.response_ids[first.response_mask])
    assert own == "opponent<|im_end|>end<|im_end|>"
    assert "theirs<|im_end|>" in tokenizer.decode(first.response_ids[~first.response_mask])
    assert (first.rollout_logprobs[~first.response_mask] == 0).all()
    assert first.turn_rewards.tolist() == [2.0, 1.0]  # the one for "theirs" goes to its own last
    assert truncated.turn_rewards.tolist() == [1.0] and truncated.finish_reason == "length"
    assert tokenizer.decode(truncated.response_ids).endswith("cut")
    assert not truncated.response_mask[-1]


def test_verdicts_are_summed_over_the_turns(obey, examples, tokenizer):
    policy = Policy(tokenizer, ended("verdicts", "verdicts", "end"), ended("verdicts", "raise"))
    found = play(obey, examples, tokenizer, policy)
    first, failed = found["0"], found["1"]
    assert first.turn_rewards.tolist() == [2.25, 2.25, 1.0]
    assert first.verdicts == {"right": 2.0, "short": 1.0}
    assert failed.verdicts == {"right": 1.0, "short": 0.5}
    verdict = episode_verdict(first.turn_rewards.tolist(), "", 0.0, first.verdicts)
    assert (verdict.score, verdict.parts) == (5.5, first.verdicts)


def test_a_prompt_of_no_environment_is_a_single_turn(obey, examples, tokenizer):
    policy = Policy(tokenizer, ended("a", "end"), ["no end"])
    draw = draw_of(examples, 2)
    plain = dataclasses.replace(draw.requests[1], group_id=7)
    draw = Draw([draw.requests[0], plain], {}, draw.columns)
    found = {r.sample_id: r for r in episodes_of(obey, tokenizer).play(draw, policy, Clock())}
    assert found["1"].turn_rewards is None and len(found["0"].turn_rewards) == 2


def test_episodes_that_are_not_played_to_the_end_leave_no_process(
    obey, examples, tokenizer, monkeypatch
):
    ended_episodes = []
    end = multi_turn.Episode.end
    monkeypatch.setattr(
        multi_turn.Episode, "end", lambda self: (ended_episodes.append(self), end(self))
    )
    policy = Policy(tokenizer, ended("end"), ended("a", "b", "end"))
    found = episodes_of(obey, tokenizer).play(draw_of(examples, 2), policy, Clock())
    with contextlib.closing(found):
        assert next(found).sample_id == "0"
    assert len(set(map(id, ended_episodes))) == 2


ASKS_WITH_IDS = """
import json, os, urllib.request

logprobs = []

def ask(ids):
    url = os.environ["OPENAI_BASE_URL"].removesuffix("/v1") + "/inference/v1/generate"
    with urllib.request.urlopen(url, json.dumps({"token_ids": ids}).encode()) as answer:
        (choice,) = json.load(answer)["choices"]
    content = choice["logprobs"]["content"]
    assert [each["token"] for each in content] == [f"token_id:{i}" for i in choice["token_ids"]]
    logprobs.extend(each["logprob"] for each in content)
    return ids + choice["token_ids"]

ids = ask([40, 41, 42])
if len(ids) == 4:
    ask([40, 41])
ids = ask(ids + [50, 51])
print(sum(logprobs))
"""


def test_a_program_may_ask_with_token_ids(tokenizer, tmp_path):
    (tmp_path / "agent.py").write_text(ASKS_WITH_IDS)
    (tmp_path / "tasks.jsonl").write_text("{}\n")
    name = f"agent:program={tmp_path}/agent.py:tasks={tmp_path}/tasks.jsonl"
    with EnvironmentPools(section(name), [name]) as environments:
        examples = held_out_tasks(environments[name], 1, tokenizer, print)
        assert first_answers(examples, tokenizer, environments) == []
        assert examples[0].prompt_ids.tolist() == [40, 41, 42]
        policy = Policy(tokenizer, ended("one", "two"), ended("", "three", "four"))
        found = play(environments, examples, tokenizer, policy)
    one, two = map(tokenizer.encode, ended("one", "two"))
    whole = found["0"]
    assert whole.response_ids.tolist() == [*one, 50, 51, *two]
    assert whole.response_mask.tolist() == [True] * len(one) + [False] * 2 + [True] * len(two)
    expected = -sum(range(1, len(one) + 1)) - sum(range(1, len(two) + 1))
    assert whole.turn_rewards.tolist() == [0.0, expected] and not whole.environment_error
    forked = found["1"]
    assert forked.conversations[[0, 1, -1]].tolist() == [0, 1, 0]
    assert forked.response_ids[forked.conversations == 1][:2].tolist() == [40, 41]


ASKS_TWO = """
import json, os, urllib.request

def ask(messages):
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    body = json.dumps({"model": "any", "messages": messages}).encode()
    with urllib.request.urlopen(url, body) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]

def user(text):
    return {"role": "user", "content": text}

first = [user("Write.")]
said = ask(first)
second = [{"role": "system", "content": "Short."}, user("Say something about " + said)]
other = ask(second)
first += [{"role": "assistant", "content": said}, user(other)]
last = ask(first)
again = ask(first)
print(len(last) + len(again))
"""


def test_a_program_may_have_several_conversations(tokenizer, tmp_path):
    (tmp_path / "agent.py").write_text(ASKS_TWO)
    (tmp_path / "tasks.jsonl").write_text("{}\n")
    name = f"agent:program={tmp_path}/agent.py:tasks={tmp_path}/tasks.jsonl"
    with EnvironmentPools(section(name), [name]) as environments:
        examples = held_out_tasks(environments[name], 1, tokenizer, print)
        policy = Policy(tokenizer, ended("one", "two", "three", "four"))
        found = play(environments, examples, tokenizer, policy)["0"]
    prompt = examples[0].prompt_ids
    assert found.turn_rewards.tolist() == [0, 0, 0, 9] and not found.environment_error
    ids = {n: found.response_ids[found.conversations == n] for n in range(3)}
    own = [tokenizer.decode(ids[n][found.response_mask[found.conversations == n]]) for n in ids]
    assert own == ["one<|im_end|>three<|im_end|>", "two<|im_end|>", "four<|im_end|>"]
    texts = [tokenizer.decode(ids[n]) for n in ids]
    assert "system\nShort." in texts[1] and "Say something about one" in texts[1]
    assert "two" in texts[0].partition("one")[2] and "Short." not in texts[0]
    # The policy saw each conversation alone, as far as it went.
    seen = [request.prompt_ids for (request,) in policy.calls]
    size = len(ids[0]) - len(tokenizer("three<|im_end|>", add_special_tokens=False)["input_ids"])
    np.testing.assert_array_equal(seen[0], prompt)
    np.testing.assert_array_equal(seen[2], [*prompt, *ids[0][:size]])
    for turn, number in ((1, 1), (3, 2)):
        np.testing.assert_array_equal(seen[turn], ids[number][: len(seen[turn])])
        assert not found.response_mask[found.conversations == number][: len(seen[turn])].any()
    # The last question is the first conversation without its answer: a fork of it.
    assert texts[2].startswith(tokenizer.decode(prompt)) and "one<|im_end|>" in texts[2]
