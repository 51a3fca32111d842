"""ResponsesRequest: the body of POST /v1/responses, and its translation to a ChatRequest."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field, PrivateAttr

from coatcheck.proto.errors import InvalidParameter
from coatcheck.proto.sampling import MAX_LOGPROBS
from coatcheck.router.event_loop.message_limits import MAX_MESSAGES, MAX_TOOLS
from coatcheck.router.openai.chat_request import ChatRequest
from coatcheck.router.openai.request_body import validate_fields
from coatcheck.router.openai.sampling_fields import IGNORED_FIELDS, Count, ReasoningTokens, RequestBody, TokenId
from coatcheck.router.responses.input_items import ChatFields, InputItem, with_instructions
from coatcheck.router.responses.responses_tools import (
    HostedTool,
    ResponsesTool,
    ToolField,
    flat_name,
    names_in_namespaces,
    to_chat_tools,
    tool_fields,
)


class NamedToolChoice(RequestBody):
    drops_unknown_fields: ClassVar = True

    type: Literal["function", "custom"]
    name: str
    namespace: str | None = None


class AllowedToolsChoice(RequestBody):
    """Offers the model only some of the tools."""

    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedToolChoice], Field(fail_fast=True, max_length=MAX_TOOLS, min_length=1)]


class ReasoningOptions(RequestBody):
    """`summary` has no effect: reasoning is returned as it is."""

    drops_unknown_fields: ClassVar = True

    effort: str | None = None
    summary: str | None = None


class TextFormat(RequestBody):
    """`name` and `description` have no effect, and the schema is always enforced."""

    type: Literal["text", "json_object", "json_schema"]
    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")
    strict: bool | None = None


class Text(RequestBody):
    format: TextFormat | None = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponsesStreamOptions(RequestBody):
    accepted_values: ClassVar = {"include_obfuscation": (True, False)}


# Only log-probabilities have an effect. The other values ask for details of hosted tools, images and encrypted
# reasoning, which no response of this server has.
_LOGPROBS: Final = "message.output_text.logprobs"
Included = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]


class ResponsesRequest(RequestBody):
    """`previous_response_id`: the chat continues after that response. `store`: the response is kept in the
    ResponseStore. `include`: asks for log-probabilities. `top_logprobs`: how many, beside each token's own. The fields
    from `top_k` on are vLLM's."""

    accepted_values: ClassVar = {
        "background": (False,),
        "truncation": ("disabled",),
        "enable_response_messages": (False,),
        "previous_input_messages": ([],),
    }
    ignored_fields: ClassVar = (IGNORED_FIELDS - {"store", "metadata", "user"}) | {"max_tool_calls", "client_metadata"}

    model: str = ""
    input: str | Annotated[list[InputItem], Field(fail_fast=True, max_length=MAX_MESSAGES, min_length=1)]
    instructions: str = ""
    previous_response_id: str | None = None
    store: bool = True
    include: Annotated[list[Included], Field(fail_fast=True, max_length=16)] = Field(default_factory=list)
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] = 0
    stream: bool = False
    stream_options: ResponsesStreamOptions | None = None
    max_output_tokens: Count | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: Annotated[list[ResponsesTool], Field(fail_fast=True, max_length=MAX_TOOLS)] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | AllowedToolsChoice | None = None
    parallel_tool_calls: bool = True
    text: Text | None = None
    reasoning: ReasoningOptions | None = None
    metadata: Annotated[dict[str, str], Field(max_length=16)] = Field(default_factory=dict)
    user: str | None = None
    top_k: Annotated[int | None, Field(ge=-1, lt=2**31)] = None
    min_p: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    seed: Annotated[int | None, Field(ge=-(2**63), lt=2**64)] = None
    stop: str | Annotated[list[str], Field(fail_fast=True)] = Field(default_factory=list)
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True)] = Field(default_factory=list)
    logit_bias: dict[str, float] = Field(default_factory=dict)
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    max_reasoning_tokens: ReasoningTokens | None = None
    include_reasoning: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    session_id: str = ""
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] = 0
    cache_salt: str = ""

    @property
    def has_logprobs(self) -> bool:
        """Whether the response has log-probabilities."""
        return _LOGPROBS in self.include

    @property
    def namespaces(self) -> dict[str, tuple[str, str]]:
        """See names_in_namespaces."""
        return names_in_namespaces(self.tools)

    def to_chat(self, messages: Sequence[ChatFields]) -> ChatRequest:
        """Translates the body. `messages`: those of the previous responses, then those of `input`. Raises
        InvalidRequest."""
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": with_instructions(self.instructions, messages),
            "stream": self.stream,
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "tools": to_chat_tools(self.tools),
            "parallel_tool_calls": self.parallel_tool_calls,
            "tool_choice": self.tool_choice,
            "logprobs": self.has_logprobs,
            "top_logprobs": self.top_logprobs if self.has_logprobs else None,
            "verbosity": self.text.verbosity if self.text is not None else None,
            **{name: getattr(self, name) for name in _PASSED_ON},
        }
        if isinstance(self.tool_choice, NamedToolChoice):
            fields["tool_choice"] = _named(self.tool_choice)
        elif isinstance(self.tool_choice, AllowedToolsChoice):
            allowed = {"mode": self.tool_choice.mode, "tools": [_named(tool) for tool in self.tool_choice.tools]}
            fields["tool_choice"] = {"type": "allowed_tools", "allowed_tools": allowed}
        if self.reasoning is not None:
            fields["reasoning_effort"] = self.reasoning.effort
        if (form := self._format()) is not None and form.type == "json_schema":
            if form.schema_ is None:
                raise InvalidParameter("text.format.schema", "is missing; give the schema, or use json_object")
            fields["response_format"] = {"type": form.type, "json_schema": {"schema": form.schema_}}
        elif form is not None:
            fields["response_format"] = {"type": form.type}
        chat = validate_fields(_Chat, fields)
        chat._tool_fields = tool_fields(self.tools)
        return chat

    def settings(self) -> dict[str, Any]:
        """The fields of the response object that repeat the request."""
        choice, form = self.tool_choice or "auto", self._format()
        text: dict[str, Any] = {
            "format": form.model_dump(by_alias=True, exclude_unset=True) if form else {"type": "text"}
        }
        if self.text is not None and self.text.verbosity is not None:
            text["verbosity"] = self.text.verbosity
        return {
            "instructions": self.instructions or None,
            "max_output_tokens": self.max_output_tokens,
            "metadata": self.metadata,
            "parallel_tool_calls": self.parallel_tool_calls,
            "previous_response_id": self.previous_response_id,
            "reasoning": {"effort": self.reasoning.effort if self.reasoning else None, "summary": None},
            "store": self.store,
            "temperature": self.temperature,
            "text": text,
            "tool_choice": choice.model_dump(exclude_none=True)
            if isinstance(choice, RequestBody)
            else choice or "auto",
            "tools": [tool.model_dump() for tool in self.tools if not isinstance(tool, HostedTool)],
            "top_logprobs": self.top_logprobs,
            "top_p": self.top_p,
            "truncation": "disabled",
            "background": False,
            "user": self.user,
        }

    def _format(self) -> TextFormat | None:
        return self.text.format if self.text is not None else None


def _named(tool: NamedToolChoice) -> dict[str, Any]:
    """A tool in the form of a chat's tool_choice."""
    return {"type": tool.type, tool.type: {"name": flat_name(tool.namespace, tool.name)}}


# Fields that have the same name and meaning in a ChatRequest.
_PASSED_ON: Final = (
    "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "seed", "stop", "stop_token_ids",
    "logit_bias", "ignore_eos", "include_reasoning", "session_id",
    "include_stop_str_in_output", "skip_special_tokens", "max_reasoning_tokens", "chat_template_kwargs", "priority",
    "cache_salt",
)  # fmt: skip


class _Chat(ChatRequest):
    _tool_fields: list[ToolField] = PrivateAttr(default_factory=list)

    @property
    def sent_names(self) -> dict[str, str]:
        """See SamplingFields."""
        return {
            "max_tokens": "max_output_tokens",
            "logprobs": "top_logprobs",
            "response_format.json_schema.schema": "text.format.schema",
        }

    def tool_field(self, index: int) -> str:
        """See ChatRequest."""
        return self._tool_fields[index].tool

    def schema_field(self, index: int) -> str:
        """See ChatRequest."""
        return self._tool_fields[index].schema
