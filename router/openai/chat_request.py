"""ChatRequest: the body of POST /v1/chat/completions, and how it becomes a GenerateRequest."""

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from coatcheck.proto.errors import InvalidRequest
from coatcheck.proto.grammar import Grammar
from coatcheck.proto.stubs.coatcheck_pb2 import Chat, ChatMessage, GenerateRequest, ToolCall
from coatcheck.router.event_loop.message_limits import MAX_MESSAGES, MAX_TOOLS
from coatcheck.router.openai.sampling_fields import Count, RequestBody, SamplingFields
from coatcheck.router.openai.tool_parser import ToolCallFormat
from coatcheck.router.openai.tools import (
    Function,
    NamedTool,
    Tool,
    named_call_grammar,
    required_calls_grammar,
    strict_calls_grammar,
)


class TextPart(RequestBody):
    """The only kind of content part that is served."""

    type: Literal["text"]
    text: str


class CalledFunction(RequestBody):
    name: str
    arguments: str = "{}"


class AssistantToolCall(RequestBody):
    """A tool call in an earlier message of the assistant."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(RequestBody):
    accepted_values: ClassVar = {"annotations": ([],), "reasoning_content": ("",), "reasoning": ("",)}

    role: Annotated[str, Field(max_length=64)]
    content: str | Annotated[list[TextPart], Field(fail_fast=True, max_length=MAX_MESSAGES)] = ""
    name: str = ""
    tool_calls: Annotated[list[AssistantToolCall], Field(fail_fast=True, max_length=MAX_MESSAGES)] = Field(
        default_factory=list
    )
    tool_call_id: str = ""

    def to_proto(self) -> ChatMessage:
        text = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        calls = [
            ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments or "{}")
            for call in self.tool_calls
        ]
        return ChatMessage(
            role=self.role, content=text, name=self.name, tool_calls=calls, tool_call_id=self.tool_call_id
        )


class ChatRequest(SamplingFields):
    """With tool_choice "required" or the name of a function a grammar constrains the calls. With "auto" calls are found
    in the text, and a grammar constrains only those of strict functions."""

    accepted_values: ClassVar = {
        "modalities": (["text"],),
        "continue_final_message": (False,),
        "add_special_tokens": (False,),
        "echo": (False,),
        "include_reasoning": (True,),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "verbosity": ("medium",),
        "return_prompt_text": (False,),
    }

    messages: Annotated[list[Message], Field(fail_fast=True, max_length=MAX_MESSAGES)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Count | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    reasoning_effort: str | None = None

    @property
    def tool_mode(self) -> Literal["none", "auto", "required", "named"]:
        """Whether tools may or must be called."""
        if not self.tools or self.tool_choice == "none":
            return "none"
        if isinstance(self.tool_choice, NamedTool):
            return "named"
        return self.tool_choice or "auto"

    @property
    def named_function(self) -> str:
        """The function that tool_choice names, or ""."""
        return self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else ""

    def to_generate_request(self, request_id: str, call_format: ToolCallFormat) -> GenerateRequest:
        """`call_format`: how the model writes tool calls. Raises InvalidRequest."""
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs; set logprobs to true")
        limits = {limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None}
        if len(limits) > 1:
            raise InvalidRequest("max_tokens and max_completion_tokens differ; send one of them")
        arguments = dict(self.chat_template_kwargs)
        if self.reasoning_effort is not None:
            arguments["reasoning_effort"] = self.reasoning_effort
        self._check_tool_names()
        tools = self.tools if self.tool_mode != "none" else []
        sampling = self.to_sampling_params(
            limits.pop() if limits else None,
            (self.top_logprobs or 0) if self.logprobs else None,
            self.prompt_logprobs,
            self._select_grammar(call_format),
        )
        chat = to_chat_proto(self.messages, tools, arguments, self.add_generation_prompt)
        return self.make_generate_request(request_id, sampling, chat=chat)

    def _check_tool_names(self) -> None:
        """Raises InvalidRequest for two functions of the same name: a call could not tell them apart."""
        indices: dict[str, int] = {}
        for index, tool in enumerate(self.tools):
            first = indices.setdefault(tool.function.name, index)
            if first != index:
                raise InvalidRequest(
                    f"tools[{first}] and tools[{index}] are both named {tool.function.name!r}; give each function its "
                    "own name"
                )

    def _select_grammar(self, call_format: ToolCallFormat) -> Grammar | None:
        """The grammar of the tool calls or of the fields for structured output."""
        grammar = self.to_grammar()
        if self.tool_choice not in (None, "none") and not self.tools:
            raise InvalidRequest("tool_choice needs tools; give them, or leave it out")
        constrained = [function for _, function in self.constrained_functions()]
        if self.tool_mode == "named" and not constrained:
            raise InvalidRequest(f"tool_choice names {self.named_function[:80]!r}, which is not among the tools")
        if not constrained:
            return grammar
        if grammar is not None:
            raise InvalidRequest(
                "structured output cannot be combined with tool calls that are required or strict; keep one of them"
            )
        if self.tool_mode == "named":
            return named_call_grammar(constrained[0])
        if self.tool_mode == "required":
            return required_calls_grammar(constrained, self.parallel_tool_calls)
        if call_format != "hermes":
            raise InvalidRequest(
                "this model does not mark its tool calls, so strict functions cannot be enforced; set tool_choice to "
                "required or to a function, or leave strict out"
            )
        return strict_calls_grammar([tool.function for tool in self.tools])

    def constrained_functions(self) -> list[tuple[str, Function]]:
        """(path in the body, function) of the functions whose schemas are part of the grammar."""
        found = [(f"tools[{index}].function", tool.function) for index, tool in enumerate(self.tools)]
        match self.tool_mode:
            case "none":
                return []
            case "auto":
                return [(path, function) for path, function in found if function.strict]
            case "required":
                return found
            case "named":
                return [(path, function) for path, function in found if function.name == self.named_function]


def to_chat_proto(
    messages: list[Message], tools: list[Tool], arguments: dict[str, Any], add_generation_prompt: bool
) -> Chat:
    return Chat(
        messages=[message.to_proto() for message in messages],
        add_generation_prompt=add_generation_prompt,
        tools=[json.dumps(tool.model_dump(exclude_none=True)) for tool in tools],
        template_arguments=json.dumps(arguments) if arguments else "",
    )
