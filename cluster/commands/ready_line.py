"""The line with which `coatcheck serve` says that everything serves."""

from typing import TYPE_CHECKING

from coatcheck.cluster.config.serve_config import ServeConfig
from coatcheck.cluster.plural import counted

if TYPE_CHECKING:
    from coatcheck.cluster.supervision.cluster_state import ClusterState


def ready_line(config: ServeConfig, state: "ClusterState") -> str:
    """Where to connect, and what each group holds: the smallest one, where they differ."""
    rank = min((group.ranks[0] for group in state.groups), key=lambda rank: rank.num_blocks)
    longest, tokens = rank.max_model_len, rank.num_blocks * config.block_size
    http = f" and http{'s' if config.tls_cert else ''}://{state.http[0]}" if state.http else ""
    holds = f"{counted(rank.num_blocks, 'block')} of {config.block_size} tokens"
    if tokens < rank.model_len:
        holds += (
            f", which is too few: no sequence can be longer than {longest} tokens, and the model goes to "
            f"{rank.model_len}; raise --kv-memory"
        )
    else:
        at_once = counted(min(config.max_num_seqs, tokens // longest), "sequence")
        holds += f", {at_once} of {longest} tokens at once"
    groups = counted(len(state.groups), "group")
    return (
        f"ready: {config.model_name} ({rank.dtype}) at {state.routers[0]}{http}, {groups} x tp {config.tp}, "
        f"{'each with ' if len(state.groups) > 1 else ''}{holds}"
    )
