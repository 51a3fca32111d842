from coatcheck.proto.stubs import coatcheck_pb2 as _coatcheck_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Tier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TIER_UNSPECIFIED: _ClassVar[Tier]
    TIER_DEVICE: _ClassVar[Tier]
    TIER_HOST: _ClassVar[Tier]
    TIER_STATE: _ClassVar[Tier]
TIER_UNSPECIFIED: Tier
TIER_DEVICE: Tier
TIER_HOST: Tier
TIER_STATE: Tier

class ToGroup(_message.Message):
    __slots__ = ("hello", "submit", "abort", "snapshot", "reset_prefix_cache")
    HELLO_FIELD_NUMBER: _ClassVar[int]
    SUBMIT_FIELD_NUMBER: _ClassVar[int]
    ABORT_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    RESET_PREFIX_CACHE_FIELD_NUMBER: _ClassVar[int]
    hello: Hello
    submit: Submit
    abort: Abort
    snapshot: SnapshotRequest
    reset_prefix_cache: ResetPrefixCache
    def __init__(self, hello: _Optional[_Union[Hello, _Mapping]] = ..., submit: _Optional[_Union[Submit, _Mapping]] = ..., abort: _Optional[_Union[Abort, _Mapping]] = ..., snapshot: _Optional[_Union[SnapshotRequest, _Mapping]] = ..., reset_prefix_cache: _Optional[_Union[ResetPrefixCache, _Mapping]] = ...) -> None: ...

class Hello(_message.Message):
    __slots__ = ("router", "contract", "version")
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    router: str
    contract: int
    version: str
    def __init__(self, router: _Optional[str] = ..., contract: _Optional[int] = ..., version: _Optional[str] = ...) -> None: ...

class Submit(_message.Message):
    __slots__ = ("id", "attempt", "request_id", "prompt_token_ids", "sampling", "resume", "cache_salt", "priority", "uncached_tokens", "retention", "traceparent", "tracestate", "tenant", "max_queued_tokens", "pooling", "adapter", "seconds_left")
    ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    UNCACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RETENTION_FIELD_NUMBER: _ClassVar[int]
    TRACEPARENT_FIELD_NUMBER: _ClassVar[int]
    TRACESTATE_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    MAX_QUEUED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    SECONDS_LEFT_FIELD_NUMBER: _ClassVar[int]
    id: int
    attempt: int
    request_id: str
    prompt_token_ids: _containers.RepeatedScalarFieldContainer[int]
    sampling: _coatcheck_pb2.SamplingParams
    resume: _containers.RepeatedCompositeFieldContainer[_coatcheck_pb2.Resumed]
    cache_salt: str
    priority: int
    uncached_tokens: int
    retention: _coatcheck_pb2.Retention
    traceparent: str
    tracestate: str
    tenant: str
    max_queued_tokens: int
    pooling: _coatcheck_pb2.Pooling
    adapter: str
    seconds_left: float
    def __init__(self, id: _Optional[int] = ..., attempt: _Optional[int] = ..., request_id: _Optional[str] = ..., prompt_token_ids: _Optional[_Iterable[int]] = ..., sampling: _Optional[_Union[_coatcheck_pb2.SamplingParams, _Mapping]] = ..., resume: _Optional[_Iterable[_Union[_coatcheck_pb2.Resumed, _Mapping]]] = ..., cache_salt: _Optional[str] = ..., priority: _Optional[int] = ..., uncached_tokens: _Optional[int] = ..., retention: _Optional[_Union[_coatcheck_pb2.Retention, _Mapping]] = ..., traceparent: _Optional[str] = ..., tracestate: _Optional[str] = ..., tenant: _Optional[str] = ..., max_queued_tokens: _Optional[int] = ..., pooling: _Optional[_Union[_coatcheck_pb2.Pooling, str]] = ..., adapter: _Optional[str] = ..., seconds_left: _Optional[float] = ...) -> None: ...

class Abort(_message.Message):
    __slots__ = ("id", "choice")
    ID_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    id: int
    choice: int
    def __init__(self, id: _Optional[int] = ..., choice: _Optional[int] = ...) -> None: ...

class SnapshotRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ResetPrefixCache(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class FromGroup(_message.Message):
    __slots__ = ("registration", "batch", "events", "snapshot", "refused", "load", "failure_notice", "returned")
    REGISTRATION_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    LOAD_FIELD_NUMBER: _ClassVar[int]
    FAILURE_NOTICE_FIELD_NUMBER: _ClassVar[int]
    RETURNED_FIELD_NUMBER: _ClassVar[int]
    registration: Registration
    batch: StepBatch
    events: KvEvents
    snapshot: SnapshotChunk
    refused: Refused
    load: Load
    failure_notice: FailureNotice
    returned: Returned
    def __init__(self, registration: _Optional[_Union[Registration, _Mapping]] = ..., batch: _Optional[_Union[StepBatch, _Mapping]] = ..., events: _Optional[_Union[KvEvents, _Mapping]] = ..., snapshot: _Optional[_Union[SnapshotChunk, _Mapping]] = ..., refused: _Optional[_Union[Refused, _Mapping]] = ..., load: _Optional[_Union[Load, _Mapping]] = ..., failure_notice: _Optional[_Union[FailureNotice, _Mapping]] = ..., returned: _Optional[_Union[Returned, _Mapping]] = ...) -> None: ...

class Registration(_message.Message):
    __slots__ = ("group", "epoch", "model", "num_blocks", "tp", "max_num_seqs", "max_batch_tokens", "host_blocks", "contract", "version", "no_prefix_cache", "keeps_states")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TP_FIELD_NUMBER: _ClassVar[int]
    MAX_NUM_SEQS_FIELD_NUMBER: _ClassVar[int]
    MAX_BATCH_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CONTRACT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    NO_PREFIX_CACHE_FIELD_NUMBER: _ClassVar[int]
    KEEPS_STATES_FIELD_NUMBER: _ClassVar[int]
    group: str
    epoch: str
    model: _coatcheck_pb2.GetModelResponse
    num_blocks: int
    tp: int
    max_num_seqs: int
    max_batch_tokens: int
    host_blocks: int
    contract: int
    version: str
    no_prefix_cache: bool
    keeps_states: bool
    def __init__(self, group: _Optional[str] = ..., epoch: _Optional[str] = ..., model: _Optional[_Union[_coatcheck_pb2.GetModelResponse, _Mapping]] = ..., num_blocks: _Optional[int] = ..., tp: _Optional[int] = ..., max_num_seqs: _Optional[int] = ..., max_batch_tokens: _Optional[int] = ..., host_blocks: _Optional[int] = ..., contract: _Optional[int] = ..., version: _Optional[str] = ..., no_prefix_cache: _Optional[bool] = ..., keeps_states: _Optional[bool] = ...) -> None: ...

class StepBatch(_message.Message):
    __slots__ = ("step", "outputs")
    STEP_FIELD_NUMBER: _ClassVar[int]
    OUTPUTS_FIELD_NUMBER: _ClassVar[int]
    step: int
    outputs: _containers.RepeatedCompositeFieldContainer[SequenceOutput]
    def __init__(self, step: _Optional[int] = ..., outputs: _Optional[_Iterable[_Union[SequenceOutput, _Mapping]]] = ...) -> None: ...

class SequenceOutput(_message.Message):
    __slots__ = ("id", "attempt", "choice", "token_ids", "logprobs", "finish_reason", "stop_token_id", "first_output", "prompt_logprobs", "embedding")
    ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    FIRST_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    id: int
    attempt: int
    choice: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[_coatcheck_pb2.TokenLogprob]
    finish_reason: _coatcheck_pb2.FinishReason
    stop_token_id: int
    first_output: FirstOutput
    prompt_logprobs: _containers.RepeatedCompositeFieldContainer[_coatcheck_pb2.TokenLogprob]
    embedding: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, id: _Optional[int] = ..., attempt: _Optional[int] = ..., choice: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[_coatcheck_pb2.TokenLogprob, _Mapping]]] = ..., finish_reason: _Optional[_Union[_coatcheck_pb2.FinishReason, str]] = ..., stop_token_id: _Optional[int] = ..., first_output: _Optional[_Union[FirstOutput, _Mapping]] = ..., prompt_logprobs: _Optional[_Iterable[_Union[_coatcheck_pb2.TokenLogprob, _Mapping]]] = ..., embedding: _Optional[_Iterable[float]] = ...) -> None: ...

