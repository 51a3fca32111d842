"""SamplingFields: the fields that chat and text completions have in common. RequestBody: the base of all bodies.

A field that would change the response is implemented, or refused by its name. A field that cannot change the response
is accepted and dropped. Any other field is refused, because its name may be misspelt. Structured output can be asked
for by the fields of OpenAI, vLLM and SGLang; each becomes a Grammar.
"""

import dataclasses
import json
from collections.abc import Callable, Sequence
from functools import cache
from typing import Annotated, Any, ClassVar, Final, Literal

from llguidance import StructTag
from pydantic import AliasChoices, BaseModel, ConfigDict, Field, model_validator

from coatcheck.proto.errors import InvalidParameter, InvalidRequest
from coatcheck.proto.grammar import JSON_STYLE, Grammar, GrammarRefused
from coatcheck.proto.sampling import SamplingParams
from coatcheck.proto.stubs.coatcheck_pb2 import GenerateRequest
from coatcheck.proto.stubs.coatcheck_pb2 import SamplingParams as SamplingMessage
from coatcheck.router.event_loop.message_limits import MAX_TOOLS

# Fields for naming, billing, storing or speed; the response is the same without them.
IGNORED_FIELDS: Final = frozenset({
    "user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "prediction", "guided_decoding_backend", "request_id", "rid", "custom_labels",
    "stream_interval", "store", "cache_control",
    # llama.cpp's, LM Studio's and Z.ai's
    "cache_prompt", "timings_per_token", "return_progress", "id_slot", "ttl", "keep_alive", "tool_stream",
})  # fmt: skip
# Fields that are not implemented, with the values that are accepted because they ask for the default behaviour.
ACCEPTED_VALUES: Final[dict[str, tuple[object, ...]]] = {
    **dict.fromkeys((
        "use_beam_search", "early_stopping", "watermarking", "return_token_offsets", "return_hidden_states",
        "return_weight_versions", "return_mm_kwargs", "return_meta_info", "return_cached_tokens_details",
        "return_prompt_token_ids", "require_reasoning", "return_routed_experts",
    ), (False,)),
    "length_penalty": (1.0,),
    "spaces_between_special_tokens": (True,),
    "detokenize": (True,),
    "logits_processors": ([],),
    "routed_experts_start_len": (0,),
    "mm_processor_kwargs": ({},),
    "media_io_kwargs": ({},),
    "vllm_xargs": ({},),
    "kv_transfer_params": ({},),
    "documents": ([],),
    "routed_experts_prompt_start": (0,),
}  # fmt: skip

# Further fields of OpenAI, vLLM and SGLang that are not implemented, in the body or in an object within the body.
UNIMPLEMENTED_FIELDS: Final = frozenset({
    "audio", "web_search_options", "moderation", "images", "image_url", "input_audio", "file", "refusal", "annotations",
    "function_call", "structural_tag",
    "prompt_embeds", "kv_transfer_params",
    "vllm_xargs", "mm_processor_kwargs", "documents", "chat_template", "repetition_detection",
    "continue_final_message", "top_a",
    "lora_path", "stop_regex", "custom_logit_processor", "session_params", "stream_reasoning",
    "data_parallel_rank", "bootstrap_host", "bootstrap_port", "bootstrap_room", "return_prompt_text",
    "disable_additional_properties", "whitespace_pattern", "require_reasoning",
})  # fmt: skip

# Fields whose default may come from the model's generation_config.json.
_MODEL_HAS_DEFAULTS: Final = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_MAX_FIELDS: Final = 2048

TokenId = Annotated[int, Field(strict=True, ge=0, lt=2**31)]  # strict: refuses true and 5.0
Count = Annotated[int, Field(ge=0, lt=2**31)]
CountOrAll = Annotated[int, Field(ge=-1, lt=2**31)]  # -1: all tokens of the vocabulary
_NO_REASONING_LIMIT: Final = -1  # vLLM's value of max_reasoning_tokens
ReasoningTokens = Annotated[int, Field(ge=_NO_REASONING_LIMIT, lt=2**31)]


