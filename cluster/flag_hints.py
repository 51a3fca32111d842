"""find_hint: names our flag when a command gets a flag of another engine, such as vLLM, SGLang or llama.cpp."""

from collections.abc import Sequence
from typing import Final

# A hint that begins with one of these is a sentence. Any other hint is what to write instead.
NOT_NEEDED: Final = "not needed: "
NOT_SUPPORTED: Final = "not supported: "

_SPECULATIVE: Final = "--speculative-tokens, such as 4, for drafts by prompt lookup (ngram); there are no draft models"
_PIPELINE: Final = f"{NOT_SUPPORTED}pipeline parallelism; --tp shards the model, also over several hosts"
_EXPERTS: Final = "--expert-parallel: whole experts on the ranks of --tp"
_LATENTS: Final = "--mla-shard tokens: the ranks of --tp divide the KV cache of latent attention"
_DISAGGREGATION: Final = f"{NOT_SUPPORTED}prefill/decode disaggregation and KV connectors"
_LORA: Final = f"{NOT_NEEDED}all adapters of --lora-modules are loaded at the start, each with its own rank"
_TOKENIZER: Final = f"{NOT_SUPPORTED}the tokenizer is always that of the model's directory"
_REVISION: Final = f"{NOT_SUPPORTED}download the revision, and serve its directory"
_TOOLS: Final = f"{NOT_NEEDED}tool calls are parsed for every model whose chat template has tools"
_TOOL_PARSER: Final = "--tool-parser, if the format that the chat template shows is not the model's"
_REASONING: Final = f"{NOT_NEEDED}reasoning is split off if the chat template has markers for it"
_GRAMMARS: Final = f"{NOT_NEEDED}llguidance computes all structured output"
_GPU_LAYERS: Final = f"{NOT_NEEDED}all layers are on the GPUs, or with --device cpu on CPUs"
_CACHE_TYPES: Final = "--kv-dtype, which holds for keys and values"
_HUB_FILE: Final = f"{NOT_SUPPORTED}download the GGUF file, and serve it; or serve the id of a safetensors checkpoint"
_REQUEST_LOGS: Final = f"{NOT_NEEDED}logs have one line per request, without its prompt"

