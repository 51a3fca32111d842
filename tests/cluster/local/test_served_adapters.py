"""`coatcheck serve --lora-modules`, as operators and clients see it: a real rank, and a request for an adapter."""

import json
import urllib.request
from pathlib import Path
from typing import Any

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from tests.cluster.serving import Serving


def test_an_adapter_answers_under_its_name(tiny_model: Path, tmp_path: Path) -> None:
    """The adapter is listed, its answer is another one than its base model's, and both repeat theirs."""
    from tests.workers.lora.adapter_files import write_adapter  # torch, which tiny_model has imported

    adapter = write_adapter(tiny_model, tmp_path / "sql", seed=1)
    flags = ("--no-ray", "--grpc-port", "0", "--kv-memory", "4MiB", "--lora-modules", f"sql={adapter}")
    with Serving(str(tiny_model), *flags) as serving:
        serving.wait_ready()

        def send(path: str, body: object = None) -> Any:
            data = None if body is None else json.dumps(body).encode()
            request = urllib.request.Request(f"{serving.url}{path}", data, {"content-type": "application/json"})
            with urllib.request.urlopen(request, timeout=MAX_WAIT_SECONDS) as answer:
                return json.load(answer)

        def tokens(model: str) -> tuple[int, ...]:
            body = {"model": model, "prompt": [*range(5, 40)], "max_tokens": 12, "temperature": 0, "ignore_eos": True}
            said = send("/v1/completions", {**body, "return_token_ids": True})
            assert said["model"] == model
            return tuple(said["choices"][0]["token_ids"])

        names = [tiny_model.name, "sql"]
        assert [one["id"] for one in send("/v1/models")["data"]] == names
        first = [tokens(name) for name in names]
        assert len(set(first)) == 2
        assert [tokens(name) for name in names] == first
