"""The routes of HTTP, and the checks before them: token, size, time."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, TypeVar

import grpc
import prometheus_client
import pydantic
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from semrl_jax.metrics.measurements import Metrics
from semrl_jax.rollout.http.calls import Calls, How, Job
from semrl_jax.rollout.http.guarding import WRONG_TOKEN, guarded, read_body
from semrl_jax.rollout.http.prometheus import Collector
from semrl_jax.rollout.http.requests import (
    Body,
    ChatBody,
    CompletionBody,
    GenerateBody,
    OpenAIBody,
    message_of,
)
from semrl_jax.rollout.http.texts import StreamedText, Texts
from semrl_jax.rollout.server.request_checks import Refused, refused_if_invalid, status_of
from semrl_jax.rollout.server.service import RolloutService
from semrl_jax.rollout.wire import codec
from semrl_jax.rollout.wire.auth import check_token
from semrl_jax.types import MetricParams, Rollout, SamplingParams, distribution_of

MAX_BODY_BYTES = 8 * 2**20
MAX_PIECES = 64  # of a stream, that wait for a client
_OPEN = ("/health", "/metrics")  # without a token
_STATUS = {
    grpc.StatusCode.INVALID_ARGUMENT: 400,
    grpc.StatusCode.RESOURCE_EXHAUSTED: 400,  # a prompt or a response that is too long
    grpc.StatusCode.UNIMPLEMENTED: 400,
    grpc.StatusCode.UNAVAILABLE: 503,
}
_FINISH = {"eos": "stop", "stop": "stop", "length": "length"}
B = TypeVar("B", bound=pydantic.BaseModel)


class Api:
    """Answers requests with the responses of a service.

    Args:
      model: the name of the policy in requests and answers.
    """

    def __init__(self, service: RolloutService, texts: Texts, model: str):
        self._service, self._texts, self._model = service, texts, model
        self._calls = Calls(service)
        self._started = int(time.time())
        self._registry = prometheus_client.CollectorRegistry()
        self._registry.register(Collector(service.counts, service.description))

    def routes(self) -> list[Route]:
        posts = {
            "/v1/completions": self.completions,
            "/v1/chat/completions": self.chat,
            "/inference/v1/generate": self.generate,
        }
        gets = {
            "/v1/models": self.models,
            "/v1/models/{name:path}": self.model,
            "/health": self.health,
            "/metrics": self.metrics,
        }
        return [
            Route(path, _answered(function), methods=[method])
            for method, functions in (("POST", posts), ("GET", gets))
            for path, function in functions.items()
        ]

    async def health(self, request: Request) -> Response:
        return Response(status_code=503 if self._service.dead.is_set() else 200)

    async def metrics(self, request: Request) -> Response:
        page = prometheus_client.generate_latest(self._registry)
        return Response(page, media_type=prometheus_client.CONTENT_TYPE_LATEST)

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        self._check_model(request.path_params["name"])
        return JSONResponse(self._card())

    def _card(self) -> dict[str, Any]:
        limits = self._service.description
        return {
            "id": self._model,
            "object": "model",
            "created": self._started,
            "owned_by": "semrl_jax",
            "max_model_len": limits.max_prompt_tokens + limits.max_response_tokens,
        }

    async def generate(self, request: Request) -> Response:
        body = await _read(request, GenerateBody)
        if body.model:
            self._check_model(body.model)
        given, prompts = body.sampling_params, [body.token_ids]
        wants = given.prompt_logprobs is not None
        how = How(self._sampling(given), prompt_logprobs=wants)
        async with self._calls.sampled(prompts, [_seeds(given.seed, 1)], how) as jobs:
            (rollout,) = await _all(request, jobs)
        ids, logprobs = rollout.response_ids.tolist(), rollout.rollout_logprobs.tolist()
        content = [  # as vLLM writes tokens without texts
            {"token": f"token_id:{i}", "logprob": value} for i, value in zip(ids, logprobs)
        ]
        choice = {
            "index": 0,
            "token_ids": ids,
            "logprobs": {"content": content},
            "finish_reason": _finish(rollout),
        }
        answer = {
            "request_id": secrets.token_hex(8),
            "choices": [choice],
            "usage": _usage(prompts, [rollout]),
        }
        if wants:
            pairs = zip(body.token_ids[1:], rollout.prompt_logprobs[1:].tolist())
            found = [None, *({str(i): {"logprob": value}} for i, value in pairs)]
            answer["prompt_logprobs"] = found
        return JSONResponse(answer)

    async def completions(self, request: Request) -> Response:
        body = await _read(request, CompletionBody)
        given = body.prompt
        if not given:
            raise ValueError(f"prompt={given!r} is empty; it needs at least one token.")
        if isinstance(given, str) or isinstance(given[0], int):
            given = [given]
        with refused_if_invalid():  # before anything is made of each
            codec.check_num_samples(len(given) * body.n, self._service.description)
        if body.echo and (body.stream or body.logprobs is not None):
            other = "stream" if body.stream else "logprobs"
            raise ValueError(f"echo=true with {other}: it has only the response's tokens.")
        prompts = await asyncio.to_thread(
            lambda: [
                self._texts.encode(each, True) if isinstance(each, str) else each for each in given
            ]
        )
        answer = _Answer("cmpl", "text_completion", "text_completion", self._model)

        def choice(index: int, rollout: Rollout) -> dict[str, Any]:
            ids = rollout.response_ids.tolist()
            text = self._texts.text(ids, body.stop_strings)
            if body.echo:
                prompt = given[index // body.n]
                text = (prompt if isinstance(prompt, str) else self._texts.text(prompt)) + text
            logprobs = None
            if body.logprobs is not None:
                logprobs = self._completion_logprobs(ids, rollout.rollout_logprobs.tolist())
            return {"text": text, "logprobs": logprobs, "finish_reason": _finish(rollout)}

        def piece(text: str) -> dict[str, Any]:
            return {"text": text, "logprobs": None, "finish_reason": None}

        return await self._answer(request, body, prompts, answer, choice, piece)

    async def chat(self, request: Request) -> Response:
        body = await _read(request, ChatBody)
        tools = () if body.tool_choice == "none" else body.tools
        messages = [message.model_dump() for message in body.messages]
        # In a thread: a template may take a second.
        prompt = await asyncio.to_thread(self._texts.chat, messages, tools)
        body.max_tokens = body.max_completion_tokens or body.max_tokens
        answer = _Answer("chatcmpl", "chat.completion", "chat.completion.chunk", self._model)

        def choice(index: int, rollout: Rollout) -> dict[str, Any]:
            ids = rollout.response_ids.tolist()
            message: dict[str, Any] = {"role": "assistant", "content": None}
            finish = _finish(rollout)
            if calls := self._texts.tool_calls(ids, tools):
                finish = "tool_calls"
                message["tool_calls"] = [
                    {
                        "index": number,  # without it, clients cannot join the pieces of a stream
                        "id": f"call_{secrets.token_hex(8)}",
                        "type": "function",
                        "function": each,
                    }
                    for number, each in enumerate(calls)
                ]
            else:
                message["content"] = self._texts.text(ids, body.stop_strings)
            logprobs = None
            if body.logprobs:
                logprobs = self._chat_logprobs(ids, rollout.rollout_logprobs.tolist())
            return {"message": message, "logprobs": logprobs, "finish_reason": finish}

        def piece(text: str) -> dict[str, Any]:
            return {"delta": {"content": text}, "logprobs": None, "finish_reason": None}

        # Whether a text is a call is known at its end.
        in_pieces = piece if not tools else None
        return await self._answer(request, body, [prompt], answer, choice, in_pieces)

    async def _answer(
        self,
        request: Request,
        body: OpenAIBody,
        prompts: Sequence[Sequence[int]],
        answer: _Answer,
        choice: Callable[[int, Rollout], dict[str, Any]],
        piece: Callable[[str], dict[str, Any]] | None,
    ) -> Response:
        """Samples `n` responses to each prompt, and sends them at once or as they come.

        Args:
          choice: what is sent of the response of a choice.
          piece: what is sent of a text that is added to a response; None: only its end is sent.
        """
        self._check_model(body.model)
        metrics = MetricParams(tuple(body.metrics), body.metric_stride) if body.metrics else None
        how = How(self._sampling(body), metrics, body.stream and piece is not None)
        seeds = [_seeds(body.seed, body.n) for _ in prompts]
        if not body.stream:
            async with self._calls.sampled(prompts, seeds, how) as jobs:
                rollouts = await _all(request, jobs)
            choices = [
                {"index": index, **choice(index, rollout), **_measured(rollout)}
                for index, rollout in enumerate(rollouts)
            ]
            usage = _usage(prompts, rollouts, body.n)
            return JSONResponse(answer.whole(choices, usage))
        stack = contextlib.AsyncExitStack()
        jobs = await stack.enter_async_context(self._calls.sampled(prompts, seeds, how))

        async def events() -> AsyncIterator[str]:
            async with stack:
                try:
                    async for index, found in _merged(jobs, self._pieces, body, piece):
                        if isinstance(found, dict):
                            yield answer.chunk(index, found)
                            continue
                        last = choice(index, found)
                        message = last.pop("message", None)
                        if message is not None:
                            last["delta"] = {} if how.is_streamed else message
                        elif how.is_streamed:
                            last["text"] = ""
                        yield answer.chunk(index, last | _measured(found))
                    if body.stream_options.get("include_usage"):
                        rollouts = [job.rollout.result() for job in jobs]
                        yield answer.usage_chunk(_usage(prompts, rollouts, body.n))
                except Exception as error:
                    yield _event(_error_body(*_described(error)))
                yield "data: [DONE]\n\n"

        return StreamingResponse(events(), media_type="text/event-stream")

    async def _pieces(
        self, job: Job, body: OpenAIBody, piece: Callable[[str], dict[str, Any]] | None
    ) -> AsyncIterator[dict[str, Any] | Rollout]:
        """The pieces of a response's text, then the response."""
        if piece is not None:
            if isinstance(body, ChatBody):
                yield piece("") | {"delta": {"role": "assistant", "content": ""}}
            text = StreamedText(self._texts, body.stop_strings)
            async for ids in job.tokens():
                if added := text.add(ids):
                    yield piece(added)
            if added := text.add([], is_last=True):
                yield piece(added)
        yield _complete(await job.rollout)

    def _check_model(self, name: str) -> None:
        if name != self._model:
            raise HTTPException(
                404, f"model={name!r:.80} is not served here; ask for {self._model!r}."
            )

    def _sampling(self, body: Body) -> SamplingParams:
        return SamplingParams(
            max_tokens=body.max_tokens or self._service.description.max_response_tokens,
            **distribution_of(body) | {"top_k": max(body.top_k, 0)},
            eos_token_ids=() if body.ignore_eos else self._texts.end_token_ids,
            stop_token_ids=tuple(body.stop_token_ids),
            stop_strings=body.stop_strings,
        )

    def _completion_logprobs(self, ids: Sequence[int], values: Sequence[float]) -> dict[str, Any]:
        tokens = [self._texts.tokenizer.decode([i]) for i in ids]
        offsets = [0]
        for token in tokens:
            offsets.append(offsets[-1] + len(token))
        return {
            "tokens": tokens,
            "token_logprobs": values,
            "top_logprobs": [{token: value} for token, value in zip(tokens, values)],
            "text_offset": offsets[:-1],
        }

    def _chat_logprobs(self, ids: Sequence[int], values: Sequence[float]) -> dict[str, Any]:
        content = []
        for token_id, value in zip(ids, values):
            token = self._texts.tokenizer.decode([token_id])
            data = list(self._texts.bytes[token_id] or token.encode())
            content.append({"token": token, "logprob": value, "bytes": data, "top_logprobs": []})
        return {"content": content, "refusal": None}


