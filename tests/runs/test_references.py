"""References that are models of their own: on replicas, and of single data sources."""

import contextlib
import dataclasses
import functools
import json
import threading

import jax
import numpy as np
import pytest

from semrl_jax import data, models
from semrl_jax.algorithms.algorithm import Algorithm
from semrl_jax.cluster.preemption import StopRequest
from semrl_jax.models.of_config import build_policy, find_references
from semrl_jax.rewards import VerifierPool
from semrl_jax.rollout.building import jax_engine
from semrl_jax.runs import train
from semrl_jax.runs.setup import check_inputs
from semrl_jax.sampling import reference_replicas
from semrl_jax.sampling.reference_replicas import ReferenceReplicas, open_reference
from semrl_jax.support.console import Reporter
from semrl_jax.training.learner import Learner
from semrl_jax.training.packing import RowPlan
from semrl_jax.training.policy_update import batch_logprobs
from semrl_jax.training.references import rows_of
from semrl_jax.training.rollout_batch import prompts_of
from semrl_jax.types import WeightVersion
from tests.cases import refused
from tests.fixtures import read_rows, stable
from tests.rollout.embedded import EmbeddedReplica
from tests.running import wait_until
from tests.training.test_packing import mesh_of

TOKEN = "a-token-for-tests"
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("reports_where_looked_at")]


@pytest.fixture
def teacher(config, tmp_path):
    """Writes a teacher with the policy's tokenizer, a size of its own, and more tokens.

    Returns the config of its replicas.
    """

    def make(seed=3, name="teacher", **sizes):
        policy, tokenizer = build_policy(config)
        known = {"hidden_size": 48, "num_layers": 2, "head_dim": 24, "tie_embeddings": False}
        known["vocab_size"] = policy.config.vocab_size + 5
        own = dataclasses.replace(policy.config, **known | sizes)
        params = models.Policy(own).init(jax.random.key(seed))
        models.save_directory(tmp_path / name, params, own, tokenizer)
        served = config.copy_and_resolve_references()
        served.model.path = str(tmp_path / name)
        served.rollout.max_prompt_tokens = 600
        return served

    return make


@pytest.fixture
def stack():
    with contextlib.ExitStack() as stack:
        yield stack


def load(replica, served):
    """Gives a replica the weights of its model, as launch.rollout --policy does."""
    config = build_policy(served)[0].config
    params, version = models.load_params(served.model.path, config), WeightVersion("t", "s", 0, "")
    tensors = functools.partial(models.iterate_hf_tensors, params, config)
    replica._run(replica._server.load(version, tensors))


@pytest.fixture
def serve(monkeypatch, stack):
    """Starts a JAX replica of a config."""
    monkeypatch.setenv("SEMRL_ROLLOUT_TOKEN", TOKEN)

    def start(served, *, has_weights=True, **place):
        policy, tokenizer = build_policy(served)
        replica = EmbeddedReplica(jax_engine(served, policy, tokenizer), token=TOKEN, **place)
        stack.callback(replica.close, 0.0)
        if has_weights:
            load(replica, served)
        return replica

    return start


