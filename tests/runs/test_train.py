"""Whole small runs in this process, on 8 forced devices."""

import contextlib
import dataclasses
import json
import pathlib
import re
from types import SimpleNamespace

import jax
import numpy as np
import orbax.checkpoint as ocp
import pyarrow.parquet as pq
import pytest

from semrl_jax import data, models
from semrl_jax.cluster.peers import Peers
from semrl_jax.metrics.measurer import Measurer
from semrl_jax.runs import lifecycle, run, train
from semrl_jax.runs.policies import find_policies
from semrl_jax.runs.starting_model import with_own_model
from semrl_jax.sampling.sampler import Sampler
from semrl_jax.support.console import Reporter
from semrl_jax.support.errors import Preempted, UserError
from semrl_jax.training import loop
from semrl_jax.training.learner import Learner
from tests.cases import raised, refused
from tests.fixtures import read_rows, scores_by_length, stable
from tests.oracles import algorithms as oracle
from tests.runs.resuming import rows_of_parts
from tests.tiny import tiny_config

# Columns of records for replays alone.
OF_RECORDS = (
    "reward", "weight_spans", "old_logprobs", "ref_logprobs", "values", "advantages", "returns",
    "trained", "mean_states", "routed_experts",
)  # fmt: skip
pytestmark = pytest.mark.usefixtures("reports_where_looked_at")


def final_params(workdir, step):
    """Parameters of a checkpoint, read by Orbax alone."""
    state = ocp.StandardCheckpointer().restore(workdir / "checkpoints" / str(step) / "state")
    return state["params"]


def assert_same(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def largest_difference(actual, expected):
    return max(
        jax.tree.leaves(jax.tree.map(lambda a, b: float(np.abs(a - b).max()), actual, expected))
    )


def warm_config():
    config = tiny_config()
    config.warm_start.num_steps = 12
    return config


@pytest.fixture(scope="module")
def warm_run(tmp_path_factory):
    """The directory of a finished run with a report."""
    workdir = tmp_path_factory.mktemp("runs") / "warm"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "group_rewards", scores_by_length)
        config = warm_config()
        config.training.export = config.checkpoints.export = "bfloat16"  # changes nothing else
        assert train(config, str(workdir)) == 0
    return workdir


@pytest.mark.slow
def test_a_run_writes_all_files_that_tools_read(warm_run):
    workdir = warm_run
    rows = read_rows(workdir)
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert ["eval/arithmetic/greedy_accuracy" in row for row in rows] == [True, False, True, True]
    for row in rows[:3]:
        for key in (
            "reward/mean", "reward/correct", "response/length/mean", "metrics/effective_rank/mean",
            "metrics/effective_rank_velocity/mean", "shaping/valid_fraction/mean",
            "shaping/beta/mean", "policy/loss", "policy/clip_fraction", "policy/approx_kl",
            "policy/entropy", "policy/grad_norm", "rollout/tokens_per_s", "rollout/staleness",
            "rollout/logprob_mismatch/max", "time/generate_s", "time/update_s", "time/step_s",
        ):  # fmt: skip
            assert np.isfinite(row[key]), key
        assert row["rollout/logprob_mismatch/max"] < 1e-4  # float32 engine and policy
    assert rows[0]["shaping/active"] == 0 and rows[1]["shaping/active"] == 1
    record = json.loads((workdir / "config.json").read_text())
    assert record["config"]["training"]["num_steps"] == 3 and record["versions"]["jax"]
    table = pq.read_table(workdir / "rollouts" / "step_000001.parquet").to_pylist()
    assert len(table) == 16
    assert [(r["group_id"], r["sample_index"]) for r in table] == [
        (4 + group, sample) for group in range(4) for sample in range(4)
    ]
    assert all(len(r["response_ids"]) == len(r["rollout_logprobs"]) for r in table)
    assert (workdir / "curves.png").stat().st_size > 10_000
    assert '"policy/entropy":' in (workdir / "report.html").read_text()
    assert list((workdir / "tensorboard").iterdir())
    assert sorted(p.name for p in (workdir / "checkpoints").iterdir()) == ["2", "3"]

    # A finished run cannot be shortened.
    before = (workdir / "metrics.jsonl").read_bytes()
    config = warm_config()
    config.training.num_steps = 2
    refused("num_steps=2 is less than the 3 finished", train, config, str(workdir))
    assert (workdir / "metrics.jsonl").read_bytes() == before
    assert (workdir / "config.json").exists()


