"""MessagesRequest: the body of POST /v1/messages in Anthropic's form, and its translation to a ChatRequest."""

import json
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Field

from coatcheck.router.event_loop.message_limits import MAX_MESSAGES, MAX_TOOLS
from coatcheck.router.http.errors import UnsupportedThread
from coatcheck.router.openai.chat_request import ChatRequest
from coatcheck.router.openai.request_body import validate_fields
from coatcheck.router.openai.sampling_fields import Count, RequestBody

_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
# Fields for caching, billing and tracing; the answer is the same without them.
_IGNORED = frozenset({
    "cache_control", "metadata", "service_tier", "inference_geo", "speed", "diagnostics", "user_profile_id",
    "workspace_id", "context_management", "betas", "anthropic_beta", "anthropic_version",
})  # fmt: skip
_BILLING: Final = "x-anthropic-billing-header:"


class Block(RequestBody):
    """A part of a message. Other fields, such as `cache_control`, have no effect."""

    drops_unknown_fields: ClassVar = True


class TextBlock(Block):
    type: Literal["text"]
    text: str


class ThinkingBlock(Block):
    """The reasoning of an earlier answer. The signature is not checked."""

    type: Literal["thinking"]
    thinking: str = ""


class OmittedBlock(Block):
    """A block that is left out of the prompt: reasoning that only Anthropic can decrypt, or a tool that Anthropic's
    servers ran. Results of a search are also in the answer's text."""

    type: Literal["redacted_thinking", "server_tool_use", "web_search_tool_result", "web_fetch_tool_result"]


class ToolUseBlock(Block):
    """A tool call in an earlier message of the assistant."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any] = Field(default_factory=dict)


class TextSource(Block):
    """The text of a document."""

    type: Literal["text"]
    data: str

    @property
    def text(self) -> str:
        return self.data


class ContentSource(Block):
    """The text of a document, as a text or as blocks."""

    type: Literal["content"]
    content: str | Annotated[list[TextBlock], Field(fail_fast=True, max_length=MAX_MESSAGES)]

    @property
    def text(self) -> str:
        return _join(self.content)


class DocumentBlock(Block):
    """A document of plain text. The prompt has its title, then its `context` (a description), then its text."""

    type: Literal["document"]
    source: Annotated[TextSource | ContentSource, Field(discriminator="type")]
    title: str = ""
    context: str = ""

    @property
    def text(self) -> str:
        return "\n".join(filter(None, (self.title, self.context, self.source.text)))


class SearchResultBlock(Block):
    """A result of a search that the client ran."""

    type: Literal["search_result"]
    source: str
    title: str
    content: Annotated[list[TextBlock], Field(fail_fast=True, max_length=MAX_MESSAGES)]

    @property
    def text(self) -> str:
        return "\n".join([f"{self.title} ({self.source})", *(block.text for block in self.content)])


class ToolReferenceBlock(Block):
    """A tool that a tool search of the client found. The prompt has all tools, so the name is enough."""

    type: Literal["tool_reference"]
    tool_name: str

    @property
    def text(self) -> str:
        return self.tool_name


ShownBlock = Annotated[TextBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock, Field(discriminator="type")]


class ToolResultBlock(Block):
    """The result of a tool. Chat templates have no field for `is_error`; clients write the error into `content`. If
    `is_error` is set and `content` is empty, the result is the text "error": without it a failure would look like a
    success."""

    type: Literal["tool_result"]
    tool_use_id: str
    content: str | Annotated[list[ShownBlock], Field(fail_fast=True, max_length=MAX_MESSAGES)] = ""
    is_error: bool | None = None

    @property
    def text(self) -> str:
        return _join(self.content) or ("error" if self.is_error else "")


AnyBlock = Annotated[
    TextBlock | DocumentBlock | SearchResultBlock | ThinkingBlock | OmittedBlock | ToolUseBlock | ToolResultBlock,
    Field(discriminator="type"),
]


class InputMessage(RequestBody):
    drops_unknown_fields: ClassVar = True

    role: Literal["user", "assistant", "system"]
    content: str | Annotated[list[AnyBlock], Field(fail_fast=True, max_length=MAX_MESSAGES)]

    def to_chat(self) -> Iterator[dict[str, Any]]:
        """The chat messages: one for each tool result, then one for all other blocks. Anthropic's API requires tool
        results to come first."""
        blocks: list[Any] = [] if isinstance(self.content, str) else self.content
        for block in blocks:
            if isinstance(block, ToolResultBlock):
                yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": block.text}
        texts = [block for block in blocks if isinstance(block, TextBlock | DocumentBlock | SearchResultBlock)]
        message: dict[str, Any] = {
            "role": self.role, "content": self.content if isinstance(self.content, str) else _join(texts),
        }  # fmt: skip
        message["reasoning_content"] = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
        message["tool_calls"] = [
            {"id": block.id, "function": {"name": block.name, "arguments": json.dumps(block.input)}}
            for block in blocks
            if isinstance(block, ToolUseBlock)
        ]
        if isinstance(self.content, str) or texts or message["reasoning_content"] or message["tool_calls"]:
            yield message


class ClientTool(RequestBody):
    """A function that the client runs. Anthropic's own tools, which have another type, are refused."""

    drops_unknown_fields: ClassVar = True

    type: Literal["custom"] = "custom"
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,128}$")]
    description: str | None = None
    input_schema: dict[str, Any] = Field(default_factory=dict)
    strict: bool | None = None

    def to_chat(self) -> dict[str, Any]:
        function = {"name": self.name, "description": self.description, "parameters": self.input_schema}
        return {"type": "function", "function": function | ({"strict": True} if self.strict else {})}


