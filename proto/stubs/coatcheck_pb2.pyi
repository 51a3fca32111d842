from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Pooling(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    POOLING_UNSPECIFIED: _ClassVar[Pooling]
    POOLING_LAST: _ClassVar[Pooling]
    POOLING_MEAN: _ClassVar[Pooling]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
POOLING_UNSPECIFIED: Pooling
POOLING_LAST: Pooling
POOLING_MEAN: Pooling
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason

class TokenIds(_message.Message):
    __slots__ = ("ids",)
    IDS_FIELD_NUMBER: _ClassVar[int]
    ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALL_ID_FIELD_NUMBER: _ClassVar[int]
    REASONING_CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    name: str
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCall]
    tool_call_id: str
    reasoning_content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., name: _Optional[str] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCall, _Mapping]]] = ..., tool_call_id: _Optional[str] = ..., reasoning_content: _Optional[str] = ...) -> None: ...

class ToolCall(_message.Message):
    __slots__ = ("id", "name", "arguments")
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    id: str
    name: str
    arguments: str
    def __init__(self, id: _Optional[str] = ..., name: _Optional[str] = ..., arguments: _Optional[str] = ...) -> None: ...

class Chat(_message.Message):
    __slots__ = ("messages", "add_generation_prompt", "tools", "template_arguments", "continue_final_message", "split_output", "chat_template", "tool_choice", "parallel_tool_calls")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    ADD_GENERATION_PROMPT_FIELD_NUMBER: _ClassVar[int]
    TOOLS_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    CONTINUE_FINAL_MESSAGE_FIELD_NUMBER: _ClassVar[int]
    SPLIT_OUTPUT_FIELD_NUMBER: _ClassVar[int]
    CHAT_TEMPLATE_FIELD_NUMBER: _ClassVar[int]
    TOOL_CHOICE_FIELD_NUMBER: _ClassVar[int]
    PARALLEL_TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    add_generation_prompt: bool
    tools: _containers.RepeatedScalarFieldContainer[str]
    template_arguments: str
    continue_final_message: bool
    split_output: bool
    chat_template: str
    tool_choice: str
    parallel_tool_calls: bool
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., add_generation_prompt: _Optional[bool] = ..., tools: _Optional[_Iterable[str]] = ..., template_arguments: _Optional[str] = ..., continue_final_message: _Optional[bool] = ..., split_output: _Optional[bool] = ..., chat_template: _Optional[str] = ..., tool_choice: _Optional[str] = ..., parallel_tool_calls: _Optional[bool] = ...) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("request_id", "model", "text", "token_ids", "chat", "sampling", "resume", "resume_ticket", "cache_salt", "priority", "session_id", "retention", "pooling")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    SAMPLING_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    RESUME_TICKET_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    RETENTION_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    text: str
    token_ids: TokenIds
    chat: Chat
    sampling: SamplingParams
    resume: _containers.RepeatedCompositeFieldContainer[Resumed]
    resume_ticket: bytes
    cache_salt: str
    priority: int
    session_id: str
    retention: Retention
    pooling: Pooling
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ..., sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., resume: _Optional[_Iterable[_Union[Resumed, _Mapping]]] = ..., resume_ticket: _Optional[bytes] = ..., cache_salt: _Optional[str] = ..., priority: _Optional[int] = ..., session_id: _Optional[str] = ..., retention: _Optional[_Union[Retention, _Mapping]] = ..., pooling: _Optional[_Union[Pooling, str]] = ...) -> None: ...

class Retention(_message.Message):
    __slots__ = ("priority", "ttl_seconds")
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    TTL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    priority: int
    ttl_seconds: float
    def __init__(self, priority: _Optional[int] = ..., ttl_seconds: _Optional[float] = ...) -> None: ...

