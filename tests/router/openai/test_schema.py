"""Requests that schemathesis generates from /openapi.json, valid ones and invalid ones."""

import asyncio
import json
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from tests.router.fake_group import FakeGroup
from tests.router.http_router import StartHttpRouter

if TYPE_CHECKING:
    from schemathesis import Case


@pytest.mark.filterwarnings("ignore:Do not use the .random. module")  # which schemathesis does
@pytest.mark.parametrize("count", [8, pytest.param(800, marks=(pytest.mark.full, pytest.mark.timeout(600)))])
async def test_no_generated_request_is_our_fault(start_http_router: StartHttpRouter, count: int) -> None:
    """Each request to each operation gets an answer, or a refusal in the form of its API, as the schema says."""
    router = await start_http_router(FakeGroup())
    seen = await asyncio.to_thread(send, f"http://{router.http_address}", count)
    assert set(seen) <= {200, 400, 404, 405, 413}, seen
    assert seen[200] and seen[400] and router.server.traffic.active == 0


def send(url: str, count: int) -> Counter[int]:
    """How often each status was returned."""
    import schemathesis  # here, because the import takes a second in every process that collects this test
    from schemathesis import GenerationMode
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

    conformance = [status_code_conformance, content_type_conformance, response_schema_conformance]
    seen = Counter[int]()
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    for found in schema.get_all_operations():
        operation = found.ok()  # type: ignore[union-attr]
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            if mode is GenerationMode.NEGATIVE and (operation.method.upper() != "POST" or not operation.body):
                continue  # there is nothing to get wrong

            @settings(max_examples=count, deadline=None, database=None, suppress_health_check=list(HealthCheck))
            @given(case=operation.as_strategy(generation_mode=mode))
            def ask(case: "Case[Any]") -> None:
                answer = case.call(base_url=url, timeout=MAX_WAIT_SECONDS)
                seen[answer.status_code] += 1
                assert answer.status_code < 500 and b'"server_error"' not in answer.content, answer.text
                case.validate_response(answer, checks=conformance)
                if answer.status_code != 200 and answer.content:
                    assert "message" in answer.json()["error"], answer.text

            ask()
    return seen


async def test_the_schema_has_every_response(start_http_router: StartHttpRouter) -> None:
    """No operation is described by FastAPI's defaults: a response that is any object, and the status 422."""
    router = await start_http_router(FakeGroup(), enable_tokenizer_info_endpoint=True)
    described = json.loads((await router.request("GET", "/openapi.json"))[2])
    for path, operations in described["paths"].items():
        for method, operation in operations.items():
            responses = operation["responses"]
            assert {"200", "default"} <= set(responses) <= {"200", "503", "default"}, (method, path)
            for content in responses["200"]["content"].values():
                assert content.get("schema") != {"type": "object"}, (method, path)
    assert "HTTPValidationError" not in described["components"]["schemas"]