def test_too_few_epochs_are_named(config):
    run = SimpleNamespace(workdir=SimpleNamespace(path="", changed=()), reporter=Reporter())
    opened = SimpleNamespace(run=run, first_state=lambda: SimpleNamespace(step=3))
    config.training.update(num_epochs=1, num_steps=2)  # which the data gave
    message = r"training\.num_epochs=1 gives 2 steps, which is less than the 3 finished"
    refused(message, next, lifecycle._train(config, opened))


@pytest.mark.slow
def test_the_page_on_run_directories_names_every_file_and_column(warm_run):
    """docs/run_directory.md; Parquet columns with their Arrow types."""
    page = (pathlib.Path(__file__).parents[2] / "docs" / "run_directory.md").read_text()
    files, recorded, _ = re.split(r"^## ", page, flags=re.MULTILINE)
    named = {name for row in _table(files) for name in re.findall(r"`([^`]+)`", row[0])}
    assert {entry.name for entry in warm_run.iterdir()} <= named
    types = {name: row[1] for row in _table(recorded) for name in re.findall(r"`([^`]+)`", row[0])}
    seen = set()
    for file in (warm_run / "rollouts").iterdir():
        for column in pq.read_schema(file):
            name = re.sub(r"^metrics/.*", "metrics/<label>", column.name)
            assert types[name] == f"`{column.type}`", column.name
            seen.add(name)
    of_commands = {"question", "problem_type", "row", "rollout_raw_logprobs"}
    of_settings = {"score/<name>", "response_mask", "conversations", "series/<metric>"}
    of_settings |= {name for name in types if name.startswith(("turn_", "step_"))}
    of_settings |= {"parent", "num_prefix", "hint"}
    of_settings |= set(OF_RECORDS)
    assert types.keys() - seen == of_commands | of_settings


def _table(text):
    """Cells of the rows of a table, without its head."""
    lines = [line for line in text.splitlines() if line.startswith("| `")]
    return [[cell.strip() for cell in line.split(" | ")] for line in lines]


@pytest.mark.slow
def test_the_model_is_written_at_the_end(warm_run):
    directory = warm_run / "model"
    assert json.loads((directory / "config.json").read_text())["dtype"] == "bfloat16"
    for file in directory.iterdir():
        same = warm_run / "checkpoints" / "3" / "model" / file.name
        assert same.read_bytes() == file.read_bytes(), file.name
    exported = models.load_params(directory, models.load_config(directory))
    expected = jax.tree.map(lambda x: x.astype("bfloat16"), final_params(warm_run, 3))
    assert_same(exported, jax.tree.map(lambda x: x.astype("float32"), expected))
    assert len(data.load_tokenizer(directory)) == len(data.character_tokenizer())


@pytest.mark.slow
def test_a_run_may_start_from_a_checkpoint_of_another(warm_run, tmp_path, pair):
    config = warm_config()
    config.model.path = str(warm_run / "checkpoints" / "2")
    with pytest.raises(UserError, match="from which one process can start"):
        with_own_model(config, tmp_path, pair[0], Reporter())
    start = tmp_path / "start"
    assert with_own_model(config, tmp_path, Peers(), Reporter()).model.path == str(start)
    assert config.model.path != str(start)  # the record of the run keeps what was set
    assert_same(models.load_params(start, models.load_config(start)), final_params(warm_run, 2))
    # The other run is not needed again.
    config.model.path = str(warm_run / "checkpoints" / "999")
    assert with_own_model(config, tmp_path, pair[0], Reporter()).model.path == str(start)
    with pytest.raises(UserError, match=r"model\.path=.*999 does not exist; .* steps \[2, 3\]"):
        with_own_model(config, tmp_path / "other", Peers(), Reporter())
    config.model.path = str(start)
    assert with_own_model(config, tmp_path / "other", Peers(), Reporter()) is config