class Resumed(_message.Message):
    __slots__ = ("choice", "token_ids")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    choice: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, choice: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class SamplingParams(_message.Message):
    __slots__ = ("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "seed", "stop", "stop_token_ids", "ignore_eos", "n", "logprobs", "prompt_logprobs", "skip_special_tokens", "include_stop", "structured", "allowed_token_ids", "bad_words", "max_reasoning_tokens", "bad_token_ids", "reasoning_limit", "logprob_token_ids")
    class LogitBiasEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: float
        def __init__(self, key: _Optional[int] = ..., value: _Optional[float] = ...) -> None: ...
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    MIN_TOKENS_FIELD_NUMBER: _ClassVar[int]
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    PRESENCE_PENALTY_FIELD_NUMBER: _ClassVar[int]
    FREQUENCY_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOGIT_BIAS_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IGNORE_EOS_FIELD_NUMBER: _ClassVar[int]
    N_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    INCLUDE_STOP_FIELD_NUMBER: _ClassVar[int]
    STRUCTURED_FIELD_NUMBER: _ClassVar[int]
    ALLOWED_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BAD_WORDS_FIELD_NUMBER: _ClassVar[int]
    MAX_REASONING_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BAD_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    REASONING_LIMIT_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    min_tokens: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: _containers.ScalarMap[int, float]
    seed: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    stop_token_ids: _containers.RepeatedScalarFieldContainer[int]
    ignore_eos: bool
    n: int
    logprobs: int
    prompt_logprobs: int
    skip_special_tokens: bool
    include_stop: bool
    structured: StructuredOutput
    allowed_token_ids: _containers.RepeatedScalarFieldContainer[int]
    bad_words: _containers.RepeatedScalarFieldContainer[str]
    max_reasoning_tokens: int
    bad_token_ids: _containers.RepeatedCompositeFieldContainer[TokenIds]
    reasoning_limit: ReasoningLimit
    logprob_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, max_tokens: _Optional[int] = ..., min_tokens: _Optional[int] = ..., temperature: _Optional[float] = ..., top_k: _Optional[int] = ..., top_p: _Optional[float] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., presence_penalty: _Optional[float] = ..., frequency_penalty: _Optional[float] = ..., logit_bias: _Optional[_Mapping[int, float]] = ..., seed: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., stop_token_ids: _Optional[_Iterable[int]] = ..., ignore_eos: _Optional[bool] = ..., n: _Optional[int] = ..., logprobs: _Optional[int] = ..., prompt_logprobs: _Optional[int] = ..., skip_special_tokens: _Optional[bool] = ..., include_stop: _Optional[bool] = ..., structured: _Optional[_Union[StructuredOutput, _Mapping]] = ..., allowed_token_ids: _Optional[_Iterable[int]] = ..., bad_words: _Optional[_Iterable[str]] = ..., max_reasoning_tokens: _Optional[int] = ..., bad_token_ids: _Optional[_Iterable[_Union[TokenIds, _Mapping]]] = ..., reasoning_limit: _Optional[_Union[ReasoningLimit, _Mapping]] = ..., logprob_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class ReasoningLimit(_message.Message):
    __slots__ = ("max_tokens", "start_token_ids", "end_token_ids")
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    START_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    END_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    max_tokens: int
    start_token_ids: _containers.RepeatedScalarFieldContainer[int]
    end_token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, max_tokens: _Optional[int] = ..., start_token_ids: _Optional[_Iterable[int]] = ..., end_token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class StructuredOutput(_message.Message):
    __slots__ = ("json_schema", "regex", "grammar", "choices", "prefix")
    JSON_SCHEMA_FIELD_NUMBER: _ClassVar[int]
    REGEX_FIELD_NUMBER: _ClassVar[int]
    GRAMMAR_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_FIELD_NUMBER: _ClassVar[int]
    json_schema: str
    regex: str
    grammar: str
    choices: Choices
    prefix: str
    def __init__(self, json_schema: _Optional[str] = ..., regex: _Optional[str] = ..., grammar: _Optional[str] = ..., choices: _Optional[_Union[Choices, _Mapping]] = ..., prefix: _Optional[str] = ...) -> None: ...

class Choices(_message.Message):
    __slots__ = ("texts",)
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, texts: _Optional[_Iterable[str]] = ...) -> None: ...

class TopLogprob(_message.Message):
    __slots__ = ("token_id", "logprob")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ...) -> None: ...

class TokenLogprob(_message.Message):
    __slots__ = ("token_id", "logprob", "rank", "top", "all_logprobs")
    TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    LOGPROB_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    ALL_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    token_id: int
    logprob: float
    rank: int
    top: _containers.RepeatedCompositeFieldContainer[TopLogprob]
    all_logprobs: bytes
    def __init__(self, token_id: _Optional[int] = ..., logprob: _Optional[float] = ..., rank: _Optional[int] = ..., top: _Optional[_Iterable[_Union[TopLogprob, _Mapping]]] = ..., all_logprobs: _Optional[bytes] = ...) -> None: ...

