"""OpenAI's own client against a replica: the same tokens as over gRPC, in the forms it expects."""

import concurrent.futures
import contextlib
import time

import jax
import numpy as np
import openai
import pytest

from semrl_jax.rollout.client import RolloutClient
from semrl_jax.rollout.http.texts import Texts
from semrl_jax.types import HiddenStateParams, MetricParams, SampleRequest, SamplingParams
from tests.rollout.conftest import TOKEN
from tests.rollout.http.conftest import MODEL

ASKED = [{"role": "user", "content": "the quick brown fox"}]


def chat(served, **options):
    return served.client.chat.completions.create(**{"model": MODEL, "messages": ASKED, **options})


def prompt_of(served, messages=ASKED):
    text = served.tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )
    return served.tokenizer(text, add_special_tokens=False)["input_ids"]


def over_grpc(served, prompt, seed, metrics=None, **sampling):
    """The same response through the trainer's client."""
    with contextlib.closing(
        RolloutClient([served.replica.address], TOKEN, run_id="run", attempt_id="attempt")
    ) as client:
        limits = served.engine.describe()
        client.connect(
            model_hash=limits.model_hash, tokenizer_hash="", vocab_size=limits.vocab_size
        )
        request = SampleRequest("0", 0, 0, np.array(prompt, np.int32), seed)
        sampling = SamplingParams(
            **{"max_tokens": 48, "eos_token_ids": (served.tokenizer.eos_token_id,), **sampling}
        )
        (rollout,) = client.generate(
            [request], sampling, HiddenStateParams(), metrics=metrics, version=served.version
        )
        return rollout


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "top_p": 0.9, "max_tokens": 20}])
def test_a_chat_has_the_tokens_of_the_trainers_client(served, options):
    found = chat(served, seed=5, logprobs=True, **options)
    expected = over_grpc(served, prompt_of(served), 5, **options)
    (choice,) = found.choices
    ids = expected.response_ids.tolist()
    assert choice.message.content == served.tokenizer.decode(ids, skip_special_tokens=True)
    content = choice.logprobs.content
    assert [entry.token for entry in content] == [served.tokenizer.decode([i]) for i in ids]
    assert np.array_equal(
        np.float32([entry.logprob for entry in content]), expected.rollout_logprobs
    )
    assert b"".join(bytes(entry.bytes) for entry in content)[:5].decode(errors="replace")
    assert choice.finish_reason == ("stop" if expected.finish_reason == "eos" else "length")
    assert found.usage.prompt_tokens == len(prompt_of(served))
    assert found.usage.completion_tokens == len(ids)
    assert choice.semrl == {"run_id": "run", "step": 3}


@pytest.mark.parametrize("stop", [[], ["e"], ["x", "o l"]])
def test_a_stream_has_the_text_of_the_whole(served, stop):
    whole = [chat(served, seed=seed, stop=stop) for seed in range(6)]
    num_pieces = []
    for seed, expected in enumerate(whole):
        chunks = list(
            chat(served, seed=seed, stop=stop, stream=True, stream_options={"include_usage": True})
        )
        *chunks, last = chunks
        assert not last.choices and last.usage == expected.usage
        choices = [chunk.choices[0] for chunk in chunks]
        assert choices[0].delta.role == "assistant"
        text = "".join(choice.delta.content or "" for choice in choices)
        assert text == expected.choices[0].message.content
        assert [c.finish_reason for c in choices if c.finish_reason] == [
            expected.choices[0].finish_reason
        ]
        num_pieces.append(len(choices))
        assert not any(each in text for each in stop)
    assert max(num_pieces) > (3 if stop else 20)  # token by token


