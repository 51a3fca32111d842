"""The chat messages that the items of a /v1/responses body mean."""

from typing import Any

import pytest

from coatcheck.router.openai.request_body import validate_fields
from coatcheck.router.responses.input_items import chat_of_items
from coatcheck.router.responses.responses_request import ResponsesRequest


def chat_of(*items: dict[str, Any]) -> list[dict[str, Any]]:
    body = validate_fields(ResponsesRequest, {"input": list(items)})
    assert not isinstance(body.input, str)
    return chat_of_items(body.input)


def thought(*texts: str, summary: str = "", **fields: Any) -> dict[str, Any]:
    content = [{"type": "reasoning_text", "text": text} for text in texts]
    parts = [{"type": "summary_text", "text": summary}] if summary else []
    return {"type": "reasoning", "content": content, "summary": parts, **fields}


USER, ANSWER = {"role": "user", "content": "u"}, {"role": "assistant", "content": "a"}
CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
CALLS = [{"id": "c", "function": {"name": "f", "arguments": "{}"}}]


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        ([thought("x", "y"), ANSWER], [ANSWER | {"reasoning_content": "xy"}]),
        ([thought("x"), thought("y"), ANSWER], [ANSWER | {"reasoning_content": "x\n\ny"}]),
        ([thought(summary="s"), ANSWER], [ANSWER | {"reasoning_content": "s"}]),
        ([thought("x", summary="s"), ANSWER], [ANSWER | {"reasoning_content": "x"}]),
        ([USER, thought(encrypted_content="e"), USER], [USER, USER]),
        ([ANSWER, thought(), CALL], [ANSWER | {"tool_calls": CALLS}]),
        (
            [ANSWER, thought("x"), CALL],
            [ANSWER, {"role": "assistant", "reasoning_content": "x", "tool_calls": CALLS}],
        ),
    ],
)
def test_reasoning_belongs_to_the_answer_after_it(items: list[dict[str, Any]], messages: list[dict[str, Any]]) -> None:
    """Several items in a row are one text, a summary stands for a text that is not there, and an item without a text,
    as of encrypted reasoning, makes no message and splits none."""
    assert chat_of(*items) == messages
