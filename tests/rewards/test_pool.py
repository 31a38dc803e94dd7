"""The pool with hostile text and hostile verifiers: every job ends, and the next one is scored."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import pytest

from semrl_jax.rewards import Verdict, VerifierPool, verifier_pool
from semrl_jax.rewards.verdict import weighted_verdict, with_model_score
from semrl_jax.settings.rewards import MAX_SCORE, reward_functions
from semrl_jax.support.errors import UserError
from tests.cases import raised, refused
from tests.running import is_running, wait_until

HERE = pathlib.Path(__file__).parent
RIGHT = Verdict(1.0, True, False, None)


@pytest.fixture(autouse=True)
def helper_on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))


@pytest.fixture(scope="module")
def obey():
    """One worker that does what the response says, within half a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE))
        with VerifierPool(
            num_workers=1, timeout_s=0.5, function="hostile:obey", failure_score=-1.0
        ) as pool:
            yield pool


@pytest.mark.parametrize(
    ("command", "error", "counter"),
    [
        ("hang", "timeout", "num_timeouts"),
        ("exit", "crash", "num_crashes"),
        ("sys.exit", "exception: SystemExit: 3", "num_exceptions"),
        ("raise", r"exception: KeyError: 'two\nlines'", "num_exceptions"),
        ("unreadable", "exception: an exception whose text", "num_exceptions"),
        ("forge", "crash", "num_crashes"),
        ("forge nested", "crash", "num_crashes"),
        ("allocate", "exception: MemoryError:", "num_exceptions"),
        ("nan", "invalid: score must be a number from -1e+09 to 1e+09, not nan", "num_invalid"),
        ("key", "invalid: unknown keys ['colour']", "num_invalid"),
        ("flag", "invalid: correct must be a bool, not 'yes'", "num_invalid"),
    ],
)
def test_bad_verifier_fails_its_own_job_only(obey, command, error, counter):
    before = obey.counters
    bad, good = obey.submit(command, "7"), obey.submit("7", "7")
    verdict = bad.result(timeout=10)
    assert (verdict.score, verdict.correct) == (-1.0, False)
    assert verdict.error.startswith(error) and "\n" not in verdict.error
    assert good.result(timeout=10) == RIGHT
    after = obey.counters
    changed = {name for name in after if after[name] != before[name]}
    assert changed == {counter, "num_verdicts"} and after[counter] == before[counter] + 1


def test_prints_and_reads_do_not_reach_the_pipes(obey):
    assert obey.submit("print", "7").result(timeout=10) == RIGHT
    assert obey.submit("print", "read").result(timeout=10).error.startswith("exception: EOFError")
    assert obey.submit("7", "7").result(timeout=10) == RIGHT


def test_verifier_may_return_a_record(obey):
    assert obey.submit("record", "").result(timeout=10) == Verdict(2.0, False, True, "é")
    assert obey.submit(r"\boxed{7}", "7").result(timeout=10) == Verdict(0.0, False, True, None)


def test_a_forked_child_answers_nothing(obey):
    """Otherwise its answer would count for the next response, and so on."""
    asked = ["fork", "7", "8", "fork", "8", "7"]
    scores = [obey.submit(text, "7").result(timeout=10).score for text in asked]
    assert scores == [0.0, 1.0, 0.0, 0.0, 0.0, 1.0]


@pytest.mark.parametrize("command", ["forge later", "child answers"])
def test_a_reply_without_a_request_costs_no_job(obey, command):
    """If it counted as the next verdict, all later verdicts would be shifted by one."""
    before = obey.counters
    assert obey.submit(command, "").result(timeout=10) == RIGHT
    time.sleep(0.15)
    for response in ("7", "8", "7"):
        assert obey.submit(response, "7").result(timeout=10).correct == (response == "7")
    assert obey.counters == before | {"num_verdicts": before["num_verdicts"] + 4}


