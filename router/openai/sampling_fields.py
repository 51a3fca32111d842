"""What the bodies of both generating endpoints have in common: sampling, streaming, and what is refused by name.

A field that would change the answer is implemented or refused; one that cannot change it is accepted and dropped. This
module does not know prompts or answers.
"""

from typing import Annotated, Any, ClassVar, Final

from pydantic import BaseModel, ConfigDict, Field, model_validator

from coatcheck.proto.errors import InvalidRequest
from coatcheck.proto.grammar import Grammar
from coatcheck.proto.sampling import SamplingParams
from coatcheck.proto.stubs.coatcheck_pb2 import SamplingParams as SamplingMessage
from coatcheck.router.openai.response_format import ResponseFormat, StructuredOutputs, grammar_of

# They name, bill, store or speed up; the answer is the same without them.
HARMLESS: Final = frozenset({
    "user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "prediction", "guided_decoding_backend", "request_id", "rid", "custom_labels",
    "stream_interval",
})  # fmt: skip
# Not implemented, and accepted where they say what happens anyway.
NEUTRAL: Final[dict[str, tuple[object, ...]]] = {
    "store": (False,),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "early_stopping": (False,),
    "spaces_between_special_tokens": (True,),
    "detokenize": (True,),
    "logits_processors": ([],),
    "bad_words": ([],),
    "watermarking": (False,),
    "return_tokens_as_token_ids": (False,),
    "return_token_offsets": (False,),
    "return_hidden_states": (False,),
    "return_routed_experts": (False,),
    "routed_experts_prompt_start": (0,),
}

# A model's generation_config.json may have defaults for these; a request that leaves one out gets the model's.
_MODEL_HAS_DEFAULTS: Final = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_MOST_FIELDS: Final = 2048

TokenId = Annotated[int, Field(strict=True, ge=0, lt=2**31)]  # strict: refuses true and 5.0
Count = Annotated[int, Field(ge=0, lt=2**31)]


class Body(BaseModel):
    """A JSON object whose unknown fields are refused, and whose nulls are as if they were not there."""

    model_config = ConfigDict(extra="forbid", protected_namespaces=(), allow_inf_nan=False)

    neutral: ClassVar[dict[str, tuple[object, ...]]] = {}

    def check_lengths(self) -> None:
        """Raises InvalidRequest for lists that are too long. A side process calls this for long bodies only."""

    @model_validator(mode="before")
    @classmethod
    def _drop(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        # What is wrong is said of the first thing that is; of millions it would take minutes.
        large = max([len(data), *(len(value) for value in data.values() if isinstance(value, dict))])
        if large > _MOST_FIELDS:
            raise InvalidRequest(f"an object of the body has {large} fields; it may have {_MOST_FIELDS}")
        neutral = NEUTRAL | cls.neutral
        return {
            name: value
            for name, value in data.items()
            if value is not None and name not in HARMLESS and value not in neutral.get(name, ())
        }


class StreamOptions(Body):
    """`include_usage`: a last chunk says what the request took; with `continuous_usage_stats` too, each one what it has
    taken so far."""

    neutral: ClassVar = {"include_obfuscation": (True, False)}

    include_usage: bool = False
    continuous_usage_stats: bool = False


class SamplingFields(Body):
    """OpenAI's own, then those that clients of other engines send."""

    model: str = ""
    n: Count = 1
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
    prompt_logprobs: Count | None = None
    cache_salt: str = ""
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    session_id: str = ""
    return_token_ids: bool = False
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Annotated[list[str], Field(fail_fast=True)] | None = None
    guided_grammar: str | None = None
    json_schema: str | dict[str, Any] | None = None
    regex: str | None = None
    ebnf: str | None = None

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def counts_on(self) -> bool:
        """Whether each chunk of a stream says what it has taken so far."""
        return self.include_usage and bool(self.stream_options and self.stream_options.continuous_usage_stats)

    def grammar(self) -> Grammar | None:
        """What the answer must be; raises InvalidRequest."""
        older = StructuredOutputs(
            json=self.guided_json, regex=self.guided_regex, choice=self.guided_choice, grammar=self.guided_grammar
        )
        others = StructuredOutputs(json=self.json_schema, regex=self.regex, grammar=self.ebnf)
        return grammar_of(self.response_format, self.structured_outputs, older, others)

    def sampling(
        self, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None, grammar: Grammar | None
    ) -> SamplingMessage:
        """The SamplingParams message; fields that the body leaves out stay unset, and the router fills in the model's
        defaults. Raises InvalidRequest."""
        if self.stream_options is not None and not self.stream:
            raise InvalidRequest("stream_options is for streams; set stream to true or leave it out")
        if self.stream and self.prompt_logprobs is not None:
            raise InvalidRequest("prompt_logprobs does not go with stream; use echo with logprobs, or do not stream")
        own = {name: getattr(self, name) for name in _MODEL_HAS_DEFAULTS if getattr(self, name) is not None}
        if "top_k" in own:
            own["top_k"] = max(own["top_k"], 0)  # vLLM's clients write -1 for "off"
        message = SamplingParams(
            **own,
            max_tokens=max_tokens,
            min_tokens=self.min_tokens,
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=_biases(self.logit_bias),
            # OpenAI's seeds are signed.
            seed=None if self.seed is None else self.seed % 2**64,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop),
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            n=self.n,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            skip_special_tokens=self.skip_special_tokens,
            include_stop=self.include_stop_str_in_output or self.no_stop_trim,
            structured=grammar,
        ).to_message()
        for name in _MODEL_HAS_DEFAULTS:
            if name not in own:
                message.ClearField(name)
        return message


def _biases(named: dict[str, float]) -> dict[int, float]:
    for name in named:
        if not (name.isascii() and name.isdigit() and len(name) < 10):
            raise InvalidRequest(f"logit_bias[{name[:40]!r}] names no token; its keys are token ids, as strings")
    return {int(name): bias for name, bias in named.items()}
