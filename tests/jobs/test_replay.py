"""Re-runs of steps: equal if nothing changed, and exactly one planted difference is found."""

import contextlib
import dataclasses
import json
import os
import pathlib
import shutil
import signal
import subprocess

import jax
import numpy as np
import pyarrow as pa
import pytest

from semrl_jax.jobs import replay_bisect
from semrl_jax.jobs.replay import Compared, Replay, chosen_steps, known_records, replayed, steps_of
from semrl_jax.jobs.replay_report import replay
from semrl_jax.runs import train
from semrl_jax.sampling import requests
from semrl_jax.sampling.multi_turn import MultiTurn
from semrl_jax.sampling.recorded import file_of
from semrl_jax.sampling.sampler import Sampler
from semrl_jax.sampling.source import Counted
from semrl_jax.settings.algorithms import importance_options
from semrl_jax.support.errors import UserError
from semrl_jax.training import loop
from semrl_jax.training.learner import Learner
from tests.cases import raised, refused
from tests.fixtures import save_chat_model, scores_by_length
from tests.launch.conftest import TINY, succeed
from tests.rollout.engines.vllm_replica import PYTHON
from tests.runs.test_algorithms import PPO
from tests.tiny import tiny_config

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("reports_where_looked_at", "rewarded")]
STEPS = 4
PLANTED = 2  # the step of a planted difference


def recorded_config(**fields):
    config = tiny_config()
    config.training.num_steps = config.checkpoints.keep = STEPS
    config.evaluation.every_steps = 0
    config.logging.replay_every = 1
    config.update_from_flattened_dict(fields)
    return config


def made(directory, **fields):
    """The directory of a finished run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("semrl_jax.runs.run.write_report", lambda workdir: None)
        patch.setattr(loop, "group_rewards", scores_by_length)
        assert train(recorded_config(**fields), str(directory), quiet=True) == 0
    return directory


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run with a record and a checkpoint of every step."""
    return made(tmp_path_factory.mktemp("runs") / "run")


def compared(run, first=0, **options):
    """The differences of a re-run, and the number of steps that were compared."""
    seen = Compared()
    asked = Replay(run, first, STEPS - 1, **options)
    found = seen.first(known_records(run), replayed(asked))
    return found and found.differences, len(seen.records)


# The tests of planted differences begin at a checkpoint and sample.
@pytest.mark.parametrize(("first", "recorded"), [(0, False), (2, True)])
def test_nothing_changed_gives_no_difference(run, first, recorded):
    before = {file: file.stat().st_mtime_ns for file in run.rglob("*")}
    assert compared(run, first, recorded=recorded) == (None, STEPS - first)
    assert {file: file.stat().st_mtime_ns for file in run.rglob("*")} == before


def another_seed(monkeypatch):
    """One response of the step gets other random numbers."""
    seed = requests.stream_seed

    def planted(*path):
        is_it = path[1:] == (requests.TRAINING, PLANTED, 1, 2)
        return seed(*path) + is_it

    monkeypatch.setattr(requests, "stream_seed", planted)


def changed_reward(monkeypatch):
    def planted(scored, config, step):
        rewards = scores_by_length(scored, config, step)
        rewards[1, 2] += step == PLANTED
        return rewards

    monkeypatch.setattr(loop, "group_rewards", planted)


def of_source(monkeypatch, change):
    """Changes the batch of the step."""
    following = Counted.next

    def planted(self, step, position, clock):
        sample = following(self, step, position, clock)
        return change(sample) if step == PLANTED else sample

    monkeypatch.setattr(Counted, "next", planted)


def dropped_prompt(monkeypatch):
    """The last group comes in the place of the second one too."""
    rows = [0, 1, 2, 3, 12, 13, 14, 15, *range(8, 16)]
    of_source(monkeypatch, lambda s: s._replace(scored=s.scored.take(rows)))


