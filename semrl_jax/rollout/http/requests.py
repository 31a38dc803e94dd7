"""The bodies of requests. Unknown fields are ignored; a known one that we cannot do is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import pydantic
from pydantic import Field

TokenIds = list[Annotated[int, Field(ge=0, lt=2**31)]]
# Fields that would change the samples, and their values that do not.
_NOT_DONE: Mapping[str, tuple[Any, ...]] = {
    "logit_bias": ({}, []),
    "suffix": ("",),
    "best_of": (1,),
    "use_beam_search": (False,),
    "bad_words": ([],),
    "allowed_token_ids": ([],),
    "response_format": ({"type": "text"},),
    "guided_json": (), "guided_regex": (), "guided_choice": (), "structured_outputs": (),
    "top_logprobs": (0,),
    "tool_choice": ("auto", "none"),
    "functions": ([],),
}  # fmt: skip


class Body(pydantic.BaseModel):
    """What is sampled; `null` is as good as no field."""

    model_config = pydantic.ConfigDict(allow_inf_nan=False)

    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=-1)
    min_p: float = Field(0.0, ge=0, le=1)
    presence_penalty: float = Field(0.0, ge=-2, le=2)
    frequency_penalty: float = Field(0.0, ge=-2, le=2)
    repetition_penalty: float = Field(1.0, ge=0.001, le=1000)
    min_tokens: int = Field(0, ge=0)
    seed: int | None = None
    max_tokens: int | None = Field(None, ge=1)
    stop: str | list[str] = []
    stop_token_ids: TokenIds = []
    ignore_eos: bool = False

    @pydantic.model_validator(mode="before")
    @classmethod
    def _only_what_we_do(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            raise ValueError("it must be a JSON object")
        values = {name: value for name, value in values.items() if value is not None}
        for name, neutral in _NOT_DONE.items():
            if name in values and values[name] not in neutral:
                rest = f" or set it to {neutral[0]!r}" if neutral else ""
                raise ValueError(
                    f"{name}={values[name]!r:.80} is not supported; leave it out{rest}"
                )
        return values

    @property
    def stop_strings(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


class OpenAIBody(Body):
    """What completions and chats have in common.

    `metrics` and `metric_stride` are ours: what is measured of the response's hidden states.
    """

    model: str
    n: int = Field(1, ge=1, le=1024)
    stream: bool = False
    stream_options: dict[str, Any] = {}
    metrics: list[str] = []
    metric_stride: int = Field(16, ge=1)


class CompletionBody(OpenAIBody):
    """The body of /v1/completions."""

    prompt: str | TokenIds | list[str] | list[TokenIds]
    max_tokens: int = Field(16, ge=1)
    echo: bool = False
    logprobs: Annotated[int, Field(ge=0, le=1)] | None = None


class Message(pydantic.BaseModel):
    """A message of a chat; the chat template gets it whole."""

    model_config = pydantic.ConfigDict(extra="allow")

    role: str
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[dict[str, Any]] | None = None


class ChatBody(OpenAIBody):
    """The body of /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    logprobs: bool = False
    tools: list[dict[str, Any]] = []
    tool_choice: str = "auto"


class SamplingBody(Body):
    """The field "sampling_params" of /inference/v1/generate."""

    n: int = Field(1, ge=1, le=1)
    prompt_logprobs: Annotated[int, Field(ge=0, le=1)] | None = None


class GenerateBody(pydantic.BaseModel):
    """The body of /inference/v1/generate: token ids in and out, as verifiers' client sends it."""

    model: str = ""
    token_ids: TokenIds
    sampling_params: SamplingBody = SamplingBody()


def message_of(error: pydantic.ValidationError) -> tuple[str, str | None]:
    """One line with the first mistake, and its field."""
    first = error.errors(include_url=False, include_context=False)[0]
    field = ".".join(map(str, first["loc"])) or None
    text = first["msg"].removeprefix("Value error, ")
    if field is None:
        return f"the request: {text}.", None
    if first["type"] == "missing":
        return f"{field} is missing; the request needs it.", field
    return f"{field}={first['input']!r:.80}: {text}.", field
