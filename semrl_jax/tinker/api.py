"""The routes of Tinker's API below /api/v1, as its SDK 0.38 calls them."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import secrets
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import pydantic
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from semrl_jax.rollout.http.guarding import WRONG_TOKEN, guarded, read_body
from semrl_jax.rollout.http.requests import message_of
from semrl_jax.tinker import requests, weights
from semrl_jax.tinker.futures import Ended, Futures, Request
from semrl_jax.tinker.listing import Answer, Listing, known
from semrl_jax.tinker.messages import Pass, read_pass
from semrl_jax.tinker.work import Work

MAX_BODY_BYTES = 32 * 2**20
MAX_WAITING, MAX_WAITING_BYTES = 10_000, 2**30
POLL_S = 30.0  # a client asks again after 45 s
STALL_S = 60.0
_PREFIX = "/api/v1/"
_OPEN = (_PREFIX + "healthz",)
_PROTOBUF = "application/x-protobuf"
_IN_PROTOBUF = ("sample", "forward_backward")  # results
# Flags of the SDK: keys without an exchange, plain bodies, parts of a batch in their order.
_CLIENT_CONFIG = {
    "pjwt_auth_enabled": False,
    "proto_compress_fwdbwd": False,
    "parallel_fwdbwd_chunks": False,
    "sample_max_concurrent_requests": 1024,
}
_NOTE = (
    "semrl_jax trains adapters of rank R and alpha 32 on the attention and the feed-forward "
    "modules; train_unembed has no effect."
)
B = TypeVar("B", bound=pydantic.BaseModel)


class Api:
    """Takes requests, and answers when they were done.

    Args:
      tokenizer_id: where clients find the tokenizer: a hub id or a directory.
    """

    def __init__(self, futures: Futures, work: Work, tokenizer_id: str):
        self._futures, self._work, self._limits = futures, work, work.limits
        self._tokenizer_id = tokenizer_id
        self._waiting: dict[str, set[asyncio.Event]] = {}  # by id of a request
        self._is_closed = False
        loop = asyncio.get_running_loop()
        work.on_end = lambda request_id: loop.call_soon_threadsafe(self._ended, request_id)

    def close(self) -> None:
        """Answers those that wait; they ask the next server."""
        self._is_closed = True
        for request_id in self._waiting:
            self._ended(request_id)

    def routes(self) -> list[Route]:
        posts = {
            "client/config": self.client_config,
            "client/dynamic_config": self.dynamic_config,
            "create_session": self.create_session,
            "session_heartbeat": self.session_heartbeat,
            "sessions/{session_id}/finish": self.finish,
            "telemetry": self.telemetry,
            "create_model": self.create_model,
            "get_info": self.get_info,
            "forward_backward": self.forward_backward,
            "optim_step": self.of_model("optim_step", requests.OptimStep),
            "save_weights": self.of_model("save_weights", requests.SaveWeights),
            "save_weights_for_sampler": self.of_model(
                "save_weights_for_sampler", requests.SaveForSampler
            ),
            "load_weights": self.load_weights,
            "weights_info": self.weights_info,
            "create_sampling_session": self.create_sampling_session,
            "asample": self.asample,
            "retrieve_future": self.retrieve_future,
        }
        gets = {
            "healthz": self.health,
            "get_server_capabilities": self.capabilities,
            "samplers/{sampler_id}": self.sampler,
        }
        listing = Listing(self._futures, self._work.directory, self._limits.name)
        functions = {("POST", path): function for path, function in posts.items()}
        functions |= {("GET", path): function for path, function in gets.items()}
        functions |= {key: _in_thread(answer) for key, answer in listing.functions().items()}
        return [
            Route(_PREFIX + path, _answered(function), methods=[method])
            for (method, path), function in functions.items()
        ]

    async def health(self, request: HttpRequest) -> Response:
        self._check_alive()
        return JSONResponse({"status": "ok"})

    async def capabilities(self, request: HttpRequest) -> Response:
        model = {
            "model_name": self._limits.name,
            "max_context_length": self._limits.max_tokens,
            "trainable": True,
            "sampleable": True,
        }
        return JSONResponse({"supported_models": [model]})

    async def client_config(self, request: HttpRequest) -> Response:
        return JSONResponse(_CLIENT_CONFIG)

    async def dynamic_config(self, request: HttpRequest) -> Response:
        return JSONResponse({"sample_cancel_enabled": False})

    async def telemetry(self, request: HttpRequest) -> Response:
        return JSONResponse({"status": "accepted"})

    async def create_session(self, request: HttpRequest) -> Response:
        key = request.headers.get("x-idempotency-key") or secrets.token_hex(16)
        session_id = hashlib.sha256(key.encode()).hexdigest()[:24]
        content = await _read(request, requests.CreateSession)
        self._futures.put("session", session_id, content.model_dump())
        return JSONResponse({"session_id": session_id, "info_message": _NOTE})

    async def session_heartbeat(self, request: HttpRequest) -> Response:
        self._check_session((await _read(request, requests.Session)).session_id)
        return JSONResponse({"type": "session_heartbeat"})

    async def finish(self, request: HttpRequest) -> Response:
        return Response(status_code=204)

    async def create_model(self, request: HttpRequest) -> Response:
        body = await read_body(request, MAX_BODY_BYTES)
        content = requests.CreateModel.model_validate_json(body)
        self._check_session(content.session_id)
        self._check_base(content.base_model)
        model = f"{content.session_id}:train:{content.model_seq_id}"
        job = Request(f"{model}:0", "create_model", body, model)
        return self._accepted(job, content, model_id=model)

    async def get_info(self, request: HttpRequest) -> Response:
        model = (await _read(request, requests.OfModel)).model_id
        name = self._limits.name
        return JSONResponse({
            "model_id": model,
            "model_name": name,
            "model_data": {"model_name": name, "tokenizer_id": self._tokenizer_id},
            "is_lora": True,
            "lora_rank": self._known("model", model)["rank"],
        })  # fmt: skip

    def of_model(
        self, kind: str, body_type: type[B]
    ) -> Callable[[HttpRequest], Awaitable[Response]]:
        """The route of requests to a model that need no other check."""

        async def accept(request: HttpRequest) -> Response:
            body = await read_body(request, MAX_BODY_BYTES)
            content = body_type.model_validate_json(body)
            return self._accepted(self._of_known(kind, body, content), content)

        return accept

    def _of_known(self, kind: str, body: bytes, content: Any) -> Request:
        """A request to a model that exists, with a number of its own: 0 is that of create_model."""
        self._known("model", content.model_id)
        if content.seq_id < 1:
            raise ValueError(
                f"seq_id={content.seq_id} must be at least 1; number the requests to a model."
            )
        name = f"{content.model_id}:{content.seq_id}"
        return Request(name, kind, body, content.model_id, content.seq_id)

    async def load_weights(self, request: HttpRequest) -> Response:
        body = await read_body(request, MAX_BODY_BYTES)
        content = requests.LoadWeights.model_validate_json(body)
        weights.find(self._work.directory, content.path)
        self._check_base(content.base_model or self._limits.name)
        if content.session_id is None:
            return self._accepted(self._of_known("load_weights", body, content), content)
        self._check_session(content.session_id)
        job = Request(f"{content.model_id}:0", "load_weights", body, content.model_id)
        return self._accepted(job, content)

    async def forward_backward(self, request: HttpRequest) -> Response:
        if request.headers.get("content-encoding", "identity") != "identity":
            raise HTTPException(415, "the body must not be compressed.")
        body = await read_body(request, MAX_BODY_BYTES)
        content = await asyncio.to_thread(read_pass, body)
        job = self._of_known("forward_backward", body, content)
        self._check_tokens(content)
        return self._accepted(job, content)

    async def weights_info(self, request: HttpRequest) -> Response:
        path = (await _read(request, requests.WeightsInfo)).tinker_path
        file = weights.find(self._work.directory, path) / "adapter_config.json"
        rank = json.loads(file.read_text("utf-8"))["r"]
        return JSONResponse({"base_model": self._limits.name, "is_lora": True, "lora_rank": rank})

    async def create_sampling_session(self, request: HttpRequest) -> Response:
        content = await _read(request, requests.CreateSampler)
        self._check_session(content.session_id)
        if content.model_path is None:
            self._check_base(content.base_model)
        else:
            weights.find(self._work.directory, content.model_path)
        name = f"{content.session_id}:sample:{content.sampling_session_seq_id}"
        self._futures.put("sampler", name, {"model_path": content.model_path})
        return JSONResponse({"sampling_session_id": name})

    async def sampler(self, request: HttpRequest) -> Response:
        name = request.path_params["sampler_id"]
        found = self._known("sampler", name)
        return JSONResponse({"sampler_id": name, "base_model": self._limits.name, **found})

    async def asample(self, request: HttpRequest) -> Response:
        body = await read_body(request, MAX_BODY_BYTES)
        content = requests.Sample.model_validate_json(body)
        self._known("sampler", content.sampling_session_id)
        ids, most = content.prompt_ids, self._limits.max_tokens
        wanted = content.sampling_params.max_tokens or 1
        if not ids or len(ids) + wanted > most:
            raise ValueError(
                f"prompt has {len(ids)} tokens and max_tokens={wanted}; a prompt has at least one, "
                f"and both together at most {most}."
            )
        if max(ids) >= self._limits.vocab_size:
            raise ValueError(
                f"prompt has the token {max(ids)}; the model has {self._limits.vocab_size}."
            )
        name = f"{content.sampling_session_id}:{content.seq_id}"
        sequences = [f"{name}:{index}" for index in range(content.num_samples)]
        job = Request(name, "sample", body)
        return self._accepted(job, content, sample_sequence_ids=sequences)

    async def retrieve_future(self, request: HttpRequest) -> Response:
        name = (await _read(request, requests.Retrieve)).request_id
        event = asyncio.Event()
        self._waiting.setdefault(name, set()).add(event)  # before the look: no end is missed
        try:
            if (found := self._find(name)) is None and not self._is_closed:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(event.wait(), POLL_S)
                found = self._find(name)
        finally:
            self._waiting[name].discard(event)
            if not self._waiting[name]:
                del self._waiting[name]
        if found is None:
            pending = {"type": "try_again", "request_id": name, "queue_state": "active"}
            return JSONResponse(pending, 408)
        if found.error:
            category = "user" if found.is_users else "server"
            return JSONResponse({"error": found.error, "category": category})
        kind = _PROTOBUF if found.kind in _IN_PROTOBUF else "application/json"
        return Response(found.result, media_type=kind)

    def _accepted(self, request: Request, content: Any, **more: Any) -> Response:
        """Hands a request and its decoded body to the thread, unless it came before."""
        self._check_alive()
        vars(request)["content"] = content
        count, size = self._work.size
        if count >= MAX_WAITING or size + len(request.body) > MAX_WAITING_BYTES:
            raise HTTPException(429, f"{count} requests wait; send this one later.")
        if self._futures.add(request):
            self._work.add(request)
        return JSONResponse({"request_id": request.id, **more})

    def _ended(self, request_id: str) -> None:
        for event in self._waiting.get(request_id, ()):
            event.set()

    def _find(self, request_id: str) -> Ended | None:
        try:
            return self._futures.find(request_id)
        except KeyError:
            raise HTTPException(410, "the request is not known, or its result expired.") from None

    def _known(self, kind: str, name: str) -> dict[str, Any]:
        return known(self._futures, kind, name)

    def _check_alive(self) -> None:
        if not self._work.is_alive:
            raise HTTPException(503, "the server failed; start it again.")

    def _check_session(self, session_id: str) -> None:
        self._known("session", session_id)

    def _check_base(self, name: str | None) -> None:
        if name != self._limits.name:
            raise HTTPException(
                404, f"base_model={name!r:.80} is not served here; ask for {self._limits.name!r}."
            )

    def _check_tokens(self, content: Pass) -> None:
        limits = self._limits
        for index, example in enumerate(content.examples):
            if len(example.token_ids) > limits.max_tokens:
                raise ValueError(
                    f"data[{index}] has {len(example.token_ids)} tokens; the limit is "
                    f"{limits.max_tokens}."
                )
            for ids in example[:2]:
                if ids.min() < 0 or ids.max() >= limits.vocab_size:
                    raise ValueError(
                        f"data[{index}] has a token outside of [0, {limits.vocab_size})."
                    )


def make_app(api: Api, token: str) -> ASGIApp:
    """The application; every request but that of health needs the token."""
    app = Starlette(routes=api.routes(), exception_handlers={HTTPException: _http_error})
    refusal = {"detail": WRONG_TOKEN}
    options = {"open_paths": _OPEN, "refusal": refusal, "stall_timeout_s": STALL_S}
    return guarded(app, header="x-api-key", value=token, **options)


async def _http_error(request: HttpRequest, error: HTTPException) -> Response:
    return JSONResponse({"detail": error.detail}, error.status_code)


def _answered(function: Callable[[HttpRequest], Awaitable[Response]]):
    """An endpoint that answers 400 to a wrong request."""

    async def endpoint(request: HttpRequest) -> Response:
        try:
            return await function(request)
        except pydantic.ValidationError as error:
            return JSONResponse({"detail": message_of(error)[0]}, 400)
        except ValueError as error:
            return JSONResponse({"detail": str(error)}, 400)

    return endpoint


def _in_thread(answer: Answer) -> Callable[[HttpRequest], Awaitable[Response]]:
    """An endpoint of a function that may block."""

    async def endpoint(request: HttpRequest) -> Response:
        content = await asyncio.to_thread(answer, request)
        return Response(status_code=204) if content is None else JSONResponse(content)

    return endpoint


async def _read(request: HttpRequest, kind: type[B]) -> B:
    return kind.model_validate_json(await read_body(request, MAX_BODY_BYTES))