class Usage(_message.Message):
    __slots__ = ("prompt_tokens", "completion_tokens", "cached_device_tokens", "cached_host_tokens")
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_DEVICE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_HOST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    prompt_tokens: int
    completion_tokens: int
    cached_device_tokens: int
    cached_host_tokens: int
    def __init__(self, prompt_tokens: _Optional[int] = ..., completion_tokens: _Optional[int] = ..., cached_device_tokens: _Optional[int] = ..., cached_host_tokens: _Optional[int] = ...) -> None: ...

class Started(_message.Message):
    __slots__ = ("request_id", "model", "seed", "group", "prompt_tokens", "resume_ticket")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESUME_TICKET_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    seed: int
    group: str
    prompt_tokens: int
    resume_ticket: bytes
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., seed: _Optional[int] = ..., group: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., resume_ticket: _Optional[bytes] = ...) -> None: ...

class Delta(_message.Message):
    __slots__ = ("choice", "text", "token_ids", "logprobs", "finish_reason", "stop", "stop_token_id", "reasoning", "tool_calls", "resume_ticket")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    STOP_TOKEN_ID_FIELD_NUMBER: _ClassVar[int]
    REASONING_FIELD_NUMBER: _ClassVar[int]
    TOOL_CALLS_FIELD_NUMBER: _ClassVar[int]
    RESUME_TICKET_FIELD_NUMBER: _ClassVar[int]
    choice: int
    text: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    finish_reason: FinishReason
    stop: str
    stop_token_id: int
    reasoning: str
    tool_calls: _containers.RepeatedCompositeFieldContainer[ToolCallDelta]
    resume_ticket: bytes
    def __init__(self, choice: _Optional[int] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., stop: _Optional[str] = ..., stop_token_id: _Optional[int] = ..., reasoning: _Optional[str] = ..., tool_calls: _Optional[_Iterable[_Union[ToolCallDelta, _Mapping]]] = ..., resume_ticket: _Optional[bytes] = ...) -> None: ...

class ToolCallDelta(_message.Message):
    __slots__ = ("index", "id", "name", "arguments")
    INDEX_FIELD_NUMBER: _ClassVar[int]
    ID_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARGUMENTS_FIELD_NUMBER: _ClassVar[int]
    index: int
    id: str
    name: str
    arguments: str
    def __init__(self, index: _Optional[int] = ..., id: _Optional[str] = ..., name: _Optional[str] = ..., arguments: _Optional[str] = ...) -> None: ...

class PromptLogprobs(_message.Message):
    __slots__ = ("tokens",)
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    tokens: _containers.RepeatedCompositeFieldContainer[TokenLogprob]
    def __init__(self, tokens: _Optional[_Iterable[_Union[TokenLogprob, _Mapping]]] = ...) -> None: ...

class Final(_message.Message):
    __slots__ = ("usage", "group", "routed_by", "moves", "choices", "embedding", "timings")
    USAGE_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    ROUTED_BY_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    usage: Usage
    group: str
    routed_by: str
    moves: int
    choices: _containers.RepeatedCompositeFieldContainer[ChoiceEnd]
    embedding: _containers.RepeatedScalarFieldContainer[float]
    timings: Timings
    def __init__(self, usage: _Optional[_Union[Usage, _Mapping]] = ..., group: _Optional[str] = ..., routed_by: _Optional[str] = ..., moves: _Optional[int] = ..., choices: _Optional[_Iterable[_Union[ChoiceEnd, _Mapping]]] = ..., embedding: _Optional[_Iterable[float]] = ..., timings: _Optional[_Union[Timings, _Mapping]] = ...) -> None: ...

class Timings(_message.Message):
    __slots__ = ("queue_seconds", "first_token_seconds", "generation_seconds")
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    FIRST_TOKEN_SECONDS_FIELD_NUMBER: _ClassVar[int]
    GENERATION_SECONDS_FIELD_NUMBER: _ClassVar[int]
    queue_seconds: float
    first_token_seconds: float
    generation_seconds: float
    def __init__(self, queue_seconds: _Optional[float] = ..., first_token_seconds: _Optional[float] = ..., generation_seconds: _Optional[float] = ...) -> None: ...

