"""A vLLM replica against transformers on the same weights: states, log-probabilities, weights."""

import collections
import dataclasses
import json
import subprocess
import threading

import grpc
import jax
import numpy as np
import pytest
import scipy.special
import scipy.stats
import torch
import transformers

from semrl_jax import data, models
from semrl_jax.metrics import MetricKey
from semrl_jax.metrics.measurements import encode
from semrl_jax.metrics.measurer import Measurer
from semrl_jax.rollout.client import RolloutClient
from semrl_jax.rollout.engines.jax import JaxEngine
from semrl_jax.rollout.wire import codec
from semrl_jax.rollout.wire.auth import token_metadata
from semrl_jax.types import HiddenStateParams, MetricParams, SampleRequest, SamplingParams
from tests.rollout.caller import make_stub
from tests.rollout.embedded import EmbeddedReplica
from tests.rollout.engines.responses import processed_logprobs
from tests.rollout.engines.vllm_replica import (
    OBSERVED_LAUNCHER,
    PYTHON,
    ROOT,
    TOKEN,
    environment,
    serving,
)
from tests.rollout.http.conftest import ask
from tests.rollout.server.test_prometheus import free_port
from tests.rollout.server.test_service import flip, refusal, update_messages

pytestmark = pytest.mark.slow

SAMPLING = SamplingParams(max_tokens=64, temperature=0.8)
STATES = HiddenStateParams((-1,), "float32")
BOTH = dataclasses.replace(STATES, kinds=("decode", "prefill"))


def architecture(tokenizer, tied):
    return models.DecoderConfig(
        model_type="llama" if tied else "qwen2", vocab_size=len(tokenizer), hidden_size=128,
        intermediate_size=192, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32,
        tie_embeddings=tied, max_position_embeddings=512,
    )  # fmt: skip


class Model:
    """A random model: on disk, as parameters of the policy, and as transformers reads it."""

    def __init__(self, directory, tied, seed=0, scale=2.0):
        self.tokenizer = data.character_tokenizer()
        self.policy = models.Policy(architecture(self.tokenizer, tied))
        self.params = self.policy.init(jax.random.key(seed))
        # Far from uniform, so that what is sampled depends on all of the prompt.
        self.params = jax.tree.map(
            lambda leaf: leaf * (scale if leaf.ndim > 2 else 1.0), self.params
        )
        self.path = directory / f"model-{tied}-{seed}-{scale}"
        models.save_directory(self.path, self.params, self.policy.config, self.tokenizer)
        self.reference = transformers.AutoModelForCausalLM.from_pretrained(
            self.path, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    def specs(self, dtype="float32"):
        return models.tensor_specs(self.policy.config, dtype)

    def arrays(self, dtype="float32"):
        config = self.policy.config
        return [array for _, array in models.iterate_hf_tensors(self.params, config, dtype)]

    def sync(self, client, step, dtype="float32"):
        return client.sync_weights(self.specs(dtype), lambda: self.arrays(dtype), step=step)

    @torch.no_grad()
    def states_and_logits(self, rollout, reference=None):
        """What a forward pass over prompt and response computes for each response token."""
        reference = reference or self.reference
        states = self.all_states(rollout, reference)[len(rollout.prompt_ids) - 1 : -1]
        logits = reference.lm_head(states).double()
        if cap := self.policy.config.final_logit_softcap:
            logits = cap * torch.tanh(logits / cap)
        return states.float().numpy(), logits.numpy()

    @torch.no_grad()
    def all_states(self, rollout, reference=None):
        """The states of the prompt's tokens, then of the response's tokens."""
        ids = np.concatenate([rollout.prompt_ids, rollout.response_ids])
        model = (reference or self.reference).model
        return model(torch.tensor(ids[None]).long()).last_hidden_state[0]


def requests_of(prompts, group_size=1, first_seed=0):
    return [
        SampleRequest(f"{group}/{sample}", group, sample, prompt, first_seed + 97 * group + sample)
        for group, prompt in enumerate(prompts)
        for sample in range(group_size)
    ]


def random_prompts(model, lengths, seed=0):
    random, size = np.random.default_rng(seed), model.policy.config.vocab_size
    return [random.integers(0, size, length, np.int32) for length in lengths]


def sampled(client, version, requests, sampling=SAMPLING, states=STATES):
    """Responses by sample id."""
    found = client.generate(requests, sampling, states, version=version)
    return {rollout.sample_id: rollout for rollout in found}


def assert_right(rollouts, model, sampling=SAMPLING, tolerance=1e-5):
    """Rows to `tolerance` of their length: float32 sums in another order gave 1e-6."""
    rollouts = list(rollouts)
    assert rollouts
    for rollout in rollouts:
        states, logits = model.states_and_logits(rollout)
        assert_near(rollout.hidden_states, states, tolerance)
        if rollout.prompt_states is not None:
            assert_prompt_right(rollout, model, tolerance)
        logprobs = processed_logprobs(logits, sampling, rollout)
        chosen = logprobs[np.arange(len(logits)), rollout.response_ids]
        np.testing.assert_allclose(rollout.rollout_logprobs, chosen, atol=10 * tolerance)


def assert_near(found, states, tolerance):
    found = found[:, 0].astype(np.float32)
    assert found.shape == states.shape
    error = np.linalg.norm(found - states, axis=1) / np.linalg.norm(states, axis=1)
    assert error.max() < tolerance, error


def assert_prompt_right(rollout, model, tolerance=1e-5):
    states = model.all_states(rollout)[: len(rollout.prompt_ids)].numpy()
    assert_near(rollout.prompt_states, states, tolerance)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(False, id="untied"),
        pytest.param(True, id="tied", marks=pytest.mark.soak),
    ],
)
def model(request, tmp_path_factory):
    return Model(tmp_path_factory.mktemp("models"), request.param)


