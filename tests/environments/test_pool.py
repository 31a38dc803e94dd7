"""Hostile environments cost their own episode, and nothing else."""

import contextlib
import dataclasses
import itertools
import os
import pathlib
import resource
import signal
import subprocess
import sys
import threading
import time

import pytest

from semrl_jax.environments import pool as pool_module
from semrl_jax.environments.interface import Turn, as_tasks
from semrl_jax.environments.pool import EnvironmentPool, EnvironmentPools, Opening, task_seed
from semrl_jax.environments.worker import made
from semrl_jax.settings.environment import Environment as Settings
from semrl_jax.settings.environment import named
from semrl_jax.support.errors import UserError
from tests.cases import refused, slow_after
from tests.running import is_running, wait_until

USERS = "tests.environments.users"


def section(name, **fields):
    """`config.environment` with the environment of this name."""
    defaults = {field.name: field.default for field in dataclasses.fields(Settings)}
    return {**defaults, "name": name, **fields}


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("hostile") / "pid"


@pytest.fixture(scope="module")
def obey(path):
    """Does what the message says, within two seconds."""
    fields = {"timeout_s": 2.0, "max_observation_chars": 50, "memory_limit_gib": 1.0}
    with EnvironmentPool(section(f"{USERS}:Hostile:path={path}", **fields)) as environments:
        yield environments


def opening(number=1):
    task = {"number": number}
    return Opening(task, task_seed(task), [{"role": "user", "content": "Say something."}])


def played(environments, begin, *messages, place=None):
    """The answers to messages, in one episode."""
    episode = environments.open(begin, place)
    with contextlib.ExitStack() as stack:
        stack.callback(episode.end)
        return [episode.step(message).result(timeout=60) for message in messages]


def play(environments, *messages, number=1):
    return played(environments, opening(number), *messages)


def since(before, environments):
    """What was counted after these counts."""
    return {name: count - before[name] for name, count in environments.counters.items()}


def nonzero(counts):
    return {name: count for name, count in counts.items() if count}


@pytest.mark.parametrize(
    ("message", "error", "counter"),
    [
        ("hang", "timeout: step took more than 2 s", "num_timeouts"),
        ("exit", "crash: ", "num_crashes"),
        ("sys.exit", "exception: SystemExit: 3", "num_exceptions"),
        ("raise", r"exception: KeyError: 'two\nlines'", "num_exceptions"),
        ("allocate", "exception: MemoryError", "num_exceptions"),
        ("read", "exception: EOFError", "num_exceptions"),
        ("forge", "crash: ", "num_crashes"),
        ("close", "crash: ", "num_crashes"),
        ("kill group", "crash: ", "num_crashes"),
        ("kill parent group", "crash: ", "num_crashes"),
        ("infinite", "invalid: reward must be a number from -1e+09", "num_invalid"),
        ("nan", "invalid: reward must be a number from -1e+09", "num_invalid"),
        ("huge", "invalid: reward must be a number from -1e+09", "num_invalid"),
        ("many rewards", "invalid: reward has 100 values, more than the 2 turns", "num_invalid"),
        ("odd owner", "invalid: is_own must be a bool, not 'yes'", "num_invalid"),
        ("odd conversation", "invalid: conversation=-1 must be a whole number", "num_invalid"),
        ("no number", "invalid: reward must be a number from -1e+09", "num_invalid"),
        ("odd verdict", "invalid: reward has ['odd'], which the environment", "num_invalid"),
        ("large verdict", "invalid: the weighted sum 2e+09 of the reward is", "num_invalid"),
        ("none", "invalid: step must return a Turn or its first three values, no", "num_invalid"),
        ("as gymnasium", "invalid: step must return a Turn or its first three", "num_invalid"),
        ("silent", "invalid: a turn that is not done needs a message", "num_invalid"),
        ("assistant", "invalid: role must be one of system, user, tool", "num_invalid"),
        ("bytes", r"invalid: content must be a text, not b'\xff'", "num_invalid"),
    ],
)
def test_a_failure_costs_its_own_episode_only(obey, message, error, counter):
    before = obey.counters
    other = obey.open(opening())
    first, failed, later = play(obey, "one", message, "two")
    assert first.turn == Turn([{"role": "user", "content": "one"}], 1.0, False)
    assert failed.error.startswith(error) and "\n" not in failed.error
    assert failed.turn == Turn((), 0.0, True) and later == failed
    assert other.step("end").result(timeout=60)[:2] == (Turn((), 1.0, True), "")
    other.end()
    assert nonzero(since(before, obey)) == {"num_episodes": 2, "num_turns": 4, counter: 1}