class ChoiceEnd(_message.Message):
    __slots__ = ("choice", "finish_reason", "completion_tokens")
    CHOICE_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TOKENS_FIELD_NUMBER: _ClassVar[int]
    choice: int
    finish_reason: FinishReason
    completion_tokens: int
    def __init__(self, choice: _Optional[int] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., completion_tokens: _Optional[int] = ...) -> None: ...

class GenerateEvent(_message.Message):
    __slots__ = ("started", "prompt_logprobs", "delta", "final")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    DELTA_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    started: Started
    prompt_logprobs: PromptLogprobs
    delta: Delta
    final: Final
    def __init__(self, started: _Optional[_Union[Started, _Mapping]] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ..., delta: _Optional[_Union[Delta, _Mapping]] = ..., final: _Optional[_Union[Final, _Mapping]] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("started", "choices", "prompt_logprobs", "final")
    STARTED_FIELD_NUMBER: _ClassVar[int]
    CHOICES_FIELD_NUMBER: _ClassVar[int]
    PROMPT_LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    FINAL_FIELD_NUMBER: _ClassVar[int]
    started: Started
    choices: _containers.RepeatedCompositeFieldContainer[Delta]
    prompt_logprobs: PromptLogprobs
    final: Final
    def __init__(self, started: _Optional[_Union[Started, _Mapping]] = ..., choices: _Optional[_Iterable[_Union[Delta, _Mapping]]] = ..., prompt_logprobs: _Optional[_Union[PromptLogprobs, _Mapping]] = ..., final: _Optional[_Union[Final, _Mapping]] = ...) -> None: ...

class EmbedRequest(_message.Message):
    __slots__ = ("request_id", "model", "text", "token_ids", "chat", "cache_salt", "priority", "session_id", "pooling", "dimensions", "normalize")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    PRIORITY_FIELD_NUMBER: _ClassVar[int]
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    POOLING_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    NORMALIZE_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    text: str
    token_ids: TokenIds
    chat: Chat
    cache_salt: str
    priority: int
    session_id: str
    pooling: Pooling
    dimensions: int
    normalize: bool
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ..., cache_salt: _Optional[str] = ..., priority: _Optional[int] = ..., session_id: _Optional[str] = ..., pooling: _Optional[_Union[Pooling, str]] = ..., dimensions: _Optional[int] = ..., normalize: _Optional[bool] = ...) -> None: ...

class EmbedResponse(_message.Message):
    __slots__ = ("request_id", "model", "embedding", "prompt_tokens", "cached_tokens", "group")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    embedding: _containers.RepeatedScalarFieldContainer[float]
    prompt_tokens: int
    cached_tokens: int
    group: str
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., embedding: _Optional[_Iterable[float]] = ..., prompt_tokens: _Optional[int] = ..., cached_tokens: _Optional[int] = ..., group: _Optional[str] = ...) -> None: ...

class TokenizeRequest(_message.Message):
    __slots__ = ("model", "text", "chat", "add_special_tokens")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    ADD_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: str
    chat: Chat
    add_special_tokens: bool
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ..., chat: _Optional[_Union[Chat, _Mapping]] = ..., add_special_tokens: _Optional[bool] = ...) -> None: ...

class TokenizeResponse(_message.Message):
    __slots__ = ("token_ids",)
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ...) -> None: ...

class DetokenizeRequest(_message.Message):
    __slots__ = ("model", "token_ids", "skip_special_tokens")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    SKIP_SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    model: str
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    skip_special_tokens: bool
    def __init__(self, model: _Optional[str] = ..., token_ids: _Optional[_Iterable[int]] = ..., skip_special_tokens: _Optional[bool] = ...) -> None: ...

class DetokenizeResponse(_message.Message):
    __slots__ = ("text",)
    TEXT_FIELD_NUMBER: _ClassVar[int]
    text: str
    def __init__(self, text: _Optional[str] = ...) -> None: ...

class GetModelRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetModelResponse(_message.Message):
    __slots__ = ("name", "max_model_len", "vocab_size", "block_size", "dtype", "kv_dtype", "fingerprint", "eos_token_ids", "default_sampling", "adapters")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MAX_MODEL_LEN_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_SIZE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    KV_DTYPE_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    EOS_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    DEFAULT_SAMPLING_FIELD_NUMBER: _ClassVar[int]
    ADAPTERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    max_model_len: int
    vocab_size: int
    block_size: int
    dtype: str
    kv_dtype: str
    fingerprint: str
    eos_token_ids: _containers.RepeatedScalarFieldContainer[int]
    default_sampling: SamplingParams
    adapters: _containers.RepeatedCompositeFieldContainer[Adapter]
    def __init__(self, name: _Optional[str] = ..., max_model_len: _Optional[int] = ..., vocab_size: _Optional[int] = ..., block_size: _Optional[int] = ..., dtype: _Optional[str] = ..., kv_dtype: _Optional[str] = ..., fingerprint: _Optional[str] = ..., eos_token_ids: _Optional[_Iterable[int]] = ..., default_sampling: _Optional[_Union[SamplingParams, _Mapping]] = ..., adapters: _Optional[_Iterable[_Union[Adapter, _Mapping]]] = ...) -> None: ...