@pytest.fixture(scope="module")
def other(model, tmp_path_factory):
    """The same architecture with other weights."""
    return Model(tmp_path_factory.mktemp("models"), model.policy.config.tie_embeddings, seed=1)


@pytest.fixture(scope="module")
def client(model, tmp_path_factory):
    """Chunked prefill (64 tokens a step) and 12 blocks of cache, too few for 16 responses."""
    directory, port = tmp_path_factory.mktemp("observed"), free_port()
    flags = (
        f"--http_port={port}", "--config.rollout.in_turns=True",
        "--config.rollout.max_prompt_tokens=200", "--config.rollout.max_response_tokens=64",
        "--config.rollout.vllm_max_num_seqs=16", "--config.rollout.vllm_max_num_batched_tokens=64",
        "--config.rollout.vllm_kv_cache_gib=0.0015",
    )  # fmt: skip
    variables = {"SEMRL_TEST_DIRECTORY": str(directory)}
    with serving(model.path, *flags, launcher=OBSERVED_LAUNCHER, variables=variables) as client:
        client.directory = directory
        client.url = f"http://127.0.0.1:{port}"
        yield client


def observed(client, name):
    """Ids of requests to which it happened so far."""
    return (client.directory / name).read_text().split()


def test_states_and_logprobs_are_those_of_a_forward_pass(client, model):
    """Prompts of 1 to 200 tokens, four responses each, preempted, ended in every way."""
    version = model.sync(client, 0)
    requests = requests_of(random_prompts(model, [1, 7, 30, 64, 65, 100, 130, 200]), 4)
    before = len(observed(client, "preempted"))
    long = sampled(client, version, requests, states=BOTH)
    assert len(observed(client, "preempted")) > before
    assert {r.finish_reason for r in long.values()} == {"length"}
    assert_right(long.values(), model)

    # Now some of these tokens end a response; the tokens before them must not change.
    counts = collections.Counter(t for r in long.values() for t in set(r.response_ids.tolist()))
    eos, stop = sorted(counts, key=lambda token: abs(counts[token] - 8))[:2]
    sampling = dataclasses.replace(SAMPLING, eos_token_ids=(eos,), stop_token_ids=(stop,))
    ended = sampled(client, version, requests, sampling)
    assert {r.finish_reason for r in ended.values()} == {"eos", "stop", "length"}
    for sample_id, rollout in ended.items():
        ids = long[sample_id].response_ids
        ends = np.flatnonzero(np.isin(ids, [eos, stop]))
        length = ends[0] + 1 if len(ends) else 64
        np.testing.assert_array_equal(rollout.response_ids, ids[:length])
        reason = {eos: "eos", stop: "stop"}[ids[length - 1]] if len(ends) else "length"
        assert rollout.finish_reason == reason
        (span,) = rollout.versions
        assert (span.version, span.start, span.end) == (version, 0, length)
    assert_right(ended.values(), model)