class RequestBody(BaseModel):
    """A JSON object. Unknown fields are refused; a null counts as a missing field. A subclass adds its own fields to
    ACCEPTED_VALUES with `accepted_values`."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), allow_inf_nan=False)

    accepted_values: ClassVar[dict[str, tuple[object, ...]]] = {}
    ignored_fields: ClassVar[frozenset[str]] = IGNORED_FIELDS
    drops_unknown_fields: ClassVar[bool] = False  # for objects that clients copy from responses of other servers

    @model_validator(mode="before")
    @classmethod
    def _drop_ignored_fields(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        # Pydantic would describe every unknown field; for millions that takes minutes.
        large = max([len(data), *(len(value) for value in data.values() if isinstance(value, dict))])
        if large > _MAX_FIELDS:
            raise InvalidRequest(f"an object of the body has {large} fields; the maximum is {_MAX_FIELDS}")
        if cls.drops_unknown_fields:
            known = _sent_names(cls)
            return {name: value for name, value in data.items() if value is not None and name in known}
        accepted = ACCEPTED_VALUES | cls.accepted_values
        return {
            name: value
            for name, value in data.items()
            if value is not None and name not in cls.ignored_fields and value not in accepted.get(name, ())
        }


@cache
def _sent_names(kind: type[RequestBody]) -> frozenset[str]:
    """The names that the fields of `kind` have in a body."""
    names: set[str] = set()
    for name, field in kind.model_fields.items():
        alias = field.validation_alias or field.alias or name
        names |= {str(choice) for choice in alias.choices} if isinstance(alias, AliasChoices) else {str(alias)}
    return frozenset(names)


class StreamOptions(RequestBody):
    """`include_usage`: a last chunk has the usage; with `continuous_usage_stats` every chunk has the usage so far."""

    accepted_values: ClassVar = {"include_obfuscation": (True, False)}

    include_usage: bool = False
    continuous_usage_stats: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class _Constrains:
    """Annotates a field that asks for structured output. `make_grammar` takes the field's value."""

    make_grammar: Callable[[Any], Grammar]


def schema_grammar(schema: str | dict[str, Any]) -> Grammar:
    """`schema`: a JSON schema, or its text."""
    return Grammar("json_schema", schema if isinstance(schema, str) else json.dumps(schema))


_SchemaField = Annotated[str | dict[str, Any] | None, _Constrains(schema_grammar)]
_RegexField = Annotated[str | None, _Constrains(lambda text: Grammar("regex", text))]
_RulesField = Annotated[str | None, _Constrains(lambda text: Grammar("grammar", text))]
_ChoiceField = Annotated[Annotated[list[str], Field(fail_fast=True)] | None, _Constrains(Grammar.of_choices)]


class StructuredOutputs(RequestBody):
    """vLLM's `structured_outputs`; one field may be set. The others of vLLM's class may have their defaults."""

    ignored_fields: ClassVar = frozenset({"disable_any_whitespace", "_backend", "_backend_was_auto"})
    accepted_values: ClassVar = {"disable_additional_properties": (False,), "disable_fallback": (False, True)}

    json_: Annotated[_SchemaField, Field(alias="json")] = None
    regex: _RegexField = None
    choice: _ChoiceField = None
    grammar: _RulesField = None
    json_object: bool | None = None


class JsonSchema(BaseModel):
    """`name` and `description` have no effect, and the schema is always enforced, whatever `strict` is."""

    model_config = ConfigDict(extra="forbid")

    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class TagStructure(BaseModel):
    """Text between `begin` and `end` fits the schema."""

    model_config = ConfigDict(extra="forbid")

    begin: Annotated[str, Field(min_length=1)]
    schema_: dict[str, Any] = Field(default_factory=dict, alias="schema")
    end: str


class ResponseFormat(BaseModel):
    """OpenAI's `response_format`; "text" does not constrain. "structural_tag" is vLLM's and SGLang's: any text, but
    after one of `triggers` comes the rest of a structure that begins with this trigger. `schema` is llama.cpp's and
    Together's: the schema of a "json_object", or one in place of `json_schema`."""

    model_config = ConfigDict(extra="forbid")

    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    json_schema: JsonSchema | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    structures: Annotated[list[TagStructure], Field(fail_fast=True, max_length=MAX_TOOLS)] = Field(default_factory=list)
    triggers: Annotated[list[str], Field(fail_fast=True, max_length=MAX_TOOLS)] = Field(default_factory=list)

    def to_tag_grammar(self) -> Grammar:
        """Raises InvalidParameter."""
        tags = []
        for structure in self.structures:
            trigger = next((one for one in self.triggers if one and structure.begin.startswith(one)), None)
            if trigger is None:
                raise InvalidParameter(
                    "response_format.triggers", f"has no text that {structure.begin[:80]!r} begins with; add one"
                )
            schema = {**structure.schema_, "x-guidance": dict(JSON_STYLE)}
            tags.append(StructTag(trigger=trigger, begin=structure.begin, grammar=schema, end=structure.end))
        if not tags:
            raise InvalidParameter("response_format.structures", "is empty; give at least one structure")
        return Grammar("grammar", StructTag.to_grammar(tags, assume_special=False))