class Adapter(_message.Message):
    __slots__ = ("name", "fingerprint")
    NAME_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    name: str
    fingerprint: str
    def __init__(self, name: _Optional[str] = ..., fingerprint: _Optional[str] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RankStatus(_message.Message):
    __slots__ = ("rank", "healthy", "node", "pid", "steps", "peak_memory_bytes", "weight_bytes")
    RANK_FIELD_NUMBER: _ClassVar[int]
    HEALTHY_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    STEPS_FIELD_NUMBER: _ClassVar[int]
    PEAK_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_BYTES_FIELD_NUMBER: _ClassVar[int]
    rank: int
    healthy: bool
    node: str
    pid: int
    steps: int
    peak_memory_bytes: int
    weight_bytes: int
    def __init__(self, rank: _Optional[int] = ..., healthy: _Optional[bool] = ..., node: _Optional[str] = ..., pid: _Optional[int] = ..., steps: _Optional[int] = ..., peak_memory_bytes: _Optional[int] = ..., weight_bytes: _Optional[int] = ...) -> None: ...

class GroupStatus(_message.Message):
    __slots__ = ("name", "state", "address", "ranks", "running", "waiting", "blocks_total", "blocks_used", "blocks_cached", "prompt_tokens", "cached_device_tokens", "cached_host_tokens", "generated_tokens", "preemptions", "prefill_tokens_per_second", "step_seconds", "reason", "restarts", "kernels", "host_blocks_total", "host_blocks_used", "demotions", "restores", "integrity_failures", "host_evictions", "bytes_per_block", "demote_bytes_per_second", "restore_bytes_per_second", "restore_tokens_per_second", "audit", "late_compiles", "device_evictions", "host_evicted", "prefix_misses", "demoted_bytes", "restored_bytes", "version", "slowness", "uptime_seconds", "replicates_latents", "expert_tokens", "divides_latents", "state_snapshot_slots", "state_snapshots_held", "state_snapshot_saves", "state_snapshot_restores", "state_snapshot_evictions", "draft_tokens", "accepted_draft_tokens")
    NAME_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    RANKS_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_USED_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_CACHED_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_DEVICE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_HOST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    GENERATED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    PREEMPTIONS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    STEP_SECONDS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    RESTARTS_FIELD_NUMBER: _ClassVar[int]
    KERNELS_FIELD_NUMBER: _ClassVar[int]
    HOST_BLOCKS_TOTAL_FIELD_NUMBER: _ClassVar[int]
    HOST_BLOCKS_USED_FIELD_NUMBER: _ClassVar[int]
    DEMOTIONS_FIELD_NUMBER: _ClassVar[int]
    RESTORES_FIELD_NUMBER: _ClassVar[int]
    INTEGRITY_FAILURES_FIELD_NUMBER: _ClassVar[int]
    HOST_EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    BYTES_PER_BLOCK_FIELD_NUMBER: _ClassVar[int]
    DEMOTE_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    RESTORE_BYTES_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    RESTORE_TOKENS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    AUDIT_FIELD_NUMBER: _ClassVar[int]
    LATE_COMPILES_FIELD_NUMBER: _ClassVar[int]
    DEVICE_EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    HOST_EVICTED_FIELD_NUMBER: _ClassVar[int]
    PREFIX_MISSES_FIELD_NUMBER: _ClassVar[int]
    DEMOTED_BYTES_FIELD_NUMBER: _ClassVar[int]
    RESTORED_BYTES_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    SLOWNESS_FIELD_NUMBER: _ClassVar[int]
    UPTIME_SECONDS_FIELD_NUMBER: _ClassVar[int]
    REPLICATES_LATENTS_FIELD_NUMBER: _ClassVar[int]
    EXPERT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DIVIDES_LATENTS_FIELD_NUMBER: _ClassVar[int]
    STATE_SNAPSHOT_SLOTS_FIELD_NUMBER: _ClassVar[int]
    STATE_SNAPSHOTS_HELD_FIELD_NUMBER: _ClassVar[int]
    STATE_SNAPSHOT_SAVES_FIELD_NUMBER: _ClassVar[int]
    STATE_SNAPSHOT_RESTORES_FIELD_NUMBER: _ClassVar[int]
    STATE_SNAPSHOT_EVICTIONS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_DRAFT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    name: str
    state: str
    address: str
    ranks: _containers.RepeatedCompositeFieldContainer[RankStatus]
    running: int
    waiting: int
    blocks_total: int
    blocks_used: int
    blocks_cached: int
    prompt_tokens: int
    cached_device_tokens: int
    cached_host_tokens: int
    generated_tokens: int
    preemptions: int
    prefill_tokens_per_second: float
    step_seconds: float
    reason: str
    restarts: int
    kernels: str
    host_blocks_total: int
    host_blocks_used: int
    demotions: int
    restores: int
    integrity_failures: int
    host_evictions: int
    bytes_per_block: int
    demote_bytes_per_second: float
    restore_bytes_per_second: float
    restore_tokens_per_second: float
    audit: CacheAudit
    late_compiles: int
    device_evictions: Evictions
    host_evicted: Evictions
    prefix_misses: PrefixMisses
    demoted_bytes: int
    restored_bytes: int
    version: str
    slowness: float
    uptime_seconds: float
    replicates_latents: bool
    expert_tokens: _containers.RepeatedScalarFieldContainer[int]
    divides_latents: bool
    state_snapshot_slots: int
    state_snapshots_held: int
    state_snapshot_saves: int
    state_snapshot_restores: int
    state_snapshot_evictions: int
    draft_tokens: int
    accepted_draft_tokens: int
    def __init__(self, name: _Optional[str] = ..., state: _Optional[str] = ..., address: _Optional[str] = ..., ranks: _Optional[_Iterable[_Union[RankStatus, _Mapping]]] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., blocks_total: _Optional[int] = ..., blocks_used: _Optional[int] = ..., blocks_cached: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., cached_device_tokens: _Optional[int] = ..., cached_host_tokens: _Optional[int] = ..., generated_tokens: _Optional[int] = ..., preemptions: _Optional[int] = ..., prefill_tokens_per_second: _Optional[float] = ..., step_seconds: _Optional[float] = ..., reason: _Optional[str] = ..., restarts: _Optional[int] = ..., kernels: _Optional[str] = ..., host_blocks_total: _Optional[int] = ..., host_blocks_used: _Optional[int] = ..., demotions: _Optional[int] = ..., restores: _Optional[int] = ..., integrity_failures: _Optional[int] = ..., host_evictions: _Optional[int] = ..., bytes_per_block: _Optional[int] = ..., demote_bytes_per_second: _Optional[float] = ..., restore_bytes_per_second: _Optional[float] = ..., restore_tokens_per_second: _Optional[float] = ..., audit: _Optional[_Union[CacheAudit, _Mapping]] = ..., late_compiles: _Optional[int] = ..., device_evictions: _Optional[_Union[Evictions, _Mapping]] = ..., host_evicted: _Optional[_Union[Evictions, _Mapping]] = ..., prefix_misses: _Optional[_Union[PrefixMisses, _Mapping]] = ..., demoted_bytes: _Optional[int] = ..., restored_bytes: _Optional[int] = ..., version: _Optional[str] = ..., slowness: _Optional[float] = ..., uptime_seconds: _Optional[float] = ..., replicates_latents: _Optional[bool] = ..., expert_tokens: _Optional[_Iterable[int]] = ..., divides_latents: _Optional[bool] = ..., state_snapshot_slots: _Optional[int] = ..., state_snapshots_held: _Optional[int] = ..., state_snapshot_saves: _Optional[int] = ..., state_snapshot_restores: _Optional[int] = ..., state_snapshot_evictions: _Optional[int] = ..., draft_tokens: _Optional[int] = ..., accepted_draft_tokens: _Optional[int] = ...) -> None: ...

class Evictions(_message.Message):
    __slots__ = ("unwanted", "lowest_value", "over_fair_share", "last_resort")
    UNWANTED_FIELD_NUMBER: _ClassVar[int]
    LOWEST_VALUE_FIELD_NUMBER: _ClassVar[int]
    OVER_FAIR_SHARE_FIELD_NUMBER: _ClassVar[int]
    LAST_RESORT_FIELD_NUMBER: _ClassVar[int]
    unwanted: int
    lowest_value: int
    over_fair_share: int
    last_resort: int
    def __init__(self, unwanted: _Optional[int] = ..., lowest_value: _Optional[int] = ..., over_fair_share: _Optional[int] = ..., last_resort: _Optional[int] = ...) -> None: ...

class PrefixMisses(_message.Message):
    __slots__ = ("never_seen", "evicted", "other_salt", "corrupt", "recomputed", "no_snapshot")
    NEVER_SEEN_FIELD_NUMBER: _ClassVar[int]
    EVICTED_FIELD_NUMBER: _ClassVar[int]
    OTHER_SALT_FIELD_NUMBER: _ClassVar[int]
    CORRUPT_FIELD_NUMBER: _ClassVar[int]
    RECOMPUTED_FIELD_NUMBER: _ClassVar[int]
    NO_SNAPSHOT_FIELD_NUMBER: _ClassVar[int]
    never_seen: int
    evicted: int
    other_salt: int
    corrupt: int
    recomputed: int
    no_snapshot: int
    def __init__(self, never_seen: _Optional[int] = ..., evicted: _Optional[int] = ..., other_salt: _Optional[int] = ..., corrupt: _Optional[int] = ..., recomputed: _Optional[int] = ..., no_snapshot: _Optional[int] = ...) -> None: ...

class GroupCost(_message.Message):
    __slots__ = ("group", "total_seconds", "queue_seconds", "prefill_seconds", "restore_seconds", "decode_seconds", "eviction_seconds", "delay_seconds", "device_tokens", "host_tokens", "expected_tokens", "stall_seconds", "has_room", "refused")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    TOTAL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    RESTORE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DECODE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    EVICTION_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DELAY_SECONDS_FIELD_NUMBER: _ClassVar[int]
    DEVICE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HOST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EXPECTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STALL_SECONDS_FIELD_NUMBER: _ClassVar[int]
    HAS_ROOM_FIELD_NUMBER: _ClassVar[int]
    REFUSED_FIELD_NUMBER: _ClassVar[int]
    group: str
    total_seconds: float
    queue_seconds: float
    prefill_seconds: float
    restore_seconds: float
    decode_seconds: float
    eviction_seconds: float
    delay_seconds: float
    device_tokens: int
    host_tokens: int
    expected_tokens: int
    stall_seconds: float
    has_room: bool
    refused: str
    def __init__(self, group: _Optional[str] = ..., total_seconds: _Optional[float] = ..., queue_seconds: _Optional[float] = ..., prefill_seconds: _Optional[float] = ..., restore_seconds: _Optional[float] = ..., decode_seconds: _Optional[float] = ..., eviction_seconds: _Optional[float] = ..., delay_seconds: _Optional[float] = ..., device_tokens: _Optional[int] = ..., host_tokens: _Optional[int] = ..., expected_tokens: _Optional[int] = ..., stall_seconds: _Optional[float] = ..., has_room: _Optional[bool] = ..., refused: _Optional[str] = ...) -> None: ...

class Explanation(_message.Message):
    __slots__ = ("group", "why", "prompt_tokens", "costs", "routing")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COSTS_FIELD_NUMBER: _ClassVar[int]
    ROUTING_FIELD_NUMBER: _ClassVar[int]
    group: str
    why: str
    prompt_tokens: int
    costs: _containers.RepeatedCompositeFieldContainer[GroupCost]
    routing: str
    def __init__(self, group: _Optional[str] = ..., why: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., costs: _Optional[_Iterable[_Union[GroupCost, _Mapping]]] = ..., routing: _Optional[str] = ...) -> None: ...

class CacheAudit(_message.Message):
    __slots__ = ("prompts", "predicted_tokens", "found_tokens", "error_tokens", "divergences")
    PROMPTS_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    FOUND_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ERROR_TOKENS_FIELD_NUMBER: _ClassVar[int]
    DIVERGENCES_FIELD_NUMBER: _ClassVar[int]
    prompts: int
    predicted_tokens: int
    found_tokens: int
    error_tokens: int
    divergences: int
    def __init__(self, prompts: _Optional[int] = ..., predicted_tokens: _Optional[int] = ..., found_tokens: _Optional[int] = ..., error_tokens: _Optional[int] = ..., divergences: _Optional[int] = ...) -> None: ...

class LatencyStatus(_message.Message):
    __slots__ = ("p50_seconds", "p90_seconds", "p99_seconds", "count")
    P50_SECONDS_FIELD_NUMBER: _ClassVar[int]
    P90_SECONDS_FIELD_NUMBER: _ClassVar[int]
    P99_SECONDS_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    p50_seconds: float
    p90_seconds: float
    p99_seconds: float
    count: int
    def __init__(self, p50_seconds: _Optional[float] = ..., p90_seconds: _Optional[float] = ..., p99_seconds: _Optional[float] = ..., count: _Optional[int] = ...) -> None: ...

class StatusResponse(_message.Message):
    __slots__ = ("router", "state", "model", "groups", "ttft", "tpot", "active_streams", "hit_ratio", "itl", "queue", "version", "queue_seconds", "routing", "configuration", "queued_requests", "outcomes")
    ROUTER_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    TTFT_FIELD_NUMBER: _ClassVar[int]
    TPOT_FIELD_NUMBER: _ClassVar[int]
    ACTIVE_STREAMS_FIELD_NUMBER: _ClassVar[int]
    HIT_RATIO_FIELD_NUMBER: _ClassVar[int]
    ITL_FIELD_NUMBER: _ClassVar[int]
    QUEUE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    QUEUE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    ROUTING_FIELD_NUMBER: _ClassVar[int]
    CONFIGURATION_FIELD_NUMBER: _ClassVar[int]
    QUEUED_REQUESTS_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    router: str
    state: str
    model: GetModelResponse
    groups: _containers.RepeatedCompositeFieldContainer[GroupStatus]
    ttft: LatencyStatus
    tpot: LatencyStatus
    active_streams: int
    hit_ratio: float
    itl: LatencyStatus
    queue: LatencyStatus
    version: str
    queue_seconds: float
    routing: str
    configuration: str
    queued_requests: int
    outcomes: _containers.RepeatedCompositeFieldContainer[OutcomeCount]
    def __init__(self, router: _Optional[str] = ..., state: _Optional[str] = ..., model: _Optional[_Union[GetModelResponse, _Mapping]] = ..., groups: _Optional[_Iterable[_Union[GroupStatus, _Mapping]]] = ..., ttft: _Optional[_Union[LatencyStatus, _Mapping]] = ..., tpot: _Optional[_Union[LatencyStatus, _Mapping]] = ..., active_streams: _Optional[int] = ..., hit_ratio: _Optional[float] = ..., itl: _Optional[_Union[LatencyStatus, _Mapping]] = ..., queue: _Optional[_Union[LatencyStatus, _Mapping]] = ..., version: _Optional[str] = ..., queue_seconds: _Optional[float] = ..., routing: _Optional[str] = ..., configuration: _Optional[str] = ..., queued_requests: _Optional[int] = ..., outcomes: _Optional[_Iterable[_Union[OutcomeCount, _Mapping]]] = ...) -> None: ...

class OutcomeCount(_message.Message):
    __slots__ = ("outcome", "count")
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    outcome: str
    count: int
    def __init__(self, outcome: _Optional[str] = ..., count: _Optional[int] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("group", "timeout_seconds", "undo")
    GROUP_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_SECONDS_FIELD_NUMBER: _ClassVar[int]
    UNDO_FIELD_NUMBER: _ClassVar[int]
    group: str
    timeout_seconds: float
    undo: bool
    def __init__(self, group: _Optional[str] = ..., timeout_seconds: _Optional[float] = ..., undo: _Optional[bool] = ...) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("drained", "remaining_streams")
    DRAINED_FIELD_NUMBER: _ClassVar[int]
    REMAINING_STREAMS_FIELD_NUMBER: _ClassVar[int]
    drained: bool
    remaining_streams: int
    def __init__(self, drained: _Optional[bool] = ..., remaining_streams: _Optional[int] = ...) -> None: ...
