"""The JSON bodies of requests. Unknown fields are ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field

from semrl_jax.tinker.weights import UNNAMED, is_ours

Name = Annotated[str, Field(min_length=1, max_length=256)]


def _free(name: str) -> str:
    if is_ours(name):
        raise ValueError(
            f"the server itself uses names that begin with {UNNAMED!r}, or end in '.writing' or "
            "'.replaced'; choose another"
        )
    return name


FileName = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9._-]{0,127}$"), pydantic.AfterValidator(_free)
]
Number = Annotated[int, Field(ge=0, lt=2**62)]
Token = Annotated[int, Field(ge=0, lt=2**31)]
Metadata = dict[str, str] | None


class Body(pydantic.BaseModel):
    """A JSON object without infinities and NaN."""

    model_config = pydantic.ConfigDict(allow_inf_nan=False, protected_namespaces=())


class CreateSession(Body):
    """The body of create_session."""

    user_metadata: Metadata = None
    display_name: str | None = None


class Session(Body):
    """The body of session_heartbeat."""

    session_id: Name


class LoraConfig(Body):
    """What a model trains."""

    rank: int = Field(ge=1, le=2**16)
    seed: Number | None = None
    train_mlp: bool = True
    train_attn: bool = True


class OptimizerConfig(Body):
    """The optimiser of a model."""

    type: Literal["adamw"] = "adamw"


class CreateModel(Body):
    """The body of create_model."""

    session_id: Name
    model_seq_id: Number
    base_model: str
    user_metadata: Metadata = None
    lora_config: LoraConfig
    optimizer_config: OptimizerConfig = OptimizerConfig()


class OfModel(Body):
    """A request to a model; its number orders it among others."""

    model_id: Name
    seq_id: Number = 0


class AdamParams(Body):
    """The settings of one step of AdamW."""

    learning_rate: float = Field(1e-4, ge=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-12, ge=0)
    weight_decay: float = Field(0.0, ge=0)
    grad_clip_norm: float = Field(0.0, ge=0)


class OptimStep(OfModel):
    """The body of optim_step."""

    adam_params: AdamParams


class SaveWeights(OfModel):
    """The body of save_weights."""

    path: FileName
    overwrite: bool = False


class SaveForSampler(OfModel):
    """The body of save_weights_for_sampler: a name, or the number of a new sampling session."""

    path: FileName | None = None
    sampling_session_seq_id: Number | None = None
    kind: Literal["snapshot"] = "snapshot"


class LoadWeights(Body):
    """The body of load_weights, into a model or into a new one."""

    model_id: Name | None = None
    seq_id: Number = 0
    session_id: Name | None = None
    model_seq_id: Number | None = None
    base_model: str | None = None
    user_metadata: Metadata = None
    path: Name
    optimizer: bool
    optimizer_config: OptimizerConfig | None = None

    @pydantic.model_validator(mode="after")
    def _one_model(self) -> LoadWeights:
        has_session = self.session_id is not None
        if len({has_session, self.model_seq_id is not None, self.model_id is None}) > 1:
            raise ValueError("set either model_id, or session_id and model_seq_id")
        if self.model_id is None:
            self.model_id, self.seq_id = f"{self.session_id}:train:{self.model_seq_id}", 0
        return self


class WeightsInfo(Body):
    """The body of weights_info."""

    tinker_path: Name


class CreateSampler(Body):
    """The body of create_sampling_session."""

    session_id: Name
    sampling_session_seq_id: Number
    base_model: str | None = None
    model_path: Name | None = None


class Chunk(Body):
    """A part of a prompt."""

    type: Literal["encoded_text"] = "encoded_text"
    tokens: list[Token]


class ModelInput(Body):
    """A prompt."""

    chunks: list[Chunk]


class SamplingParams(Body):
    """How a response is sampled."""

    max_tokens: int | None = Field(None, ge=1)
    seed: int | None = None
    stop: str | list[str] | list[Token] | None = None
    temperature: float = Field(1.0, ge=0)
    top_k: int = Field(-1, ge=-1)
    top_p: float = Field(1.0, gt=0, le=1)


class Sample(Body):
    """The body of asample."""

    prompt: ModelInput
    sampling_params: SamplingParams
    num_samples: int = Field(1, ge=1, le=1024)
    sampling_session_id: Name
    seq_id: Number
    prompt_logprobs: bool | None = None
    prompt_logprobs_last_n: int | None = Field(None, ge=1)

    @pydantic.model_validator(mode="before")
    @classmethod
    def _only_what_we_do(cls, values: Any) -> Any:
        others = (
            "topk_prompt_logprobs", "topk_sample_logprobs", "target_prompt_logprobs",
            "prompt_alt_tokens_k", "record_stability_info",
        )  # fmt: skip
        for name in others:
            if isinstance(values, dict) and values.get(name):
                raise ValueError(f"{name} is not supported by this server; leave it out")
        return values

    @property
    def prompt_ids(self) -> list[int]:
        return [token for chunk in self.prompt.chunks for token in chunk.tokens]


class Page(Body):
    """The query of a list."""

    limit: Number = 100
    offset: Number = 0


class Retrieve(Body):
    """The body of retrieve_future."""

    request_id: Name