def test_http_gives_the_same_tokens_and_the_prompts_logprobs(client, model):
    version = model.sync(client, 0)
    (prompt,) = random_prompts(model, [20], seed=3)
    (request,) = requests_of([prompt])
    sampling = dataclasses.replace(SAMPLING, max_tokens=24)
    expected = sampled(client, version, [request], sampling)["0/0"]
    given = {"seed": request.seed, "temperature": sampling.temperature, "max_tokens": 24}
    body = {"token_ids": prompt.tolist(), "sampling_params": {**given, "prompt_logprobs": 1}}
    body["sampling_params"]["ignore_eos"] = True
    answer = ask(f"{client.url}/inference/v1/generate", body, token=TOKEN)
    found = json.loads(answer.text)
    (choice,) = found["choices"]
    assert choice["token_ids"] == expected.response_ids.tolist()
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    np.testing.assert_allclose(logprobs, expected.rollout_logprobs, atol=1e-5)
    with torch.no_grad():
        logits = model.reference(torch.tensor(prompt[None]).long()).logits[0].double().numpy()
    right = scipy.special.log_softmax(logits, 1)[np.arange(19), prompt[1:]]
    first, *rest = found["prompt_logprobs"]
    assert first is None
    told = [entry[str(i)]["logprob"] for entry, i in zip(rest, prompt[1:].tolist())]
    np.testing.assert_allclose(told, right, atol=1e-4)
    # Streamed as tokens come, to the same text. A busy machine joins several tokens in one event.
    url, common = f"{client.url}/v1/completions", {"model": model.path.name, "ignore_eos": True}
    body = {**common, **given, "prompt": prompt.tolist()}
    whole = json.loads(ask(url, body, token=TOKEN).text)["choices"][0]
    assert whole["text"] == model.tokenizer.decode(choice["token_ids"], skip_special_tokens=True)
    events = ask(url, {**body, "stream": True}, token=TOKEN).text.split("\n\n")
    pieces = [json.loads(event[6:])["choices"][0]["text"] for event in events[:-2]]
    assert "".join(pieces) == whole["text"] and len(pieces) > 2


