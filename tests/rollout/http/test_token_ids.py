"""/inference/v1/generate, which verifiers' client and prime-rl call: token ids in and out."""

import json
import types

import numpy as np
import pytest

from tests.rollout.engines.responses import full_forward
from tests.rollout.http.conftest import MODEL, ask
from tests.rollout.http.test_openai import over_grpc

PROMPT = [5, 6, 7, 40, 41, 100, 101]


def generate(served, **body):
    sampling = {"seed": 4, "logprobs": 1, "skip_special_tokens": False, "max_tokens": 12}
    sampling |= body.pop("sampling_params", {})
    body = {"model": MODEL, "token_ids": PROMPT, "sampling_params": sampling, **body}
    url = f"{served.url}/inference/v1/generate"
    return ask(url, body, headers={"X-Session-ID": "trace-1"})


def test_ids_and_logprobs_are_the_engines(served):
    # Keys that verifiers sends and others that nobody knows.
    penalties = {"presence_penalty": 0.5, "repetition_penalty": 1.2, "min_tokens": 8}
    answer = generate(
        served,
        sampling_params={
            "min_p": 0.05,
            "routed_experts_prompt_start": 0,
            "new_in_2030": "x",
            **penalties,
        },
        cache_salt="7",
        priority=0,
    )
    answer = json.loads(answer.text)
    expected = over_grpc(served, PROMPT, 4, max_tokens=12, min_p=0.05, **penalties)
    (choice,) = answer["choices"]
    assert choice["token_ids"] == expected.response_ids.tolist()
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    assert np.array_equal(np.float32(logprobs), expected.rollout_logprobs)
    assert choice["finish_reason"] in ("stop", "length")
    usage = answer["usage"]
    assert usage["prompt_tokens"] == len(PROMPT)
    assert usage["total_tokens"] == len(PROMPT) + len(choice["token_ids"])
    assert answer["request_id"] and "prompt_logprobs" not in answer


def test_logprobs_of_the_prompt_are_those_of_a_full_forward_pass(served, policy, params):
    answer = generate(served, sampling_params={"max_tokens": 1, "prompt_logprobs": 1})
    first, *rest = json.loads(answer.text)["prompt_logprobs"]
    assert first is None
    assert [list(entry) for entry in rest] == [[str(i)] for i in PROMPT[1:]]
    found = [entry[str(i)]["logprob"] for entry, i in zip(rest, PROMPT[1:])]
    as_response = types.SimpleNamespace(prompt_ids=PROMPT[:1], response_ids=PROMPT[1:])
    ((_, _, expected),) = full_forward(policy, params, [as_response])
    # Two float32 passes of 2 layers, in other batch shapes.
    np.testing.assert_allclose(found, expected, atol=2e-5)


@pytest.mark.parametrize(
    "body, message",
    [
        ({"token_ids": []}, "prompts[0] is empty"),
        ({"token_ids": [10**6]}, "1000000"),
        ({"token_ids": [-1]}, "token_ids.0=-1"),
        ({"token_ids": "text"}, "token_ids"),
        ({"sampling_params": {"n": 2}}, "sampling_params.n=2"),
        ({"sampling_params": {"min_p": 1.1}}, "min_p"),
    ],
)
def test_bad_input_is_one_line(served, body, message):
    answer = generate(served, **body)
    assert answer.status == 400
    said = json.loads(answer.text)["error"]["message"]
    assert message in said and "\n" not in said