def test_a_reply_without_end_does_not_fill_the_memory(obey, monkeypatch):
    monkeypatch.setattr(verifier_pool, "MAX_REPLY_BYTES", 200_000)
    assert obey.submit("flood", "").result(timeout=10).error == "crash"  # before the timeout
    assert obey.submit("7", "7").result(timeout=10) == RIGHT


@pytest.mark.parametrize(
    ("command", "error"), [("daemon and hang", "timeout"), ("daemon and exit", "crash")]
)
def test_a_worker_ends_with_processes_that_left_its_session(obey, tmp_path, command, error):
    pid_file = tmp_path / "pid"
    assert obey.submit(command, str(pid_file)).result(timeout=10).error == error
    daemon = int(pid_file.read_text())
    wait_until(lambda: not is_running(daemon))
    assert obey.submit("7", "7").result(timeout=10) == RIGHT


def test_a_closed_pool_leaves_no_process_that_left_its_session(tmp_path):
    pid_file = tmp_path / "pid"
    with VerifierPool(num_workers=1, function="hostile:obey") as pool:
        assert pool.submit("daemon", str(pid_file)).result(timeout=10) == RIGHT
        daemon = int(pid_file.read_text())
        assert is_running(daemon)  # a verifier may have helpers
    assert not is_running(daemon)


def test_workers_get_no_credentials(monkeypatch):
    hidden = {
        "SEMRL_ROLLOUT_TOKEN", "HF_TOKEN", "WANDB_API_KEY", "AWS_ACCESS_KEY_ID", "PGPASSWORD",
        "AWS_SECRET_ACCESS_KEY", "GOOGLE_APPLICATION_CREDENTIALS", "SSH_AUTH_SOCK", "MYSQL_PWD",
        "my_token", "GITLABTOKEN",
    }  # fmt: skip
    kept = {"PATH", "PWD", "TOKENIZERS_PARALLELISM", "KEYBOARD", "VERIFIER_API_KEY"}
    for name in hidden | kept - {"PATH"}:
        monkeypatch.setenv(name, "x")
    with VerifierPool(num_workers=1, function="hostile:obey") as pool:
        found = set(pool.submit("variables", "").result(timeout=10).extracted.split())
    assert kept <= found and not found & hidden


def test_worker_that_died_idle_costs_no_job(obey):
    crashes = obey.counters["num_crashes"]
    pid = int(obey.submit("pid", "").result(timeout=10).score)
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_running(pid))
    assert obey.submit("7", "7").result(timeout=10) == RIGHT
    assert obey.counters["num_crashes"] == crashes


@pytest.mark.parametrize(
    "text", ["\x00", "\ud800", '"\n{}\r\n', "\u2028", "a" * 300_000], ids=lambda t: repr(t)[:12]
)
def test_any_text_crosses_the_pipe(obey, text):
    assert obey.submit(text, text).result(timeout=10) == RIGHT
    assert obey.submit(text, "7").result(timeout=10).correct is False


def test_too_long_text_never_reaches_a_worker(monkeypatch):
    monkeypatch.setattr(verifier_pool, "MAX_RESPONSE_CHARS", 10)
    with VerifierPool(num_workers=1) as pool:
        for response, reference in [("1" * 11, "1"), ("1", "1" * 11)]:
            verdict = pool.submit(response, reference).result(timeout=0)
            assert verdict == Verdict(-1.0, False, False, None, "too_long")
        assert pool.counters["num_too_long"] == 2


def test_hung_job_does_not_delay_the_others():
    with VerifierPool(num_workers=2, timeout_s=30.0, function="hostile:obey") as pool:
        hung = pool.submit("hang", "7")
        others = [pool.submit(str(i), str(i)) for i in range(20)]
        assert all(future.result(timeout=10).correct for future in others)
        assert not hung.done()
        closing = time.monotonic()
    assert time.monotonic() - closing < 15.0  # closing does not wait for a running job
    raised(RuntimeError, "closed", hung.result, timeout=0)


