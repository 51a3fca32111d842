"""MessagesAnswer: a message is valid JSON, whatever a model writes."""

import pytest

from coatcheck.proto.stubs.coatcheck_pb2 import GenerateResponse
from coatcheck.router.anthropic.messages_answer import MessagesAnswer
from coatcheck.router.http.json_response import json_bytes
from coatcheck.router.openai.logprobs_format import LogprobsFormatter
from coatcheck.router.parsing.output_format import OutputFormat
from coatcheck.router.parsing.output_parser import ParsingPlan
from coatcheck.router.text.tokenizer import TokenizerJson
from tests.router.tiny_tokenizer import byte_level_tokenizer


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999"])
def test_an_input_with_a_number_that_json_lacks_is_empty(number: str) -> None:
    """Arguments with NaN or infinity are no JSON: the call has an empty input, and the message can be encoded."""
    response = GenerateResponse()
    response.choices.add(text=f'<tool_call>{{"name": "f", "arguments": {{"n": {number}}}}}</tool_call>')
    plan = ParsingPlan(OutputFormat("hermes"), tool_mode="auto")
    formatter = LogprobsFormatter(TokenizerJson(byte_level_tokenizer(), None))
    message = MessagesAnswer("msg_1", "m", plan, formatter).make_response([response])
    assert message["content"][0]["input"] == {}
    assert json_bytes(message)