def test_replicas_compute_what_the_trainer_does(
    config, teacher, serve, tmp_path, rewarded, monkeypatch
):
    """A run with one replica; and one in two parts: with two replicas, of which one fails, and with
    one that is started again. Their numbers are the same.
    """
    monkeypatch.setattr(reference_replicas, "SEQUENCES_PER_CALL", 4)
    served = teacher()
    config.evaluation.every_steps, config.training.num_steps = 0, 1
    config.update_from_flattened_dict(
        {
            "algorithms.name": "distillation", "model.reference_path": served.model.path,
            "rollout.temperature": 0.7,
        }
    )  # fmt: skip
    assert train(config, str(tmp_path / "here")) == 0
    first, second = serve(served), serve(served)
    config.model.reference_addresses = (second.address,)
    config.training.num_steps = 2
    assert train(config, str(tmp_path / "one")) == 0
    real, again = ReferenceReplicas.final_states, []

    def failing(replicas, sequences):
        for found in real(replicas, sequences):
            yield found
            first.close(0.0)

    def restarted(replicas, sequences):
        second.close(0.0)
        place = int(second.address.rpartition(":")[2])
        third, (known,) = serve(served, has_weights=False, port=place), replicas.client._replicas

        def load_late():
            wait_until(lambda: known.version is None)
            load(third, served)

        again.append(threading.Thread(target=load_late))
        again[-1].start()
        yield from real(replicas, sequences)

    config.training.num_steps = 1
    config.model.reference_addresses = (first.address, second.address)
    monkeypatch.setattr(ReferenceReplicas, "final_states", failing)
    assert train(config, str(tmp_path / "parts")) == 0
    config.training.num_steps = 2
    config.model.reference_addresses = (second.address,)
    monkeypatch.setattr(ReferenceReplicas, "final_states", restarted)
    assert train(config, str(tmp_path / "parts")) == 0
    again[0].join()
    (here,), one, parts = (read_rows(tmp_path / name) for name in ("here", "one", "parts"))
    assert stable(one) == stable(parts)
    for key in ("advantage/mean", "advantage/min", "policy/kl", "policy/grad_norm"):
        np.testing.assert_allclose(one[0][key], here[key], rtol=1e-5)


def test_a_replica_that_does_not_fit_is_refused(config, teacher, serve, monkeypatch):
    served, other = teacher(), teacher(seed=4, name="other")
    policy, tokenizer = build_policy(config)
    good = serve(served)

    def opened(replica, served, *others):
        addresses = tuple(each.address for each in (replica, *others))
        config.model.reference_path = served.model.path
        config.model.reference_addresses = addresses
        (files,) = find_references(config, policy, tokenizer, None).values()
        context = open_reference(
            config, files, config.rollout.max_prompt_tokens, StopRequest(0.0, 0), Reporter()
        )
        with context as replicas:
            return replicas.version

    config.rollout.connect_timeout_s = 1.0
    assert opened(good, served).run_id == "t"
    line = refused("serves other weights, such as in lm_head", opened, good, other)
    assert line.startswith("model.reference_addresses, for ") and "\n" not in line
    half = teacher()
    half.model.compute_dtype = "bfloat16"
    refused("such as in another dtype; start all .* alike", opened, good, served, serve(half))
    wide = teacher(name="wide", hidden_size=64)
    refused("has model_hash=.*start the replica from the same model", opened, good, wide)
    served.rollout.max_prompt_tokens = 20
    needed = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens - 1
    line = f"start it with --config.rollout.max_prompt_tokens={needed}"
    refused(line, opened, serve(served), served)
    served.rollout.max_prompt_tokens = 600
    empty = serve(served, has_weights=False)
    refused("no replica serves the weights .*started without --policy", opened, empty, served)
    with monkeypatch.context() as patch:
        patch.setattr(reference_replicas, "SEQUENCES_PER_CALL", 70_000)
        refused("takes 65536 sequences per call, and a ref.* needs 70000", opened, good, served)
    good.close(0.0)
    refused("cannot be reached within 1 s .*correct model.reference_addr", opened, good, served)


