from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class WeightVersion(_message.Message):
    __slots__ = ("run_id", "attempt_id", "step", "digest")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    attempt_id: str
    step: int
    digest: str
    def __init__(self, run_id: _Optional[str] = ..., attempt_id: _Optional[str] = ..., step: _Optional[int] = ..., digest: _Optional[str] = ...) -> None: ...

class VersionSpan(_message.Message):
    __slots__ = ("version", "start", "end")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    version: WeightVersion
    start: int
    end: int
    def __init__(self, version: _Optional[_Union[WeightVersion, _Mapping]] = ..., start: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class SharedMemory(_message.Message):
    __slots__ = ("process", "file", "name")
    PROCESS_FIELD_NUMBER: _ClassVar[int]
    FILE_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    process: int
    file: int
    name: str
    def __init__(self, process: _Optional[int] = ..., file: _Optional[int] = ..., name: _Optional[str] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ("memory",)
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    memory: SharedMemory
    def __init__(self, memory: _Optional[_Union[SharedMemory, _Mapping]] = ...) -> None: ...

class DescribeResponse(_message.Message):
    __slots__ = ("protocol_major", "protocol_minor", "replica_id", "engine", "engine_version", "model_hash", "tokenizer_hash", "vocab_size", "layers", "state_kinds", "logprob_kinds", "metric_kinds", "max_prompts", "max_prompt_tokens", "max_response_tokens", "version", "layers_reason", "sampling_kinds", "reads_memory", "is_deterministic", "calls_at_once", "compiling")
    PROTOCOL_MAJOR_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_MINOR_FIELD_NUMBER: _ClassVar[int]
    REPLICA_ID_FIELD_NUMBER: _ClassVar[int]
    ENGINE_FIELD_NUMBER: _ClassVar[int]
    ENGINE_VERSION_FIELD_NUMBER: _ClassVar[int]
    MODEL_HASH_FIELD_NUMBER: _ClassVar[int]
    TOKENIZER_HASH_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    STATE_KINDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_KINDS_FIELD_NUMBER: _ClassVar[int]
    METRIC_KINDS_FIELD_NUMBER: _ClassVar[int]
    MAX_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    MAX_PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MAX_RESPONSE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LAYERS_REASON_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_KINDS_FIELD_NUMBER: _ClassVar[int]
    READS_MEMORY_FIELD_NUMBER: _ClassVar[int]
    IS_DETERMINISTIC_FIELD_NUMBER: _ClassVar[int]
    CALLS_AT_ONCE_FIELD_NUMBER: _ClassVar[int]
    COMPILING_FIELD_NUMBER: _ClassVar[int]
    protocol_major: int
    protocol_minor: int
    replica_id: str
    engine: str
    engine_version: str
    model_hash: str
    tokenizer_hash: str
    vocab_size: int
    layers: _containers.RepeatedScalarFieldContainer[int]
    state_kinds: _containers.RepeatedScalarFieldContainer[str]
    logprob_kinds: _containers.RepeatedScalarFieldContainer[str]
    metric_kinds: _containers.RepeatedScalarFieldContainer[str]
    max_prompts: int
    max_prompt_tokens: int
    max_response_tokens: int
    version: WeightVersion
    layers_reason: str
    sampling_kinds: _containers.RepeatedScalarFieldContainer[str]
    reads_memory: bool
    is_deterministic: bool
    calls_at_once: int
    compiling: str
    def __init__(self, protocol_major: _Optional[int] = ..., protocol_minor: _Optional[int] = ..., replica_id: _Optional[str] = ..., engine: _Optional[str] = ..., engine_version: _Optional[str] = ..., model_hash: _Optional[str] = ..., tokenizer_hash: _Optional[str] = ..., vocab_size: _Optional[int] = ..., layers: _Optional[_Iterable[int]] = ..., state_kinds: _Optional[_Iterable[str]] = ..., logprob_kinds: _Optional[_Iterable[str]] = ..., metric_kinds: _Optional[_Iterable[str]] = ..., max_prompts: _Optional[int] = ..., max_prompt_tokens: _Optional[int] = ..., max_response_tokens: _Optional[int] = ..., version: _Optional[_Union[WeightVersion, _Mapping]] = ..., layers_reason: _Optional[str] = ..., sampling_kinds: _Optional[_Iterable[str]] = ..., reads_memory: _Optional[bool] = ..., is_deterministic: _Optional[bool] = ..., calls_at_once: _Optional[int] = ..., compiling: _Optional[str] = ...) -> None: ...

class Annealing(_message.Message):
    __slots__ = ("maximum", "minimum", "warmup_tokens", "decay_tokens")
    MAXIMUM_FIELD_NUMBER: _ClassVar[int]
    MINIMUM_FIELD_NUMBER: _ClassVar[int]
    WARMUP_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DECAY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    maximum: float
    minimum: float
    warmup_tokens: int
    decay_tokens: float
    def __init__(self, maximum: _Optional[float] = ..., minimum: _Optional[float] = ..., warmup_tokens: _Optional[int] = ..., decay_tokens: _Optional[float] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "max_tokens", "eos_token_ids", "stop_token_ids", "annealing", "stop_strings")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    ANNEALING_FIELD_NUMBER: _ClassVar[int]
    STOP_STRINGS_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    annealing: Annealing
    stop_strings: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., max_tokens: _Optional[int] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., annealing: _Optional[_Union[Annealing, _Mapping]] = ..., stop_strings: _Optional[_Iterable[str]] = ...) -> None: ...

class HiddenStateParams(_message.Message):
    __slots__ = ("layers", "dtype", "kinds")
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    KINDS_FIELD_NUMBER: _ClassVar[int]
    layers: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    kinds: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, layers: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ..., kinds: _Optional[_Iterable[str]] = ...) -> None: ...

