"""The items of a response's input and output, and their translation to the messages of a chat."""

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import AliasChoices, Discriminator, Field, Tag, TypeAdapter

from coatcheck.router.event_loop.message_limits import MAX_MESSAGES
from coatcheck.router.openai.chat_request import input_as_arguments
from coatcheck.router.openai.sampling_fields import RequestBody
from coatcheck.router.parsing.parts import Content, Part, Reasoning, ToolCallDelta
from coatcheck.router.responses.responses_tools import flat_name

ChatFields = dict[str, Any]  # of a chat message


class Item(RequestBody):
    """Other fields, such as `id` and `status`, have no effect."""

    drops_unknown_fields: ClassVar = True


class ItemText(Item):
    """The only kind of content part that is served."""

    type: Literal["input_text", "output_text", "text", "refusal"]
    text: Annotated[str, Field(validation_alias=AliasChoices("text", "refusal"))] = ""


class ReasoningText(Item):
    type: Literal["reasoning_text"] = "reasoning_text"
    text: str = ""


class SummaryText(Item):
    type: Literal["summary_text"] = "summary_text"
    text: str = ""


class MessageItem(Item):
    type: Literal["message"] = "message"
    role: Literal["user", "assistant", "system", "developer"]
    content: str | Annotated[list[ItemText], Field(fail_fast=True, max_length=MAX_MESSAGES)]


class FunctionCallItem(Item):
    """A tool call of an earlier answer."""

    type: Literal["function_call"]
    call_id: str
    name: str
    namespace: str | None = None
    arguments: str = "{}"


class CustomToolCallItem(Item):
    """A call of a custom tool in an earlier answer."""

    type: Literal["custom_tool_call"]
    call_id: str
    name: str
    namespace: str | None = None
    input: str

    @property
    def arguments(self) -> str:
        """The arguments with which the model made the call."""
        return input_as_arguments(self.input)


class CallOutputItem(Item):
    """The answer of a function or custom tool."""

    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: str
    output: str | Annotated[list[ItemText], Field(fail_fast=True, max_length=MAX_MESSAGES)]


class ReasoningItem(Item):
    """Reasoning of an earlier answer. Its summary counts only without `content`, as in vLLM. Encrypted reasoning has no
    effect."""

    type: Literal["reasoning"]
    content: Annotated[list[ReasoningText], Field(fail_fast=True, max_length=MAX_MESSAGES)] = Field(
        default_factory=list
    )
    summary: Annotated[list[SummaryText], Field(fail_fast=True, max_length=MAX_MESSAGES)] = Field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content) or "\n\n".join(part.text for part in self.summary)


class WebSearchItem(Item):
    """A search that OpenAI's servers ran in an earlier answer. Has no effect: what was found is in the answer."""

    type: Literal["web_search_call"]


class ItemReference(Item):
    """The id of an item in the output of a stored response."""

    type: Literal["item_reference"]
    id: str


def _type_of(item: Any) -> str:
    """The type of an item; without one it is a message."""
    found = item.get("type") if isinstance(item, dict) else getattr(item, "type", None)
    return found if isinstance(found, str) else "message"