@pytest.mark.slow
def test_a_run_from_another_begins_with_its_weights(warm_run, tmp_path, rewarded):
    config = warm_config()
    config.model.path, config.training.num_steps = str(warm_run), 1
    assert train(config, str(tmp_path / "run")) == 0
    first, last = read_rows(tmp_path / "run")[0], read_rows(warm_run)[-1]
    for name in ("greedy_accuracy", "finished_fraction"):
        assert first[f"eval/arithmetic/{name}"] == last[f"eval/arithmetic/{name}"]
    (source,) = find_policies(str(tmp_path / "run"), None)
    assert source.model == tmp_path / "run" / "start" and source.step == 1
    config.training.num_steps = 2
    assert train(config, str(tmp_path / "run")) == 0  # resumes


@pytest.mark.slow
def test_a_run_from_a_checkpoint_with_all_its_state_continues_it(warm_run, tmp_path, rewarded):
    config, fork = warm_config(), tmp_path / "fork"
    config.training.resume_from = str(warm_run / "checkpoints" / "2")
    assert train(config, str(fork)) == 0
    assert_same(final_params(fork, 3), final_params(warm_run, 3))
    assert stable(read_rows(fork)) == stable(read_rows(warm_run))
    for file in (warm_run / "rollouts").iterdir():
        assert (fork / "rollouts" / file.name).read_bytes() == file.read_bytes(), file.name


@pytest.mark.slow
def test_the_same_config_gives_the_same_run_and_a_resumed_run_continues_it(
    warm_run, tmp_path, rewarded, capsys
):
    """Compares a run of 3 steps with a run of 1 step that a second call resumes."""
    straight, resumed = warm_run, tmp_path / "resumed"
    config = warm_config()
    config.training.num_steps = 1
    train(config, str(resumed))
    config.training.num_steps = 3
    train(config, str(resumed))
    out = "".join(capsys.readouterr())
    assert "resumed" in out and "launch.mismatch" not in out  # no warning of a mismatch
    first, second = (
        json.loads(line) for line in (resumed / "starts.jsonl").read_text().splitlines()
    )
    assert (first["step"], second["step"], first["changed"]) == (0, 1, [])
    assert second["changed"] == ["training.num_steps: 1 -> 3"] and "cpu" in second["devices"]
    assert_same(final_params(resumed, 3), final_params(straight, 3))
    assert largest_difference(final_params(straight, 3), final_params(straight, 2)) > 0
    expected, actual = stable(read_rows(straight)), stable(read_rows(resumed))
    for row, want in zip(actual, expected, strict=True):
        for key, value in want.items():
            assert row[key] == value, key
    assert sorted(file.name for file in (straight / "rollouts").iterdir()) == [
        *(f"eval_{step:06d}.parquet" for step in (0, 2, 3)),
        *(f"step_{step:06d}.parquet" for step in range(3)),
    ]
    for file in (straight / "rollouts").iterdir():  # the resumed run also evaluated after step 1
        assert (resumed / "rollouts" / file.name).read_bytes() == file.read_bytes(), file.name
    table = pq.read_table(straight / "rollouts" / "eval_000003.parquet").to_pydict()
    assert set(table["benchmark"]) == {"arithmetic"} and len(table["correct"]) == 8
    assert expected[3]["eval/arithmetic/greedy_accuracy"] == np.mean(table["correct"])


