"""A replica that serves a tiny random chat model over HTTP, and OpenAI's own client of it."""

import contextlib
import json
import types
import urllib.error
import urllib.request

import jax
import openai
import pytest

from semrl_jax import data, models
from semrl_jax.data import TokenBytes
from semrl_jax.rollout.engines.jax import JaxEngine
from semrl_jax.rollout.server import Http
from semrl_jax.types import WeightVersion
from tests.rollout.conftest import TOKEN
from tests.rollout.embedded import EmbeddedReplica
from tests.rollout.server.test_prometheus import free_port

MODEL = "tiny"


def ask(url, body=None, *, token=TOKEN, headers=(), timeout_s=60):
    """The status and the text of the answer; `body` may be bytes, or what becomes JSON."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    for name, value in dict(headers).items():
        request.add_header(name, value)
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return types.SimpleNamespace(status=answer.status, text=answer.read().decode())
    except urllib.error.HTTPError as error:
        return types.SimpleNamespace(status=error.code, text=error.read().decode())


class Served:
    """A replica with HTTP.

    Attributes:
      url: of the server, without a path.
      client: of OpenAI.
    """

    def __init__(self, engine, tokenizer, stack, **settings):
        http = Http(free_port(), "127.0.0.1", tokenizer, (tokenizer.eos_token_id,), MODEL)
        self.engine, self.tokenizer = engine, tokenizer
        self.replica = EmbeddedReplica(engine, token=TOKEN, http=http, **settings)
        stack.callback(self.replica.close, 0.0)
        self.url = f"http://127.0.0.1:{http.port}"
        self.client = stack.enter_context(
            openai.OpenAI(base_url=f"{self.url}/v1", api_key=TOKEN, max_retries=0)
        )

    def load(self, policy, params, step=3):
        version = WeightVersion("run", "attempt", step, "")

        def tensors(dtype):
            return models.iterate_hf_tensors(params, policy.config, dtype)

        return self.replica._run(self.replica._server.load(version, tensors))


@pytest.fixture(scope="session")
def tokenizer():
    words = "the quick brown fox jumps over a lazy dog and sums 12 + 30 = 42 . é 日本"
    return data.train_tokenizer([words] * 3, 300)


@pytest.fixture(scope="session")
def policy(tokenizer):
    config = models.DecoderConfig(
        vocab_size=len(tokenizer), hidden_size=64, intermediate_size=96, num_layers=2, num_heads=2,
        num_kv_heads=1, head_dim=32, tie_embeddings=True,
    )  # fmt: skip
    return models.Policy(config)


@pytest.fixture(scope="session")
def params(policy):
    return jax.tree.map(lambda leaf: leaf * 1.5, policy.init(jax.random.key(3)))


@pytest.fixture(scope="session")
def served(policy, params, tokenizer):
    with contextlib.ExitStack() as stack:
        engine = JaxEngine(
            policy, tokens=TokenBytes(tokenizer), chunk=4, max_prompt_tokens=256,
            max_response_tokens=48,
        )  # fmt: skip
        served = Served(engine, tokenizer, stack)
        served.version = served.load(policy, params)
        yield served