def test_prints_and_forks_disturb_nothing(obey, capfd):
    answers = play(obey, "print", "fork", "next", "mapping")
    assert [answer.turn.messages[0]["content"] for answer in answers] == [
        "printed", "forked", "next", "mapped",
    ]  # fmt: skip
    assert answers[-1].turn.reward == 2.0
    assert "noise" not in capfd.readouterr().out


def test_episodes_that_are_ended_during_a_call_say_nothing(capfd):
    with EnvironmentPool(section(f"{USERS}:Vowels")) as environments:
        for _ in range(20):
            episodes = [environments.open(opening()) for _ in range(16)]
            time.sleep(0.01)  # their processes begin
            for episode in episodes:
                episode.end()
    assert capfd.readouterr().err == ""


def test_verdicts_are_summed_with_their_weights(obey):
    graded, plain = play(obey, "verdicts", "end")
    assert graded.turn.reward == 2.0 * 1.0 + 0.5 * 0.5
    assert graded.verdicts == {"right": 1.0, "short": 0.5} and plain.verdicts == {}


def test_answers_are_cut_and_can_be_written(obey):
    long, many, surrogate = play(obey, "long", "many", "surrogate")
    assert long.turn.messages == many.turn.messages == [{"role": "user", "content": "a" * 50}]
    assert surrogate.turn.messages == [{"role": "user", "content": "a?b"}]
    assert as_tasks([{"answer": "a\ud800b"}], 1) == [{"answer": "a?b"}]
    assert as_tasks(({"word": "w"} for _ in itertools.count()), 3) == [{"word": "w"}] * 3


def test_an_episode_ends_with_all_processes_that_it_started(obey, path):
    (answer,) = play(obey, "daemon")
    assert not answer.error
    wait_until(lambda: not is_running(int(path.read_text())))


def test_a_million_messages_cost_the_episode(obey):
    (answer,) = play(obey, "many empty")
    assert answer.error.startswith(("crash: the process of the environment replied", "timeout"))


def test_an_episode_that_stops_its_guard_ends_too(obey, path):
    (answer,) = play(obey, "stop parent")
    assert answer.error.startswith("timeout")
    wait_until(lambda: not is_running(int(path.read_text())))
    path.unlink()


def held(environments):
    """Descriptors of this process and of the home, threads, and processes below the home."""
    play(environments, "end")  # the home reaps at its next order
    parents = {}
    for entry in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            state = (entry / "stat").read_text().rpartition(")")[2].split()
            parents[int(entry.name)] = int(state[1])
    (home,) = (pid for pid, parent in parents.items() if parent == environments._home._process.pid)
    below = [home]
    for pid in below:
        below += [child for child, parent in parents.items() if parent == pid]
    descriptors = [len(os.listdir(f"/proc/{pid}/fd")) for pid in (os.getpid(), home)]
    return *descriptors, threading.active_count(), len(below)


@pytest.mark.parametrize("count", [40, pytest.param(2000, marks=pytest.mark.soak)])
def test_many_episodes_leave_no_process_and_no_descriptor(obey, count):
    play(obey, "one", "exit")
    before = held(obey)
    messages = ("fork", "raise", "exit", "kill group", "nan", "close", "kill parent group", "end")
    for number in range(count):
        play(obey, "one", messages[number % len(messages)])
    wait_until(lambda: held(obey) == before)


@pytest.mark.parametrize(
    ("number", "error"),
    [(99, "invalid: reset made another prompt than before"), (98, "exception: ValueError: no")],
)
def test_a_reset_must_be_the_one_that_made_the_prompt(obey, number, error):
    (answer,) = play(obey, "one", number=number)
    assert answer.error.startswith(error)


def test_tasks_are_opened_in_order_with_seeds_of_their_own(obey):
    found = obey.openings(seed=3, count=98)
    assert [each.task for each in found] == [{"number": number} for number in range(98)]
    assert found[5]._replace(environment="") == opening(5)
    assert len({each.seed for each in found}) == 98
    line = r"its method reset failed \(exception: ValueError: no reset \(users.py:\d+\)\); it must"
    refused(line, obey.openings, seed=3, count=99)


def test_seeds_make_the_global_generators_the_same():
    with EnvironmentPool(section(f"{USERS}:Vowels")) as environments:
        first, second = environments.openings(seed=1, count=2)

        def answers(begin):
            return [answer.turn for answer in played(environments, begin, "a", "a", "a")]

        assert answers(first) == answers(first) != answers(second)
        assert environments.openings(seed=1, count=2) == [first, second]


def test_a_home_that_dies_is_replaced(obey):
    episode = obey.open(opening())
    assert not episode.step("one").result(timeout=60).error
    os.killpg(obey._home._process.pid, signal.SIGKILL)
    wait_until(lambda: episode.step("two").result(timeout=60).error.startswith("crash: "))
    assert [answer.error for answer in play(obey, "one", "end")] == ["", ""]