# Flag of another engine -> hint for `coatcheck serve`. docs/quickstart.md has these hints as a table.
SERVE_HINTS: Final[dict[str, str]] = {
    "--host": "--grpc-host (gRPC) or --http-host (OpenAI's API)",
    "--port": "--grpc-port (gRPC) or --http-port (OpenAI's API)",
    "--model": "the first argument: coatcheck serve MODEL",
    "--model-path": "the first argument: coatcheck serve MODEL",
    "-m": "the first argument: coatcheck serve MODEL",
    "--tensor-parallel-size": "--tp",
    "-tp": "--tp",
    "--tp-size": "--tp",
    "--data-parallel-size": "--groups",
    "-dp": "--groups",
    "--dp-size": "--groups",
    "--mem-fraction-static": "--gpu-memory-utilization",
    "--cuda-graph-max-bs": "--max-cudagraph-capture-size",
    "--enforce-eager": "--max-cudagraph-capture-size, 0 for none",
    "--disable-cuda-graph": "--max-cudagraph-capture-size, 0 for none",
    "--kv-cache-memory-bytes": "--kv-memory, such as 4GiB",
    "--kv-cache-dtype": "--kv-dtype",
    "--max-num-batched-tokens": "--max-batch-tokens",
    "--chunked-prefill-size": "--max-batch-tokens",
    "--context-length": "--max-model-len",
    "--ctx-size": "--max-model-len",
    "-c": "--max-model-len",
    "--max-running-requests": "--max-num-seqs",
    "--parallel": "--max-num-seqs",
    "-np": "--max-num-seqs",
    "--alias": "--served-model-name",
    "-a": "--served-model-name",
    "--n-gpu-layers": _GPU_LAYERS,
    "--gpu-layers": _GPU_LAYERS,
    "-ngl": _GPU_LAYERS,
    "--cache-type-k": _CACHE_TYPES,
    "-ctk": _CACHE_TYPES,
    "--cache-type-v": _CACHE_TYPES,
    "-ctv": _CACHE_TYPES,
    "--hf-repo": _HUB_FILE,
    "-hf": _HUB_FILE,
    "--sampling-defaults": "--generation-config: auto for the model's own defaults, none for ours",
    "--enable-expert-parallel": _EXPERTS,
    "--ep-size": _EXPERTS,
    "--decode-context-parallel-size": _LATENTS,
    "-dcp": _LATENTS,
    "--policy": "--routing: prefix-aware, least-loaded or round-robin",
    "--routing-logic": "--routing: prefix-aware, least-loaded or round-robin",
    "--swap-space": "--host-kv-memory, such as 4GiB",
    "--kv-offloading-size": "--host-kv-memory, such as 4GiB",
    "--api-key": "--api-keys FILE, which `coatcheck keys` writes; other users can read arguments",
    "--ssl-certfile": "--tls-cert",
    "--ssl-keyfile": "--tls-key",
    "--ssl-ca-certs": "--tls-client-ca",
    "--otlp-traces-endpoint": "--otlp-endpoint",
    "--download-dir": "the variable HF_HOME, in the environment of `serve` (of `ray start` if you join a cluster)",
    "--enable-prefix-caching": f"{NOT_NEEDED}prefixes are always cached",
    "--no-enable-prefix-caching": f"{NOT_SUPPORTED}prefixes are always cached; requests with different `cache_salt` "
    "share none",
    "--enable-chunked-prefill": f"{NOT_NEEDED}prompts are always computed in chunks",
    "--tool-call-parser": _TOOL_PARSER,
    "--enable-auto-tool-choice": _TOOLS,
    "--guided-decoding-backend": _GRAMMARS,
    "--grammar-backend": _GRAMMARS,
    "--distributed-executor-backend": f"{NOT_NEEDED}Ray starts all ranks, or with --no-ray `serve` itself",
    "--scheduling-policy": f"{NOT_NEEDED}the field `priority` of a request always applies",
    "--disable-log-requests": _REQUEST_LOGS,
    "--no-enable-log-requests": _REQUEST_LOGS,
    "--disable-log-stats": f"{NOT_NEEDED}statistics are at /metrics, not in the logs",
    "--seed": f"{NOT_NEEDED}each request has its field `seed`, or a random one",
    "-q": "--quantization",
    "--speculative-config": _SPECULATIVE,
    "--speculative-algorithm": _SPECULATIVE,
    "--speculative-num-draft-tokens": "--speculative-tokens",
    "--pipeline-parallel-size": _PIPELINE,
    "-pp": _PIPELINE,
    "--pp-size": _PIPELINE,
    "--kv-transfer-config": _DISAGGREGATION,
    "--disaggregation-mode": _DISAGGREGATION,
    "--lora-paths": "--lora-modules NAME=PATH, or several: a=/x b=/y",
    "--enable-lora": f"{NOT_NEEDED}--lora-modules NAME=PATH serves adapters",
    "--max-loras": _LORA,
    "--max-loras-per-batch": _LORA,
    "--max-lora-rank": _LORA,
    "--reasoning-parser": _REASONING,
    "--chat-template": f"{NOT_SUPPORTED}put it into the model's directory, as chat_template.jinja",
    "--tokenizer": _TOKENIZER,
    "--tokenizer-mode": _TOKENIZER,
    "--tokenizer-path": _TOKENIZER,
    "--revision": _REVISION,
    "--tokenizer-revision": _REVISION,
    "--trust-remote-code": f"{NOT_SUPPORTED}code that comes with a checkpoint never runs; transformers must have the "
    "model type",
    "--load-format": f"{NOT_NEEDED}weights are safetensors, or those of a GGUF file",
    "--limit-mm-per-prompt": f"{NOT_SUPPORTED}images, audio and video",
    "--cpu-offload-gb": f"{NOT_SUPPORTED}weights stay on the device; use a larger --tp",
}

# Command -> flag of another engine -> hint.
HINTS: Final[dict[str, dict[str, str]]] = {
    "serve": SERVE_HINTS,
    "generate": {"--prompt": "the first argument: coatcheck generate PROMPT"},
    "bench": {
        "--num-prompts": "--num-requests",
        "--max-concurrency": "--concurrency",
        "--request-rate": "--rate",
        "--random-input-len": "--input-len",
        "--random-output-len": "--output-len",
        "--backend": f"{NOT_NEEDED}the load is always gRPC, to a coatcheck server",
        "--endpoint": "--address HOST:PORT, of gRPC",
        "--model": f"{NOT_NEEDED}the server has one model",
        "--tokenizer": f"{NOT_NEEDED}prompts are token ids",
        "--dataset-name": "--prompts random, fixed or shared-prefix, or --trace FILE",
        "--dataset-path": "--trace FILE",
        "--goodput": "--slo-ttft-ms and --slo-tpot-ms",
        "--ignore-eos": f"{NOT_NEEDED}end-of-sequence is always ignored",
        "--save-result": "--json, which prints the result",
    },
    "plan": {"--tensor-parallel-size": "--tp", "-tp": "--tp", "--max-model-len": "--context"},
}
for _command in ("generate", "status", "drain", "explain", "bench"):
    HINTS.setdefault(_command, {}).update(dict.fromkeys(("--host", "--port", "--base-url"), "--address HOST:PORT"))


def find_hint(arguments: Sequence[str]) -> str | None:
    """A message that says what to write instead. None if no argument is a flag of another engine."""
    command, *rest = [*arguments, ""]
    hints = HINTS.get(command, {})
    for word in rest:
        if word == "--":
            break
        flag = word.partition("=")[0]
        if flag in hints:
            hint = hints[flag]
            is_sentence = hint.startswith((NOT_NEEDED, NOT_SUPPORTED))
            return f"coatcheck {command} has no {flag}; {'' if is_sentence else 'here it is '}{hint}"
    return None
