"""What tests of chats share: messages, a tool, a template with tools, and a group that says a given text."""

from typing import Any

from llguidance import LLMatcher, LLTokenizer

from coatcheck.proto.grammar import Grammar
from coatcheck.proto.stubs.coatcheck_pb2 import GetModelResponse
from tests.router.fake_group import EOS, VOCAB, FakeGroup
from tests.router.tiny_tokenizer import byte_level_tokenizer

HELLO: list[Any] = [{"role": "user", "content": "hello"}]
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Now.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
# How a Qwen-like model shows tools and its own calls.
TOOL_TEMPLATE = (
    "{% for tool in tools or [] %}[tool {{ tool | tojson }}]{% endfor %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{% endfor %}{% if thinking %}<think>{% endif %}"
)


def streamed_calls(chunks: list[Any]) -> list[tuple[str, str]]:
    """(name, arguments) of each call of a stream, joined by index as clients do."""
    calls: list[tuple[str, str]] = []
    for chunk in chunks:
        for piece in chunk.delta.tool_calls or []:
            if piece.index == len(calls):
                assert piece.id and piece.type == "function"
                calls.append((piece.function.name, ""))
            name, arguments = calls[piece.index]
            calls[piece.index] = (name, arguments + piece.function.arguments)
    return calls


def saying(text: str) -> FakeGroup:
    """A group whose every answer is this text."""
    ids = [*byte_level_tokenizer().encode(text).ids, EOS]
    model = GetModelResponse(name="tiny", max_model_len=2048, vocab_size=VOCAB, block_size=4, eos_token_ids=[EOS])
    return FakeGroup(token=lambda submit, choice, position: ids[position], model=model, num_blocks=512)


def tokens_until(text: str, place: str) -> int:
    """How many tokens `saying(text)` sends up to the end of `place`, a word of the text.

    For `FakeGroup.go`: a router that is behind sends everything that has arrived as one piece, so a test that wants
    pieces must hold the group.
    """
    return len(byte_level_tokenizer().encode("".join(text.partition(place)[:2])).ids)


def allows(grammar: Grammar, text: str) -> bool:
    """Whether the grammar allows an answer that begins with the text, in the tests' vocabulary."""
    matcher = LLMatcher(LLTokenizer(byte_level_tokenizer().to_str(), eos_token=EOS), grammar.to_llguidance())
    ids = byte_level_tokenizer().encode(text).ids
    return bool(matcher.validate_tokens(ids) == len(ids))