class FirstOutput(_message.Message):
    __slots__ = ("device_tokens", "host_tokens", "queued_seconds", "prefill_seconds")
    DEVICE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HOST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    device_tokens: int
    host_tokens: int
    queued_seconds: float
    prefill_seconds: float
    def __init__(self, device_tokens: _Optional[int] = ..., host_tokens: _Optional[int] = ..., queued_seconds: _Optional[float] = ..., prefill_seconds: _Optional[float] = ...) -> None: ...

class KvEvent(_message.Message):
    __slots__ = ("stored", "block_hash", "parent_hash", "tier")
    STORED_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASH_FIELD_NUMBER: _ClassVar[int]
    PARENT_HASH_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    stored: bool
    block_hash: bytes
    parent_hash: bytes
    tier: Tier
    def __init__(self, stored: _Optional[bool] = ..., block_hash: _Optional[bytes] = ..., parent_hash: _Optional[bytes] = ..., tier: _Optional[_Union[Tier, str]] = ...) -> None: ...

class KvEvents(_message.Message):
    __slots__ = ("epoch", "sequence", "events")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    epoch: str
    sequence: int
    events: _containers.RepeatedCompositeFieldContainer[KvEvent]
    def __init__(self, epoch: _Optional[str] = ..., sequence: _Optional[int] = ..., events: _Optional[_Iterable[_Union[KvEvent, _Mapping]]] = ...) -> None: ...

class SnapshotChunk(_message.Message):
    __slots__ = ("epoch", "sequence", "events", "first", "last")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    EVENTS_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    LAST_FIELD_NUMBER: _ClassVar[int]
    epoch: str
    sequence: int
    events: _containers.RepeatedCompositeFieldContainer[KvEvent]
    first: bool
    last: bool
    def __init__(self, epoch: _Optional[str] = ..., sequence: _Optional[int] = ..., events: _Optional[_Iterable[_Union[KvEvent, _Mapping]]] = ..., first: _Optional[bool] = ..., last: _Optional[bool] = ...) -> None: ...

class Refused(_message.Message):
    __slots__ = ("id", "attempt", "code", "message")
    ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    id: int
    attempt: int
    code: int
    message: str
    def __init__(self, id: _Optional[int] = ..., attempt: _Optional[int] = ..., code: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class Returned(_message.Message):
    __slots__ = ("id", "attempt", "queued_prefill_tokens")
    ID_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    QUEUED_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    id: int
    attempt: int
    queued_prefill_tokens: int
    def __init__(self, id: _Optional[int] = ..., attempt: _Optional[int] = ..., queued_prefill_tokens: _Optional[int] = ...) -> None: ...

class Load(_message.Message):
    __slots__ = ("status", "queued_prefill_tokens", "prefill_seconds", "submissions", "all_submissions")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    QUEUED_PREFILL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    SUBMISSIONS_FIELD_NUMBER: _ClassVar[int]
    ALL_SUBMISSIONS_FIELD_NUMBER: _ClassVar[int]
    status: _coatcheck_pb2.GroupStatus
    queued_prefill_tokens: int
    prefill_seconds: float
    submissions: int
    all_submissions: int
    def __init__(self, status: _Optional[_Union[_coatcheck_pb2.GroupStatus, _Mapping]] = ..., queued_prefill_tokens: _Optional[int] = ..., prefill_seconds: _Optional[float] = ..., submissions: _Optional[int] = ..., all_submissions: _Optional[int] = ...) -> None: ...

class FailureNotice(_message.Message):
    __slots__ = ("reason", "unstarted")
    REASON_FIELD_NUMBER: _ClassVar[int]
    UNSTARTED_FIELD_NUMBER: _ClassVar[int]
    reason: str
    unstarted: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, reason: _Optional[str] = ..., unstarted: _Optional[_Iterable[int]] = ...) -> None: ...