def first_stop(model, ids, stop_strings):
    """Number of tokens of the shortest prefix whose text contains a stop string, or None."""
    for count in range(1, len(ids) + 1):
        text = model.tokenizer.decode(ids[:count], skip_special_tokens=True)
        if any(stop_string in text for stop_string in stop_strings):
            return count
    return None


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_stop_strings_end_responses_where_the_jax_engine_ends_them(client, model, temperature):
    """Stop strings lie over several tokens; greedy responses equal the JAX engine's responses."""
    version = model.sync(client, 0)
    sampling = dataclasses.replace(SAMPLING, temperature=temperature)
    requests = requests_of(random_prompts(model, [1, 7, 30, 65, 130, 200], seed=5), 2)
    long = sampled(client, version, requests, sampling, BOTH)
    texts = [
        model.tokenizer.decode(r.response_ids, skip_special_tokens=True) for r in long.values()
    ]
    stops = tuple({text[2:5] for text in texts} - {""})  # special tokens: no text
    stopping = dataclasses.replace(sampling, stop_strings=stops)
    ended = sampled(client, version, requests, stopping, BOTH)
    reasons = collections.Counter()
    for sample_id, rollout in ended.items():
        ids = long[sample_id].response_ids
        stop = first_stop(model, ids, stops)
        length, reason = (64, "length") if stop is None else (stop, "stop")
        reasons[reason] += 1
        assert rollout.finish_reason == reason
        np.testing.assert_array_equal(rollout.response_ids, ids[:length])
        (span,) = rollout.versions
        assert (span.version, span.start, span.end) == (version, 0, length)
    assert reasons["stop"] >= 6
    assert_right(ended.values(), model, sampling)
    if temperature == 0:
        engine = JaxEngine(
            model.policy, tokens=data.TokenBytes(model.tokenizer), max_prompt_tokens=200
        )
        with EmbeddedReplica(engine) as replica:
            with RolloutClient(
                (replica.address,), replica.token, run_id="r", attempt_id="a"
            ) as own:
                expected = sampled(own, model.sync(own, 0), requests, stopping, BOTH)
        for sample_id, rollout in ended.items():
            assert rollout.finish_reason == expected[sample_id].finish_reason
            np.testing.assert_array_equal(rollout.response_ids, expected[sample_id].response_ids)


def test_cached_prefixes_change_nothing(client, model):
    """All prompts share a prefix of 150 tokens, and every prompt is sent twice."""
    version = model.sync(client, 0)
    (prefix,) = random_prompts(model, [150], seed=1)
    tails = random_prompts(model, [1, 5, 20, 50], seed=2)
    requests = requests_of([np.concatenate([prefix, tail]) for tail in tails], 4)
    for _ in range(2):
        before = len(observed(client, "cached"))
        assert_right(sampled(client, version, requests).values(), model)
        assert len(observed(client, "cached")) > before
    # Cached tokens have no states, so prompts with requested states are computed.
    before = len(observed(client, "cached"))
    for kinds in (("decode", "prefill"), ("prefill",)):
        states = dataclasses.replace(STATES, kinds=kinds)
        for rollout in sampled(client, version, requests, states=states).values():
            assert_prompt_right(rollout, model)
            assert (rollout.hidden_states is None) == ("decode" not in kinds)
    assert len(observed(client, "cached")) == before


@pytest.mark.parametrize("top_k", [0, 5])
def test_entropies_count_all_but_the_likeliest_tokens_as_one(client, model, top_k):
    """The rest of the 34 tokens beyond 20 counts as one; exact if fewer can be sampled."""
    version = model.sync(client, 0)
    requests, sampling = requests_of(random_prompts(model, [3, 40])), dataclasses.replace(
        SAMPLING, top_k=top_k, max_tokens=16
    )  # fmt: skip
    found = list(client.generate(requests, sampling, version=version, entropies=True))
    for rollout in found:
        p = np.exp(processed_logprobs(model.states_and_logits(rollout)[1], sampling))
        p = np.sort(p)[:, ::-1]
        parts = np.concatenate([p[:, :20], p[:, 20:].sum(axis=1, keepdims=True)], axis=1)
        expected = -(parts * np.log(np.maximum(parts, 1e-300))).sum(axis=1)
        np.testing.assert_allclose(rollout.entropies, expected, atol=1e-4)
    plain = sampled(client, version, requests, sampling)
    for rollout in found:
        np.testing.assert_array_equal(plain[rollout.sample_id].response_ids, rollout.response_ids)
        assert plain[rollout.sample_id].entropies is None


PROCESSED = [
    SamplingParams(32, temperature=1.3),
    SamplingParams(32, temperature=0.7, top_p=0.8),
    SamplingParams(32, temperature=1.0, top_k=5),
    SamplingParams(32, temperature=0.9, top_p=0.7, top_k=9),
    SamplingParams(32, temperature=1.3, min_p=0.2, top_p=0.9),
    SamplingParams(
        32, 0.8, min_p=0.02, presence_penalty=0.7, frequency_penalty=-0.3, repetition_penalty=1.4
    ),
    SamplingParams(32, 0.0, frequency_penalty=0.8, min_tokens=20, eos_token_ids=tuple(range(8))),
]