class SamplingFields(RequestBody):
    """OpenAI's fields first, then those of vLLM and SGLang."""

    model: str = ""
    n: Count = 1
    best_of: Annotated[Count | None, Field(description="Must equal n: choices are not ranked.")] = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**64)] = None
    stop: str | Annotated[list[str], Field(fail_fast=True)] = Field(default_factory=list)
    logit_bias: dict[str, float] = Field(default_factory=dict)
    response_format: ResponseFormat | None = None

    top_k: Annotated[int | None, Field(ge=-1, lt=2**31)] = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    ignore_eos: bool = False
    min_tokens: Count = 0
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True)] = Field(default_factory=list)
    include_stop_str_in_output: bool = False
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    prompt_logprobs: CountOrAll | None = None
    logprob_token_ids: Annotated[list[TokenId], Field(fail_fast=True)] = Field(default_factory=list)
    cache_salt: str = ""
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    session_id: str = ""
    return_token_ids: bool = False
    return_tokens_as_token_ids: bool = False
    truncate_prompt_tokens: Annotated[int | None, Field(ge=-1, lt=2**31)] = None  # -1: as many as fit
    truncation_side: Literal["left", "right"] = "left"  # where tokens are dropped
    allowed_token_ids: Annotated[list[TokenId], Field(fail_fast=True)] = Field(default_factory=list)
    bad_words: Annotated[list[str], Field(fail_fast=True)] = Field(default_factory=list)
    # vLLM's name comes second, and Qwen's third.
    max_reasoning_tokens: Annotated[
        ReasoningTokens | None,
        Field(validation_alias=AliasChoices("max_reasoning_tokens", "thinking_token_budget", "thinking_budget")),
    ] = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: _SchemaField = None
    guided_regex: _RegexField = None
    guided_choice: _ChoiceField = None
    guided_grammar: _RulesField = None
    json_schema: _SchemaField = None
    regex: _RegexField = None
    ebnf: _RulesField = None

    @property
    def sent_names(self) -> dict[str, str]:
        """The names in the body of parameters that have other names in SamplingParams."""
        return {}

    def truncate(self, token_ids: Sequence[int], max_tokens: int | None, max_model_len: int) -> list[int]:
        """The tokens of a prompt that truncate_prompt_tokens keeps. -1 leaves room for `max_tokens`, or for one."""
        count = self.truncate_prompt_tokens
        if not count:
            raise InvalidParameter("truncate_prompt_tokens", "is 0; it must be -1 or at least 1")
        if count == -1:
            count = max(max_model_len - (max_tokens or 1), 1)
        return list(token_ids[-count:] if self.truncation_side == "left" else token_ids[:count])

    @property
    def include_usage(self) -> bool:
        """Whether the last chunk of a stream has its usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def has_running_usage(self) -> bool:
        """Whether each chunk of a stream has the usage so far."""
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def to_grammar(self) -> Grammar | None:
        """The grammar of the fields for structured output; None if none is set. Several fields may ask for the same
        grammar (guidance sends the names of old and new vLLM). Raises InvalidRequest if they differ."""
        found = self._find_grammars()
        if len({grammar for _, grammar in found}) > 1:
            raise InvalidRequest("several fields ask for structured output; keep one of them")
        return found[0][1] if found else None

    def explain_refused_grammar(self, refused: GrammarRefused) -> InvalidRequest:
        """The error for a grammar that does not compile, with the name of the field that asks for it."""
        name = next(name for name, _ in self._find_grammars())
        reason = f"cannot be compiled: {refused.reason}; change the named part"
        return InvalidParameter(self.sent_names.get(name, name), reason)

    def _find_grammars(self) -> list[tuple[str, Grammar]]:
        """(name in the body, grammar) of each field that asks for structured output. Raises InvalidRequest."""
        found = _make_grammars(self, "")
        outputs, wanted = self.structured_outputs, self.response_format
        if outputs is not None:
            found += _make_grammars(outputs, "structured_outputs.")
            if outputs.json_object:
                found.append(("structured_outputs.json_object", schema_grammar({"type": "object"})))
        if wanted is not None and wanted.type == "json_schema":
            name = "response_format.json_schema.schema"
            schema = wanted.json_schema.schema_ if wanted.json_schema is not None else wanted.schema_
            if schema is None:
                raise InvalidParameter(name, "is missing; give the schema, or use json_object")
            found.append((name, schema_grammar(schema)))
        if wanted is not None and wanted.type == "structural_tag":
            found.append(("response_format", wanted.to_tag_grammar()))
        if wanted is not None and wanted.type == "json_object":
            found.append(("response_format.schema", schema_grammar(wanted.schema_ or {"type": "object"})))
        return found

    @property
    def reasoning_limit(self) -> int | None:
        """Max tokens of the reasoning; None for no limit."""
        return None if self.max_reasoning_tokens == _NO_REASONING_LIMIT else self.max_reasoning_tokens

    def make_generate_request(self, request_id: str, sampling: SamplingMessage, **prompt: Any) -> GenerateRequest:
        """`prompt`: the field of GenerateRequest that holds the prompt."""
        return GenerateRequest(
            request_id=request_id,
            model=self.model,
            sampling=sampling,
            cache_salt=self.cache_salt,
            priority=self.priority,
            session_id=self.session_id,
            **prompt,
        )

    def to_sampling_params(
        self, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None, grammar: Grammar | None
    ) -> SamplingMessage:
        """The SamplingParams message. Fields of _MODEL_HAS_DEFAULTS that the body leaves out stay unset: the router
        fills in the model's defaults later. Raises InvalidRequest."""
        if self.best_of not in (None, self.n):
            raise InvalidParameter("best_of", f"is {self.best_of}; choices are not ranked: remove it, or set it to n")
        if self.stream_options is not None and not self.stream:
            raise InvalidParameter("stream_options", "is for streams; set stream to true or remove it")
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidParameter(
                "prompt_logprobs", "does not go with stream; use echo with logprobs, or do not stream"
            )
        copied = {name: value for name in _COPIED if (value := getattr(self, name)) is not None}
        special = {
            "max_reasoning_tokens": self.reasoning_limit,
            "top_k": max(self.top_k or 0, 0),  # vLLM's -1 means "off"
            "logit_bias": _parse_logit_bias(self.logit_bias),
            "seed": None if self.seed is None else self.seed % 2**64,  # OpenAI's seeds are signed
            "stop": (self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
            "stop_token_ids": tuple(self.stop_token_ids),
            "logprob_token_ids": tuple(self.logprob_token_ids),
            "allowed_token_ids": tuple(self.allowed_token_ids),
            "bad_words": tuple(self.bad_words),
            "include_stop": self.include_stop_str_in_output or self.no_stop_trim,
        }
        params = copied | special | {"max_tokens": max_tokens, "logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
        try:
            message = SamplingParams(**params, structured=grammar).to_message()
        except InvalidParameter as error:  # named as in the body
            raise InvalidParameter(self.sent_names.get(error.name, error.name), error.reason) from None
        for name in _MODEL_HAS_DEFAULTS:
            if getattr(self, name) is None:
                message.ClearField(name)
        return message


# The fields that the body and SamplingParams have in common.
_COPIED: Final = SamplingFields.model_fields.keys() & {field.name for field in dataclasses.fields(SamplingParams)}


def _make_grammars(body: BaseModel, path: str) -> list[tuple[str, Grammar]]:
    """(name, grammar) for each field of `body` that has a _Constrains and is set. `path`: where `body` is within the
    whole body. Raises InvalidParameter."""
    found = []
    for name, make_grammar in _grammar_fields(type(body)):
        if (value := getattr(body, name)) is not None:
            sent_name = path + name.rstrip("_")
            try:
                found.append((sent_name, make_grammar(value)))
            except InvalidParameter as error:
                raise InvalidParameter(sent_name, error.reason) from None
    return found


@cache
def _grammar_fields(kind: type[BaseModel]) -> list[tuple[str, Callable[[Any], Grammar]]]:
    fields = kind.model_fields.items()
    return [
        (name, one.make_grammar) for name, field in fields for one in field.metadata if isinstance(one, _Constrains)
    ]


def _parse_logit_bias(named: dict[str, float]) -> dict[int, float]:
    wrong = [name for name in named if not (name.isascii() and name.isdigit() and len(name) < 10)]
    if wrong:
        shown = ", ".join(repr(name[:40]) for name in wrong[:8]) + (", ..." if len(wrong) > 8 else "")
        raise InvalidParameter("logit_bias", f"has keys that are not token ids written as strings: {shown}")
    return {int(name): bias for name, bias in named.items()}