def test_close_leaves_no_process_and_no_open_future():
    with VerifierPool(num_workers=2, timeout_s=60.0, function="hostile:obey") as pool:
        pids = set()
        while len(pids) < 2:
            jobs = [pool.submit("pid", "") for _ in range(4)]
            pids |= {int(job.result(timeout=10).score) for job in jobs}
        futures = [pool.submit("hang", "") for _ in range(6)]
    assert all(isinstance(future.exception(timeout=0), RuntimeError) for future in futures)
    assert not any(is_running(pid) for pid in pids)
    raised(RuntimeError, "closed", pool.submit("7", "7").result, timeout=0)
    pool.close()


@pytest.mark.slow
def test_many_threads_may_submit():
    results = {}

    def score(pool, offset):
        futures = [pool.submit(f"\\boxed{{{offset + i}}}", str(i)) for i in range(100)]
        results[offset] = [future.result(timeout=30).correct for future in futures]

    with VerifierPool(num_workers=2) as pool:
        threads = [threading.Thread(target=score, args=(pool, k)) for k in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert pool.counters["num_verdicts"] == 400
    assert results == {k: [k == 0] * 100 for k in range(4)}


def test_cancelled_job_is_skipped(obey):
    obey.submit("hang", "")
    assert obey.submit("7", "7").cancel()
    assert obey.submit("8", "8").result(timeout=10) == RIGHT


def test_worker_is_replaced_before_its_memory_fills(monkeypatch):
    monkeypatch.setattr(verifier_pool, "MAX_JOBS_PER_WORKER", 2)
    with VerifierPool(num_workers=1, function="hostile:obey") as pool:
        pids = [int(pool.submit("pid", "").result(timeout=10).score) for _ in range(5)]
    assert pids[0] == pids[1] != pids[2] == pids[3] != pids[4]
    assert pool.counters["num_crashes"] == 0


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("no_such_module:f", "cannot be imported .ModuleNotFoundError"),
        ("hostile:no_such_name", "cannot be imported .AttributeError"),
        ("broken_import:f", "cannot be imported .OSError: no such data set"),
        ("hostile:one_argument", r"must be callable as one_argument\(response, reference\)"),
        ("hostile:not_callable", "must be callable"),
    ],
)
def test_bad_function_is_the_users_error_at_the_start(function, message):
    with pytest.raises(UserError, match=message) as caught:
        with VerifierPool(num_workers=1, function=function):
            pass
    assert "\n" not in str(caught.value) and f"rewards.function={function!r}" in str(caught.value)


def test_validate_tries_the_function_on_one_example(obey):
    assert obey.validate("7", "7") == RIGHT
    for command in ("nan", "raise", "hang"):
        refused(r"rewards\.function='hostile:obey' failed on", obey.validate, command, "7")


def test_workers_that_never_start_fail_the_pool():
    with VerifierPool(num_workers=1, memory_limit_gib=0.01) as pool:
        future = pool.submit("7", "7")
        raised(RuntimeError, "failed to start 3 times in a row", future.result, timeout=30)
        raised(RuntimeError, "failed to start", pool.wait_ready)


def test_bad_limits_are_the_users_error():
    for value in (float("nan"), 1e39, 1.1e9):
        with pytest.raises(UserError, match=r"rewards\.failure_score=.* must be in \[-1e\+09"):
            VerifierPool(failure_score=value)
    for settings, message in [
        ({"num_workers": 0}, r"rewards\.num_workers=0 must be above 0"),
        ({"timeout_s": float("inf")}, r"rewards\.timeout_s=inf must be at most"),
        ({"mode": "best"}, r"rewards\.mode='best' must be one of"),
        ({"unboxed_penalty": float("nan")}, r"rewards\.unboxed_penalty=nan"),
        ({"function": "module"}, r"rewards\.function='module' must be .* verifier: .*math,"),
        ({"function": ":name"}, r"rewards\.function=':name' must be"),
        ({"memory_limit_gib": -1.0}, r"rewards\.memory_limit_gib=-1"),
    ]:
        refused(message, VerifierPool, **settings)


