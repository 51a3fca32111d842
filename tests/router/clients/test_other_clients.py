"""The clients of other projects against a router, each in a process of its own; see run_client.py."""

import asyncio
import re
from pathlib import Path

import pytest

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.proto.stubs.worker_pb2 import Submit
from coatcheck.router.text.tokenizer import TokenizerJson
from tests.programs.find import need_program
from tests.router.fake_group import EOS
from tests.router.http_router import StartHttpRouter
from tests.router.openai.scripted_chat import saying
from tests.router.tiny_tokenizer import byte_level_tokenizer, write_model

TEMPLATE = (
    "{% for tool in tools or [] %}[tool {{ tool.function.name }}]{% endfor %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "{% endfor %}<assistant>{# <think></think> #}"
)
TOKENIZER = byte_level_tokenizer()
ARGUMENTS = '{"city": "Bonn"}'


def answer_to(submit: Submit) -> str:
    """What the model says: see run_client.py."""
    prompt, structured = TOKENIZER.decode(list(submit.prompt_token_ids)), submit.sampling.structured
    name = next(iter(re.findall(r"\[tool (\w+)\]", prompt)), "")
    call = f'{{"name": "{name}", "arguments": {ARGUMENTS}}}'
    if "<tool>" in prompt:
        return "<think>hm</think>It rains."
    if structured.HasField("json_schema"):
        return ARGUMENTS
    if structured.HasField("grammar") and "opening_0" not in structured.grammar:  # a call is required
        return f"[{call}]"
    return f"<think>hm</think>so<tool_call>\n{call}\n</tool_call>" if name else "<think>hm</think>It rains."


@pytest.mark.parametrize("client", ["langchain", "litellm", "instructor", "agents", "lm_eval"])
async def test_a_client_of_another_project(start_http_router: StartHttpRouter, tmp_path: Path, client: str) -> None:
    """What it sends is served, and it understands what it gets."""
    python = need_program("clients-python")
    said: dict[str, list[int]] = {}

    def token(submit: Submit, choice: int, position: int) -> int:
        if submit.request_id not in said:
            said[submit.request_id] = [*TOKENIZER.encode(answer_to(submit)).ids, EOS]
        return said[submit.request_id][position]

    group = saying("")
    group.token = token
    model = TokenizerJson.load(str(write_model(tmp_path / "model", TEMPLATE)))
    router = await start_http_router(group, tokenizer=model, enable_tokenizer_info_endpoint=True)
    script = str(Path(__file__).with_name("run_client.py"))
    process = await asyncio.create_subprocess_exec(
        python, script, client, router.http_address, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        async with asyncio.timeout(MAX_WAIT_SECONDS):
            output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, output.decode()[-4000:]
