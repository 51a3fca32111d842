"""ServeConfig: the settings of `coatcheck serve`, from flags or from a YAML file with the same names.

This module imports neither Ray nor torch, so that a wrong setting is refused at once.
"""

from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from coatcheck.cluster.config.exposure import check_exposure
from coatcheck.cluster.config.setting_values import (
    lora_modules_of,
    parse_dtype,
    parse_http_port,
    parse_kv_dtype,
    parse_lora_modules,
    parse_memory,
    parse_otlp_endpoint,
    parse_root_path,
)
from coatcheck.cluster.config.settings import Settings, setting
from coatcheck.proto.host_port import bare_host
from coatcheck.proto.log_lines import LogFormat
from coatcheck.proto.setting_names import Routing, ToolParserName
from coatcheck.workers.core.attention_selector import AttentionBackendSetting
from coatcheck.workers.core.lora_module import LoraModule

DEFAULT_PORT: Final = 50051
DEFAULT_HTTP_PORT: Final = 8000
_ALL_ADDRESSES: Final = {"0.0.0.0", "::"}
# Default of kv_memory by device, as a share of the free memory. On CPUs activations and other programs need the rest.
# On GPUs the free memory is what gpu_memory_utilization leaves beside the weights and the measured step.
FREE_SHARE: Final = {"cpu": 0.1, "cuda": 1.0}
# Default of max_batch_tokens by device. A larger step computes prompts no faster and delays every running decode.
BATCH_TOKENS: Final = {"cpu": 512, "cuda": 2048}

# Types of settings with their bounds.
NonEmpty = Annotated[str, Field(min_length=1)]
ModelName = Annotated[str, Field(min_length=1, max_length=256, pattern=r"\S")]
Groups = Annotated[int, Field(ge=1, le=4096)]
Port = Annotated[int, Field(ge=0, le=65535)]
UpToAnHour = Annotated[float, Field(gt=0, le=3600, allow_inf_nan=False)]  # seconds
UpToADay = Annotated[float, Field(gt=0, le=86400, allow_inf_nan=False)]


