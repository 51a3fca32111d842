"""RouterConfig: the settings of a router, validated. The list of groups is no setting: Router.set_groups changes it."""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, get_args

from coatcheck.proto.errors import InvalidConfig
from coatcheck.proto.host_port import is_loopback
from coatcheck.proto.internal_tls import ClusterCertificate
from coatcheck.proto.log_lines import LogFormat
from coatcheck.proto.sampling import MAX_LOGPROBS
from coatcheck.proto.setting_names import ROOT_PATH, ROOT_PATH_HINT, Routing, ToolParserName

# A prompt of a million tokens is at most 5 MB as ids and about as much as text; gRPC's own limit is 4 MiB.
MESSAGE_BYTES: Final = 32 * 1024 * 1024
MAX_STREAMS: Final = 512  # of one gRPC connection
# Limit of a message between router and group. A message to a group has a prompt and the tokens delivered so far. A
# message from a group has the outputs of one step; log-probabilities of prompt tokens take most, up to 300 bytes each.
GROUP_MESSAGE_BYTES: Final = 2 * MESSAGE_BYTES


@dataclass(frozen=True)
class RouterConfig:
    """`model` is the directory or model id of the tokenizer; `served_model_name` is the model's name for clients."""

    model: str
    served_model_name: str = ""
    name: str = "router-0"
    host: str = "127.0.0.1"
    port: int = 0  # 0: any free port
    http_host: str = "127.0.0.1"
    http_port: int | None = None  # None: no HTTP
    # How long a new request waits while no group serves.
    admission_wait_seconds: float = 0.0
    # How long a request that has lost its group waits for another one. All groups may be lost together, so this should
    # be at least the start time of a group (GroupConfig.startup_timeout_seconds).
    move_wait_seconds: float = 600.0
    # How long a request waits for the causes of its groups' failures, if they decide whether it is retried. A group's
    # next incarnation reports the cause once its processes are up.
    cause_wait_seconds: float = 3.0
    # Length of the admission queue; further requests are refused.
    max_queued: int = 1024
    # Max log-probabilities that a request may ask for at a position; -1: any number, up to the whole vocabulary.
    max_logprobs: int = MAX_LOGPROBS
    routing: Routing = "prefix-aware"  # see router/routing/routing_policy.py
    # Defaults of sampling parameters. "auto": from the model's generation_config.json; "none": Coatcheck's own.
    generation_config: str = "auto"
    model_aliases: tuple[str, ...] = ()  # further names of the model for clients
    lora_modules: Mapping[str, str] = field(default_factory=dict)  # LoRA adapters: name -> directory
    # "auto": the format in which the model's chat template writes tool calls.
    tool_parser: ToolParserName = "auto"
    # A group reports its load at least once a second. If it has sent nothing for silence_seconds, the router tries to
    # connect to its host. If the host accepts no connection, the host or the network is gone, and the group is lost.
    # Else the group may be slow, suspended or swapped out; it is lost after hang_seconds of silence.
    silence_seconds: float = 4.0
    hang_seconds: float = 15.0
    tokenizer_threads: int = 2
    # Files on the router's host. Without tls_cert there is no TLS; with tls_client_ca clients need a certificate too.
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_client_ca: str | None = None
    key_file: str | None = None  # None: no keys are required
    cors_origins: tuple[str, ...] = ()  # origins whose web pages may call the HTTP API; "*" for any
    root_path: str = ""  # the path at which a proxy serves the HTTP API, such as /llm; requests may begin with it
    enable_force_include_usage: bool = False  # every chunk of a stream has the usage so far
    enable_per_request_metrics: bool = False  # responses have the timings of their request
    trust_request_chat_template: bool = False  # requests may bring their own chat template
    enable_tokenizer_info_endpoint: bool = False  # GET /tokenizer_info
    insecure: bool = False  # requests without credentials are accepted, whatever host they name
    # The stream of a client that reads nothing for this long is ended, and its blocks are freed.
    slow_reader_seconds: float = 30.0
    # For mutual TLS between routers and groups; None: plain connections.
    cluster_certificate: ClusterCertificate | None = None
    # The key of resume tickets (see ResumeTickets), the same for all routers of a cluster. b"": each has a random one.
    resume_key: bytes = field(default=b"", repr=False)
    log_format: LogFormat = "text"
    otlp_endpoint: str | None = None  # a collector's gRPC address; None: no traces

    def __post_init__(self) -> None:
        """Raises InvalidConfig, naming the setting, its value and what it may be."""
        _require(bool(self.model), "model", self.model, "a checkpoint directory or a Hugging Face model id")
        _require(bool(self.name), "name", self.name, "a name")
        _require(0 <= self.port < 65536, "port", self.port, "from 0 (any) to 65535")
        _require(0 <= (self.http_port or 0) < 65536, "http_port", self.http_port, "from 0 (any) to 65535, or None")
        for name in ("admission_wait_seconds", "move_wait_seconds", "cause_wait_seconds"):
            seconds = getattr(self, name)
            _require(math.isfinite(seconds) and seconds >= 0, name, seconds, "at least 0")
        _require(1.0 <= self.silence_seconds < math.inf, "silence_seconds", self.silence_seconds, "at least 1")
        _require(
            self.silence_seconds <= self.hang_seconds < math.inf,
            "hang_seconds",
            self.hang_seconds,
            "at least silence_seconds",
        )
        _require(
            1.0 <= self.slow_reader_seconds < math.inf, "slow_reader_seconds", self.slow_reader_seconds, "at least 1"
        )
        _require(bool(self.tls_cert) == bool(self.tls_key), "tls_key", self.tls_key, "given with tls_cert, or neither")
        _require(bool(self.tls_cert) or not self.tls_client_ca, "tls_cert", self.tls_cert, "given with tls_client_ca")
        _require(self.max_queued >= 0, "max_queued", self.max_queued, "at least 0")
        _require(self.max_logprobs >= -1, "max_logprobs", self.max_logprobs, "at least 0, or -1 for no limit")
        _require(self.routing in get_args(Routing), "routing", self.routing, ", ".join(get_args(Routing)))
        for origin in self.cors_origins:
            is_origin = origin == "*" or re.fullmatch(r"https?://[^/\s,*]+", origin) is not None
            _require(is_origin, "cors_origins", origin, "* or an origin such as https://chat.example.com")
        is_path = not self.root_path or re.fullmatch(ROOT_PATH, self.root_path) is not None
        _require(is_path, "root_path", self.root_path, ROOT_PATH_HINT)
        source = self.generation_config
        _require(source in ("auto", "none"), "generation_config", source, "auto or none")
        _require(self.tokenizer_threads >= 1, "tokenizer_threads", self.tokenizer_threads, "at least 1")

    @property
    def checks_host(self) -> bool:
        """Whether HTTP requests must name this host, because no credentials are required (see RequestGate)."""
        return is_loopback(self.http_host) and not (self.key_file or self.tls_client_ca or self.insecure)

    @property
    def model_names(self) -> tuple[str, ...]:
        """What requests may name as the model: its names, and those of its LoRA adapters."""
        return (self.model_name, *self.model_aliases, *self.lora_modules)

    def response_name(self, requested_model: str) -> str:
        """The `model` of responses to requests that name `requested_model`: the adapter's name, or the model's first
        name."""
        return self.adapter_of(requested_model) or self.model_name

    def adapter_of(self, requested_model: str) -> str:
        """`requested_model` if that is a LoRA adapter; "" if it is the model itself."""
        return requested_model if requested_model in self.lora_modules else ""

    @property
    def model_name(self) -> str:
        """The model's name for clients."""
        return self.served_model_name or self.model


def _require(holds: bool, name: str, value: object, allowed: str) -> None:
    if not holds:
        raise InvalidConfig(f"{name} is {value!r}; it must be {allowed}")