@pytest.mark.slow
def test_a_run_that_ends_early_is_kept_with_a_report(
    config, tmp_path, rewarded, monkeypatch, capsys, report
):
    """First a user mistake, such as a replica with another token. Then a signal, with a report that
    cannot be drawn."""
    workdir, real, drawn = tmp_path / "run", Sampler.sync_weights, []
    ends = {1: UserError("the replica refuses the token"), 2: Preempted("SIGTERM")}
    config.checkpoints.every_steps = 5

    def ended(sampler, params, step):
        if step in ends:
            raise ends.pop(step)
        return real(sampler, params, step)

    def not_drawn(path):
        drawn.append([file.parent.name for file in path.glob("checkpoints/*/manifest.0.json")])
        raise OSError("no font")

    monkeypatch.setattr(Sampler, "sync_weights", ended)
    refused("refuses the token", train, config, str(workdir))
    assert [row["step"] for row in read_rows(workdir)] == [0]
    assert '"steps":[0]' in (workdir / "report.html").read_text()
    monkeypatch.setattr(run, "write_report", not_drawn)
    assert train(config, str(workdir)) == 75
    assert drawn == [["2"]]  # after the checkpoint
    assert capsys.readouterr().out.splitlines()[-1] == "no report: OSError: no font"
    monkeypatch.undo()
    assert train(config, str(workdir)) == 0
    assert [row["step"] for row in read_rows(workdir)] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("error", "is_kept"), [(UserError("refused"), False), (RuntimeError("not reached"), True)]
)
def test_only_a_user_mistake_in_the_first_step_removes_the_run(
    config, tmp_path, monkeypatch, error, is_kept
):
    """After other errors the run keeps its id, because replicas may know it already."""

    @contextlib.contextmanager
    def opened(config, workdir, *_):
        workdir.check_inputs({"data": "0"})
        (workdir.path / "checkpoints").mkdir()
        (workdir.path / "metrics.jsonl").touch()
        yield object()

    def train_until_error(config, opened):
        raise error

    monkeypatch.setattr(lifecycle, "open_run", opened)
    monkeypatch.setattr(lifecycle, "_train", train_until_error)
    with pytest.raises(type(error), match=str(error)):
        train(config, str(tmp_path / "run"))
    assert (tmp_path / "run" / "config.json").exists() is is_kept
    assert (tmp_path / "run").exists() is is_kept


@pytest.mark.slow
def test_shaping_acts_on_the_parameters(tmp_path, rewarded):
    """Without baselines, the first update is the same. From the second on, the bonus changes it.

    Evaluations of equal weights are equal, also at step 1, where shaping takes effect.
    """
    params, rows = {}, {}
    for target in ("advantage", "none"):
        config = tiny_config()
        config.training.num_steps = 2
        config.evaluation.every_steps = 1
        config.shaping.target = target
        config.checkpoints.keep = 3
        train(config, str(tmp_path / target))
        params[target] = [final_params(tmp_path / target, step) for step in (1, 2)]
        rows[target] = read_rows(tmp_path / target)
    assert_same(params["advantage"][0], params["none"][0])
    assert largest_difference(params["advantage"][1], params["none"][1]) > 1e-5
    shaped, plain = rows["advantage"], rows["none"]
    assert shaped[1]["shaping/active"] == 1 and shaped[1]["shaping/bonus/mean"] > 0
    assert plain[1]["shaping/bonus/mean"] == 0
    for step in (0, 1):
        evaluations = [
            {key: value for key, value in found[step].items() if key.startswith("eval/")}
            for found in (shaped, plain)
        ]
        assert "eval/arithmetic/mean_score" in evaluations[0]
        assert evaluations[0] == evaluations[1]


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param("float32", marks=pytest.mark.slow),
        pytest.param("bfloat16", marks=pytest.mark.soak),
    ],
)
def test_both_sources_of_hidden_states_agree(tmp_path, rewarded, dtype):
    metrics = {}
    for source in ("rollout", "policy"):
        config = tiny_config()
        config.training.num_steps = 1
        config.hidden_states.source = source
        config.hidden_states.dtype = dtype
        config.hidden_states.compare_every = 1
        train(config, str(tmp_path / source))
        row = read_rows(tmp_path / source)[0]
        # bfloat16 keeps 8 bits: rounding by up to 2^-9 per coordinate, less over a row.
        limit = {"float32": 1e-4, "bfloat16": 2**-8}[dtype]
        assert row["rollout/hidden_state_mismatch/max"] < limit
        metrics[source] = row["metrics/effective_rank/mean"]
    tolerance = {"float32": 1e-4, "bfloat16": 1e-2}[dtype]
    np.testing.assert_allclose(metrics["policy"], metrics["rollout"], rtol=tolerance)