def test_a_stream_across_an_update_has_the_weights_of_its_begin(
    served, policy, params, monkeypatch
):
    options = {"seed": 5, "logprobs": True, "extra_body": {"ignore_eos": True}}
    before = chat(served, **options).choices[0]
    step = type(served.engine)._step

    def slow(*arguments):
        time.sleep(0.05)
        return step(*arguments)

    monkeypatch.setattr(type(served.engine), "_step", slow)
    chunks, was_updating = [], False
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        for chunk in chat(served, stream=True, **options):
            chunks.append(chunk.choices[0])
            if len(chunks) == 2:  # the first one comes before the call begins
                negated = jax.tree.map(lambda leaf: -leaf, params)
                update = pool.submit(served.load, policy, negated, 4)
            was_updating |= served.replica._server._service._updating
    try:
        assert update.result().step == 4 and was_updating
        assert "".join(each.delta.content or "" for each in chunks) == before.message.content
        assert chunks[-1].semrl == before.semrl == {"run_id": "run", "step": 3}
        sampled = before.logprobs.model_dump()
        assert chunks[-1].logprobs.model_dump() == sampled
        after = chat(served, **options).choices[0]
        assert after.semrl["step"] == 4 and after.logprobs.model_dump() != sampled
    finally:
        assert served.load(policy, params) == served.version


def test_choices_have_seeds_of_their_own(served):
    several = chat(served, seed=5, n=3, max_tokens=16)
    assert [choice.index for choice in several.choices] == [0, 1, 2]
    texts = [choice.message.content for choice in several.choices]
    assert len(set(texts)) == 3
    for index, text in enumerate(texts):
        assert chat(served, seed=5 + index, max_tokens=16).choices[0].message.content == text
    unseeded = {chat(served, max_tokens=16).choices[0].message.content for _ in range(2)}
    assert len(unseeded) == 2
    streamed = chat(served, seed=5, n=3, max_tokens=16, stream=True)
    parts = ["", "", ""]
    for chunk in streamed:
        for choice in chunk.choices:
            parts[choice.index] += choice.delta.content or ""
    assert parts == texts


def test_completions_take_texts_and_token_ids(served):
    create = served.client.completions.create
    text = "a lazy dog"
    ids = served.tokenizer(text)["input_ids"]
    options = {"model": MODEL, "seed": 1, "max_tokens": 16}
    of_text = create(prompt=text, **options).choices[0].text
    assert create(prompt=ids, **options).choices[0].text == of_text
    both = create(prompt=[text, "the fox"], n=2, **options)
    assert [choice.index for choice in both.choices] == [0, 1, 2, 3]
    assert both.choices[0].text == of_text
    assert both.usage.completion_tokens <= 4 * 16
    with_logprobs = create(prompt=text, logprobs=1, **options).choices[0]
    logprobs = with_logprobs.logprobs
    assert "".join(logprobs.tokens).removesuffix("<|im_end|>") == with_logprobs.text
    assert [logprobs.tokens[0]] == list(logprobs.top_logprobs[0])
    assert logprobs.text_offset[1] == len(logprobs.tokens[0])
    assert create(prompt=text, echo=True, **options).choices[0].text == text + of_text
    streamed = "".join(c.choices[0].text for c in create(prompt=text, stream=True, **options))
    assert streamed == of_text


def test_logprobs_of_an_echo_are_refused(served):
    with pytest.raises(openai.BadRequestError, match="echo=true with logprobs"):
        served.client.completions.create(model=MODEL, prompt="fox", echo=True, logprobs=1)


@pytest.mark.parametrize("stream", [False, True])
def test_calls_of_tools_have_the_index_by_which_a_stream_is_joined(served, stream, monkeypatch):
    tool = {"type": "function", "function": {"name": "add"}}
    found = [{"name": "add", "arguments": "{}"}] * 2
    monkeypatch.setattr(Texts, "tool_calls", lambda self, ids, tools: found if tools else [])
    options = {"model": MODEL, "messages": ASKED, "tools": [tool], "max_tokens": 16}
    if stream:
        with served.client.chat.completions.stream(**options) as events:
            choice = events.get_final_completion().choices[0]
    else:
        choice = chat(served, **options).choices[0]
    calls = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    assert [(call.function.name, call.index) for call in calls] == [("add", 0), ("add", 1)]


@pytest.mark.slow
def test_metrics_are_those_that_a_replica_measures(served):
    asked = {"metrics": ["effective_rank"], "metric_stride": 4}
    names = "effective_rank", "effective_rank_velocity", "effective_rank_acceleration"
    found = chat(served, seed=2, extra_body=asked).choices[0].semrl["metrics"]
    params = MetricParams(("effective_rank",), 4)
    rollout = over_grpc(served, prompt_of(served), 2, metrics=params)
    assert len(rollout.response_ids) >= 16
    for key, (value, valid) in rollout.metrics.items():
        if key.order != "series":
            assert valid and found[key.label] == value
    assert set(names) <= set(found)
    short = chat(served, seed=2, max_tokens=2, extra_body=asked).choices[0].semrl["metrics"]
    assert short["effective_rank_velocity"] is None
    streamed = list(chat(served, seed=2, stream=True, extra_body=asked))
    assert streamed[-1].choices[0].semrl["metrics"] == found