@pytest.mark.parametrize("sampling", PROCESSED, ids=str)
def test_logprobs_are_of_the_distribution_sampled_from(client, model, sampling):
    version = model.sync(client, 0)
    requests = requests_of(random_prompts(model, [3, 40, 90]), 2)
    rollouts = sampled(client, version, requests, sampling).values()
    assert_right(rollouts, model, sampling)
    assert min(len(rollout.response_ids) for rollout in rollouts) > sampling.min_tokens


def test_tokens_follow_that_distribution(client, model):
    """Chi-square over 600 first tokens of one prompt; the seeds are fixed."""
    version = model.sync(client, 0)
    sampling = SamplingParams(1, temperature=0.9, top_p=0.95, top_k=20)
    requests = requests_of(random_prompts(model, [9]), 600)
    rollouts = list(sampled(client, version, requests, sampling).values())
    _, logits = model.states_and_logits(rollouts[0])
    p = np.exp(processed_logprobs(logits, sampling)[0])
    counts = np.bincount([r.response_ids[0] for r in rollouts], minlength=len(p))
    assert not counts[p == 0].any()
    rare = (p > 0) & (p < 5 / len(rollouts))  # too few for the test: one class
    expected = np.append(p[p >= 5 / len(rollouts)], p[rare].sum())
    found = np.append(counts[p >= 5 / len(rollouts)], counts[rare].sum())
    expected, found = expected[expected > 0], found[expected > 0]
    assert len(found) > 5
    assert scipy.stats.chisquare(found, expected * len(rollouts)).pvalue > 1e-3


def test_a_request_alone_is_repeated_and_greedy_is_the_likeliest_token(client, model):
    version = model.sync(client, 0)
    (prompt,) = random_prompts(model, [50])
    first, again, other = (
        sampled(client, version, requests_of([prompt], first_seed=seed))["0/0"]
        for seed in (7, 7, 8)
    )
    np.testing.assert_array_equal(first.response_ids, again.response_ids)
    np.testing.assert_array_equal(first.rollout_logprobs, again.rollout_logprobs)
    np.testing.assert_array_equal(first.hidden_states, again.hidden_states)
    assert not np.array_equal(first.response_ids, other.response_ids)
    greedy = dataclasses.replace(SAMPLING, temperature=0.0)
    for rollout in sampled(client, version, requests_of([prompt]), greedy).values():
        _, logits = model.states_and_logits(rollout)
        np.testing.assert_array_equal(rollout.response_ids, logits.argmax(-1))


def test_metrics_are_those_of_the_states(client, model):
    """A replica measures the same as the trainer, whether or not it sends the states."""
    version = model.sync(client, 0)
    requests = requests_of(random_prompts(model, [3, 90]), 2)
    options = {"names": ("effective_rank", "curvature"), "stride": 8, "window": "exact"}
    params = MetricParams(**options, dtype="float32")
    found = client.generate(requests, SAMPLING, STATES, version=version, metrics=params)
    by_id = {rollout.sample_id: rollout for rollout in found}
    assert by_id.keys() == {request.sample_id for request in requests}
    with Measurer(max_tokens=64, num_threads=1, **options) as measurer:
        for rollout in by_id.values():
            future = measurer.submit(rollout.hidden_states[:, 0])
            measurer.flush()
            expected = future.result()
            assert expected.metrics[MetricKey("effective_rank", "acceleration")].valid
            found = encode(rollout.metrics)
            assert found == pytest.approx(encode(expected.metrics), rel=1e-5, abs=1e-5)
            np.testing.assert_allclose(rollout.mean_state, expected.mean_states[0], rtol=1e-5)
    before = client.counters["state_bytes"]
    for rollout in client.generate(requests, SAMPLING, version=version, metrics=params):
        assert rollout.hidden_states is None
        assert rollout.metrics.keys() == by_id[rollout.sample_id].metrics.keys()
    assert client.counters["state_bytes"] == before