@pytest.mark.slow
def test_without_metrics_it_is_plain_grpo_and_resumes(config, tmp_path, rewarded, monkeypatch):
    """Without a KL penalty, a reference is neither loaded nor evaluated.

    Responses are of a part of the vocabulary.
    """
    real, passes = Learner.logprobs, []

    def logprobs(learner, params, batch, **options):
        passes.append(learner.reference)
        return real(learner, params, batch, **options)

    monkeypatch.setattr(Learner, "logprobs", logprobs)
    config.hidden_states.source = "none"
    config.shaping.target = "none"
    config.algorithms.loss.kl_coefficient = 0.0
    config.rollout.top_p, config.rollout.top_k = 0.7, 5
    config.logging.rollouts_every_steps, config.training.num_steps = 5, 2
    rows, resumed = rows_of_parts(config, tmp_path, 1)
    responses = sorted(file.stem for file in (tmp_path / "whole" / "rollouts").iterdir())
    assert responses == ["eval_000000", "eval_000002", "step_000000", "step_000001"]  # the last
    assert all(reference is None for reference in passes) and len(passes) == 4
    assert "policy/kl" not in rows[1] and np.isfinite(rows[1]["policy/loss"])
    assert rows[1]["rollout/state_bytes"] == 0
    assert not any(key.startswith("metrics/effective_rank") for key in rows[1])
    # An evaluation without metrics still has its statistics.
    assert {"eval/arithmetic/greedy_accuracy", "eval/arithmetic/mean_length"} <= set(rows[0])
    # float32 engine and policy, both over the whole vocabulary
    assert all(0 < row["rollout/logprob_mismatch/max"] < 1e-4 for row in rows[:2])
    assert_same(*(final_params(tmp_path / name, 2) for name in ("whole", "parts")))
    assert stable(resumed)[:2] == stable(rows)[:2]


@pytest.mark.slow
def test_a_run_that_only_makes_nonfinite_updates_stops_with_its_batch(
    config, tmp_path, monkeypatch, report
):
    real = loop.assign_credit

    def spoiled(*arguments):
        credit = real(*arguments)
        return credit._replace(advantages=credit.advantages.at[0, 0].set(np.inf))

    monkeypatch.setattr(loop, "assign_credit", spoiled)
    config.training.prompts_per_minibatch = 4
    config.training.max_skipped_updates = 2
    raised(RuntimeError, "2 updates in a row was not finite", train, config, str(tmp_path / "run"))
    rows = read_rows(tmp_path / "run")
    assert len(rows) == 1 and rows[0]["policy/update_skipped"] == 1
    saved = np.load(tmp_path / "run" / "nonfinite_batch.npz")
    assert [name for name in saved if np.isinf(saved[name]).any()] == ["advantages"]
    num_responses = 4 * config.rollout.group_size
    assert len(saved["token_ids"]) == len(saved["response_mask"]) == num_responses
    assert "returns" not in saved  # nothing learns them
    assert (tmp_path / "run" / "report.html").exists()


@pytest.mark.slow
def test_indicators_of_the_tokens_shape_without_hidden_states(config, tmp_path, rewarded):
    config.hidden_states.source = "none"
    config.shaping.indicators = ("avg_log_probs",)
    config.shaping.explore_weights = config.shaping.exploit_weights = (1.0,)
    config.shaping.guidance = "avg_logits_entropy"
    config.training.num_steps = 2
    assert train(config, str(tmp_path / "run")) == 0
    rows = read_rows(tmp_path / "run")
    assert rows[1]["shaping/active"] == 1 and rows[1]["shaping/bonus/mean"] != 0
    table = pq.read_table(tmp_path / "run" / "rollouts" / "step_000001.parquet").to_pylist()
    means = [np.mean(row["rollout_logprobs"]) for row in table]
    # Engine and policy are both float32; see rollout/logprob_mismatch.
    assert rows[1]["metrics/avg_log_probs/mean"] == pytest.approx(np.mean(means), abs=1e-4)
    assert rows[1]["metrics/avg_log_probs/min"] == pytest.approx(min(means), abs=1e-4)
    entropy = rows[1]["metrics/avg_logits_entropy/mean"]
    assert 0 < entropy < np.log(32) and entropy != pytest.approx(-np.mean(means), rel=1e-3)