class _Answer:
    """The objects in which OpenAI's clients expect choices."""

    def __init__(self, prefix: str, whole: str, chunk: str, model: str):
        self._names = whole, chunk
        self._common = {
            "id": f"{prefix}-{secrets.token_hex(12)}",
            "created": int(time.time()),
            "model": model,
        }

    def whole(self, choices: Sequence[dict[str, Any]], usage: dict[str, Any]) -> dict[str, Any]:
        return {**self._common, "object": self._names[0], "choices": choices, "usage": usage}

    def chunk(self, index: int, choice: dict[str, Any]) -> str:
        choices = [{"index": index, **choice}]
        return _event({**self._common, "object": self._names[1], "choices": choices})

    def usage_chunk(self, usage: dict[str, Any]) -> str:
        return _event({**self._common, "object": self._names[1], "choices": [], "usage": usage})


def make_app(
    service: RolloutService, texts: Texts, *, token: str, model: str, stall_timeout_s: float
) -> ASGIApp:
    """The application of a server of HTTP.

    Args:
      token: of every request except those of health and metrics.
      stall_timeout_s: a client that reads nothing for this long loses its connection.
    """
    app = Starlette(
        routes=Api(service, texts, model).routes(), exception_handlers={HTTPException: _http_error}
    )
    return guarded(
        app,
        header="authorization",
        value=f"Bearer {check_token(token)}",
        open_paths=_OPEN,
        refusal=_error_body(401, WRONG_TOKEN, None),
        stall_timeout_s=stall_timeout_s,
    )


