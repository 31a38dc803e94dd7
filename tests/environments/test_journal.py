"""What was answered is not asked again, also by the next start of a run."""

import contextlib
import functools
import os

import numpy as np
import pytest

from semrl_jax import data
from semrl_jax.environments.interface import Turn
from semrl_jax.environments.journal import Journal, Place, Reply
from semrl_jax.environments.pool import EnvironmentPool, EnvironmentPools
from semrl_jax.sampling.environment_tasks import training_tasks
from semrl_jax.support.clock import Clock
from semrl_jax.support.errors import Preempted
from tests.cases import refused
from tests.environments.test_pool import played, section, since
from tests.sampling.test_multi_turn import Policy, draw_of, ended, episodes_of
from tests.tiny import tiny_config

PLACE = Place(3, "train/3/0/1")


@pytest.fixture(scope="module")
def log(tmp_path_factory):
    return tmp_path_factory.mktemp("journal") / "log"


@pytest.fixture(scope="module")
def pool_of(log):
    """A pool for each kind of environment, made when it is first asked for."""
    with contextlib.ExitStack() as stack:

        @functools.cache
        def pool_of(kind):
            name = f"tests.environments.logged:{kind}:path={log}"
            return stack.enter_context(EnvironmentPool(section(name, timeout_s=2.0)))

        yield pool_of


@pytest.fixture
def started(tmp_path, log, pool_of):
    """Plays messages in an episode as a start of a run does; returns answers, calls and counts."""

    def start(kind, *messages, place=PLACE):
        environments = pool_of(kind)
        environments.journal = Journal(tmp_path / "answers")
        (opening,) = environments.openings(seed=5, count=1)
        log.write_text("")
        before = environments.counters
        found = played(environments, opening, *messages, place=place)
        return found, log.read_text().splitlines(), since(before, environments)

    return start


def turns(found):
    return [answer.turn for answer in found]


@pytest.mark.parametrize(
    ("kind", "calls"),
    [
        ("Logged", ["reset", "step one", "step three", "step five"]),
        ("Recalling", ["reset", "recall one", "recall three", "step five"]),
    ],
)
def test_what_was_answered_is_not_asked_again(started, kind, calls):
    first, called, counted = started(kind, "one", "three")
    assert called == ["reset", "step one", "step three"]
    again, called, recounted = started(kind, "one", "three")
    assert again == first and not called  # not even a process begins
    assert recounted == counted
    longer, called, _ = started(kind, "one", "three", "five")
    assert longer[:2] == first and called == calls
    assert longer[2].turn == Turn([{"role": "user", "content": "12"}], 1.2, False)
    assert started(kind, "one", "three", "five")[:2] == (longer, [])


def test_tools_that_were_called_are_not_called_again(started):
    call = '```json\n{"name": "press", "arguments": {"key": "x"}}\n```'
    first, called, counted = started("Calling", call, "one")
    assert called == ["reset", "press x", "step one"] and counted["num_tool_calls"] == 1
    assert started("Calling", call, "one") == (first, [], counted)
    longer, called, counted = started("Calling", call, "one", call)
    assert longer[:2] == first and called == ["reset", "step one", "press x"]
    assert counted["num_tool_calls"] == 2


def test_others_are_asked(started):
    asked = ["reset", "step one", "step three"]
    for place in (PLACE, Place(4, PLACE.episode), Place(3, "train/3/0/2")):
        assert started("Logged", "one", "three", place=place)[1] == asked
    found, called, _ = started("Logged", "two", "three")
    assert called == ["reset", "step two", "step three"]
    assert [turn.messages[0]["content"] for turn in turns(found)] == ["3", "8"]
    # Another first message: all that follows has other state.
    found, called, _ = started("Logged", "three", "three")
    assert called == ["reset", "step three", "step three"]


@pytest.mark.parametrize(
    ("message", "counter"), [("raise", "num_exceptions"), ("hang", "num_timeouts")]
)
def test_failures_are_recorded_and_counted_again(started, message, counter):
    first, called, counted = started("Logged", "one", message, "late")
    assert counted[counter] == 1 and first[1].error and called[-1] == f"step {message}"
    assert first[2] == first[1]
    assert started("Logged", "one", message, "late") == (first, [], counted)