class ServeConfig(Settings):
    """`groups` tensor-parallel groups of `tp` ranks each, behind a router."""

    model: NonEmpty = Field(description="A checkpoint directory, a GGUF file or a Hugging Face model id.")

    served_model_name: ModelName | None = setting(
        "Model",
        "The model's name for clients, or several with commas; responses have the first.",
        None,
        in_words="the name of the directory or GGUF file, or the Hugging Face model id",
    )
    device: Literal["auto", "cpu", "cuda"] = setting("Model", "cpu, cuda, or auto: GPUs if there are any.", "auto")
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], BeforeValidator(parse_dtype)] = setting(
        "Model", "float32, bfloat16, float16, or auto: the checkpoint's dtype.", "auto"
    )
    quantization: Literal["auto", "int8", "int4", "fp8"] = setting(
        "Model",
        "int8, int4 or fp8: quantise linears and experts when they are loaded. auto: as in the checkpoint.",
        "auto",
    )
    activation_quantization: Literal["auto", "dynamic", "off"] = setting(
        "Model",
        "On GPUs, activations of linears and experts with weights of 8 bits (W8A8). auto: quantised if the checkpoint "
        "asks for that. dynamic: quantised, also with --quantization int8 or fp8. off: never.",
        "auto",
    )
    lora_modules: Annotated[str | None, BeforeValidator(parse_lora_modules)] = setting(
        "Model",
        "LoRA adapters in PEFT's format, such as sql=/a/sql chat=/a/chat. Clients name one as the model.",
        None,
        metavar="NAME=PATH...",
    )
    max_model_len: Annotated[int, Field(ge=2, lt=2**31)] | None = setting(
        "Model", "Maximum tokens in a sequence, prompt and answer together.", None, in_words="the model's"
    )
    generation_config: Literal["auto", "none"] = setting(
        "Model",
        "Sampling fields that a request leaves unset. auto: from the model's generation_config.json. none: temperature "
        "1 and no filter. Stop ids come from that file either way.",
        "auto",
    )
    tool_parser: ToolParserName = setting(
        "Model",
        "How the model writes tool calls. auto: as its chat template does. Or hermes, llama3_json, pythonic, mistral, "
        "deepseek_v3, deepseek_v32, kimi_k2, kimi_k3, minimax, minimax_m2, minimax_m3, qwen3_coder, glm45, step3, "
        "solar_open, solar_open2, apertus, gemma4 or openai.",
        "auto",
    )
    deterministic: bool = setting(
        "Model",
        "A request gets the same logits, bit for bit, whatever runs beside it: cached, chunked, preempted or not.",
        False,
    )

    attention_backend: AttentionBackendSetting = setting(
        "Model",
        "On GPUs: triton, or the libraries flashinfer or fa3 (FlashAttention-3), which no GPU has run from Coatcheck. "
        "auto: triton.",
        "auto",
    )

    skip_verify: bool = setting(
        "Model",
        "Serve a model type that the tests do not cover without comparing a small copy of it with transformers first.",
        False,
    )

    groups: Groups = setting("Groups", "Tensor-parallel groups. Each serves a copy of the model.", 1)
    tp: int = setting("Groups", "Ranks in each group: GPUs that share one copy.", 1, ge=1, le=1024)
    expert_parallel: bool = setting(
        "Groups", "Each rank of a mixture of experts holds whole experts, instead of a part of each.", False
    )
    mla_shard: Literal["replicate", "tokens"] = setting(
        "Groups",
        "Latent attention (MLA). replicate: each rank stores the latents of all tokens. tokens: each rank stores a "
        "part of the tokens of each block, so the KV cache of a group holds --tp times the tokens.",
        "replicate",
    )
    max_groups: Groups | None = setting(
        "Groups",
        "Maximum number of groups. A group is added after requests have waited longer than --queue-target for 10 s. A "
        "group is removed, down to --groups, after --scale-in-after.",
        None,
        in_words="as many as --groups",
    )
    queue_target: UpToAnHour = setting(
        "Groups", "With --max-groups: seconds that requests may wait before a group is added.", 2.0
    )
    scale_in_after: UpToADay = setting(
        "Groups",
        "With --max-groups: seconds without a waiting request and with an idle group before a group is removed.",
        600.0,
    )

    kv_memory: Annotated[float | None, BeforeValidator(parse_memory)] = setting(
        "Memory",
        "KV pool of each rank: bytes (4GiB), or a share of the free memory (0.5). On CPUs free is what is free once "
        "the weights are loaded; on GPUs, what --gpu-memory-utilization leaves beside weights and the largest step.",
        None,
        in_words=f"{FREE_SHARE['cpu']} on CPUs, {FREE_SHARE['cuda']:g} on GPUs",
        gt=0,
        lt=2**60,
    )
    state_snapshot_share: float = setting(
        "Memory",
        "Models whose layers keep states: share of --kv-memory for snapshots of states, at which cached prompts start. "
        "0: no prefix cache for such models.",
        0.25,
        ge=0,
        le=0.9,
    )
    gpu_memory_utilization: float = setting(
        "Memory",
        "Share of a GPU's memory that may be in use: weights, KV pool, and the largest step with its CUDA graphs, "
        "which each rank measures before it allocates the pool.",
        0.9,
        gt=0,
        le=1,
    )
    kv_dtype: Annotated[Literal["auto", "bf16", "fp16", "fp8", "int8", "int4"], BeforeValidator(parse_kv_dtype)] = (
        setting(
            "Memory",
            "Type of the KV pool: bf16, fp16, or fp8, int8, int4 with a scale per token and head. auto: as --dtype.",
            "auto",
        )
    )
    host_kv_memory: Annotated[float, BeforeValidator(parse_memory)] = setting(
        "Memory",
        "Host memory of each rank for prefix blocks that leave the KV pool: bytes, or a share of the free memory.",
        0.0,
        ge=0,
        lt=2**60,
    )
    eviction: Literal["cost", "lru"] = setting(
        "Memory",
        "The cached block that is evicted first. cost: the one expected to save the least computing time, learned "
        "from the load. lru: the least recently used one.",
        "cost",
    )
    block_size: Literal[8, 16, 32, 64, 128] = setting("Memory", "Tokens in a KV block: 8, 16, 32, 64 or 128.", 16)

    max_num_seqs: int = setting("Limits", "Maximum sequences that run at once in a group.", 256, ge=1, le=2**16)
    max_batch_tokens: int | None = setting(
        "Limits",
        "Maximum tokens that a step computes. Longer prompts are computed in chunks between decodes.",
        None,
        in_words=f"{BATCH_TOKENS['cpu']} on CPUs, {BATCH_TOKENS['cuda']} on GPUs",
        ge=1,
        le=2**20,
    )
    max_cudagraph_capture_size: int = setting(
        "Limits",
        "On GPUs: tokens of the largest step that is captured as a CUDA graph, 2048 at most. Graphs take memory and "
        "time at startup. 0: no graphs, so each step launches every kernel.",
        2048,
        ge=0,
        le=2048,
    )
    speculative_tokens: int = setting(
        "Limits",
        "Speculative decoding: maximum draft tokens of a sequence in one step, from the sequence's text or its "
        "grammar. Steps get draft tokens only if that saves time. Tokens stay the same. 0: none.",
        0,
        ge=0,
        le=32,
    )
    max_queued: int = setting(
        "Limits",
        "Maximum requests that wait in the router while no group has room. Further requests get RESOURCE_EXHAUSTED "
        "(HTTP 429) and the time after which to try again.",
        1024,
        ge=0,
        le=2**20,
    )
    max_logprobs: int = setting(
        "Limits",
        "Maximum log-probabilities that a request may ask for at a position. -1: no limit, and a request may ask for "
        "those of the whole vocabulary.",
        20,
        ge=-1,
        le=2**20,
    )

    routing: Routing = setting(
        "Router",
        "The group that a request is sent to. prefix-aware: the one that answers soonest, by its cached prefix and its "
        "queue. least-loaded: the one with the fewest requests. round-robin: each in turn.",
        "prefix-aware",
    )
    grpc_host: NonEmpty = setting("Router", "Address where the router listens for gRPC.", "127.0.0.1")
    grpc_port: Port = setting("Router", "Port for gRPC. 0: any free port.", DEFAULT_PORT)
    http_host: NonEmpty = setting("Router", "Address where the router listens for HTTP.", "127.0.0.1")
    http_port: Annotated[int | Literal["none"] | None, BeforeValidator(parse_http_port)] = setting(
        "Router",
        "Port for HTTP. 0: any free port, also the default if --grpc-port is 0. none: no HTTP.",
        None,
        in_words=str(DEFAULT_HTTP_PORT),
    )
    root_path: Annotated[str | None, BeforeValidator(parse_root_path)] = setting(
        "Router",
        "Path at which a reverse proxy serves the HTTP API, such as /llm. Requests may have this prefix or not.",
        None,
        in_words="none",
    )
    enable_force_include_usage: bool = setting(
        "Router",
        "Every chunk of a stream of chats and completions has the usage so far, also if the request asks for none.",
        False,
    )
    enable_per_request_metrics: bool = setting(
        "Router",
        "Responses of chats, of completions and of /v1/responses have the timings of their request, as the field "
        "metrics.",
        False,
    )
    router_resource: NonEmpty | None = setting(
        "Router", "A Ray resource. The router runs only on nodes that have it.", None, in_words="any node"
    )
    router_per_node: bool = setting("Router", "One router on each node, instead of one for the whole cluster.", False)

    api_keys: NonEmpty | None = setting(
        "Security",
        "A file of tenants and hashes of their keys. `coatcheck keys new NAME` writes it. Read again on change.",
        None,
    )
    tls_cert: NonEmpty | None = setting(
        "Security", "The router's certificate for gRPC and HTTP: a PEM file on its host. Read again on change.", None
    )
    tls_key: NonEmpty | None = setting("Security", "The private key of --tls-cert: a PEM file.", None)
    tls_client_ca: NonEmpty | None = setting(
        "Security", "Clients need a certificate that this authority signed: mutual TLS.", None
    )
    insecure: bool = setting(
        "Security", "Listen beyond loopback without asking clients for keys or certificates.", False
    )
    cors_origins: NonEmpty | None = setting(
        "Security",
        "Origins whose web pages may call the HTTP API, such as https://chat.example.com; several with commas. *: any.",
        None,
        in_words="none",
    )
    trust_request_chat_template: bool = setting(
        "Security",
        "A request may bring its own chat template. It runs in a sandbox, but may run for long.",
        False,
    )
    enable_tokenizer_info_endpoint: bool = setting(
        "Security",
        "GET /tokenizer_info returns the tokenizer's configuration and the chat template.",
        False,
    )

    no_ray: bool = setting(
        "Ray",
        "One host without Ray, for laptops: the router runs in the process of `serve`, and the ranks are its children.",
        False,
    )
    ray_address: NonEmpty | None = setting(
        "Ray", "An existing Ray cluster: HOST:PORT or auto.", None, in_words="a Ray of its own"
    )
    ray_start_timeout: UpToAnHour = setting(
        "Ray", "Seconds that Ray may take to start, or to answer at --ray-address. A busy machine may need more.", 120.0
    )

    log_format: LogFormat = setting(
        "Logs and traces",
        "How router and ranks log: text, or json, one object a line with the request's id.",
        "text",
    )
    otlp_endpoint: Annotated[str | None, BeforeValidator(parse_otlp_endpoint)] = setting(
        "Logs and traces",
        "The OTLP collector for traces, such as http://127.0.0.1:4317. Needs `pip install 'coatcheck[otel]'`.",
        None,
    )

    @classmethod
    def build(cls, flags: dict[str, Any], file: Path | None = None) -> Self:
        """Like Settings.build. Also raises InvalidConfig as check_exposure does."""
        config = super().build(flags, file)
        check_exposure(config)
        return config

    @model_validator(mode="after")
    def _check_max_groups(self) -> Self:
        if self.max_groups is not None and self.max_groups < self.groups:
            raise ValueError(f"max-groups is {self.max_groups}, and groups {self.groups}; it must be at least that")
        return self

    @model_validator(mode="after")
    def _check_ports(self) -> Self:
        hosts = {bare_host(self.grpc_host), bare_host(self.http_host)}
        if self.grpc_port and self.grpc_port == self.http_listen_port and (len(hosts) == 1 or hosts & _ALL_ADDRESSES):
            raise ValueError(f"grpc-port and http-port are both {self.grpc_port}; choose another for one of them")
        return self

    @model_validator(mode="after")
    def _check_no_ray(self) -> Self:
        needing = ("ray_address", "ray_start_timeout", "router_per_node", "router_resource", "max_groups")
        given = [name for name in needing if getattr(self, name) != type(self).model_fields[name].default]
        if self.no_ray and given:
            raise ValueError(f"{given[0].replace('_', '-')} needs Ray; leave it out, or leave no-ray out")
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle only the settings that were given, so that a setting of a later version has its default."""
        return type(self).model_validate, (self.model_dump(exclude_unset=True),)

    @property
    def http_listen_port(self) -> int | None:
        """The port for HTTP. 0: any free port. None: no HTTP."""
        if self.http_port == "none":
            return None
        if self.http_port is None:
            return DEFAULT_HTTP_PORT if self.grpc_port else 0
        return self.http_port

    @property
    def model_aliases(self) -> tuple[str, ...]:
        """Further names of the model for clients."""
        return tuple(filter(None, map(str.strip, (self.served_model_name or "").split(",")[1:])))

    @property
    def adapters(self) -> tuple[LoraModule, ...]:
        """The LoRA adapters, with absolute paths for processes with other working directories."""
        return lora_modules_of(self.lora_modules)

    @property
    def model_name(self) -> str:
        """The model's name in requests: as configured, else the directory's name or the Hugging Face model id."""
        if self.served_model_name:
            return self.served_model_name.partition(",")[0].strip()
        path = Path(self.model).expanduser()
        return path.resolve().name if path.is_dir() else self.model

    @property
    def model_source(self) -> str:
        """The model's absolute path, for processes with other working directories, or its Hugging Face model id."""
        path = Path(self.model).expanduser()
        return str(path.resolve()) if path.is_dir() else self.model

    @property
    def group_names(self) -> list[str]:
        return group_names(self.groups)


def group_names(groups: int) -> list[str]:
    return [f"group-{index}" for index in range(groups)]