def test_aborted_responses_are_right_as_far_as_they_go(client, model):
    version = model.sync(client, 0)
    # With different prompt lengths, concurrent responses have different numbers of tokens.
    lengths = np.random.default_rng(0).integers(1, 200, 64)
    requests = requests_of(random_prompts(model, lengths), 3)
    aborts = []
    rollouts = []
    with client.replica.caller() as caller:
        aborting = threading.Thread(target=lambda: aborts.append(caller.abort()))
        for rollout in caller.generate(requests, SAMPLING, BOTH, version=version):
            rollouts.append(rollout)
            if len(rollouts) == 20:
                aborting.start()
        aborting.join()
    assert len(rollouts) == len(requests)
    aborted = [r for r in rollouts if r.finish_reason == "aborted"]
    assert aborts == [len(aborted)]
    begun = [r for r in aborted if len(r.response_ids)]
    assert begun and len(begun) < len(aborted)
    assert_right([r for r in rollouts if len(r.response_ids)], model)
    assert_right(sampled(client, version, requests[:4]).values(), model)


def test_update_reaches_every_layer_and_no_cached_prefix_survives_it(client, model, other):
    """Greedy responses are those of a vLLM that read the new weights from disk."""
    requests = requests_of(random_prompts(model, [20, 140, 180, 200], seed=3))
    greedy = SamplingParams(48, temperature=0.0)
    expected = subprocess.run(
        [str(PYTHON), "-m", "tests.rollout.engines.vllm_fresh", str(other.path), "48"],
        input=json.dumps([request.prompt_ids.tolist() for request in requests]),
        cwd=ROOT, env=environment(), text=True, capture_output=True, timeout=120,
    )  # fmt: skip
    assert expected.returncode == 0, expected.stderr
    expected = json.loads(expected.stdout.splitlines()[-1])
    for step, weights in enumerate([model, other, model, other]):
        version = weights.sync(client, step)
        rollouts = sampled(client, version, requests, greedy)
        assert_right(rollouts.values(), weights, greedy)
    assert [rollouts[r.sample_id].response_ids.tolist() for r in requests] == expected


def test_it_sleeps_until_new_weights_come(client, model, other):
    """In vLLM's own order. A CPU frees nothing, which the replica says; a load fails in between."""
    requests, lines = requests_of(random_prompts(model, [20, 140]), 2), []
    in_turns = RolloutClient(
        (client.replica.address(),), TOKEN, run_id="run", attempt_id="attempt", in_turns=True,
        sync_timeout_s=60.0, progress=lines.append,
    )  # fmt: skip
    with in_turns:
        version = model.sync(in_turns, 0)
        expected = sampled(in_turns, version, requests)
        (client.directory / "slept").write_text("")
        for step, weights in enumerate([other, model], start=1):
            in_turns.release(weights=True)
            in_turns.release(weights=True)
            with client.replica.caller() as caller, pytest.raises(grpc.RpcError) as caught:
                list(caller.generate(requests, SAMPLING, STATES, version=version))
            assert caught.value.code() == grpc.StatusCode.FAILED_PRECONDITION
            if weights is model:
                (client.directory / "fail_loads").write_text("broken off")
            rollouts = sampled(in_turns, weights.sync(in_turns, step), requests)
            assert_right(rollouts.values(), weights)
    for name, rollout in rollouts.items():
        np.testing.assert_array_equal(rollout.response_ids, expected[name].response_ids)
    told = [line for line in lines if "frees no memory on this platform while it sleeps" in line]
    assert len(told) == 1
    waking = ["weights", "load", "kv_cache"]
    failing = ["weights", "load", "load", "load", "kv_cache"]  # new, old, and new ones once more
    assert observed(client, "slept") == ["sleep_2", *waking, "sleep_2", *failing]