def test_what_does_not_go_with_a_teacher_is_refused(config, teacher, monkeypatch, stack):
    """Before anything is computed, and whoever the teacher is."""
    rollout = config.rollout
    verifier = stack.enter_context(VerifierPool.of(config.rewards))
    check = functools.partial(check_inputs, config, mesh_of(1), verifier, {}, print)
    length = rollout.max_prompt_tokens + rollout.max_response_tokens
    short = teacher(max_position_embeddings=length).model.path
    config.algorithms.name, config.model.reference_path = "distillation", short
    # The policy's context holds this prompt.
    config.data.teacher_input = "{answer}" + "1" * rollout.max_prompt_tokens + "{input}"
    refused(f"more than {length} of the model's context", check)
    config.data.teacher_input, config.algorithms.advantage.teacher_weight = "", 0.0
    config.algorithms.loss.kl_estimator = "exact"
    config.model.reference_path, config.model.references = "", (f"arithmetic={short}",)
    refused("'exact' compares .*model.references and model.reference_add", check)
    config.algorithms.loss.kl_estimator = "low_var_kl"
    config.algorithms.loss.kl_coefficient = 0.0
    refused(r"model.references\['arithmetic'\]=.* is not read", check)
    config.algorithms.loss.kl_coefficient, config.metrics.drift_every = 0.1, 1
    refused("measures how far .*'arithmetic'.* is another model", check)
    config.metrics.drift_every = 0
    config.model.reference_addresses = ("arithmetic=127.0.0.1:1",)
    monkeypatch.delenv("SEMRL_ROLLOUT_TOKEN", raising=False)
    refused("the replicas' token is empty", check)
    config.rollout.addresses = ("127.0.0.1:1",)  # as from rollout.addresses_file
    refused("both name '127.0.0.1:1'; a replica has one model", check)
    config.model.reference_addresses = ()
    refused("the replicas' token is empty", check)
    config.rollout.addresses = ()
    config.model.reference_path = short
    refused("model.reference_path=.* is not read: each data source", check)
    config.model.references, real = (), Algorithm.needs.fget
    monkeypatch.setattr(
        Algorithm, "needs", property(lambda each: real(each)._replace(own_teacher=True))
    )
    refused("needs a reference and its own teacher, which take the same", check)


def test_each_data_source_has_its_teacher(config, teacher, serve, tmp_path, monkeypatch):
    """Two are here, one on a replica; other prompts have the weights at the start."""
    policy, tokenizer = build_policy(config)
    start = policy.init(jax.random.key(1))
    models.save_directory(tmp_path / "start", start, policy.config, tokenizer)
    here, more = teacher(name="here"), teacher(seed=5, name="more")
    remote = teacher(seed=4, name="remote", hidden_size=64)
    rows = [
        {"question": f"{n}+{n}", "answer": str(2 * n), "data_source": source}
        for n, source in zip(range(10, 19), [*["sums", "plus", "more", "rest"] * 2, "sums"])
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config.training.num_steps, config.evaluation.every_steps = 1, 0
    config.update_from_flattened_dict(
        {
            "algorithms.name": "distillation", "model.path": str(tmp_path / "start"),
            "model.references": (
                f"sums={here.model.path}", f"plus={remote.model.path}", f"more={more.model.path}"
            ),
            "model.reference_addresses": (f"plus={serve(remote).address}",),
            "data.task": "files", "data.files": (str(file),), "data.prompts_per_step": 9,
            "training.prompts_per_minibatch": 9, "rollout.group_size": 2,
            "data.template": "plain", "evaluation.held_out": False,
            "rollout.max_response_tokens": 24,
        }
    )  # fmt: skip
    seen, real = [], Learner.passes

    def passes(learner, state, batch, *options):
        found = real(learner, state, batch, *options)
        seen.append((batch, np.asarray(found.ref_logprobs)))
        return found

    monkeypatch.setattr(Learner, "passes", passes)
    assert train(config, str(tmp_path / "run")) == 0
    ((batch, found),) = seen
    source_of = {
        data.prompt_key(tokenizer(row["question"])["input_ids"]): row["data_source"] for row in rows
    }
    sources = np.array([source_of[data.prompt_key(ids)] for ids in prompts_of(batch)])
    served = {"sums": here, "plus": remote, "more": more, "rest": config}
    for source, path in ((source, each.model.path) for source, each in served.items()):
        own = models.load_config(path)
        known = batch_logprobs(
            models.load_params(path, own),
            part := rows_of(batch, np.flatnonzero(sources == source)),
            policy=models.Policy(own),
            temperature=config.rollout.temperature,
            plan=RowPlan(mesh_of(1)),
        ).logprobs
        assert part.response_mask.any()
        np.testing.assert_allclose(found[sources == source], known, atol=1e-5)
    config.model.references = (f"sum={here.model.path}",)
    config.model.reference_addresses = ()
    line = "no prompt is of this data source; the sources are sums, plus, more, rest"
    refused(line, train, config, str(tmp_path / "other"))
