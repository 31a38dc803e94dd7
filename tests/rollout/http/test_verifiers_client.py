"""verifiers' train client and its renderers, in an environment that has them, against a replica."""

import numpy as np
import pytest

from tests.environments.test_verifiers import run
from tests.rollout.conftest import TOKEN
from tests.rollout.http.conftest import MODEL
from tests.rollout.http.test_openai import over_grpc

PROGRAM = """
import asyncio, json, os, sys

from verifiers.v1.clients.train import TrainClient
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.dialects.chat import ChatDialect
from verifiers.v1.types import SamplingConfig

url, tokenizer, model, token = json.loads(sys.argv[1])
os.environ["KEY"] = token
config = TrainClientConfig(base_url=f"{url}/v1", api_key_var="KEY", renderer_model_name=tokenizer)
body = {"model": model, "messages": [{"role": "user", "content": "the quick brown fox"}]}
sampling = SamplingConfig(temperature=0.8, max_tokens=12, seed=7)

async def main():
    client = TrainClient(config)
    found = await client.get_response(ChatDialect(), body, sampling, session_id="trace")
    tokens = found.tokens
    print(json.dumps([list(tokens.prompt_ids), list(tokens.completion_ids),
                      list(tokens.completion_logprobs), found.finish_reason]))

asyncio.run(main())
"""


@pytest.mark.slow
def test_its_responses_are_the_replicas(served, tmp_path):
    served.tokenizer.save_pretrained(tmp_path / "tokenizer")
    arguments = [served.url, str(tmp_path / "tokenizer"), MODEL, TOKEN]
    prompt, ids, logprobs, finish = run(PROGRAM, arguments, path=tmp_path)
    expected = over_grpc(served, prompt, 7, temperature=0.8, max_tokens=12)
    assert ids == expected.response_ids.tolist()
    np.testing.assert_array_equal(np.float32(logprobs), expected.rollout_logprobs)
    assert finish in ("stop", "length")