def spoiled_updates(model, other):
    """Weights of `other`, each spoiled in another way."""
    whole = update_messages(other.arrays(), specs=other.specs(), step=5)
    flipped = update_messages(other.arrays(), specs=other.specs(), step=5)
    flip(flipped)
    fewer = update_messages(other.arrays()[:-1], specs=other.specs()[:-1], step=5)
    wrong = [
        dataclasses.replace(other.specs()[0], shape=other.specs()[0].shape[::-1]),
        *other.specs()[1:],
    ]
    return {
        "checksum": flipped,
        "the stream ended": whole[: len(whole) // 2],
        "missing": fewer,
        "do not match the replica's model": update_messages(other.arrays(), specs=wrong, step=5),
    }


def test_broken_update_leaves_the_old_weights(client, model, other):
    version = model.sync(client, 4)
    requests = requests_of(random_prompts(model, [5, 150]))
    with grpc.insecure_channel(client.replica.address()) as channel:
        stub = make_stub(channel)
        options = {"metadata": token_metadata(TOKEN), "timeout": 30}
        for reason, messages in spoiled_updates(model, other).items():
            assert reason in refusal(stub.UpdateWeights, iter(messages), **options)[1]
            assert_right(sampled(client, version, requests).values(), model)

    def dying():
        yield from other.arrays()[:3]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        client.sync_weights(other.specs(), dying, step=5)
    assert_right(sampled(client, version, requests).values(), model)


@pytest.mark.parametrize("kind", ["broken off", "cut", "lost"])
def test_failed_load_brings_the_previous_weights_back(client, model, other, kind):
    version = model.sync(client, 6)
    requests = requests_of(random_prompts(model, [5, 150]))
    (client.directory / "fail_loads").write_text(kind)
    messages = update_messages(other.arrays(), specs=other.specs(), step=7)
    with grpc.insecure_channel(client.replica.address()) as channel:
        stub = make_stub(channel)
        options = {"metadata": token_metadata(TOKEN), "timeout": 30}
        code, _ = refusal(stub.UpdateWeights, iter(messages), **options)
    assert code == grpc.StatusCode.INTERNAL
    assert (client.directory / "fail_loads").read_text() == ""
    assert_right(sampled(client, version, requests).values(), model)
    version = other.sync(client, 8)
    assert_right(sampled(client, version, requests).values(), other)


BAD_REQUESTS = {
    "empty prompt": ({"prompt": []}, "prompts[0] is empty"),
    "long prompt": ({"prompt": [1] * 201}, "201 tokens; the replica takes 200"),
    "id beyond the vocabulary": ({"prompt": [10**6]}, "token id 1000000"),
    "long response": ({"sampling": SamplingParams(65)}, "max_tokens=65 must be in"),
    "other layer": (
        {"layers": (1,)},
        "hidden_states.layers has 1; the replica has [-1, 2]: vLLM's compiled model gives out no "
        "inner ones; set rollout.vllm_inner_states, or take the JAX engine.",
    ),
    "no samples": ({"num_samples": 0}, "samples is empty"),
}


@pytest.mark.parametrize("name", BAD_REQUESTS)
def test_bad_request_is_one_line_and_the_server_goes_on(client, model, name):
    spoiled, reason = BAD_REQUESTS[name]
    version = model.sync(client, 0)
    good = requests_of(random_prompts(model, [5]))
    requests = requests_of([np.array(spoiled.get("prompt", [1]), np.int32)])
    call = codec.GenerateCall(
        tuple(requests[: spoiled.get("num_samples", 1)]),
        spoiled.get("sampling", SAMPLING),
        HiddenStateParams(spoiled.get("layers", (-1,)), "float32"),
        version,
    )
    message = codec.encode_request(call)
    with grpc.insecure_channel(client.replica.address()) as channel:
        stub = make_stub(channel)
        options = {"metadata": token_metadata(TOKEN), "timeout": 30}
        _, found = refusal(stub.Generate, message, **options)
    assert reason in found and "\n" not in found
    assert_right(sampled(client, version, good).values(), model)
