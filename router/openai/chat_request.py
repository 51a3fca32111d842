"""ChatRequest: the body of POST /v1/chat/completions, and the request to the core that it stands for."""

import json
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from coatcheck.proto.errors import InvalidRequest
from coatcheck.proto.grammar import Grammar
from coatcheck.proto.stubs.coatcheck_pb2 import Chat, ChatMessage, GenerateRequest, ToolCall
from coatcheck.router.event_loop.message_limits import MOST_MESSAGES, MOST_TOOLS
from coatcheck.router.openai.sampling_fields import Body, Count, SamplingFields
from coatcheck.router.openai.tool_parser import Form
from coatcheck.router.openai.tools import Function, NamedTool, Tool, call_of, some_calls, strict_calls


class TextPart(Body):
    """The one kind of content part that a text model takes."""

    type: Literal["text"]
    text: str


class CalledFunction(Body):
    """What an assistant called."""

    name: str
    arguments: str = "{}"


class Called(Body):
    """One call in an assistant's message."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Body):
    """One turn."""

    neutral: ClassVar = {"annotations": ([],), "reasoning_content": ("",), "reasoning": ("",)}

    role: Annotated[str, Field(max_length=64)]
    content: str | Annotated[list[TextPart], Field(fail_fast=True, max_length=MOST_MESSAGES)] = ""
    name: str = ""
    tool_calls: Annotated[list[Called], Field(fail_fast=True, max_length=MOST_MESSAGES)] = Field(default_factory=list)
    tool_call_id: str = ""

    def message(self) -> ChatMessage:
        """As the core takes it."""
        text = self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        calls = [
            ToolCall(id=call.id, name=call.function.name, arguments=call.function.arguments or "{}")
            for call in self.tool_calls
        ]
        return ChatMessage(
            role=self.role, content=text, name=self.name, tool_calls=calls, tool_call_id=self.tool_call_id
        )


class ChatRequest(SamplingFields):
    """With tool_choice `required` or a name the call is structured output; with `auto` it is found in the text."""

    neutral: ClassVar = {
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

    messages: Annotated[list[Message], Field(fail_fast=True, max_length=MOST_MESSAGES)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: Count | None = None
    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MOST_TOOLS)] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool = True
    add_generation_prompt: bool = True
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    reasoning_effort: str | None = None

    @property
    def called(self) -> str:
        """ "" when no tool may be called, "auto", "required", or "named"."""
        if not self.tools or self.tool_choice == "none":
            return ""
        if isinstance(self.tool_choice, NamedTool):
            return "named"
        return self.tool_choice or "auto"

    @property
    def named(self) -> str:
        """The function that must be called, if it is one."""
        return self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else ""

    def message(self, request_id: str, form: Form) -> GenerateRequest:
        """To the core, for a model that writes calls in that form; raises InvalidRequest."""
        if self.top_logprobs is not None and not self.logprobs:
            raise InvalidRequest("top_logprobs needs logprobs; set logprobs to true")
        limits = {limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None}
        if len(limits) > 1:
            raise InvalidRequest("max_tokens and max_completion_tokens differ; send one of them")
        arguments = dict(self.chat_template_kwargs)
        if self.reasoning_effort is not None:
            arguments["reasoning_effort"] = self.reasoning_effort
        self._check_names()
        tools = self.tools if self.called else []
        return GenerateRequest(
            request_id=request_id,
            model=self.model,
            chat=chat_message(self.messages, tools, arguments, self.add_generation_prompt),
            sampling=self.sampling(
                limits.pop() if limits else None,
                (self.top_logprobs or 0) if self.logprobs else None,
                self.prompt_logprobs,
                self._grammar(form),
            ),
            cache_salt=self.cache_salt,
            priority=self.priority,
            session_id=self.session_id,
        )

    def _check_names(self) -> None:
        """Raises InvalidRequest for two functions of one name: a call could not say which one it means."""
        places: dict[str, int] = {}
        for place, tool in enumerate(self.tools):
            first = places.setdefault(tool.function.name, place)
            if first != place:
                raise InvalidRequest(
                    f"tools[{first}] and tools[{place}] are both named {tool.function.name!r}; give each function a "
                    "name of its own"
                )

    def _grammar(self, form: Form) -> Grammar | None:
        asked = self.grammar()
        if self.tool_choice not in (None, "none") and not self.tools:
            raise InvalidRequest("tool_choice needs tools; give them, or leave it out")
        functions = [tool.function for tool in self.tools]
        strict = self.called == "auto" and any(function.strict for function in functions)
        if self.called not in ("required", "named") and not strict:
            return asked
        if asked is not None:
            raise InvalidRequest("response_format and the like do not go with calls that must fit; keep one of them")
        if self.named:
            return call_of(self._function(self.named))
        if self.called == "required":
            return some_calls(functions, self.parallel_tool_calls)
        if form != "hermes":
            raise InvalidRequest(
                "this model does not mark its calls, so that a strict function cannot be kept to; set tool_choice to "
                "required or to its name, or leave strict out"
            )
        return strict_calls(functions)

    def constrained(self) -> list[tuple[str, Function]]:
        """The functions whose schemas are part of the grammar, and where the body has each."""
        found = [(f"tools[{place}].function", tool.function) for place, tool in enumerate(self.tools)]
        if self.called == "named":
            return [(place, function) for place, function in found if function.name == self.named]
        return found if self.called == "required" else [one for one in found if self.called and one[1].strict]

    def _function(self, name: str) -> Function:
        for tool in self.tools:
            if tool.function.name == name:
                return tool.function
        raise InvalidRequest(f"tool_choice names {name[:80]!r}, which is not among the tools")


def chat_message(
    messages: list[Message], tools: list[Tool], arguments: dict[str, Any], add_generation_prompt: bool
) -> Chat:
    """A conversation as the core takes it."""
    return Chat(
        messages=[message.message() for message in messages],
        add_generation_prompt=add_generation_prompt,
        tools=[json.dumps(tool.model_dump(exclude_none=True)) for tool in tools],
        template_arguments=json.dumps(arguments) if arguments else "",
    )