def test_a_crash_is_not_recorded(started):
    """The process may have been killed together with the run."""
    for _ in range(2):
        found, called, counted = started("Recalling", "one", "exit")
        assert found[1].error.startswith("crash") and counted["num_crashes"] == 1
        assert called[-1] == "step exit"


def test_an_environment_that_answers_otherwise_costs_its_episode(started):
    started("Forgetful", "one")
    found, _, counted = started("Forgetful", "one", "two")
    assert not found[0].error and counted["num_invalid"] == 1
    assert found[1].error.startswith("invalid: step answered otherwise than before the run was")


def test_damaged_lines_are_asked_again(started, tmp_path):
    started("Logged", "one", "two")
    (file,) = (tmp_path / "answers").iterdir()
    content = file.read_bytes()
    file.write_bytes(content[:-20])  # of a kill
    started("Logged", "one", "two")
    assert file.read_bytes().count(b"\n") == 3
    assert started("Logged", "one", "two")[1] == []
    file.write_bytes(b"\xff\n[]\n{}\n" + b"[" * 9999 + content.replace(b'"value"', b'"valve"'))
    found, called, _ = started("Logged", "one", "two")
    assert called == ["reset", "step one", "step two"] and not any(each.error for each in found)


def test_a_journal_that_is_no_file_is_the_users(started, tmp_path):
    (tmp_path / "answers").mkdir()
    os.mkfifo(tmp_path / "answers" / "000003.0.jsonl")
    refused(r"000003\.0\.jsonl is no regular file", started, "Logged", "one")


def test_answers_are_kept_as_long_as_a_run_may_need_them(tmp_path):
    directory = tmp_path / "answers"
    first, second = Journal(directory), Journal(directory, process=1)
    for journal, step in ((first, 0), (second, 0), (first, 1), (second, 2)):
        journal.add(Place(step, "a"), 0, "said", Reply(step, "", 0.0))
    first.forget(trained=1, sealed=0)
    assert first.find(Place(0, "a"), 0, "said") is None
    assert first.find(Place(1, "a"), 0, "said") == Reply(1, "", 0.0)
    assert first.find(Place(1, "a"), 0, "other") is None
    read = Journal(directory)
    assert [read.find(Place(step, "a"), 0, "said").value for step in range(3)] == [0, 1, 2]
    first.forget(trained=2, sealed=1)
    second.forget(trained=2, sealed=1)
    names = sorted(file.name for file in directory.iterdir())
    assert names == ["000001.0.jsonl", "000002.1.jsonl"]
    first.end()
    second.end()
    assert not directory.exists()


def test_a_draw_that_is_played_again_asks_only_for_the_rest(tmp_path, log):
    tokenizer = data.train_tokenizer(["Write. user assistant system"], 270)
    scripts = ["a", "b", "c", "end"], ["d", "end"], ["e", "f", "h"], ["g", "raise"]
    config = tiny_config()
    config.data.update(num_prompts=2, prompts_per_step=2)
    config.evaluation.num_problems = 1

    name = f"tests.environments.logged:Recalling:path={log}"

    def played(directory, num_calls):
        """Until the policy is asked once more than `num_calls` times."""
        environments.keep_answers(Journal(tmp_path / directory))
        policy, before = (
            Policy(tokenizer, *(ended(*script) for script in scripts)),
            environments.counters,
        )

        def ask(requests, **options):
            if len(policy.calls) == num_calls:
                raise Preempted
            return policy(requests, **options)

        episodes = episodes_of(environments, tokenizer, max_turns=3)
        found = {r.sample_id: r for r in episodes.play(draw_of(examples, 4), ask, Clock())}
        return found, since(before, environments)

    def steps():
        return sorted(line for line in log.read_text().splitlines() if line.startswith("step"))

    with EnvironmentPools(section(name), [name]) as environments:
        examples = training_tasks(config, tokenizer, environments[name], print).examples
        log.write_text("")
        whole, counted = played("whole", 4)
        wanted = steps()
        assert len(wanted) == 10 and counted["num_exceptions"] == 1
        log.unlink()
        for num_calls in (1, 2):
            with pytest.raises(Preempted):
                played("killed", num_calls)
        again, recounted = played("killed", 4)
    assert steps() == wanted and recounted == counted
    for name, rollout in whole.items():
        np.testing.assert_array_equal(again[name].response_ids, rollout.response_ids)
        assert again[name].turn_rewards.tolist() == rollout.turn_rewards.tolist()
        assert again[name].environment_error == rollout.environment_error