def reordered_batch(monkeypatch):
    rows = [*range(4), *range(8, 12), *range(4, 8), *range(12, 16)]
    of_source(monkeypatch, lambda s: s._replace(scored=s.scored.take(rows)))


def changed_metric(monkeypatch):
    def change(sample):
        metrics = dict(sample.scored.metrics)
        key = next(iter(metrics))
        values = metrics[key].value.copy()
        values[6] += 1
        metrics[key] = metrics[key]._replace(value=values)
        return sample._replace(scored=dataclasses.replace(sample.scored, metrics=metrics))

    of_source(monkeypatch, change)


def stale_weights(monkeypatch):
    """The replica gets the weights of the step before, under the version of this one."""
    sync, kept = Sampler.sync_weights, {}

    def planted(self, params, step):
        kept[step] = jax.tree.map(np.array, params)
        return sync(self, kept[step - 1] if step == PLANTED else params, step)

    monkeypatch.setattr(Sampler, "sync_weights", planted)


def wrong_logprob(monkeypatch):
    """The trainer's pass gives one other log-probability."""
    passes = Learner.passes

    def planted(self, state, *rest):
        found = passes(self, state, *rest)
        if int(state.step) == PLANTED:
            logprobs = found.old.logprobs.at[6, 0].add(1e-3)
            found = found._replace(old=found.old._replace(logprobs=logprobs))
        return found

    monkeypatch.setattr(Learner, "passes", planted)


def flipped_bit(monkeypatch):
    """The lowest bit of one weight changes after the update."""
    update = Learner.update

    def planted(self, state, *rest):
        step = int(state.step)
        state, *others = update(self, state, *rest)
        if step == PLANTED:
            state = state._replace(params=with_flipped_bit(state.params))
        return state, *others

    monkeypatch.setattr(Learner, "update", planted)


def with_flipped_bit(params):
    layers = params["layers"]
    leaf = layers["down"]["kernel"]
    values = np.array(leaf)
    values.reshape(-1).view(np.uint32)[5] ^= 1
    kernel = jax.device_put(values, leaf.sharding)
    return {**params, "layers": {**layers, "down": {**layers["down"], "kernel": kernel}}}


# The stage, what differs in it, and the response and its token.
PLANTS = {
    dropped_prompt: ("prompts", "group_id", 4, None),
    reordered_batch: ("prompts", "group_id", 4, None),
    another_seed: ("tokens", "response_ids", 6, ...),
    stale_weights: ("tokens", "response_ids", ..., ...),
    wrong_logprob: ("log-probabilities", "old_logprobs", 6, 0),
    changed_reward: ("rewards", "reward", 6, None),
    changed_metric: ("metrics", ..., 6, None),
    flipped_bit: ("weights", "policy/layers/down/kernel", None, None),
}


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_a_planted_difference_is_found(run, monkeypatch, plant):
    plant(monkeypatch)
    (first, *_), count = compared(run, 1)
    assert (first.step, count) == (PLANTED, PLANTED)
    found = first.stage, first.what, first.row, first.token
    expected = PLANTS[plant]
    assert [a for a, b in zip(found, expected) if b is not ...] == [
        b for b in expected if b is not ...
    ]
    notes = {
        reordered_batch: "the same prompts in another order",
        dropped_prompt: "1 prompts are missing and 0 are new",
        flipped_bit: "1 of",
    }
    assert notes.get(plant, "") in first.note


# What a setting changes first, at the first step of the re-run.
SETTINGS = {
    "algorithms.advantage.epsilon": (0.1, "advantages"),
    "shaping.target": ("none", "advantages"),
    "algorithms.loss.clip_epsilon": (1e-6, "weights"),
    "training.max_grad_norm": (1e-3, "weights"),
    "metrics.stride": (2, "metrics"),
    "rollout.temperature": (0.5, "tokens"),
    "seed": (5, "prompts"),
}


OFTEN = ("algorithms.advantage.epsilon", "training.max_grad_norm", "seed")