def test_hung_worker_dies_with_a_killed_parent(tmp_path):
    program = (
        "import time\n"
        "from semrl_jax.rewards import VerifierPool\n"
        "pool = VerifierPool(num_workers=1, timeout_s=600.0, function='hostile:obey')\n"
        "print(int(pool.submit('pid', '').result().score), flush=True)\n"
        f"pool.submit('daemon', {str(tmp_path / 'pid')!r}).result()\n"
        "pool.submit('hang', '')\n"
        "time.sleep(0.2)\n"
        "print('hung', flush=True)\n"
        "time.sleep(600)\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        with contextlib.ExitStack() as stack:
            stack.callback(parent.kill)
            worker = int(parent.stdout.readline())
            assert parent.stdout.readline() == "hung\n"
            daemon = int((tmp_path / "pid").read_text())
            assert is_running(worker) and is_running(daemon)
    wait_until(lambda: not is_running(worker) and not is_running(daemon))


def test_rewards_load_the_parser_for_a_verdict_and_no_accelerator_library():
    program = (
        "import sys\n"
        "import semrl_jax.rewards, semrl_jax.rewards.verifier_worker\n"
        "assert not {'sympy', 'latex2sympy2_extended'} & set(sys.modules)\n"
        "from semrl_jax.rewards.verifiers import math\n"
        "math.verify('\\\\boxed{\\\\sqrt{2}}', '1.5', semrl_jax.rewards.VerifierSettings())\n"
        "bad = {'jax', 'jaxlib', 'grpc', 'transformers', 'torch'} & set(sys.modules)\n"
        "assert not bad, bad\n"
        "assert 'latex2sympy2_extended' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_a_verifier_may_take_the_row_of_the_prompt(obey):
    row = json.dumps({"limit": 2.5, "tests": [None, {"é": [1, True]}]})
    with VerifierPool(num_workers=1, function="hostile:with_row") as pool:
        assert pool.takes_row and not obey.takes_row
        for _ in range(2):
            verdict = pool.submit("", "", row).result(timeout=10)
            assert verdict.score == 2.5
            assert json.loads(verdict.extracted) == {"tests": [None, {"é": [1, True]}]}
        assert pool.submit("", "").result(timeout=10) == Verdict(-1.0, False, False, "{}")
        too_long = json.dumps({"text": "x" * verifier_pool.MAX_RESPONSE_CHARS})
        assert pool.submit("", "", too_long).result(timeout=10).error == "too_long"
    assert obey.submit("7", "7", row).result(timeout=10) == RIGHT  # it takes no row


SEVERAL = ("hostile:obey:weight=2", "math_text:weight=-0.25", "hostile:with_row:name=limit")


@pytest.fixture(scope="module")
def several():
    """One worker with a verifier that obeys, a built-in one, and one that takes the row."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(HERE))
        with VerifierPool(
            num_workers=1, timeout_s=0.5, functions=SEVERAL, failure_score=-3.0
        ) as pool:
            yield pool


def test_the_reward_is_the_weighted_sum_of_the_functions(several):
    assert several.takes_row
    row = json.dumps({"limit": 3.0})
    verdict = several.submit(r"\boxed{7}", r"\boxed{7}", row).result(timeout=10)
    assert verdict == Verdict(
        # math_text is 0: the reference has a box. Correctness and text are the first function's.
        2 * 1.0 - 0.25 * 0.0 + 3.0, True, True, None, "",
        {"obey": 1.0, "math_text": 0.0, "limit": 3.0},
    )  # fmt: skip
    verdict = several.submit(r"\boxed{7}", "7").result(timeout=10)
    assert (verdict.score, verdict.correct) == (2 * 0.0 - 0.25 * 1.0 - 1.0, False)
    assert verdict.parts == {"obey": 0.0, "math_text": 1.0, "limit": -1.0}


@pytest.mark.parametrize(
    ("command", "error", "counter"),
    [
        ("hang", "timeout: obey", "num_timeouts"),
        ("raise", r"exception: obey: KeyError: 'two\nlines'", "num_exceptions"),
    ],
)
def test_a_function_that_fails_loses_only_its_part(several, command, error, counter):
    before = several.counters
    row = json.dumps({"limit": 3.0})
    verdict = several.submit(command, "7", row).result(timeout=10)
    assert verdict.parts == {"obey": -3.0, "math_text": 0.0, "limit": 3.0}
    assert (verdict.score, verdict.correct, verdict.error) == (2 * -3.0 + 3.0, False, error)
    after = several.counters
    assert after == before | {counter: before[counter] + 1, "num_verdicts": after["num_verdicts"]}
    assert after["num_verdicts"] == before["num_verdicts"] + 3


def test_a_function_that_fails_on_the_first_row_is_named(several):
    with pytest.raises(UserError, match=r"rewards\.functions=.*: exception: limit: TypeError"):
        several.validate("7", "7", "[1]")  # a list has no limit


def test_steps_of_several_functions_are_joined():
    functions = reward_functions(("math:weight=2", "math_text:weight=-1"))
    verdicts = [
        Verdict(1.0, True, True, None, steps=steps)
        for steps in (((3, 1.0), (9, 0.0)), ((1, 1.0), (3, 0.5)))
    ]
    found = weighted_verdict(functions, verdicts)
    assert (found.score, found.steps) == (1.0, ((1, -1.0), (3, 1.5), (9, 0.0)))


def test_a_sum_beyond_the_bound_is_clipped_and_named():
    *functions, model = reward_functions(("math:weight=1e9", "math_text:weight=-1", "model"))
    verdicts = [Verdict(2.0, True, True, None), Verdict(1.0, False, False, None)]
    verdict = weighted_verdict(functions, verdicts)
    error = "invalid: the weighted sum 2e+09 is beyond 1e+09"
    assert (verdict.score, verdict.error, verdict.correct) == (MAX_SCORE, error, True)
    verdict = with_model_score(verdicts[0], model._replace(weight=-1e9), 2.0, joins=True)
    assert (verdict.score, verdict.error_kind) == (-MAX_SCORE, "invalid")


def test_several_functions_are_imported_at_the_start():
    entries = "math_text", "hostile:one_argument"
    message = "rewards.functions='hostile:one_argument' must be callable"
    with pytest.raises(UserError, match=message), VerifierPool(num_workers=1, functions=entries):
        pass


@pytest.mark.skipif(
    not hasattr(os, "sched_getaffinity") or len(os.sched_getaffinity(0)) < 2,
    reason="needs two cores that a process can be bound to",
)
def test_workers_may_use_the_cores_that_the_trainer_left():
    program = (
        "import json, os, sys\n"
        f"sys.path.insert(0, {str(HERE)!r})\n"
        "from semrl_jax import rewards\n"
        "from semrl_jax.support import cores\n"
        "before = sorted(os.sched_getaffinity(0))\n"
        "cores.leave_cores(len(before) - 1, 1, in_turn=True)\n"
        "with rewards.VerifierPool(num_workers=1, function='hostile:usable_cores') as pool:\n"
        "    print(json.dumps([before, pool.submit('', '').result().extracted]))\n"
    )
    found = subprocess.check_output([sys.executable, "-c", program], text=True, timeout=60)
    before, of_worker = json.loads(found)
    assert of_worker == str(before)


def test_workers_start_if_the_cores_of_the_start_are_gone(monkeypatch):
    """The system may move a process to other cores, such as those of another container."""
    monkeypatch.setattr("semrl_jax.support.cores.helper_cores", lambda: (10_000,))
    with VerifierPool(num_workers=1) as pool:
        assert pool.submit(r"\boxed{7}", "7").result().correct