class MetricParams(_message.Message):
    __slots__ = ("names", "stride", "window", "method", "dtype", "num_threads")
    NAMES_FIELD_NUMBER: _ClassVar[int]
    STRIDE_FIELD_NUMBER: _ClassVar[int]
    WINDOW_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    NUM_THREADS_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    stride: int
    window: str
    method: str
    dtype: str
    num_threads: int
    def __init__(self, names: _Optional[_Iterable[str]] = ..., stride: _Optional[int] = ..., window: _Optional[str] = ..., method: _Optional[str] = ..., dtype: _Optional[str] = ..., num_threads: _Optional[int] = ...) -> None: ...

class Sample(_message.Message):
    __slots__ = ("sample_id", "group_id", "sample_index", "seed", "prompt_index")
    SAMPLE_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_INDEX_FIELD_NUMBER: _ClassVar[int]
    sample_id: str
    group_id: int
    sample_index: int
    seed: int
    prompt_index: int
    def __init__(self, sample_id: _Optional[str] = ..., group_id: _Optional[int] = ..., sample_index: _Optional[int] = ..., seed: _Optional[int] = ..., prompt_index: _Optional[int] = ...) -> None: ...

class Prompt(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("version", "sampling", "hidden_states", "prompts", "samples", "metrics")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_STATES_FIELD_NUMBER: _ClassVar[int]
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    version: WeightVersion
    sampling: SamplingParams
    hidden_states: HiddenStateParams
    prompts: _containers.RepeatedCompositeFieldContainer[Prompt]
    samples: _containers.RepeatedCompositeFieldContainer[Sample]
    metrics: MetricParams
    def __init__(self, version: _Optional[_Union[WeightVersion, _Mapping]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., hidden_states: _Optional[_Union[HiddenStateParams, _Mapping]] = ..., prompts: _Optional[_Iterable[_Union[Prompt, _Mapping]]] = ..., samples: _Optional[_Iterable[_Union[Sample, _Mapping]]] = ..., metrics: _Optional[_Union[MetricParams, _Mapping]] = ...) -> None: ...

class Array(_message.Message):
    __slots__ = ("dtype", "shape", "data")
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    dtype: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    def __init__(self, dtype: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ...) -> None: ...

class Response(_message.Message):
    __slots__ = ("sample_id", "group_id", "sample_index", "token_ids", "logprobs", "raw_logprobs", "finish_reason", "versions", "layers", "hidden_states", "metrics", "generate_s", "mean_state", "prompt_states", "response_mask", "effective_ranks")
    class MetricsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    SAMPLE_ID_FIELD_NUMBER: _ClassVar[int]
    GROUP_ID_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    RAW_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    LAYERS_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_STATES_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    GENERATE_S_FIELD_NUMBER: _ClassVar[int]
    MEAN_STATE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_STATES_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_MASK_FIELD_NUMBER: _ClassVar[int]
    EFFECTIVE_RANKS_FIELD_NUMBER: _ClassVar[int]
    sample_id: str
    group_id: int
    sample_index: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: bytes
    raw_logprobs: bytes
    finish_reason: str
    versions: _containers.RepeatedCompositeFieldContainer[VersionSpan]
    layers: _containers.RepeatedScalarFieldContainer[int]
    hidden_states: Array
    metrics: _containers.ScalarMap[str, float]
    generate_s: float
    mean_state: bytes
    prompt_states: Array
    response_mask: bytes
    effective_ranks: bytes
    def __init__(self, sample_id: _Optional[str] = ..., group_id: _Optional[int] = ..., sample_index: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[bytes] = ..., raw_logprobs: _Optional[bytes] = ..., finish_reason: _Optional[str] = ..., versions: _Optional[_Iterable[_Union[VersionSpan, _Mapping]]] = ..., layers: _Optional[_Iterable[int]] = ..., hidden_states: _Optional[_Union[Array, _Mapping]] = ..., metrics: _Optional[_Mapping[str, float]] = ..., generate_s: _Optional[float] = ..., mean_state: _Optional[bytes] = ..., prompt_states: _Optional[_Union[Array, _Mapping]] = ..., response_mask: _Optional[bytes] = ..., effective_ranks: _Optional[bytes] = ...) -> None: ...

class StateChunk(_message.Message):
    __slots__ = ("sample_id", "data")
    SAMPLE_ID_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    sample_id: str
    data: bytes
    def __init__(self, sample_id: _Optional[str] = ..., data: _Optional[bytes] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("response", "state_chunk")
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    STATE_CHUNK_FIELD_NUMBER: _ClassVar[int]
    response: Response
    state_chunk: StateChunk
    def __init__(self, response: _Optional[_Union[Response, _Mapping]] = ..., state_chunk: _Optional[_Union[StateChunk, _Mapping]] = ...) -> None: ...

class TensorSpec(_message.Message):
    __slots__ = ("name", "shape", "dtype")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    name: str
    shape: _containers.RepeatedScalarFieldContainer[int]
    dtype: str
    def __init__(self, name: _Optional[str] = ..., shape: _Optional[_Iterable[int]] = ..., dtype: _Optional[str] = ...) -> None: ...

class BeginUpdate(_message.Message):
    __slots__ = ("run_id", "attempt_id", "step", "tensors", "memory")
    RUN_ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_ID_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_FIELD_NUMBER: _ClassVar[int]
    run_id: str
    attempt_id: str
    step: int
    tensors: _containers.RepeatedCompositeFieldContainer[TensorSpec]
    memory: SharedMemory
    def __init__(self, run_id: _Optional[str] = ..., attempt_id: _Optional[str] = ..., step: _Optional[int] = ..., tensors: _Optional[_Iterable[_Union[TensorSpec, _Mapping]]] = ..., memory: _Optional[_Union[SharedMemory, _Mapping]] = ...) -> None: ...

class TensorChunk(_message.Message):
    __slots__ = ("tensor_index", "data")
    TENSOR_INDEX_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    tensor_index: int
    data: bytes
    def __init__(self, tensor_index: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

class CommitUpdate(_message.Message):
    __slots__ = ("checksums", "digest")
    CHECKSUMS_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    checksums: _containers.RepeatedScalarFieldContainer[bytes]
    digest: str
    def __init__(self, checksums: _Optional[_Iterable[bytes]] = ..., digest: _Optional[str] = ...) -> None: ...

class UpdateWeightsRequest(_message.Message):
    __slots__ = ("begin", "chunk", "commit")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    CHUNK_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    begin: BeginUpdate
    chunk: TensorChunk
    commit: CommitUpdate
    def __init__(self, begin: _Optional[_Union[BeginUpdate, _Mapping]] = ..., chunk: _Optional[_Union[TensorChunk, _Mapping]] = ..., commit: _Optional[_Union[CommitUpdate, _Mapping]] = ...) -> None: ...

class UpdateWeightsResponse(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: WeightVersion
    def __init__(self, version: _Optional[_Union[WeightVersion, _Mapping]] = ...) -> None: ...

class PauseRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class PauseResponse(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: WeightVersion
    def __init__(self, version: _Optional[_Union[WeightVersion, _Mapping]] = ...) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResumeResponse(_message.Message):
    __slots__ = ("version",)
    VERSION_FIELD_NUMBER: _ClassVar[int]
    version: WeightVersion
    def __init__(self, version: _Optional[_Union[WeightVersion, _Mapping]] = ...) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("num_aborted", "version")
    NUM_ABORTED_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    num_aborted: int
    version: WeightVersion
    def __init__(self, num_aborted: _Optional[int] = ..., version: _Optional[_Union[WeightVersion, _Mapping]] = ...) -> None: ...