def test_hung_episodes_delay_no_other_and_end_with_the_pool():
    with EnvironmentPool(section(f"{USERS}:Hostile", timeout_s=600.0)) as environments:
        hung = [environments.open(opening()).step("hang") for _ in range(3)]
        others = [environments.open(opening()) for _ in range(20)]
        answers = [episode.step("end") for episode in others]
        assert all(answer.result(timeout=60).turn.done for answer in answers)
        assert not any(call.done() for call in hung)
        home = environments._home._process
    assert home.returncode is not None
    assert {call.result(timeout=0).error.partition(":")[0] for call in hung} == {"crash"}
    assert not any(thread.is_alive() for thread in environments._threads._threads)


def test_calls_that_wait_for_a_thread_are_answered_when_the_pool_closes():
    fields = {"timeout_s": 600.0, "num_workers": 2}
    with EnvironmentPool(section(f"{USERS}:Hostile", **fields)) as environments:
        episodes = [environments.open(opening()) for _ in range(4)]
        calls = [episode.step("hang") for episode in episodes]
        calls += [episodes[0].step("one") for _ in range(2000)]
    assert {call.result(timeout=0).error.partition(":")[0] for call in calls} == {"crash"}


def test_a_home_that_is_stopped_is_replaced(monkeypatch):
    monkeypatch.setattr(pool_module, "KILL_TIMEOUT_S", 0.5)
    with EnvironmentPool(section(f"{USERS}:Hostile", timeout_s=0.5)) as environments:
        (stopped,) = play(environments, "stop home")
        assert not stopped.error
        ended = threading.Thread(  # orders fill its socket
            target=lambda: [environments._home.close(-1) for _ in range(2000)], daemon=True
        )
        ended.start()
        ended.join(timeout=30)
        assert not ended.is_alive(), "an order waits for a stopped home"
        wait_until(lambda: not play(environments, "end")[0].error)


def test_the_last_attempt_to_make_a_home_counts(tmp_path):
    with EnvironmentPool(section(f"{USERS}:Late:path={tmp_path / 'made'}")) as environments:
        assert not play(environments, "one")[0].error


def test_a_second_home_that_cannot_be_made_costs_its_episodes(tmp_path):
    name = f"{USERS}:Once:path={tmp_path / 'made'}"
    with EnvironmentPool(section(name)) as environments:
        assert not play(environments, "one")[0].error
        os.killpg(environments._home._process.pid, signal.SIGKILL)
        reason = f"crash: environment.name: {USERS}:Once("
        wait_until(lambda: play(environments, "one")[0].error.startswith(reason))
        assert environments.open(opening()).verdicts == ("right", "short")


def test_episodes_without_a_descriptor_cost_no_other_one():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(soft, 200), hard))
        environments = stack.enter_context(EnvironmentPool(section(f"{USERS}:Hostile")))
        allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        assert allowed == min(hard, pool_module.MAX_DESCRIPTORS)
        play(environments, "end")
        highest = max(map(int, os.listdir("/proc/self/fd")))
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 10, hard))
        episodes = [environments.open(opening()) for _ in range(highest + 20)]
        calls = [episode.step("one") for episode in episodes]
        errors = {call.result(timeout=60).error for call in calls}
        for episode in episodes:
            episode.end()
        few = f"crash: {highest + 10} descriptors (ulimit -n) are too few for all open episodes; "
        assert len(errors) == 2 and "" in errors and max(errors).startswith(few)
        assert not play(environments, "one")[0].error


def test_an_episode_without_a_process_costs_no_other_one(capfd):
    with EnvironmentPool(section(f"{USERS}:FewProcesses")) as environments:
        (begin,) = environments.openings(seed=1, count=1)
        refused_one, kept, late = (environments.open(begin) for _ in range(3))
        errors = [each.step("a").result(timeout=60).error for each in (refused_one, kept, late)]
        assert sorted(map(bool, errors)) == [False, True, True]
        (good,) = [each for each, error in zip((refused_one, kept, late), errors) if not error]
        assert not good.step("a").result(timeout=60).error  # the home still lives
        for each in (refused_one, kept, late):
            each.end()
    assert "an episode cannot begin: [Errno 11]" in capfd.readouterr().err


