"""A vLLM replica against transformers on the same weights: states, log-probabilities, weights."""

import jax
import numpy as np
import pytest
import torch
import transformers

from semrl_jax import data, models
from semrl_jax.types import HiddenStateParams, SampleRequest, SamplingParams
from tests.rollout.engines.vllm_replica import serving

pytestmark = pytest.mark.slow

TEMPERATURE = 0.8
STATES = HiddenStateParams((-1,), "float32")


def architecture(tokenizer, tied):
    return models.DecoderConfig(
        model_type="llama" if tied else "qwen2", vocab_size=len(tokenizer), hidden_size=128,
        intermediate_size=192, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=32,
        tie_embeddings=tied, max_position_embeddings=512,
    )  # fmt: skip


class Model:
    """A random model: on disk, as parameters of the policy, and as transformers reads it."""

    def __init__(self, directory, tied, seed=0):
        self.tokenizer = data.character_tokenizer()
        self.policy = models.Policy(architecture(self.tokenizer, tied))
        self.params = self.policy.init(jax.random.key(seed))
        # Far from each other, so that what is sampled depends on all of the prompt.
        self.params = jax.tree.map(lambda leaf: leaf * (2.0 if leaf.ndim > 2 else 1.0), self.params)
        self.path = directory / f"model-{tied}-{seed}"
        models.save_directory(self.path, self.params, self.policy.config, self.tokenizer)
        self.reference = transformers.AutoModelForCausalLM.from_pretrained(
            self.path, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    def sync(self, client, step):
        config = self.policy.config
        return client.sync_weights(
            models.tensor_specs(config, "float32"),
            lambda: (a for _, a in models.iterate_hf_tensors(self.params, config, "float32")),
            step=step,
        )

    @torch.no_grad()
    def states_and_logprobs(self, rollout, temperature=TEMPERATURE):
        """What a forward pass over prompt and response says of each response token."""
        ids = np.concatenate([rollout.prompt_ids, rollout.response_ids])
        found = self.reference.model(torch.tensor(ids[None]).long()).last_hidden_state[0]
        states = found[len(rollout.prompt_ids) - 1 : -1]
        logits = self.reference.lm_head(states) / (temperature or 1.0)
        logprobs = torch.log_softmax(logits, -1)
        chosen = logprobs[np.arange(len(states)), rollout.response_ids]
        return states.numpy(), chosen.numpy()


def requests_of(prompts, group_size=1):
    return [
        SampleRequest(f"{group}/{sample}", group, sample, prompt, seed=97 * group + sample)
        for group, prompt in enumerate(prompts)
        for sample in range(group_size)
    ]


def random_prompts(vocab_size, lengths, seed=0):
    random = np.random.default_rng(seed)
    return [random.integers(0, vocab_size, length, np.int32) for length in lengths]


def assert_right(rollouts, model, temperature=TEMPERATURE, tolerance=1e-5):
    """Rows to `tolerance` of their length: float32 sums in another order gave 1e-6."""
    assert rollouts
    for rollout in rollouts:
        states, logprobs = model.states_and_logprobs(rollout, temperature)
        found = rollout.hidden_states[:, 0].astype(np.float32)
        assert found.shape == states.shape
        error = np.linalg.norm(found - states, axis=1) / np.linalg.norm(states, axis=1)
        assert error.max() < tolerance, (rollout.sample_id, error)
        np.testing.assert_allclose(rollout.rollout_logprobs, logprobs, atol=10 * tolerance)


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def model(request, tmp_path_factory):
    return Model(tmp_path_factory.mktemp("models"), request.param)


@pytest.fixture(scope="module")
def client(model):
    """Chunked prefill (64 tokens a step) and a cache so small that responses preempt each other."""
    flags = (
        "--config.rollout.max_prompt_tokens=200", "--config.rollout.max_response_tokens=64",
        "--config.rollout.vllm_max_num_seqs=16", "--config.rollout.vllm_max_num_batched_tokens=64",
    )  # fmt: skip
    with serving(model.path, *flags) as client:
        yield client


def test_states_and_logprobs_are_those_of_a_forward_pass(client, model):
    """Prompts of 1 to 200 tokens, four responses each, ended in every way."""
    version = model.sync(client, 0)
    vocab_size = model.policy.config.vocab_size
    prompts = random_prompts(vocab_size, [1, 7, 30, 64, 65, 130, 200, 200])
    sampling = SamplingParams(
        max_tokens=64, temperature=TEMPERATURE, eos_token_ids=(3,), stop_token_ids=(5,)
    )
    rollouts = list(client.generate(requests_of(prompts, 4), sampling, STATES, version=version))
    assert len(rollouts) == 32
    assert {r.finish_reason for r in rollouts} == {"eos", "stop", "length"}
    for rollout in rollouts:
        last = rollout.response_ids[-1]
        assert (rollout.finish_reason == "eos") == (last == 3)
        assert (rollout.finish_reason == "stop") == (last == 5)
        (span,) = rollout.versions
        assert (span.version, span.start, span.end) == (version, 0, len(rollout.response_ids))
    assert_right(rollouts, model)