@pytest.mark.slow
def test_packed_rows_change_nothing_but_rounding(config, tmp_path, rewarded):
    config.hidden_states.source = "policy"
    config.training.num_steps = 1
    for name, packed in (("rows", False), ("packed", True)):
        config.training.pack_sequences = packed
        config.training.micro_batch_tokens = 128 if packed else 0
        assert train(config, str(tmp_path / name)) == 0
    row, packed_row = (read_rows(tmp_path / name)[0] for name in ("rows", "packed"))
    for key in ("policy/loss", "policy/entropy", "policy/grad_norm", "metrics/effective_rank/mean"):
        # float32: sums over tokens have another order.
        assert packed_row[key] == pytest.approx(row[key], rel=1e-4, abs=1e-6), key
    assert packed_row["policy/padding_fraction"] != row["policy/padding_fraction"]


@pytest.mark.slow
def test_importance_weights_change_the_update(config, tmp_path, rewarded, monkeypatch):
    """An engine with bfloat16 weights samples from a slightly different distribution."""
    real_update, real_credit, seen = Learner.update, loop.assign_credit, {}

    def credit(rules, *arguments):
        unweighted = dataclasses.replace(rules, importance=())
        seen["shaped"] = real_credit(unweighted, *arguments).advantages
        return real_credit(rules, *arguments)

    def update(learner, state, batch, passes, credit):
        seen.update(batch=batch, old=passes.old.logprobs, advantages=credit.advantages)
        return real_update(learner, state, batch, passes, credit)

    monkeypatch.setattr(loop, "assign_credit", credit)
    monkeypatch.setattr(Learner, "update", update)
    config.training.num_steps = 1
    config.rollout.weight_dtype = "bfloat16"
    cap = config.algorithms.importance.cap = 1.01
    rows, params = {}, {}
    for level in ("none", "token", "sequence"):
        config.algorithms.importance.level = level
        assert train(config, str(tmp_path / level)) == 0
        row = rows[level] = stable(read_rows(tmp_path / level))[0]
        params[level] = final_params(tmp_path / level, 1)
        if level == "none":
            np.testing.assert_array_equal(seen["advantages"], seen["shaped"])
            continue
        batch = seen["batch"]
        weights, share = oracle.importance_weights(
            seen["old"], batch.rollout_logprobs, batch.response_mask, level, cap
        )
        np.testing.assert_allclose(
            seen["advantages"], weights * np.asarray(seen["shaped"]), rtol=1e-5, atol=1e-7
        )
        weights = weights[batch.response_mask]
        prefix = "policy/importance_weight"
        for kind, expected in (
            ("mean", weights.mean()), ("max", weights.max()), ("min", weights.min()),
            ("capped_fraction", share),
        ):  # fmt: skip
            assert row.pop(f"{prefix}/{kind}") == pytest.approx(expected, rel=1e-5), kind
        assert 0 < share < 1 and weights.min() < 0.999
        assert row.keys() == rows["none"].keys()
        changed = {key for key, value in rows["none"].items() if row[key] != value}
        assert "policy/pg_loss" in changed and all(key.startswith("policy/") for key in changed)
        assert largest_difference(params["none"], params[level]) > 0