@pytest.mark.parametrize(
    "field",
    [name if name in OFTEN else pytest.param(name, marks=pytest.mark.soak) for name in SETTINGS],
)
def test_a_changed_setting_is_found_in_its_stage(run, field):
    value, stage = SETTINGS[field]
    (first, *_), count = compared(run, 2, changes={field: value})
    assert (first.step, first.stage, count) == (2, stage, 1)


def test_weights_of_another_policy_differ_from_the_start(run, tmp_path):
    """A directory, and a file whose only difference is one bit of one tensor."""
    (first, *_), _ = compared(run, 2, weights=str(run / "checkpoints" / "3"))
    assert (first.stage, first.step) == ("start", 2)
    assert compared(run, 2, weights=str(run / "checkpoints" / "2"))[0] is None


def test_the_command_tells_and_writes_a_page(run, tmp_path, capsys):
    page = tmp_path / "page.html"
    assert replay([run], 1, None, page) == 0
    out = capsys.readouterr().out
    assert "no difference in steps 1 to 3 (compared: rows of 3 steps, resp" in out
    assert not page.exists()
    changes = {"rollout.temperature": 0.5}
    assert replay([run], 1, None, page, changes=changes) == 1
    out = capsys.readouterr().out
    assert "step 1, tokens: response " in out and str(page) in out
    text = page.read_text()
    assert text.count("<mark>") == 2 and "rollout.temperature=0.5" in text
    assert "before it is equal to the bit" in text


@pytest.mark.soak
def test_a_change_begins_at_its_step_without_a_checkpoint_of_it(run, tmp_path, capsys):
    few = shutil.copytree(run, tmp_path / "few")
    for step in (2, 3, 4):
        shutil.rmtree(few / "checkpoints" / str(step))
    page = tmp_path / "page.html"
    changes = {"shaping.target": "none"}
    assert replay([few], 2, 3, page, changes=changes, bisect=True) == 1
    assert "step 2, advantages" in capsys.readouterr().out
    # Without records and responses, the row of the log names the stage.
    shutil.rmtree(few / "records")
    shutil.rmtree(few / "rollouts")
    assert replay([few], 2, 3, page, changes=changes) == 1
    assert "step 2, advantages" in capsys.readouterr().out
    assert replay([few], 1, 3, page) == 0
    # A derived setting follows.
    assert replay([few], 1, 1, page, changes={"rollout.group_size": 2}) == 1
    assert "step 1, tokens: response/" in capsys.readouterr().out
    # Without a checkpoint before it, the run is repeated from its beginning.
    shutil.rmtree(few / "checkpoints" / "1")
    assert replay([few], 1, 1, page, changes=changes) == 1
    assert "step 1, advantages" in capsys.readouterr().out


@pytest.mark.soak
def test_steps_of_a_resumed_run_have_the_settings_of_their_attempt(tmp_path, capsys):
    """Also those of a longer run, and those before and after a fork."""
    run, page = tmp_path / "run", tmp_path / "page.html"
    packed = {"training.pack_sequences": True, "training.micro_batch_tokens": 80}
    for fields in ({"training.num_steps": 2}, {"training.num_steps": STEPS, **packed}):
        made(run, **fields)
    fork = {"training.resume_from": str(run / "checkpoints" / "3"), "training.num_steps": STEPS}
    fork = made(tmp_path / "fork", **fork)
    for each in (run, fork):
        for recorded in (False, True):
            assert replay([each], 0, None, page, recorded=recorded) == 0
            out = capsys.readouterr().out
            assert "no difference in steps 0 to 3 (compared: rows of 4 steps, resp" in out
            assert "gradients of 4 steps" in out  # only records have them
    # A fork has no checkpoint and no record of the steps that it inherited.
    assert chosen_steps(fork, 2, None)[0] == 2 and chosen_steps(fork, None, None)[0] == 3
    # The settings matter.
    for each in (run, fork):
        assert replay([each], 2, None, page, changes={"training.pack_sequences": False}) == 1
        assert "step 2" in capsys.readouterr().out
    run.rename(tmp_path / "gone")
    refused(f"continues {run} from step 3 on", replay, [fork], 2, None, page)
    assert replay([fork], 3, None, page) == 0


