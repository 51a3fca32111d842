"""What the tools and the tool_choice of a gRPC chat mean: how its output is parsed, and the grammar of its calls.

HTTP endpoints make the grammar themselves (openai/chat_request.py) and leave Chat.tool_choice empty.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from coatcheck.proto.errors import InvalidParameter
from coatcheck.proto.grammar import Grammar
from coatcheck.proto.stubs.coatcheck_pb2 import Chat, GenerateRequest
from coatcheck.router.parsing.output_parser import ParsingPlan, ToolMode
from coatcheck.router.parsing.output_planner import OutputPlanner
from coatcheck.router.parsing.reasoning_parser import ReasoningStart
from coatcheck.router.tool_grammars.call_grammar import named_call_grammar, required_calls_grammar
from coatcheck.router.tool_grammars.strict_calls import strict_calls_grammar

_MODES: Final[dict[str, ToolMode]] = {"": "auto", "auto": "auto", "required": "required", "none": "none"}
_NAME: Final = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_MAY_BE_STRICT: Final = re.compile(r'"strict"\s*:\s*true|\\u00')  # an escape may spell any letter of the name


def hide_tools(chat: Chat) -> None:
    """Removes the tools of a chat with tool_choice "none", which the model must not see."""
    if _mode(chat) == "none":
        del chat.tools[:]


def check_tool_choice(message: GenerateRequest) -> None:
    """Raises InvalidParameter for a choice that cannot be met."""
    chat, mode = message.chat, _mode(message.chat)
    if mode in ("required", "named"):
        if not chat.tools:
            raise InvalidParameter("tool_choice", "needs tools; give them, or remove it")
        if message.sampling.HasField("structured"):
            raise InvalidParameter("tool_choice", "that requires calls does not go with structured; remove one of them")


@dataclass(frozen=True, slots=True)
class ChatFunction:
    """A function among the tools of a chat; see FunctionSchema."""

    name: str
    parameters: dict[str, Any] | None
    strict: bool


def functions_of(chat: Chat) -> list[ChatFunction]:
    """The functions of a chat, which has been rendered before. A tool in another form than OpenAI's has none."""
    functions = []
    for text in chat.tools:
        tool = json.loads(text)
        function = tool.get("function", tool)
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            parameters = function.get("parameters")
            schema = parameters if isinstance(parameters, dict) else None
            functions.append(ChatFunction(function["name"], schema, function.get("strict") is True))
    return functions


def make_plan(chat: Chat, planner: OutputPlanner) -> ParsingPlan:
    """How the output is parsed. `chat` must have been rendered before."""
    return ParsingPlan(
        planner.output_format,
        reasoning_start_of_chat(chat, planner),
        tool_mode=_mode(chat) if chat.tools else "none",
        named_function="" if chat.tool_choice in _MODES else chat.tool_choice,
        schemas={function.name: function.parameters or {} for function in functions_of(chat)},
        max_calls=None if _is_parallel(chat) else 1,
    )


def reasoning_start_of_chat(chat: Chat, planner: OutputPlanner) -> ReasoningStart:
    """Whether the prompt ends inside of reasoning."""
    begins_message = not chat.continue_final_message and (
        chat.add_generation_prompt or not chat.HasField("add_generation_prompt")
    )
    arguments = json.loads(chat.template_arguments or "{}")
    return planner.reasoning_start(arguments, begins_message=begins_message)


def may_constrain_calls(chat: Chat) -> bool:
    """Whether calls_grammar may return a grammar: a call is required, or a tool may be strict. Parses nothing, since
    every chat with tools asks."""
    return bool(chat.tools) and (_mode(chat) in ("required", "named") or any(map(_MAY_BE_STRICT.search, chat.tools)))


def calls_grammar(chat: Chat, planner: OutputPlanner) -> Grammar | None:
    """The grammar of the chat's calls; None if any text is allowed. `chat` has tools and has been rendered before.
    Raises InvalidRequest."""
    mode, functions = _mode(chat), functions_of(chat)
    constrained = [function for function in functions if mode == "required" or function.strict]
    if mode == "named":
        constrained = [function for function in functions if function.name == chat.tool_choice]
        if not constrained:
            raise InvalidParameter("tool_choice", f"names {chat.tool_choice[:80]!r}, which is not among the tools")
    if not constrained:
        return None
    _check_names(functions)
    prefix = planner.grammar_prefix(reasoning_start_of_chat(chat, planner))
    if mode == "auto":
        return strict_calls_grammar(functions, planner.output_format.tool_format, planner.special_ids, prefix)
    if mode == "named":
        return named_call_grammar(constrained[0], prefix)
    return required_calls_grammar(constrained, _is_parallel(chat), prefix)


def _mode(chat: Chat) -> ToolMode:
    return _MODES.get(chat.tool_choice, "named")


def _is_parallel(chat: Chat) -> bool:
    return chat.parallel_tool_calls or not chat.HasField("parallel_tool_calls")


def _check_names(functions: Sequence[ChatFunction]) -> None:
    """Raises InvalidParameter for a name that a grammar cannot have, and for a name that two functions have."""
    names = set[str]()
    for function in functions:
        if not _NAME.fullmatch(function.name):
            raise InvalidParameter(
                "tools", f"has the name {function.name[:80]!r}; use at most 128 letters, digits, dots, dashes and _"
            )
        if function.name in names:
            raise InvalidParameter("tools", f"has two functions named {function.name!r}; give each its own name")
        names.add(function.name)
