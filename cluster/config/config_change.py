"""compare_configs(): what a running cluster must do to change its settings. Pure; ConfigRollout carries it out.

A change of a setting has one effect:

    LIVE      the supervisor uses the new value from now on
    SCALE     groups are added or removed
    GROUPS    each group starts again, one after another
    ROUTERS   each router starts again, one after another
    BOTH      groups, then routers
    NEVER     refused: streams could not continue on a group with the new value, or processes would have to be placed
              or certified again
    OWN       none on the cluster: the setting is for `coatcheck serve` itself
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

from coatcheck.cluster.config.serve_config import ServeConfig


class Effect(Enum):
    """The effect of a change of a setting; see above."""

    LIVE = auto()
    SCALE = auto()
    GROUPS = auto()
    ROUTERS = auto()
    BOTH = auto()
    NEVER = auto()
    OWN = auto()


EFFECTS: Final[Mapping[str, Effect]] = {
    **dict.fromkeys(("max_groups", "queue_target", "scale_in_after"), Effect.LIVE),
    "groups": Effect.SCALE,
    **dict.fromkeys(("kv_memory", "gpu_memory_utilization", "host_kv_memory", "eviction"), Effect.GROUPS),
    **dict.fromkeys(("max_num_seqs", "max_batch_tokens", "max_model_len", "skip_verify"), Effect.GROUPS),
    "state_snapshot_share": Effect.GROUPS,
    **dict.fromkeys(("max_cudagraph_capture_size", "attention_backend", "speculative_tokens"), Effect.GROUPS),
    **dict.fromkeys(("max_queued", "max_logprobs", "routing", "generation_config", "tool_parser"), Effect.ROUTERS),
    **dict.fromkeys(("cors_origins", "trust_request_chat_template", "enable_tokenizer_info_endpoint"), Effect.ROUTERS),
    **dict.fromkeys(("root_path", "enable_force_include_usage", "enable_per_request_metrics"), Effect.ROUTERS),
    **dict.fromkeys(("log_format", "otlp_endpoint"), Effect.BOTH),
    # A stream continues only on a group that would give the same answer. Prefixes are matched by blocks of one size.
    **dict.fromkeys(("model", "served_model_name", "dtype", "kv_dtype", "block_size", "deterministic"), Effect.NEVER),
    **dict.fromkeys(("quantization", "activation_quantization", "device", "tp"), Effect.NEVER),
    **dict.fromkeys(("expert_parallel", "mla_shard", "lora_modules"), Effect.NEVER),
    **dict.fromkeys(("router_resource", "router_per_node"), Effect.NEVER),
    # The addresses at which clients find routers, and files that routers read. These decide whether the cluster has
    # certificates of its own.
    **dict.fromkeys(("grpc_host", "grpc_port", "http_host", "http_port"), Effect.NEVER),
    **dict.fromkeys(("api_keys", "tls_cert", "tls_key", "tls_client_ca", "insecure"), Effect.NEVER),
    **dict.fromkeys(("ray_address", "ray_start_timeout", "no_ray"), Effect.OWN),
}


@dataclass(frozen=True)
class ConfigChange:
    """The settings that differ, by effect. Names are those of the flags, without the leading dashes.

    `refusal`: why none of the changes is made; "" if they can be made.
    """

    live: tuple[str, ...] = ()
    scale: bool = False
    groups: tuple[str, ...] = ()
    routers: tuple[str, ...] = ()
    refusal: str = ""


def compare_configs(applied: ServeConfig, wanted: ServeConfig) -> ConfigChange:
    """The change from the settings `applied` to the settings `wanted`."""
    by_effect: dict[Effect, list[str]] = {effect: [] for effect in Effect}
    for name in ServeConfig.model_fields:
        if getattr(applied, name) != getattr(wanted, name):
            by_effect[EFFECTS[name]].append(name)
    if never := by_effect[Effect.NEVER]:
        changes = ", ".join(
            f"{_flag(name)} from {_shown(applied, name)} to {_shown(wanted, name)}" for name in never
        )  # fmt: skip
        return ConfigChange(
            refusal=f"a running cluster cannot change {changes}; set the old value again, or start another cluster "
            "beside this one and stop this one"
        )
    both = by_effect[Effect.BOTH]
    return ConfigChange(
        live=tuple(map(_flag, by_effect[Effect.LIVE])),
        scale=bool(by_effect[Effect.SCALE]),
        groups=tuple(map(_flag, by_effect[Effect.GROUPS] + both)),
        routers=tuple(map(_flag, by_effect[Effect.ROUTERS] + both)),
    )


def _flag(name: str) -> str:
    return name.replace("_", "-")


def _shown(config: ServeConfig, name: str) -> str:
    value = getattr(config, name)
    return "its default" if value is None else str(value)
