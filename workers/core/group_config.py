"""GroupConfig: the settings of one tensor-parallel group. `ServeConfig` has validated them."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from coatcheck.proto.log_lines import LogFormat
from coatcheck.workers.core.lora_module import LoraModule

if TYPE_CHECKING:  # `coatcheck plan` uses this module without gRPC
    from coatcheck.proto.internal_tls import ClusterCertificate


@dataclass(frozen=True)
class GroupConfig:
    """`kv_memory`: the size of each rank's KV pool. Up to 1: a share of the free memory. Above 1: bytes (`is_share`).

    `host_kv_memory`: the same for the host tier; 0 for none.
    `state_snapshot_share`: the share of `kv_memory` for snapshots of recurrent states. Only for models that have them.
    `gpu_memory_utilization`: the share of a GPU's memory that may be in use, the pool and everything else together.
    `max_waiting`: limit on the waiting requests of all routers together; the group refuses more.
    `mla_shard`: `tokens` divides the latents of a block's tokens over the ranks; `replicate` stores all on each.
    `max_cudagraph_capture_size`: tokens of the largest step that is a CUDA graph; 0 for no graphs.
    `speculative_tokens`: draft tokens of a sequence in a step, at most; 0 for no speculative decoding.
    `attention_backend`: auto, triton, flashinfer or fa3 (attention_selector.py).
    `skip_verify`: serve a model type that the tests do not cover without comparing a small copy with transformers.
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
    quantization: str = "auto"
    activation_quantization: str = "auto"
    kv_dtype: str = "auto"
    block_size: int = 16
    kv_memory: float = 0.3
    state_snapshot_share: float = 0.25
    gpu_memory_utilization: float = 0.9
    host_kv_memory: float = 0.0
    eviction: str = "cost"
    max_num_seqs: int = 256
    max_waiting: int = 1024
    max_batch_tokens: int = 2048
    max_cudagraph_capture_size: int = 2048
    speculative_tokens: int = 0
    max_model_len: int | None = None
    deterministic: bool = False
    attention_backend: str = "auto"
    expert_parallel: bool = False
    mla_shard: str = "replicate"
    lora_modules: tuple[LoraModule, ...] = ()
    skip_verify: bool = False
    threads: int = 0
    cluster_certificate: "ClusterCertificate | None" = None
    startup_timeout_seconds: float = 300.0
    collective_timeout_seconds: float = 60.0
    log_format: LogFormat = "text"
    otlp_endpoint: str | None = None


def is_share(memory: float) -> bool:
    """Whether a memory setting is a share of the free memory, 0 to 1. Larger values are bytes for each rank."""
    return memory <= 1