@pytest.mark.slow
def test_measuring_on_the_replica_gives_the_same_run_without_sending_states(
    tmp_path, rewarded, monkeypatch
):
    sizes, submit_batch = [], Measurer.submit_batch

    def submitted(measurer, means):
        sizes.append(len(means))
        return submit_batch(measurer, means)

    monkeypatch.setattr(Measurer, "submit_batch", submitted)
    rows, params = {}, {}
    for placement in ("trainer", "rollout"):
        config = tiny_config()
        config.training.num_steps = 1
        config.metrics.placement = placement
        config.metrics.dataset_stride = 2
        config.evaluation.metrics = True
        assert train(config, str(tmp_path / placement)) == 0
        rows[placement] = stable(read_rows(tmp_path / placement))
        params[placement] = final_params(tmp_path / placement, 1)
    for here, there in zip(rows["trainer"], rows["rollout"], strict=True):
        assert here.keys() == there.keys()
        if "rollout/responses" in here:
            states, metrics = here.pop("rollout/state_bytes"), there.pop("rollout/metric_bytes")
            assert here.pop("rollout/metric_bytes") == there.pop("rollout/state_bytes") == 0
            assert 0 < metrics < states
            assert (
                "metrics/global/effective_rank" in there and "metrics/effective_rank/mean" in there
            )
        for key, value in here.items():
            # Equal bits: one compiled function of the same bfloat16 states.
            assert there[key] == pytest.approx(value, rel=1e-5, abs=1e-5), key
    assert any("eval/arithmetic/metrics" in key for key in rows["rollout"][0])
    # Evaluation and batch are each measured as one set, in any order of arrival.
    num_responses = config.data.prompts_per_step * config.rollout.group_size
    assert set(sizes) == {config.evaluation.num_problems, num_responses}
    assert len(set(sizes)) == 2
    assert largest_difference(params["trainer"], params["rollout"]) < 1e-5


@pytest.mark.slow
def test_more_layers_are_logged_and_change_nothing_else(tmp_path):
    rows, tables = [], []
    for layers in ((-1,), (-1, 0)):
        config = tiny_config()
        config.training.num_steps = 2
        config.metrics.dataset_stride = 2
        config.evaluation.metrics = True
        config.metrics.layers = layers
        workdir = tmp_path / str(len(layers))
        assert train(config, str(workdir)) == 0
        rows.append(stable(read_rows(workdir)))
        tables.append(pq.read_table(workdir / "rollouts" / "step_000001.parquet"))
    for row, more in zip(*rows, strict=True):
        for key in row.keys() - {"rollout/state_bytes"}:
            assert more[key] == row[key], key
        added = more.keys() - row.keys()
        assert added == {
            key.replace("metrics/", "metrics/layer_0/")
            for key in row
            if "metrics/" in key and "/correlation/" not in key
        }
    assert "metrics/layer_0/effective_rank_acceleration/valid_fraction" in rows[1][0]
    assert "metrics/layer_0/global/effective_rank" in rows[1][0]
    assert any(key.startswith("eval/arithmetic/metrics/layer_0/") for key in rows[1][0])
    names = set(tables[1].column_names) - set(tables[0].column_names)
    assert "metrics/layer_0/effective_rank" in names


@pytest.mark.slow
def test_shaping_may_use_a_layer_other_than_the_final_one(tmp_path):
    config = tiny_config()
    config.training.num_steps = 2
    config.metrics.layers = (-1, 0)
    config.shaping.guidance = "layer_0/effective_rank_acceleration"
    assert train(config, str(tmp_path / "run")) == 0
    assert "shaping/baseline/layer_0/effective_rank_acceleration" in read_rows(tmp_path / "run")[1]


@pytest.mark.slow
def test_a_replica_that_measures_sends_states_in_steps_that_compare_them(tmp_path, config):
    config.training.num_steps = 2
    config.metrics.placement = "rollout"
    config.hidden_states.compare_every = 2
    assert train(config, str(tmp_path / "run")) == 0
    compared, other, _ = read_rows(tmp_path / "run")
    assert compared["rollout/state_bytes"] > 0 and other["rollout/state_bytes"] == 0
    assert compared["rollout/hidden_state_mismatch/max"] < 2**-8  # rounded to bfloat16
    assert all("metrics/effective_rank/mean" in row for row in (compared, other))