def _answered(function: Callable[[Request], Awaitable[Response]]):
    """An endpoint whose exceptions become answers."""

    async def endpoint(request: Request) -> Response:
        try:
            return await function(request)
        except (HTTPException, ClientDisconnect):
            raise
        except Exception as error:
            status, text, param = _described(error)
            return JSONResponse(_error_body(status, text, param), status)

    return endpoint


async def _http_error(request: Request, error: HTTPException) -> Response:
    text = error.detail
    if text == "Not Found":  # of no route of ours
        text = f"there is no {request.url.path!r:.80}; a base URL ends in /v1."
    body = _error_body(error.status_code, text, None)
    return JSONResponse(body, error.status_code, error.headers)


def _described(error: Exception) -> tuple[int, str, str | None]:
    """The status of an exception, its line, and the field that caused it."""
    if isinstance(error, pydantic.ValidationError):
        return 400, *message_of(error)
    if isinstance(error, ValueError):
        return 400, str(error), None
    code, text = status_of(error, "HTTP")
    return _STATUS.get(code, 500), text, None


def _error_body(status: int, text: str, param: str | None) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": text, "type": kind, "param": param, "code": status}}


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value, ensure_ascii=False)}\n\n"


async def _read(request: Request, kind: type[B]) -> B:
    """The body of a request; raises HTTPException if it is too long or slow, or no JSON."""
    return kind.model_validate_json(await read_body(request, MAX_BODY_BYTES))


