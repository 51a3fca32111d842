"""`coatcheck serve FILE.gguf --no-ray` as a user of llama.cpp runs it: one command, then a chat."""

import json
import urllib.request
from pathlib import Path
from typing import Any

from gguf.constants import GGMLQuantizationType as Type

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from tests.cluster.serving import Serving
from tests.workers.gguf.gguf_models import write_model

_FLAGS = ("--no-ray", "--device", "cpu", "--grpc-port", "0", "--kv-memory", "4MiB")


def test_a_file_is_served_under_its_name(tmp_path: Path) -> None:
    """The first start converts it; a chat is answered with the file's template, under the file's name. The next start
    finds the conversion."""
    path, _ = write_model("qwen3", tmp_path, lambda name: Type.Q6_K if "attn_v" in name else Type.Q8_0)
    path = path.rename(tmp_path / "Tiny-Q8_0.gguf")
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    answers = []
    for _ in range(2):
        with Serving(str(path), *_FLAGS, environment=environment) as serving:
            serving.wait_ready()
            answers.append(_chat(serving.url))
    assert answers[0]["model"] == "Tiny-Q8_0"
    assert answers[0]["choices"] == answers[1]["choices"] and answers[0]["usage"]["completion_tokens"] > 0
    assert len(list((tmp_path / "cache").rglob("model.safetensors"))) == 1


def _chat(url: str) -> dict[str, Any]:
    body = {"model": "Tiny-Q8_0", "messages": [{"role": "user", "content": "the quick fox"}], "max_tokens": 4,
            "temperature": 0}  # fmt: skip
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=MAX_WAIT_SECONDS) as answer:
        fields: dict[str, Any] = json.load(answer)
    return fields
