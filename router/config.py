"""RouterConfig: everything a router is told when it starts, validated at the edge.

It does not know the groups: those come later and change (see group_address).
"""

import math
from dataclasses import dataclass
from typing import Final

from coatcheck.proto.errors import InvalidConfig
from coatcheck.proto.log_lines import check_log_format
from coatcheck.proto.plane_certificate import PlaneCertificate
from coatcheck.proto.tracing import check_endpoint

# A prompt of a million tokens is at most 5 MB as ids and about as much as text; gRPC's own limit is 4 MiB.
MESSAGE_BYTES: Final = 32 * 1024 * 1024
# To a group: a prompt, and what was delivered of its answer. From it: one step's outputs, of which the largest are the
# log-probabilities of the prompt tokens computed in it, up to 300 bytes each.
GROUP_MESSAGE_BYTES: Final = 2 * MESSAGE_BYTES


@dataclass(frozen=True)
class RouterConfig:
    """`model` is a directory or hub id and names the tokenizer; `served_model_name` is what clients call it."""

    model: str
    served_model_name: str = ""
    name: str = "router-0"
    host: str = "127.0.0.1"
    port: int = 0  # 0: any free one
    http_host: str = "127.0.0.1"
    http_port: int | None = None  # None: no HTTP
    # How long a new request waits for a first group, and an accepted one for another after its own was lost.
    # The latter is no less than a start may take (GroupConfig.meeting_seconds), since all may be lost together.
    admission_wait_seconds: float = 0.0
    move_wait_seconds: float = 600.0
    # How long a request waits to learn whether the groups that it has lost ended by themselves, where that decides
    # whether it goes on: what the next incarnation says of the last, once its processes are up.
    cause_wait_seconds: float = 3.0
    # Requests that wait here while no group has room; more are refused.
    max_queued: int = 1024
    # Sampling of fields that requests leave unset. "auto": from the model's generation_config.json; "none": our own
    # defaults.
    generation_config: str = "auto"
    # A group that says nothing for this long is lost: it reports its load at least once a second. Looked at five times
    # as often, so that it is noticed within 5 s.
    silence_seconds: float = 4.0
    tokenizer_threads: int = 2
    # Files on the router's host. Without a certificate there is no TLS; with `tls_client_ca` clients need one, too.
    tls_cert: str | None = None
    tls_key: str | None = None
    tls_client_ca: str | None = None
    keys_file: str | None = None  # None: no keys are asked for
    insecure: bool = False  # anybody may come in, under whatever name they call this server
    # A client that takes nothing for so long has its stream ended, and its blocks freed.
    slow_reader_seconds: float = 30.0
    # What shows groups that this is a router of theirs, and routers that those are groups; None: plain connections.
    plane: PlaneCertificate | None = None
    log_format: str = "text"  # or "json"
    otlp_endpoint: str | None = None  # a collector's gRPC address; None: no traces

    def __post_init__(self) -> None:
        """Raises InvalidConfig, naming the setting, its value and what it may be."""
        _require(bool(self.model), "model", self.model, "a checkpoint directory or a hub id")
        _require(bool(self.name), "name", self.name, "a name")
        _require(0 <= self.port < 65536, "port", self.port, "from 0 (any) to 65535")
        _require(0 <= (self.http_port or 0) < 65536, "http_port", self.http_port, "from 0 (any) to 65535, or None")
        for name in ("admission_wait_seconds", "move_wait_seconds", "cause_wait_seconds"):
            seconds = getattr(self, name)
            _require(math.isfinite(seconds) and seconds >= 0, name, seconds, "at least 0")
        _require(1.0 <= self.silence_seconds < math.inf, "silence_seconds", self.silence_seconds, "at least 1")
        _require(
            1.0 <= self.slow_reader_seconds < math.inf, "slow_reader_seconds", self.slow_reader_seconds, "at least 1"
        )
        _require(bool(self.tls_cert) == bool(self.tls_key), "tls_key", self.tls_key, "given with tls_cert, or neither")
        _require(bool(self.tls_cert) or not self.tls_client_ca, "tls_cert", self.tls_cert, "given with tls_client_ca")
        check_log_format(self.log_format)
        check_endpoint(self.otlp_endpoint)
        _require(self.max_queued >= 0, "max_queued", self.max_queued, "at least 0")
        said = self.generation_config
        _require(said in ("auto", "none"), "generation_config", said, "auto or none")
        _require(self.tokenizer_threads >= 1, "tokenizer_threads", self.tokenizer_threads, "at least 1")

    @property
    def answers_only_locally(self) -> bool:
        """Whether nothing but where it listens keeps strangers out (see http/host_check)."""
        loopback = self.http_host in ("localhost", "::1") or self.http_host.startswith("127.")
        return loopback and not (self.keys_file or self.tls_client_ca or self.insecure)

    @property
    def model_name(self) -> str:
        """The name that clients use."""
        return self.served_model_name or self.model


def _require(holds: bool, name: str, value: object, allowed: str) -> None:
    if not holds:
        raise InvalidConfig(f"{name} is {value!r}; it must be {allowed}")
