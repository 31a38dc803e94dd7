"""`Trainer`: a loop over steps, functions and rows of the program, ends and resumes."""

import contextlib
import importlib
import json
import operator
import os
import pathlib
import signal
import threading
import types

import pytest

import semrl_jax
from configs.default import get_config
from semrl_jax.library.settings import configure
from semrl_jax.runs.config_checks import method_line
from semrl_jax.settings.training import Training
from semrl_jax.support.errors import UserError
from tests.cases import refused, slow_after
from tests.fixtures import read_rows, stable
from tests.library.conftest import ROWS, SIZES

pytestmark = pytest.mark.usefixtures("reports_where_looked_at")


FEW_CHECKPOINTS = {"checkpoints": {"every_steps": 40}}  # for runs that nobody continues


@pytest.fixture
def trainer(chat_model, tmp_path):
    """Makes trainers of one small run; keywords replace its arguments."""
    made = []

    def make(workdir="run", **arguments):
        given = {"model": chat_model, "prompts": ROWS, "reward": digits, **SIZES, **arguments}
        made.append(semrl_jax.Trainer(tmp_path / workdir, config="grpo", **given))
        return made[-1]

    yield make
    for one in made:
        one.close()


def digits(response, reference):
    return sum(c.isdigit() for c in response) / (1 + len(response))


KNOWN = {row["question"] + row["answer"] for row in ROWS} | {"1+1=-"}


def locked():
    lock = threading.Lock()

    def reward(response, reference):
        with lock:
            return 1.0

    return reward


@pytest.fixture(scope="module")
def straight(chat_model, tmp_path_factory):
    """The rows of an undisturbed run."""
    given = {"model": chat_model, "prompts": ROWS, "reward": digits, **SIZES}
    one = semrl_jax.Trainer(tmp_path_factory.mktemp("straight"), config="grpo", **given)
    with contextlib.closing(one):
        return stable(read_rows(one.train().workdir))


def test_a_loop_gives_every_step_with_its_responses(trainer, capsys):
    given = FEW_CHECKPOINTS | {"reward": lambda response, reference: float(len(reference))}
    one = trainer(**given)
    steps = list(one)
    assert "method: grpo\n" in capsys.readouterr().out
    assert [step.number for step in steps] == [0, 1, 2]
    for step in steps:
        scores = [item.verdict.score for item in step.responses]
        assert len(scores) == 16 and {1.0, 2.0} >= set(scores)
        assert step.scalars["reward/mean"] == pytest.approx(sum(scores) / 16)
    assert one.log.column("step").to_pylist() == [0, 1, 2]
    assert one.log.column("reward/mean").to_pylist() == [s.scalars["reward/mean"] for s in steps]
    assert (one.workdir / "checkpoints" / "3").is_dir()
    refused("holds a run with other prompts", trainer(prompts=ROWS[1:], **given).train)


@pytest.mark.slow
def test_a_loop_that_is_left_goes_on_where_it_was(trainer, straight):
    one = trainer()
    for _ in one:
        break
    found = []
    other = trainer()  # as in another process; it also works in another thread
    thread = threading.Thread(target=other.train, args=[found.append])
    thread.start()
    thread.join()
    assert [step.number for step in found] == [1, 2]
    assert stable(read_rows(one.workdir)) == straight


@pytest.mark.slow
def test_an_error_in_the_loop_leaves_a_run_that_goes_on(trainer, straight):
    one = trainer()
    with pytest.raises(ZeroDivisionError) as held:  # the error holds the loop
        one.train(lambda step: 1 / 0)
    assert held.value.__traceback__
    assert [step.number for step in one] == [1, 2]
    assert stable(read_rows(one.workdir)) == straight


