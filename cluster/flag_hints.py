"""find_hint: names our flag when a command gets a flag of another engine, such as vLLM or SGLang."""

from collections.abc import Sequence
from typing import Final

# command -> flag of another engine -> what to write instead.
_HINTS: Final[dict[str, dict[str, str]]] = {
    "serve": {
        "--host": "--grpc-host (gRPC) or --http-host (OpenAI's API)",
        "--port": "--grpc-port (gRPC) or --http-port (OpenAI's API)",
        "--model": "the first argument: coatcheck serve MODEL",
        "--model-path": "the first argument: coatcheck serve MODEL",
        "--tensor-parallel-size": "--tp",
        "-tp": "--tp",
        "--tp-size": "--tp",
        "--data-parallel-size": "--groups",
        "-dp": "--groups",
        "--gpu-memory-utilization": "--kv-memory, a share of the memory that is free once the weights are loaded",
        "--mem-fraction-static": "--kv-memory, a share of the memory that is free once the weights are loaded",
        "--kv-cache-memory-bytes": "--kv-memory, such as 4GiB",
        "--kv-cache-dtype": "--kv-dtype",
        "--max-num-batched-tokens": "--max-batch-tokens",
        "--ssl-certfile": "--tls-cert",
        "--ssl-keyfile": "--tls-key",
        "--ssl-ca-certs": "--tls-client-ca",
        "--api-key": "--api-keys FILE, which `coatcheck keys` writes; other users can read arguments",
        "--context-length": "--max-model-len",
        "--sampling-defaults": "--generation-config: auto for the model's own defaults, none for ours",
        "--swap-space": "--host-kv-memory, such as 4GiB",
        "--enable-prefix-caching": "nothing: prefixes are always cached",
        "--enable-chunked-prefill": "nothing: prompts are always computed in chunks",
    },
    "generate": {"--prompt": "the first argument: coatcheck generate PROMPT"},
    "bench": {
        "--num-prompts": "--num-requests",
        "--max-concurrency": "--concurrency",
        "--request-rate": "--rate",
        "--random-input-len": "--input-len",
        "--random-output-len": "--output-len",
    },
    "plan": {"--tensor-parallel-size": "--tp", "-tp": "--tp", "--max-model-len": "--context"},
}
for _command in ("generate", "status", "drain", "explain", "bench"):
    _HINTS.setdefault(_command, {}).update(dict.fromkeys(("--host", "--port", "--base-url"), "--address HOST:PORT"))


def find_hint(arguments: Sequence[str]) -> str | None:
    """A message that says what to write instead. None if no argument is a flag of another engine."""
    command, *rest = [*arguments, ""]
    hints = _HINTS.get(command, {})
    for word in rest:
        if word == "--":
            break
        flag = word.partition("=")[0]
        if flag in hints:
            return f"coatcheck {command} has no {flag}; here it is {hints[flag]}"
    return None
