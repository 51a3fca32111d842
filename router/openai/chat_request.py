"""ChatRequest: the body of POST /v1/chat/completions, and how it becomes a GenerateRequest."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import AliasChoices, BeforeValidator, Discriminator, Field, Tag, model_validator

from coatcheck.proto.errors import InvalidParameter, InvalidRequest
from coatcheck.proto.grammar import Grammar
from coatcheck.proto.stubs.coatcheck_pb2 import Chat, ChatMessage, GenerateRequest, ToolCall
from coatcheck.router.event_loop.message_limits import MAX_MESSAGES, MAX_TOOLS
from coatcheck.router.http.errors import InvalidBody
from coatcheck.router.openai.sampling_fields import Count, CountOrAll, RequestBody, SamplingFields
from coatcheck.router.openai.tools import (
    AllowedTools,
    AnyTool,
    Function,
    NamedCustom,
    NamedFunction,
    type_or_function,
)
from coatcheck.router.parsing.output_parser import ParsingPlan, ToolMode
from coatcheck.router.text.reasoning_variables import ReasoningSettings, ReasoningVariables
from coatcheck.router.tool_grammars.call_grammar import UnenforcedParameters, named_call_grammar, required_calls_grammar
from coatcheck.router.tool_grammars.input_grammar import INPUT, CustomFunction, check_definitions
from coatcheck.router.tool_grammars.strict_calls import strict_calls_grammar

_LONG_GRAMMAR: Final = 1024  # characters


class TextPart(RequestBody):
    """A content part with text, in each form that the APIs have. Parts of the types "thinking" and "reasoning" are
    reasoning. Other fields, such as `cache_control`, have no effect."""

    drops_unknown_fields: ClassVar = True

    type: Literal["text", "input_text", "output_text", "refusal", "thinking", "reasoning"]
    text: Annotated[str, Field(validation_alias=AliasChoices("text", "refusal", "thinking"))]

    @model_validator(mode="before")
    @classmethod
    def _accept_text(cls, part: Any) -> Any:
        """A bare string in a list of parts is a text, as in vLLM."""
        return {"type": "text", "text": part} if isinstance(part, str) else part


def _as_json(arguments: Any) -> Any:
    """An object or a list as JSON text, and no arguments as an empty object; anything else unchanged."""
    if arguments is None:
        return "{}"
    return json.dumps(arguments) if isinstance(arguments, dict | list) else arguments


class CalledFunction(RequestBody):
    """`arguments` is JSON text; clients that keep calls parsed send the object itself."""

    drops_unknown_fields: ClassVar = True

    name: str
    arguments: Annotated[str, BeforeValidator(_as_json)] = "{}"


class FunctionCall(RequestBody):
    """A tool call in an earlier message of the assistant. Other fields, such as `index`, have no effect."""

    drops_unknown_fields: ClassVar = True

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class CalledTool(RequestBody):
    drops_unknown_fields: ClassVar = True

    name: str
    input: str


class CustomCall(RequestBody):
    """A call of a custom tool in an earlier message of the assistant."""

    drops_unknown_fields: ClassVar = True

    id: str = ""
    type: Literal["custom"]
    custom: CalledTool

    @property
    def function(self) -> CalledFunction:
        """The call in the form in which the model made it."""
        return CalledFunction(name=self.custom.name, arguments=input_as_arguments(self.custom.input))


def input_as_arguments(text: str) -> str:
    """The input of a custom tool as the arguments of its function, in JSON."""
    return json.dumps({INPUT: text}, ensure_ascii=False)


AssistantToolCall = Annotated[
    Annotated[FunctionCall, Tag("function")] | Annotated[CustomCall, Tag("custom")], Discriminator(type_or_function)
]


class Message(RequestBody):
    """A message of a chat. Unknown fields have no effect: clients send back messages that other servers have made.
    `refusal` is OpenAI's answer in place of `content`. `function_call` is the older form of one of `tool_calls`, and a
    message of the role "function" is its result."""

    drops_unknown_fields: ClassVar = True

    role: Annotated[str, Field(max_length=64)]
    content: str | Annotated[list[TextPart], Field(fail_fast=True, max_length=MAX_MESSAGES)] = ""
    name: str = ""
    tool_calls: Annotated[list[AssistantToolCall], Field(fail_fast=True, max_length=MAX_MESSAGES)] = Field(
        default_factory=list
    )
    tool_call_id: str = ""
    refusal: str = ""
    function_call: CalledFunction | None = None
    reasoning_content: str = ""
    reasoning: str = ""

    def to_proto(self) -> ChatMessage:
        parts = [] if isinstance(self.content, str) else self.content
        text = self.content if isinstance(self.content, str) else _join(parts, is_reasoning=False)
        called = [(call.id, call.function) for call in self.tool_calls]
        if self.function_call is not None:
            called.append(("", self.function_call))
        calls = [
            ToolCall(id=call_id, name=function.name, arguments=function.arguments or "{}")
            for call_id, function in called
        ]
        return ChatMessage(
            role="tool" if self.role == "function" else self.role,
            content=text or self.refusal,
            name=self.name,
            tool_calls=calls,
            tool_call_id=self.tool_call_id,
            reasoning_content=self.reasoning_content or self.reasoning or _join(parts, is_reasoning=True),
        )


def _join(parts: Sequence[TextPart], *, is_reasoning: bool) -> str:
    return "\n".join(part.text for part in parts if (part.type in ("thinking", "reasoning")) == is_reasoning)


class ThinkingSwitch(RequestBody):
    """The field `thinking` of DeepSeek, GLM, Kimi and MiniMax: whether the model reasons. "adaptive": it may reason."""

    drops_unknown_fields: ClassVar = True

    type: Literal["enabled", "disabled", "adaptive", "auto"]
    budget_tokens: Count | None = None


class ReasoningFields(RequestBody):
    """The field `reasoning` of OpenRouter: how much the model reasons. `exclude`: the response lacks the reasoning."""

    drops_unknown_fields: ClassVar = True

    effort: str | None = None
    enabled: bool | None = None
    max_tokens: Count | None = None
    exclude: bool = False


class ChatRequest(SamplingFields):
    """With the tool_choice "required", or with a function's name, a grammar constrains the calls. With "auto" the
    router finds the calls in the text, and a grammar constrains only those of strict functions."""

    accepted_values: ClassVar = {
        "modalities": (["text"],),
        "add_special_tokens": (False,),
        "stream_reasoning": (True,),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "return_prompt_text": (False,),
    }

    messages: Annotated[list[Message], Field(fail_fast=True, max_length=MAX_MESSAGES)]
    max_tokens: Count | None = None
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    top_logprobs: CountOrAll | None = None
    tools: Annotated[list[AnyTool], Field(fail_fast=True, max_length=MAX_TOOLS)] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | NamedFunction | NamedCustom | AllowedTools | None = None
    parallel_tool_calls: bool = True
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str = ""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    reasoning_effort: str | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    enable_thinking: bool | None = None
    thinking: ThinkingSwitch | None = None
    reasoning: ReasoningFields | None = None
    echo: bool = False  # the answer begins with the last message, if that is the assistant's
    include_reasoning: bool = True
    separate_reasoning: bool = True

    @property
    def tool_mode(self) -> ToolMode:
        """Whether tools may or must be called."""
        if not self.tools or self.tool_choice == "none":
            return "none"
        if isinstance(self.tool_choice, NamedFunction | NamedCustom):
            return "named"
        if isinstance(self.tool_choice, AllowedTools):
            return self.tool_choice.allowed_tools.mode
        return self.tool_choice or "auto"

    @property
    def offered_tools(self) -> list[AnyTool]:
        """The tools that the model sees and may call."""
        if self.tool_mode == "none":
            return []
        if not isinstance(self.tool_choice, AllowedTools):
            return self.tools
        allowed = {tool.name for tool in self.tool_choice.allowed_tools.tools}
        return [tool for tool in self.tools if tool.function.name in allowed]

    @property
    def named_function(self) -> str:
        """The function or custom tool that tool_choice names, or ""."""
        return self.tool_choice.name if isinstance(self.tool_choice, NamedFunction | NamedCustom) else ""

    @property
    def custom_names(self) -> frozenset[str]:
        """The names of the custom tools."""
        return frozenset(tool.function.name for tool in self.tools if isinstance(tool.function, CustomFunction))

    @property
    def has_long_grammar(self) -> bool:
        """Whether translating the grammars of the custom tools may take over 10 ms."""
        grammars = (getattr(tool.function, "input_grammar", None) for tool in self.offered_tools)
        return sum(len(grammar.definition) for grammar in grammars if grammar is not None) > _LONG_GRAMMAR

    @property
    def sent_names(self) -> dict[str, str]:
        """See SamplingFields."""
        limit = "max_tokens" if self.max_tokens is not None else "max_completion_tokens"
        return {"logprobs": "top_logprobs", "max_tokens": limit}

    @model_validator(mode="after")
    def _copy_reasoning_fields(self) -> Self:
        """Copies `thinking` and `reasoning` into the fields of OpenAI, Qwen and vLLM that the body does not set."""
        reasoning, switch = self.reasoning or ReasoningFields(), self.thinking
        if self.reasoning_effort is None:
            self.reasoning_effort = reasoning.effort
        if self.enable_thinking is None and switch is not None and switch.type != "auto":
            self.enable_thinking = switch.type != "disabled"
        if self.enable_thinking is None:
            self.enable_thinking = reasoning.enabled
        limits = (self.max_reasoning_tokens, switch.budget_tokens if switch is not None else None, reasoning.max_tokens)
        self.max_reasoning_tokens = next((limit for limit in limits if limit is not None), None)
        self.include_reasoning = self.include_reasoning and not reasoning.exclude
        return self

    def template_arguments(self, variables: ReasoningVariables) -> dict[str, Any]:
        """The variables of the chat template that the request sets. `variables`: those of the template for reasoning.
        The fields `reasoning_effort` and `verbosity` override chat_template_kwargs."""
        is_adaptive = self.thinking is not None and self.thinking.type == "adaptive"
        settings = ReasoningSettings(self.reasoning_effort, self.enable_thinking, is_adaptive, self.reasoning_limit)
        verbosity = {"verbosity": self.verbosity} if self.verbosity is not None else {}
        return variables.switches(settings) | self.chat_template_kwargs | variables.effort(settings) | verbosity

    @property
    def echoed(self) -> str:
        """The text of the last message that `echo` puts before the answer; else ""."""
        last = self.messages[-1] if self.echo and self.messages else None
        return last.to_proto().content if last is not None and last.role == "assistant" else ""

    def to_generate_request(
        self,
        request_id: str,
        plan: ParsingPlan,
        grammar_prefix: str,
        special_ids: Mapping[str, int],
        arguments: dict[str, Any],
        *,
        shows_tools: bool,
    ) -> GenerateRequest:
        """`plan`: how the answer will be parsed. `grammar_prefix`: rules for what may come before structured output.
        `special_ids`: the ids of special tokens by their text. `arguments`: see template_arguments. `shows_tools`:
        whether the chat template shows tools. If it does not, a required or named call is still possible: the grammar
        gives its form, and the prompt has no tools. Raises InvalidRequest.
        """
        if self.top_logprobs and not self.logprobs:
            raise InvalidParameter("top_logprobs", "needs logprobs; set logprobs to true")
        limits = {limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None}
        if len(limits) > 1:
            raise InvalidParameter("max_tokens", "and max_completion_tokens differ; send one of them")
        self._check_tool_names()
        sampling = self.to_sampling_params(
            limits.pop() if limits else None,
            (self.top_logprobs or 0) if self.logprobs else None,
            self.prompt_logprobs,
            self._select_grammar(plan, grammar_prefix, special_ids),
        )
        if plan.keeps_special_tokens:
            sampling.skip_special_tokens = False
        shown = self.offered_tools if shows_tools or self.tool_mode == "auto" else []
        chat = to_chat_proto(self.messages, shown, arguments, self.add_generation_prompt)
        chat.chat_template = self.chat_template
        if self.continue_final_message:
            if "add_generation_prompt" in self.model_fields_set and self.add_generation_prompt:
                raise InvalidParameter(
                    "continue_final_message", "does not go with add_generation_prompt; set one of them"
                )
            chat.continue_final_message = True
        return self.make_generate_request(request_id, sampling, chat=chat)

    def _check_tool_names(self) -> None:
        """Raises InvalidRequest for two functions of the same name: a call could not tell them apart."""
        indices: dict[str, int] = {}
        for index, tool in enumerate(self.tools):
            first = indices.setdefault(tool.function.name, index)
            if first != index:
                fields = f"{self.tool_field(first)} and {self.tool_field(index)}"
                raise InvalidRequest(f"{fields} are both named {tool.function.name!r}; give each function its own name")

    def _select_grammar(self, plan: ParsingPlan, prefix: str, special_ids: Mapping[str, int]) -> Grammar | None:
        """The grammar of the tool calls or of the fields for structured output."""
        grammar = self.to_grammar()
        if self.tool_choice not in (None, "none", "auto") and not self.tools:
            raise InvalidParameter("tool_choice", "needs tools; give them, or remove it")
        if isinstance(self.tool_choice, AllowedTools) and not self.offered_tools:
            raise InvalidParameter("tool_choice", "allows no function that is among the tools")
        constrained = [function for _, function in self.constrained_functions()]
        if self.tool_mode == "named" and not constrained:
            raise InvalidParameter("tool_choice", f"names {self.named_function[:80]!r}, which is not among the tools")
        if not constrained:
            return replace(grammar, prefix=prefix) if grammar is not None else None
        if grammar is not None and self.tool_mode == "auto":
            raise InvalidRequest(
                "structured output cannot be combined with strict tool calls, or with custom tools that have a "
                "grammar; keep one of them"
            )
        # An answer of required calls alone has no content that could have the structure.
        try:
            check_definitions(constrained)
            if self.tool_mode == "named":
                return named_call_grammar(constrained[0], prefix)
            if self.tool_mode == "required":
                return required_calls_grammar(constrained, self.parallel_tool_calls, prefix)
            functions = [tool.function for tool in self.offered_tools]
            return strict_calls_grammar(functions, plan.output_format.tool_format, special_ids, prefix)
        except UnenforcedParameters as error:
            paths = {function.name: path for path, function in self.constrained_functions()}
            raise InvalidBody(str(error), paths[error.function_name]) from None
        except InvalidRequest as error:
            raise InvalidBody(str(error), "tools") from None

    def tool_field(self, index: int) -> str:
        """The place in the body of tool number `index`."""
        return f"tools[{index}]"

    def schema_field(self, index: int) -> str:
        """The field of the body that constrains the calls of tool number `index`."""
        return f"{self.tool_field(index)}.{self.tools[index].schema_path}"

    def constrained_functions(self) -> list[tuple[str, Function | CustomFunction]]:
        """(path of the schema in the body, function) of the functions whose schemas are part of the grammar."""
        offered = {tool.function.name for tool in self.offered_tools}
        tools = [(index, tool) for index, tool in enumerate(self.tools) if tool.function.name in offered]
        found = [(self.schema_field(index), tool.function) for index, tool in tools]
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
    messages: list[Message], tools: list[AnyTool], arguments: dict[str, Any], add_generation_prompt: bool
) -> Chat:
    return Chat(
        messages=[message.to_proto() for message in messages],
        add_generation_prompt=add_generation_prompt,
        tools=[json.dumps(tool.shown()) for tool in tools],
        template_arguments=json.dumps(arguments) if arguments else "",
    )