def test_an_environment_that_forks_while_it_is_made_has_one_home(path):
    with EnvironmentPool(section(f"{USERS}:Forks:path={path}")) as environments:
        wait_until(lambda: not is_running(int(path.read_text())))
        assert not play(environments, "end")[0].error
    path.unlink()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("search", r"search\(\) cannot be made: TypeError: .*'corpus' and 'questions'"),
        (f"{USERS}:Nobody", r"cannot be imported \(AttributeError: .*'Nobody'"),
        (f"{USERS}:TakenVerdict", r"weights=\{'shaped': 1.0\} must give a number"),
        (
            f"{USERS}:OddVerdicts:weights=huge",
            r"weights cannot be read \(ValueError: .*; it must give a number from -1e\+09",
        ),
        (
            f"{USERS}:OddVerdicts:weights=many",
            "have 2 characters, and weights 103903; at most 60000 are allowed, so shorten",
        ),
        (f"{USERS}:NoWeights", r"\(\) cannot be made: ValueError: no weights"),
        (f"{USERS}:Undecided", r"\(\) cannot be made: ValueError: nobody knows"),
        (f"{USERS}:NoStep", "has no step; an environment is a class with the methods"),
        ("calculator:digit=3", r"calculator\(digit=3\) cannot be made: .*unexpected"),
        ("calculator:digits=30", "digits must be from 1 to 9"),
    ],
)
def test_an_environment_that_cannot_be_made_is_the_users_mistake(name, message):
    refused(message, made, *named(name)[:2])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"name": "calculater"}, "'package.module:Class'.* a built-in .*: agent, calculator"),
        ({"name": "calculator", "tool_format": "xml"}, "tool_format='xml' must be one of"),
        ({"name": f"{USERS}:Picky"}, r"Picky\(\) cannot be made: OSError: no corpus"),
        (
            {"name": f"{USERS}:Exits", "memory_limit_gib": 1.0},
            r"^environment.name: .*:Exits cannot be made: the process of environments ended, 3 "
            r"times in a row. .* must not end their process\. .*memory_limit_gib=1 is too small, ",
        ),
        ({"name": "calculator", "timeout_s": 0.0}, r"environment.timeout_s=0.0 must be above 0"),
    ],
)
def test_mistakes_are_the_users(fields, message):
    with pytest.raises(UserError, match=message), EnvironmentPool(section(**fields)):
        pass


def test_a_home_that_cannot_start_is_named(monkeypatch):
    monkeypatch.setattr(pool_module, "START_TIMEOUT_S", 0.01)
    with (
        pytest.raises(UserError, match=r"took too long, 3 times in a row. .* less than 0.01 s"),
        EnvironmentPool(section("calculator")),
    ):
        pass


@pytest.mark.parametrize(
    "more",
    slow_after(
        1, ["", "made('textarena', {'game': 'Nim-v0'})\nmade('reasoning_gym', {'sets': 'gcd'})"]
    ),
)
def test_the_home_loads_no_jax(more):
    """JAX has threads, which a fork does not take along."""
    code = (
        "import pkgutil, sys\n"
        "from semrl_jax.environments import kinds\n"
        "from semrl_jax.environments.worker import load_environment, made\n"
        "names = {module.name for module in pkgutil.iter_modules(kinds.__path__)}\n"
        "for name in names - {'verifiers'}:\n"  # which needs the package
        "    load_environment(name)\n"
        f"{more}\n"
        "assert not {'jax', 'torch', 'transformers', 'grpc'} & sys.modules.keys()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)


def test_pools_of_several_environments_open_episodes_by_name():
    names = [f"{USERS}:Vowels:turns=1", f"{USERS}:Vowels:turns=2"]
    with EnvironmentPools(section("not read"), [*names, names[0]]) as pools:
        for turns, name in enumerate(names, 1):
            (found,) = pools[name].openings(seed=3, count=1)
            episode = pools.open(found)
            done = [episode.step("a").result(timeout=60).turn.done for _ in range(turns)]
            episode.end()
            assert (found.environment, done) == (name, [False] * (turns - 1) + [True])
        episode.count("invalid")
        counters = pools.counters
    assert (counters["num_episodes"], counters["num_turns"], counters["num_invalid"]) == (2, 3, 1)
    assert not EnvironmentPools(section(""), [])
    with (
        pytest.raises(UserError, match="no corpus"),
        EnvironmentPools(section(""), [names[0], f"{USERS}:Picky"]),
    ):
        pass


def test_first_messages_may_take_seconds_each(tmp_path, monkeypatch):
    (tmp_path / "slow_start.py").write_text(
        "import time\n\n\nclass Slow:\n"
        '    def tasks(self, seed, count):\n        return [{"n": i} for i in range(count)]\n\n'
        '    def reset(self, task, seed):\n        time.sleep(0.05)\n        return "go"\n\n'
        "    def step(self, message):\n        return [], 0.0, True\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with EnvironmentPool(section("slow_start:Slow", timeout_s=1.0)) as environments:
        environments.openings(0, 1)  # the process has started
        monkeypatch.setattr(pool_module, "START_TIMEOUT_S", 1.5)
        assert len(environments.openings(0, 40)) == 40