def test_requests_that_come_together_share_calls(served, monkeypatch):
    calls = []
    start = type(served.engine)._start

    def counted(self, call):
        calls.append(len(call.requests))
        return start(self, call)

    alone = [chat(served, seed=seed, max_tokens=16) for seed in range(24)]
    monkeypatch.setattr(type(served.engine), "_start", counted)
    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        together = list(pool.map(lambda seed: chat(served, seed=seed, max_tokens=16), range(24)))
    assert sum(calls) == 24 and len(calls) < 12
    for one, other in zip(alone, together):
        assert one.choices[0].message.content == other.choices[0].message.content


def test_models_and_a_wrong_name(served):
    (model,) = served.client.models.list()
    assert (model.id, model.max_model_len) == (MODEL, 256 + 48)
    assert served.client.models.retrieve(MODEL) == model
    with pytest.raises(openai.NotFoundError, match="'gpt-4' is not served here"):
        served.client.models.retrieve("gpt-4")
    without_v1 = served.client.with_options(base_url=served.url)
    with pytest.raises(openai.NotFoundError, match="no '/models'; a base URL ends in /v1"):
        without_v1.models.list()
    with pytest.raises(openai.NotFoundError, match="'gpt-4' is not served here; ask for 'tiny'"):
        chat(served, model="gpt-4")


@pytest.mark.parametrize(
    "options, message",
    [
        ({"temperature": -1}, "temperature=-1: Input should be greater than or equal to 0"),
        ({"top_p": 0}, "top_p=0"),
        ({"max_tokens": 49}, r"max_tokens=49 must be in \[1, 48\]"),
        ({"n": 0}, "n=0"),
        ({"presence_penalty": 2.5}, "presence_penalty=2.5: Input should be less"),
        ({"extra_body": {"repetition_penalty": 0}}, "repetition_penalty=0: Input should be"),
        ({"extra_body": {"min_tokens": 9}, "max_tokens": 8}, r"min_tokens=9 must be in \[0, 8\]"),
        ({"extra_body": {"min_tokens": 9}, "stop": "x"}, "stop strings are texts; leave"),
        ({"logit_bias": {"5": 1}}, "logit_bias"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"top_logprobs": 3, "logprobs": True}, "top_logprobs=3"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "type 'text'"),
        ({"messages": [{"role": "user", "content": "fox " * 300}]}, r"prompts\[0\] has \d+ tokens"),
        ({"stop": [""]}, "stop_strings"),
        ({"extra_body": {"metrics": ["nonsense"]}}, "nonsense"),
        ({"extra_body": {"stop_token_ids": [2**31]}}, "stop_token_ids"),
        ({"extra_body": {"stop_token_ids": [5000]}}, "5000"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"messages": [{"role": "assistant", "tool_calls": [{}]}]}, "an object as 'function'"),
        (
            {"messages": [
                {"role": "assistant", "tool_calls": [{"function": {"arguments": "[" * 5000}}]}
            ]},
            "arguments must be JSON",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_one_line(served, options, message):
    with pytest.raises(openai.BadRequestError, match=message) as caught:
        chat(served, **options)
    assert "\n" not in caught.value.body["message"]
    assert chat(served, max_tokens=16).choices


def test_too_many_responses_are_refused_before_a_text_is_read(served, monkeypatch):
    texts = []
    encode = Texts.encode
    monkeypatch.setattr(Texts, "encode", lambda self, *a: texts.append(a) or encode(self, *a))
    with pytest.raises(openai.BadRequestError, match="102400 samples; the replica takes 65536"):
        served.client.completions.create(model=MODEL, prompt=["fox"] * 100, n=1024)
    assert not texts


def test_a_wrong_token_is_refused(served):
    for key in ("wrong", TOKEN + "x", TOKEN[:-1]):
        with pytest.raises(openai.AuthenticationError, match="token is missing or wrong"):
            served.client.with_options(api_key=key).models.list()
