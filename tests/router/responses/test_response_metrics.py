"""The timings of a request in its response, with enable_per_request_metrics."""

import json

import pytest

from tests.router.fake_group import FakeGroup
from tests.router.http_router import StartHttpRouter


async def test_a_response_may_have_its_timings(start_http_router: StartHttpRouter) -> None:
    """With enable_per_request_metrics the complete response has vLLM's field `metrics`, whole, kept, and in the last
    event of a stream. Earlier events lack it, and so do responses without the setting."""
    router = await start_http_router(FakeGroup(), enable_per_request_metrics=True)
    plain = await start_http_router(FakeGroup("g1"))
    body = {"input": "hello", "max_output_tokens": 3}
    whole = json.loads((await router.request("POST", "/v1/responses", body))[2])
    kept = json.loads((await router.request("GET", f"/v1/responses/{whole['id']}"))[2])
    _, _, text = await router.request("POST", "/v1/responses", body | {"stream": True})
    *before, last = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    assert not any("metrics" in event.get("response", {}) for event in before)
    for metrics in (whole["metrics"], last["response"]["metrics"]):
        assert metrics.keys() == {
            "time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms", "tokens_per_second"
        }  # fmt: skip
        assert metrics["time_to_first_token_ms"] > 0 and metrics["tokens_per_second"] > 0
        assert metrics["mean_itl_ms"] == pytest.approx(metrics["generation_time_ms"] / 2, abs=0.001)
    assert kept["metrics"] == whole["metrics"]
    assert "metrics" not in json.loads((await plain.request("POST", "/v1/responses", body))[2])