InputItem = Annotated[
    Annotated[FunctionCallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[CustomToolCallItem, Tag("custom_tool_call")]
    | Annotated[CallOutputItem, Tag("custom_tool_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")]
    | Annotated[WebSearchItem, Tag("web_search_call")]
    | Annotated[ItemReference, Tag("item_reference")]
    | Annotated[MessageItem, Tag("message")],
    Discriminator(_type_of),
]
_ITEM: Final[TypeAdapter[InputItem]] = TypeAdapter(InputItem)


def item_of(output: dict[str, Any]) -> InputItem:
    """An item of a response's output as an item of an input."""
    return _ITEM.validate_python(output)


def listed_items(items: Sequence[InputItem], response_id: str) -> list[dict[str, Any]]:
    """The items as GET /v1/responses/{response_id}/input_items returns them, each with a new id. Searches of OpenAI's
    servers are left out; the prompt has none either."""
    listed: list[dict[str, Any]] = []
    for item in items:
        fields = item.model_dump(exclude_none=True)
        match item:
            case MessageItem():
                texts = [item.content] if isinstance(item.content, str) else [part.text for part in item.content]
                of_text: dict[str, Any] = {"type": "input_text"}
                if item.role == "assistant":
                    of_text = {"type": "output_text", "annotations": [], "logprobs": []}
                prefix, fields["content"] = "msg", [{**of_text, "text": text} for text in texts]
            case FunctionCallItem():
                prefix = "fc"
            case CustomToolCallItem():
                prefix = "ctc"
            case CallOutputItem():
                prefix = "fco" if item.type == "function_call_output" else "ctco"
                if not isinstance(item.output, str):
                    fields["output"] = [{"type": "input_text", "text": part.text} for part in item.output]
            case ReasoningItem():
                prefix = "rs"
            case _:
                continue
        # No item of an output has such an id; see ResponsesRoutes.
        item_id = f"{prefix}_{response_id.removeprefix('resp_')}_in{len(listed)}"
        listed.append({"id": item_id, "status": "completed", **fields})
    return listed


def chat_of_items(items: Sequence[InputItem]) -> list[ChatFields]:
    """The messages of a chat. Reasoning, text and calls of one answer become one message of the assistant."""
    messages: list[ChatFields] = []
    for item in items:
        match item:
            case ReasoningItem():
                if text := item.text:  # else it would only split the assistant's message in two
                    message = _assistant_message(messages, without=("content", "tool_calls"))
                    earlier = message.get("reasoning_content", "")
                    message["reasoning_content"] = f"{earlier}\n\n{text}" if earlier else text
            case FunctionCallItem() | CustomToolCallItem():
                name = flat_name(item.namespace, item.name)
                call = {"id": item.call_id, "function": {"name": name, "arguments": item.arguments}}
                _assistant_message(messages).setdefault("tool_calls", []).append(call)
            case CallOutputItem():
                messages.append({"role": "tool", "tool_call_id": item.call_id, "content": _join(item.output)})
            case MessageItem(role="assistant"):
                _assistant_message(messages, without=("content", "tool_calls"))["content"] = _join(item.content)
            case MessageItem():
                role = "system" if item.role == "developer" else item.role
                messages.append({"role": role, "content": _join(item.content)})
    return messages


def chat_of_parts(parts: Sequence[Part]) -> list[ChatFields]:
    """The parts of an answer as one message of the assistant."""
    message: ChatFields = {"role": "assistant", "content": ""}
    for part in parts:
        match part:
            case Reasoning(text):
                message["reasoning_content"] = message.get("reasoning_content", "") + text
            case Content(text):
                message["content"] += text
            case ToolCallDelta(_, arguments, name, call_id, is_custom):
                function = {"name": name, "arguments": input_as_arguments(arguments) if is_custom else arguments}
                call = {"id": call_id, "function": function}
                message.setdefault("tool_calls", []).append(call)
    return [message]


def with_instructions(instructions: str, messages: Sequence[ChatFields]) -> list[ChatFields]:
    """The chat with the instructions and the system messages at its beginning in one system message, because many chat
    templates take only one."""
    count = next((n for n, message in enumerate(messages) if message["role"] != "system"), len(messages))
    texts = [instructions, *(message["content"] for message in messages[:count])]
    system = "\n\n".join(filter(None, texts))
    return [*([{"role": "system", "content": system}] if system else []), *messages[count:]]


def _assistant_message(messages: list[ChatFields], without: Sequence[str] = ()) -> ChatFields:
    """The last message if it is the assistant's and has none of the fields `without`. Else a new one, added to
    `messages`."""
    last = messages[-1] if messages else None
    if last is None or last["role"] != "assistant" or any(name in last for name in without):
        messages.append(last := {"role": "assistant"})
    return last


def _join(content: str | Sequence[ItemText]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)