def test_a_signal_is_no_answer(run):
    records = replayed(Replay(run, 1, STEPS - 1))
    assert next(records).step == 1
    os.kill(os.getpid(), signal.SIGTERM)
    raised(SystemExit, "75", list, records)


def test_a_run_with_vllm_replays_from_its_records_alone(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # starts faster
    fields = {f"rollout.vllm_{name}": value for name, value in {
        "python": str(PYTHON), "enforce_eager": True, "kv_cache_gib": 0.1, "max_num_seqs": 16,
    }.items()}  # fmt: skip
    # vLLM on CPUs has no heads of 16.
    fields |= {"rollout.engine": "vllm", "model.num_heads": 1, "training.num_steps": 2}
    run, page = made(tmp_path / "run", **fields), tmp_path / "page.html"
    assert replay([run], 0, None, page, recorded=True) == 0
    assert "compared: rows of 2 steps, responses of 2 steps, grad" in capsys.readouterr().out
    refused("from recorded responses only", replay, [run], 0, None, page)


def test_recorded_responses_of_a_quantised_engine_are_corrected_again(tmp_path):
    config = recorded_config(**{
        "rollout.engine": "vllm", "rollout.vllm_quantization": "fp8_per_tensor",
        "rollout.weight_dtype": "bfloat16",
    })  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps({"run_id": "a", "config": config.to_dict()}))
    again = Replay(tmp_path, 0, 1, recorded=True).config()
    assert importance_options(again)["level"] == importance_options(config)["level"] == "token"
    chosen = {"algorithms.importance.level": "none"}
    again = Replay(tmp_path, 0, 1, chosen, recorded=True).config()
    assert importance_options(again)["level"] == "none"


def test_a_change_of_a_setting_that_is_gone_is_one_line(tmp_path):
    record = {"run_id": "a", "config": recorded_config().to_dict()}
    (tmp_path / "config.json").write_text(json.dumps(record))
    starts = tmp_path / "starts.jsonl"
    starts.write_text(
        json.dumps({"step": 0, "changed": ["rollout.annealing.enabled: True -> False"]})
    )
    Replay(tmp_path, 0, 1).config()  # the value with which it did nothing
    starts.write_text(
        json.dumps({"step": 0, "changed": ["rollout.annealing.enabled: False -> True"]})
    )
    refused("has a setting that this version lacks", Replay(tmp_path, 0, 1).config)


def test_two_runs_part_at_the_first_step_of_another_number(run, tmp_path, capsys):
    page = tmp_path / "page.html"
    plain = {"shaping.target": "none", "logging.replay_every": 0}
    other = made(tmp_path / "other", **plain)
    assert replay([run, other], None, None, page, bisect=True) == 1
    out = capsys.readouterr().out
    # The first step has no baseline, and so no shaping.
    assert "step 1, advantages: response " in out and "shaping.target 'advantage' ->" in out
    # Records change no number of a run.
    again = made(tmp_path / "again", **{"logging.replay_every": 0})
    assert replay([run, again], None, None, page, bisect=True) == 0
    later = made(tmp_path / "later", seed=3)
    assert replay([run, later], None, None, page, bisect=True) == 1
    assert "the two runs differ from the start" in capsys.readouterr().out


