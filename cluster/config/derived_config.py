"""Derives the settings of each group and each router from the settings of the cluster."""

from coatcheck.cluster.config.exposure import absolute_path
from coatcheck.cluster.config.serve_config import BATCH_TOKENS, FREE_SHARE, ServeConfig
from coatcheck.proto.internal_tls import ClusterCertificate
from coatcheck.router.config import RouterConfig
from coatcheck.workers.core.group_config import GroupConfig


def group_config(
    config: ServeConfig, name: str, device: str, certificate: ClusterCertificate | None = None
) -> GroupConfig:
    """The settings of the group `name`. `device`: "cpu" or "cuda"."""
    return GroupConfig(
        name=name,
        model=config.model_source,
        served_model_name=config.model_name,
        tp=config.tp,
        device=device,
        dtype=config.dtype,
        quantization=config.quantization,
        activation_quantization=config.activation_quantization,
        kv_dtype=config.kv_dtype,
        eviction=config.eviction,
        block_size=config.block_size,
        kv_memory=config.kv_memory if config.kv_memory is not None else FREE_SHARE[device],
        state_snapshot_share=config.state_snapshot_share,
        gpu_memory_utilization=config.gpu_memory_utilization,
        host_kv_memory=config.host_kv_memory,
        max_num_seqs=config.max_num_seqs,
        max_batch_tokens=config.max_batch_tokens or BATCH_TOKENS[device],
        max_cudagraph_capture_size=config.max_cudagraph_capture_size,
        speculative_tokens=config.speculative_tokens,
        max_model_len=config.max_model_len,
        deterministic=config.deterministic,
        attention_backend=config.attention_backend,
        expert_parallel=config.expert_parallel,
        mla_shard=config.mla_shard,
        lora_modules=config.adapters,
        skip_verify=config.skip_verify,
        log_format=config.log_format,
        otlp_endpoint=config.otlp_endpoint,
        cluster_certificate=certificate,
    )


def router_config(
    config: ServeConfig,
    name: str,
    port: int,
    certificate: ClusterCertificate | None = None,
    resume_key: bytes = b"",
) -> RouterConfig:
    """The settings of the router `name`, which listens for gRPC at `port`."""
    return RouterConfig(
        model=config.model_source,
        served_model_name=config.model_name,
        model_aliases=config.model_aliases,
        lora_modules={adapter.name: adapter.path for adapter in config.adapters},
        name=name,
        host=config.grpc_host,
        port=port,
        http_host=config.http_host,
        http_port=config.http_listen_port,
        log_format=config.log_format,
        otlp_endpoint=config.otlp_endpoint,
        tls_cert=absolute_path(config.tls_cert),
        tls_key=absolute_path(config.tls_key),
        tls_client_ca=absolute_path(config.tls_client_ca),
        key_file=absolute_path(config.api_keys),
        resume_key=resume_key,
        insecure=config.insecure,
        cors_origins=tuple(filter(None, map(str.strip, (config.cors_origins or "").split(",")))),
        root_path=config.root_path or "",
        enable_force_include_usage=config.enable_force_include_usage,
        enable_per_request_metrics=config.enable_per_request_metrics,
        trust_request_chat_template=config.trust_request_chat_template,
        enable_tokenizer_info_endpoint=config.enable_tokenizer_info_endpoint,
        cluster_certificate=certificate,
        max_queued=config.max_queued,
        max_logprobs=config.max_logprobs,
        generation_config=config.generation_config,
        tool_parser=config.tool_parser,
        routing=config.routing,
    )
