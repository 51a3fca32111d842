"""Where ranks go: device, resources per rank, and whether a Ray cluster has room. Pure: nodes come in as numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..proto.errors import InvalidConfig
from .counted import counted

Resources = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Placement:
    """One group's bundles: `tp` times `bundle`, all on one node if `strategy` is STRICT_PACK."""

    device: str
    bundle: dict[str, float]
    strategy: str


def choose_placement(device: str, groups: int, tp: int, nodes: Sequence[Resources]) -> Placement:
    """`nodes`: what each node has free. Raises InvalidConfig when the groups do not fit, with what is missing."""
    if device == "auto":
        device = "cuda" if any(node.get("GPU", 0) >= 1 for node in nodes) else "cpu"
    resource = "GPU" if device == "cuda" else "CPU"
    needed, free = groups * tp, sum(int(node.get(resource, 0)) for node in nodes)
    if free < needed:
        raise InvalidConfig(
            f"{counted(groups, 'group')} with tp {tp} need {counted(needed, resource)}, and this Ray cluster has "
            f"{free} free on {counted(len(nodes), 'node')}; lower --groups or --tp, or add nodes"
        )
    # Ranks of a group talk in every layer: one node where one can hold them.
    holds = any(int(node.get(resource, 0)) >= tp for node in nodes)
    return Placement(device, {resource: 1.0}, "STRICT_PACK" if holds else "PACK")