def test_what_cannot_be_replayed_is_one_line(run, tmp_path):
    page = tmp_path / "page.html"
    refused("is no run", replay, [tmp_path], None, None, page)
    refused("--from=9", replay, [run], 9, None, page)
    broken = shutil.copytree(run, tmp_path / "broken")
    refused("no field of the config", replay, [broken], 2, 3, page, changes={"shaping.x": 1})
    refused("shaping.target='x'", replay, [broken], 2, 3, page, changes={"shaping.target": "x"})
    refused("must be of type", replay, [broken], 2, 3, page, changes={"seed": "x"})
    own = {"logging.replay_every": 0}
    refused("a re-run has its own", replay, [broken], 2, 3, page, changes=own)
    short = {"training.num_steps": 3}
    refused("ended before step 3", replay, [broken], 2, 3, page, changes=short)
    sampling = {"rollout.group_size": 2}
    refused("of the sampling", replay, [broken], 2, 3, page, changes=sampling, recorded=True)
    content = bytearray(file_of(run, 2).read_bytes())
    content[len(content) // 4] ^= 1
    file_of(broken, 2).write_bytes(content)
    refused("remove it, and the step is compared", replay, [broken], 2, 3, page)
    shutil.copy(file_of(run, 1), file_of(broken, 3))
    shutil.copy(file_of(run, 2), file_of(broken, 2))
    refused("is the record of step 1", replay, [broken], 2, 3, page)
    file_of(broken, 3).unlink()
    refused("has no record of step 3", replay, [broken], 2, 3, page, recorded=True)
    file_of(broken, 2).write_bytes(file_of(broken, 2).read_bytes()[:100])
    refused("remove it, and the step is compared", replay, [broken], 2, 3, page)
    inputs = json.loads((broken / "inputs.json").read_text())
    (broken / "inputs.json").write_text(json.dumps(inputs | {"data": "0"}))
    refused(f"run in {broken} began with other data", replay, [broken], 2, 3, page)
    state = next((broken / "checkpoints" / "2").rglob("_METADATA"))
    state.write_bytes(b"")
    refused("_METADATA has been altered; name another", replay, [broken], 2, 3, page)
    shutil.rmtree(broken / "checkpoints")
    refused("has no checkpoint at or before step 3", replay, [broken], None, None, page)
    record = json.loads((broken / "config.json").read_text())
    record["config"]["rollout"]["engine"] = "vllm"
    (broken / "config.json").write_text(json.dumps(record))
    refused("from recorded responses only", replay, [broken], 0, 1, page)
    shutil.copy(run / "inputs.json", broken)
    assert replay([broken], 0, 1, page, recorded=True) == 0
    assert not page.exists() and steps_of(run).checkpoints == [1, 2, 3, 4]
    assert chosen_steps(run, None, None) == (1, 1, 3)


def test_revisions_are_tried_by_halves(run, tmp_path, monkeypatch):
    """Without git: the revisions 3 and later change a token of step 2."""
    known = [known_records(run)(step) for step in range(STEPS)]
    names, tried = [str(number) for number in range(6)], []

    def git(*arguments, why=""):
        if arguments[0] == "rev-parse" and arguments[-1] == "none^{commit}":
            raise UserError(why)
        if arguments[0] == "rev-list":
            first, last = arguments[-1].split("..")
            return "\n".join(names[int(first) + 1 : int(last) + 1])
        if arguments[0] == "rev-parse":
            return arguments[-1].removesuffix("^{commit}")
        return f"subject of {arguments[-1]}"

    def records(asked, code):
        tried.append(code.name)
        for record in known:
            if record.step == 2 and int(code.name) >= 3:
                rows = record.columns["response_ids"].to_pylist()
                rows[5][1] += 1
                at = record.columns.column_names.index("response_ids")
                field = record.columns.schema.field("response_ids")
                record = record._replace(
                    columns=record.columns.set_column(at, field, pa.array(rows, field.type))
                )
            yield record

    monkeypatch.setattr(replay_bisect, "_git", git)
    monkeypatch.setattr(replay_bisect, "records_of", records)
    monkeypatch.setattr(
        replay_bisect, "_checkout", lambda name: contextlib.nullcontext(pathlib.Path(name))
    )

    def found(good, bad):
        asked = Replay(run, 0, STEPS - 1)
        return replay_bisect.between_revisions(asked, good, bad, Compared(), lambda line: None)

    answer = found("0", "5")
    assert (answer.revision, answer.finding.first.step) == ("3", 2)
    assert (answer.finding.first.row, answer.finding.first.token) == (5, 1)
    assert tried[:2] == ["0", "5"] and len(tried) == answer.tried == 4
    refused("do not differ in steps 0 to 3", found, "0", "2")
    refused("differs already from what", found, "4", "5")
    refused("must be before", found, "5", "5")
    refused("'none' is no revision", found, "none", "5")


def test_a_revision_is_checked_out_for_a_while(tmp_path, monkeypatch):
    """With git, in a repository of one commit."""
    monkeypatch.setattr(replay_bisect, "ROOT", tmp_path)
    asked = Replay(tmp_path, 0, 1)
    ends = asked, "nothing", "HEAD", Compared(), print
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    refused("need a checkout of git", replay_bisect.between_revisions, *ends)
    (tmp_path / "file").write_text("text")
    own = ("-c", "user.name=a", "-c", "user.email=a@b")
    for words in (("init", "-q"), ("add", "file"), (*own, "commit", "-qm", "first")):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    refused("'nothing' is no revision", replay_bisect.between_revisions, *ends)
    with replay_bisect._checkout("HEAD") as code:
        assert (code / "file").read_text() == "text"
        assert len(replay_bisect._git("worktree", "list").splitlines()) == 2
    assert not code.exists() and len(replay_bisect._git("worktree", "list").splitlines()) == 1


OTHER_RUNS = {
    "ahead": {"rollout.max_staleness": 2},
    "parts": {"rollout.max_staleness": 2, "rollout.in_flight": "keep"},
    "lora": {"lora.rank": 4, "lora.alpha": 8.0, "lora.dropout": 0.1},
    "ppo": PPO,
}


@pytest.mark.soak
@pytest.mark.parametrize("name", OTHER_RUNS)
def test_other_runs_replay_too(tmp_path, name):
    run = made(tmp_path / "run", **OTHER_RUNS[name])
    for recorded in (False, True):
        assert compared(run, 2, recorded=recorded) == (None, STEPS - 2)
    (first, *_), _ = compared(run, 2, changes={"rollout.temperature": 0.5})
    assert first.stage == "tokens"


@pytest.mark.soak
def test_episodes_replay_with_recorded_answers_too(tmp_path, monkeypatch):
    """With records, no environment is asked."""
    save_chat_model(tmp_path / "model")
    fields = {
        "model.path": str(tmp_path / "model"), "data.task": "environment", "data.num_prompts": 8,
        "environment.name": "tests.environments.users:Vowels", "environment.num_workers": 2,
        "rollout.stop_token_ids": tuple(range(0, 280, 7)), "rollout.max_prompt_tokens": 64,
        "rollout.max_response_tokens": 96,
    }  # fmt: skip
    run = made(tmp_path / "run", **fields)
    assert compared(run, 2) == (None, STEPS - 2)
    monkeypatch.setattr(MultiTurn, "play", None)
    assert compared(run, 2, recorded=True) == (None, STEPS - 2)


@pytest.mark.soak
def test_two_processes_replay_as_two_processes(tmp_path):
    run, page = tmp_path / "run", tmp_path / "page.html"
    succeed(
        "launch.local", "--processes=2", "--devices_per_process=2", "--", f"--config={TINY}",
        f"--workdir={run}", "--config.logging.replay_every=1", "--config.training.num_steps=3",
        "--config.checkpoints.keep=3", timeout=300,
    )  # fmt: skip
    for flags in ((), ("--recorded",)):
        done = succeed("launch.replay", run, "--from=1", f"--output={page}", *flags, timeout=300)
        what = "(compared: rows of 2 steps, responses of 2 steps"
        assert f"no difference in steps 1 to 2 {what}" in done.stdout
