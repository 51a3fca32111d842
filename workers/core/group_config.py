"""GroupConfig: the settings of one tensor-parallel group, validated."""

from dataclasses import dataclass

from coatcheck.proto.errors import InvalidConfig
from coatcheck.proto.internal_tls import ClusterCertificate
from coatcheck.proto.log_lines import check_log_format
from coatcheck.proto.tracing import check_endpoint
from coatcheck.workers.core.kv_dtype import KV_DTYPES


@dataclass(frozen=True)
class GroupConfig:
    """`kv_memory`: bytes for each rank, or a share (0, 1] of the free device memory (on CPU: host memory).

    `host_kv_memory`: bytes for each rank, or a share of the free host memory, for the host tier; 0 for none.
    `max_waiting`: limit on the waiting requests of all routers together; the group refuses more.
    `threads`: intra-op threads of each rank on CPU; 0 divides the host's cores among its ranks.
    `cluster_certificate`: rank 0's certificate and the routers that it trusts; None for plain connections.
    `startup_timeout_seconds`: the time within which all ranks must start and load.
    `collective_timeout_seconds`: how long a rank waits for another within a step.
    `otlp_endpoint`: a collector's gRPC address; None for no traces.
    """

    name: str
    model: str
    served_model_name: str
    tp: int = 1
    device: str = "auto"
    dtype: str = "auto"
    kv_dtype: str = "auto"
    block_size: int = 16
    kv_memory: float = 0.3
    host_kv_memory: float = 0.0
    eviction: str = "cost"
    max_num_seqs: int = 256
    max_waiting: int = 1024
    max_batch_tokens: int = 2048
    max_model_len: int | None = None
    deterministic: bool = False
    threads: int = 0
    cluster_certificate: ClusterCertificate | None = None
    startup_timeout_seconds: float = 300.0
    collective_timeout_seconds: float = 60.0
    log_format: str = "text"  # or "json"
    otlp_endpoint: str | None = None

    def __post_init__(self) -> None:
        """Raise InvalidConfig for an invalid setting."""
        if self.device not in ("auto", "cpu", "cuda"):
            raise InvalidConfig(f"device is {self.device!r}; use auto, cpu or cuda")
        if self.dtype not in ("auto", "float32", "bfloat16", "float16"):
            raise InvalidConfig(f"dtype is {self.dtype!r}; use auto, float32, bfloat16 or float16")
        if self.kv_dtype not in ("auto", *KV_DTYPES):
            raise InvalidConfig(f"kv-dtype is {self.kv_dtype!r}; use auto, {', '.join(KV_DTYPES)}")
        if self.eviction not in ("cost", "lru"):
            raise InvalidConfig(f"eviction is {self.eviction!r}; use cost or lru")
        if self.block_size not in (8, 16, 32, 64, 128):
            raise InvalidConfig(f"block-size is {self.block_size}; use 8, 16, 32, 64 or 128")
        if not self.kv_memory > 0:
            raise InvalidConfig(f"kv-memory is {self.kv_memory}; use bytes (above 1) or a share in (0, 1]")
        if not self.host_kv_memory >= 0:
            raise InvalidConfig(
                f"host-kv-memory is {self.host_kv_memory}; use bytes (above 1), a share in (0, 1], or 0 for none"
            )
        for name in ("tp", "max_num_seqs", "max_waiting", "max_batch_tokens"):
            if getattr(self, name) < 1:
                raise InvalidConfig(f"{name.replace('_', '-')} is {getattr(self, name)}; use at least 1")
        if self.max_model_len is not None and self.max_model_len < 2:
            raise InvalidConfig(f"max-model-len is {self.max_model_len}; use at least 2")
        if self.threads < 0:
            raise InvalidConfig(f"threads is {self.threads}; use 0 (divide the cores) or more")
        check_log_format(self.log_format)
        check_endpoint(self.otlp_endpoint)
