"""Runs that replay routers: to the bit in a resumed run, over the wire and from records."""

import contextlib

import jax
import numpy as np
import pyarrow.parquet as pq
import pytest

from semrl_jax import models
from semrl_jax.jobs.replay import Compared, Replay, known_records, replayed
from semrl_jax.models.of_config import build_policy
from semrl_jax.rollout.building import jax_engine
from semrl_jax.runs import train
from semrl_jax.sampling.recorded import Recorded, file_of, read_record, scored_of, write_record
from semrl_jax.support.clock import Clock
from semrl_jax.training import loop
from tests.cases import refused
from tests.fixtures import read_rows, save_chat_model, save_model, scores_by_length, stable
from tests.rollout.embedded import EmbeddedReplica
from tests.rollout.engines.test_routed_experts import assert_of_full_pass
from tests.runs.test_train import assert_same, final_params
from tests.tiny import tiny_config

pytestmark = pytest.mark.usefixtures("reports_where_looked_at", "rewarded")


def mixture_config(**fields):
    config = tiny_config()
    config.model.family, config.model.num_layers = "qwen3_moe", 2
    config.rollout.router_replay = True
    config.training.num_steps, config.evaluation.every_steps = 2, 0
    config.logging.replay_every = 1
    config.update_from_flattened_dict(fields)
    return config


# The weights of the engine are rounded: it chooses some other experts.
ROUNDED = {"rollout.weight_dtype": "bfloat16"}


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    """A run of two steps in this process."""
    directory = tmp_path_factory.mktemp("runs") / "straight"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("semrl_jax.runs.run.write_report", lambda workdir: None)
        patch.setattr(loop, "group_rewards", scores_by_length)
        assert train(mixture_config(**ROUNDED), str(directory), quiet=True) == 0
    return directory


@pytest.mark.slow
def test_a_resumed_run_is_the_same_to_the_bit(straight, tmp_path):
    for fields in ({"training.num_steps": 1}, {}):
        assert train(mixture_config(**ROUNDED, **fields), str(tmp_path / "run")) == 0
    assert_same(final_params(tmp_path / "run", 2), final_params(straight, 2))
    assert stable(read_rows(tmp_path / "run")) == stable(read_rows(straight))


@pytest.mark.slow
def test_a_replica_behind_the_wire_changes_no_bit(straight, tmp_path, monkeypatch):
    config = mixture_config(**ROUNDED)
    monkeypatch.setenv("SEMRL_ROLLOUT_TOKEN", "a-token-for-tests")
    engine = jax_engine(config, *build_policy(config))
    with contextlib.closing(EmbeddedReplica(engine, token="a-token-for-tests")) as replica:
        config.rollout.addresses = (replica.address,)
        assert train(config, str(tmp_path / "run")) == 0
    assert_same(final_params(tmp_path / "run", 2), final_params(straight, 2))


@pytest.mark.slow
def test_records_hold_the_experts_for_a_rerun(straight, tmp_path):
    again = Replay(straight, 1, 1, recorded=True)
    assert Compared().first(known_records(straight), replayed(again), begin=1) is None
    file = file_of(straight, 1)
    record = read_record(file)
    for item in scored_of(record):
        experts, rollout = item.rollout.routed_experts, item.rollout
        num_tokens = len(rollout.prompt_ids) + len(rollout.response_ids)
        assert (experts.shape, experts.dtype) == ((num_tokens - 1, 2, 2), np.uint8)
    table = pq.read_table(straight / "rollouts" / "step_000001.parquet")
    assert "routed_experts" not in table.column_names  # the other files stay small
    # With other experts, it is another step.
    place = record.columns.column_names.index("routed_experts")
    column = record.columns["routed_experts"].to_pylist()
    changed = [[bytes(7 - byte for byte in each) for each in column]]
    columns = record.columns.set_column(place, "routed_experts", changed)
    write_record(file, record._replace(columns=columns))
    found = Compared().first(known_records(straight), replayed(again), begin=1)
    assert found.differences[0].what == "old_logprobs"
    write_record(file, record._replace(columns=columns.drop_columns("routed_experts")))
    source = Recorded(straight, replays_routers=True)
    message = r"has no routed_experts of step 1, because it ran without rollout\.router_replay"
    refused(message, source.next, 1, None, Clock())
    write_record(file, record)


def test_a_dense_model_is_refused(tmp_path):
    config = mixture_config(**{"model.family": "qwen3"})
    message = r"rollout\.router_replay=True replays the choice of experts, .*'qwen3' has none"
    refused(message, train, config, str(tmp_path / "run"))


@pytest.mark.soak
@pytest.mark.parametrize("kind", ["turns", "parts", "ahead", "lora"])
def test_responses_of_several_calls_have_the_experts_of_all_tokens(tmp_path, kind):
    """Turns of episodes that continue caches, and parts of responses; with weights of one step."""
    experts = models.Experts(8, 2, 16, normalize_weights=True)
    changes = {"model_type": "qwen3_moe", "experts": experts, "num_layers": 2}
    path, config = tmp_path / "model", mixture_config()
    config.training.num_steps = 4
    config.model.path, config.model.family = str(path), ""
    if kind == "turns":
        save_chat_model(path, **changes)
        config.data.task, config.data.num_prompts = "environment", 8
        config.environment.name = "tests.environments.users:Vowels"
        config.rollout.max_prompt_tokens, config.rollout.max_response_tokens = 64, 96
        config.rollout.stop_token_ids = tuple(range(0, 280, 7))
    else:
        save_model(path, **changes)
    if kind in ("parts", "ahead"):
        config.rollout.max_staleness = 3
        config.rollout.in_flight = "keep" if kind == "parts" else "wait"
    if kind == "lora":
        config.lora.rank = 4
    assert train(config, str(tmp_path / "run")) == 0
    rollouts = [item.rollout for item in scored_of(read_record(file_of(tmp_path / "run", 0)))]
    if kind == "turns":
        assert sum(not rollout.response_mask.all() for rollout in rollouts) > 4
    architecture = models.load_config(path)
    params = jax.device_put(models.load_params(path, architecture))
    assert_of_full_pass(models.Policy(architecture), params, rollouts)
    row = read_rows(tmp_path / "run")[0]
    assert row["rollout/logprob_mismatch/max"] < 1e-4