@pytest.fixture
def interruptible():
    """Shells start background jobs, perhaps these tests, with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.slow
@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_during_a_step_saves_a_checkpoint(trainer, straight):
    one, numbers = trainer(), []

    def watch(step):
        numbers.append(step.number)
        # In the loop's own code an interrupt is Python's; the run's handler comes with the step.
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT)).start()

    with pytest.raises(KeyboardInterrupt):
        one.train(watch)
    assert len(numbers) < 3 and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    one.train()
    assert stable(read_rows(one.workdir)) == straight


@pytest.mark.slow
def test_several_rewards_have_names_and_weights(trainer):
    def short(response, reference, row):
        return 1.0 / (1 + len(row["question"]))

    one = trainer(reward={"exact": digits, "short": (short, 0.5)}, training={"num_steps": 1})
    (step,) = one
    scalars = step.scalars
    total = scalars["reward/exact/mean"] + 0.5 * scalars["reward/short/mean"]
    assert scalars["reward/short/mean"] == pytest.approx(0.2)
    assert scalars["reward/mean"] == pytest.approx(total)


def test_rows_of_any_iterable(trainer):
    rows = ({"prompt": row["question"], "extra": [1]} for row in ROWS)
    reward = lambda a, b, row: float(row["extra"][0])  # noqa: E731
    (step,) = trainer(prompts=rows, reward=reward, training={"num_steps": 1}, **FEW_CHECKPOINTS)
    assert step.scalars["reward/mean"] == 1.0
    questions = trainer("other", prompts=[row["question"] for row in ROWS])
    assert questions.config.data.files == (str(questions.workdir / "given" / "prompts.jsonl"),)


@pytest.mark.parametrize(
    "package, make", slow_after(1, [("pandas", "DataFrame"), ("datasets", "Dataset.from_list")])
)
def test_rows_of_other_libraries(trainer, package, make):
    library = importlib.import_module(package)
    given = [*ROWS[:-1], {"question": "1+1=", "answer": None}]
    one = trainer(
        prompts=operator.attrgetter(make)(library)(given),
        reward=lambda response, reference, row: float(row["question"] + reference in KNOWN),
        training={"num_steps": 3}, **FEW_CHECKPOINTS,
    )  # fmt: skip
    assert [step.scalars["reward/mean"] for step in one] == [1.0] * 3
    (file,) = one.config.data.files
    written = [json.loads(line) for line in pathlib.Path(file).read_text().splitlines()]
    assert written == [*ROWS[:-1], {"question": "1+1=", "answer": "-"}]


def test_a_policy_is_read_again_after_a_step(trainer, monkeypatch):
    def steps(config, workdir):
        for number in range(2):
            yield types.SimpleNamespace(step=number, scored=None), {}
        return 0

    module = importlib.import_module("semrl_jax.library.trainer")
    monkeypatch.setattr(module, "train_steps", steps)
    monkeypatch.setattr(module, "LanguageModel", lambda path: contextlib.ExitStack())
    one = trainer()
    found = [one.policy for _ in one]
    found.append(one.policy)  # of the checkpoint at the end
    assert len(set(found)) == 3 and one.policy is found[-1]


@pytest.mark.slow
def test_policy_and_evaluation_of_the_newest_checkpoint(trainer, tmp_path):
    template = SIZES["data"] | {"template": "Q {input} A"}  # which questions get too
    one = trainer(problems=ROWS[:4], data=template).train()
    ((response,),) = one.policy.generate("1+1=", max_tokens=4)
    assert len(response.token_ids) <= 4
    assert one.policy.tokenizer.decode(one.policy.encode("1+2=")) == "Q 1+2= A"
    figures = one.evaluate(tmp_path / "evaluation", n=2)
    assert 0 <= figures["problems"]["pass@2"] <= 1


@pytest.mark.parametrize(
    "given, message",
    [
        ({"training": {"lr": 1.0}}, "training.lr is no field of the config; did you mean training"),
        ({"trainin": {}, "sed": 1}, "sed is no field of the config; did you mean seed?"),
        ({"training": {"num_steps": "x"}}, "training.num_steps='x' must be of type int, not str"),
        ({"prompts": []}, "prompts has no row"),
        ({"prompts": [3]}, "prompts: row 0 must be a mapping or a question, not 3"),
        ({"prompts": [{"question": {1}}]}, "prompts must have rows that JSON can hold"),
        ({"reward": "maths"}, "rewards.function='maths' must be"),
        ({"prompts": {"train": ROWS}}, "prompts is a mapping with train; give rows"),
        ({"reward": threading.Lock().acquire}, "reward cannot be sent to its own process (Type"),
        ({"reward": locked()}, "cannot be sent to its own process, because of lock (TypeError"),
    ],
)
def test_a_mistake_is_one_line(trainer, given, message):
    with pytest.raises(UserError) as caught:
        trainer(**given).train()
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert caught.value._render_traceback_() == [f"UserError: {caught.value}"]


def test_a_function_of_a_wrong_form_is_one_line(trainer):
    with pytest.raises(UserError, match=r"must be callable as reward\(response, reference\)"):
        trainer(reward=lambda: 1.0).train()


def test_settings_as_dataclasses_and_files(tmp_path):
    one = semrl_jax.Trainer(
        tmp_path / "run",
        training=Training(num_steps=7),
        seed=3,
        metrics={"names": ["effective_rank"]},
    )
    assert one.config.training.num_steps == 7 and one.config.seed == 3
    assert one.config.metrics.names == ("effective_rank",)
    file = tmp_path / "mine.py"
    file.write_text(
        "from configs import grpo\n\n\ndef get_config():\n    return grpo.get_config()\n"
    )
    assert semrl_jax.Trainer(tmp_path, config=file).config.shaping.target == "none"
    refused("config='grp' is unknown; choose one of ", semrl_jax.Trainer, tmp_path, config="grp")


@pytest.mark.parametrize(
    "settings, parts",
    [
        ({}, ["grpo", "VERL shaping of advantage", "KL 0.001", "entropy bonus", "-1 if"]),
        ({"rewards": {"mode": "mix"}, "shaping": {"target": "none"}}, ["grpo", "KL", "entropy"]),
        ({"environment": {"name": "a:B"}}, ["grpo", "VERL", "KL", "entropy"]),
    ],
)
def test_the_method_in_a_line(settings, parts):
    config = get_config()
    configure(config, settings)
    line = method_line(config).removeprefix("method: ")
    found = line.split(", ")
    assert len(found) == len(parts) and all(map(str.startswith, found, parts))
    assert len(f"method: {line}") <= 100