class ToolChoice(RequestBody):
    type: Literal["auto", "any", "tool", "none"]
    name: str = ""
    disable_parallel_tool_use: bool = False


class Thinking(RequestBody):
    """Whether the model reasons (for chat templates with a switch), and for how many tokens at most. "adaptive": it may
    reason, and decides for itself."""

    drops_unknown_fields: ClassVar = True

    type: Literal["enabled", "disabled", "adaptive"]
    budget_tokens: Count | None = None


class JsonFormat(RequestBody):
    drops_unknown_fields: ClassVar = True

    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(RequestBody):
    effort: str | None = None
    format: JsonFormat | None = None


class CountTokensRequest(RequestBody):
    """The body of POST /v1/messages/count_tokens, and what both bodies share."""

    accepted_values: ClassVar = {"mcp_servers": ([],)}
    ignored_fields: ClassVar = _IGNORED

    model: str
    messages: Annotated[list[InputMessage], Field(fail_fast=True, max_length=MAX_MESSAGES, min_length=1)]
    system: str | Annotated[list[TextBlock], Field(fail_fast=True, max_length=MAX_MESSAGES)] = ""
    tools: Annotated[list[ClientTool], Field(fail_fast=True, max_length=MAX_TOOLS)] = Field(default_factory=list)
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: JsonFormat | None = None
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    thread: Any = Field(None, description="Not supported: send the whole conversation.")

    def to_chat(self) -> ChatRequest:
        """Translates the body. Raises InvalidRequest."""
        if self.thread is not None:
            raise UnsupportedThread
        return validate_fields(_Chat, self._chat_fields())

    def _chat_fields(self) -> dict[str, Any]:
        system = _join_system(self.system)
        messages = [{"role": "system", "content": system}] if system else []
        for message in self.messages:
            messages += message.to_chat()
        last = messages[-1] if messages else {}
        fields: dict[str, Any] = {
            "model": self.model,
            "messages": messages,
            "tools": [tool.to_chat() for tool in self.tools],
            "chat_template_kwargs": self.chat_template_kwargs,
            # The answer continues a last message of the assistant.
            "continue_final_message": last.get("role") == "assistant"
            and bool(last["content"].strip())
            and not last["tool_calls"],
        }
        if self.tool_choice is not None:
            fields["parallel_tool_calls"] = not self.tool_choice.disable_parallel_tool_use
            named = {"type": "function", "function": {"name": self.tool_choice.name}}
            fields["tool_choice"] = named if self.tool_choice.type == "tool" else _CHOICES[self.tool_choice.type]
        if self.thinking is not None:
            budget = self.thinking.budget_tokens if self.thinking.type == "enabled" else None
            fields["thinking"] = {"type": self.thinking.type, "budget_tokens": budget}
        config = self.output_config or OutputConfig()
        if config.effort is not None:
            fields["reasoning_effort"] = config.effort
        if (form := config.format or self.output_format) is not None:
            schema = {"name": "answer", "schema": form.schema_}
            fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        return fields


def _join_system(system: str | Sequence[TextBlock]) -> str:
    """The system prompt without the line in which Claude Code states its version and a hash. The line is a block of its
    own. The hash may differ in each request; with it the prompts would share no prefix."""
    if isinstance(system, str):
        return system
    texts = [one.text.partition("\n")[2] if one.text.startswith(_BILLING) else one.text for one in system]
    return "\n".join(text for text, one in zip(texts, system, strict=True) if text or not one.text)


class MessagesRequest(CountTokensRequest):
    max_tokens: Count
    stop_sequences: Annotated[list[str], Field(fail_fast=True)] = Field(default_factory=list)
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: Count | None = None
    cache_salt: str = ""

    def _chat_fields(self) -> dict[str, Any]:
        return super()._chat_fields() | {
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences,
            "stream": self.stream,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "cache_salt": self.cache_salt,
        }


class _Chat(ChatRequest):
    @property
    def sent_names(self) -> dict[str, str]:
        """See SamplingFields."""
        return {
            "stop": "stop_sequences",
            "response_format.json_schema.schema": "output_config.format.schema",
        }

    def schema_field(self, index: int) -> str:
        """See ChatRequest."""
        return f"tools[{index}].input_schema"


def _join(content: str | Sequence[ShownBlock]) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)