def _seeds(seed: int | None, count: int) -> list[int]:
    """The seeds of the choices of a prompt."""
    if seed is None:
        return [secrets.randbits(64) for _ in range(count)]
    return [(seed + index) % 2**64 for index in range(count)]


async def _all(request: Request, jobs: Sequence[Job]) -> list[Rollout]:
    """Waits for all responses; raises ClientDisconnect if the client goes away before."""
    left = asyncio.ensure_future(request.receive())  # the body was read: only the end is left
    found = asyncio.create_task(_results(jobs))
    try:
        await asyncio.wait((left, found), return_when=asyncio.FIRST_COMPLETED)
        if not found.done():
            raise ClientDisconnect
        return await found
    finally:
        left.cancel()
        found.cancel()


async def _results(jobs: Sequence[Job]) -> list[Rollout]:
    return [_complete(await job.rollout) for job in jobs]


def _complete(rollout: Rollout) -> Rollout:
    if rollout.finish_reason == "aborted":
        raise Refused(grpc.StatusCode.UNAVAILABLE, "the response was aborted; ask again.")
    return rollout


async def _merged(jobs: Sequence[Job], pieces, *arguments) -> AsyncIterator[tuple[int, Any]]:
    """What several responses send, in the order in which it comes."""
    # A slow client's texts wait as token ids, which need less memory.
    queue: asyncio.Queue[tuple[int, Any] | None] = asyncio.Queue(MAX_PIECES)

    async def forward(index: int, job: Job) -> None:
        try:
            async for found in pieces(job, *arguments):
                await queue.put((index, found))
        except Exception:  # not a cancellation: then nobody reads
            await queue.put(None)
            raise
        await queue.put(None)

    tasks = [asyncio.create_task(forward(*each)) for each in enumerate(jobs)]
    try:
        for _ in tasks:  # each puts one None
            while (found := await queue.get()) is not None:
                yield found
        for task in tasks:
            await task
    finally:
        for task in tasks:
            task.cancel()


def _finish(rollout: Rollout) -> str:
    return _FINISH[rollout.finish_reason]


def _usage(
    prompts: Sequence[Sequence[int]], rollouts: Sequence[Rollout], n: int = 1
) -> dict[str, Any]:
    num_prompt = sum(map(len, prompts))
    num_response = sum(len(rollout.response_ids) for rollout in rollouts)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_response,
        "total_tokens": num_prompt + num_response,
        "prompt_tokens_details": {"cached_tokens": 0},
    }


def _measured(rollout: Rollout) -> dict[str, Any]:
    """Our own field of a choice: which weights, and what was measured; null where not valid."""
    span = rollout.versions[-1].version
    found: dict[str, Any] = {"run_id": span.run_id, "step": span.step}
    if rollout.metrics:
        found["metrics"] = _numbers(rollout.metrics)
    return {"semrl": found}


def _numbers(metrics: Metrics) -> dict[str, float | None]:
    return {
        key.label: float(value) if valid else None
        for key, (value, valid) in metrics.items()
        if key.order != "series"
    }
