"""Decides where ranks go: the device, the resources of each rank, and whether the Ray cluster has room. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from coatcheck.cluster.plural import counted
from coatcheck.proto.errors import InvalidConfig

Node = tuple[str, Mapping[str, float]]  # name and free resources

_SHOWN_NODES = 8


class InsufficientResources(InvalidConfig):
    """The groups do not fit on the Ray cluster. The message says how much is missing and what is free on which node."""

    def __init__(self, message: str, resource: str = "CPU") -> None:
        super().__init__(message)
        self.resource = resource

    def for_serve(self, *, own_ray: bool) -> InvalidConfig:
        """The error of `coatcheck serve`, with what to change. `own_ray`: the command has started this Ray."""
        remedy = "serve on a Ray cluster with more (--ray-address)" if own_ray else "add nodes"
        cpus = ", or use --device cpu" if self.resource == "GPU" else ""
        return InvalidConfig(f"{self}; lower --groups or --tp, or {remedy}{cpus}")

    def for_scale(self, before: int, groups: int, *, own_ray: bool) -> InvalidConfig:
        """The error of `coatcheck scale --groups GROUPS` on a cluster of `before` groups, with what to change."""
        if not own_ray:
            remedy = "ask for fewer, or add nodes"
        elif self.resource == "CPU":
            remedy = (
                "this Ray was started by `coatcheck serve` with room for the groups of its flags: start it again with "
                f"--groups {groups}, or with --max-groups {groups}, or on a Ray cluster with more (--ray-address)"
            )
        else:
            remedy = "this Ray is of one host: serve on a Ray cluster with more (--ray-address)"
        return InvalidConfig(f"{counted(before, 'group')} serve, and more have no room: {self}; {remedy}")


@dataclass(frozen=True)
class PlacementPlan:
    """The resources of a group's placement group: `tp` bundles, each `bundle`.

    `strategies` has Ray's placement strategy of each group, in the order in which to reserve them: first STRICT_PACK
    (all ranks on one node), then PACK (over several nodes).
    """

    device: str
    bundle: dict[str, float]
    strategies: tuple[str, ...]


def plan_placement(device: str, groups: int, tp: int, nodes: Sequence[Node]) -> PlacementPlan:
    """Place `groups` groups of `tp` ranks. Two of the `nodes` may have the same name.

    Device "auto" is "cuda" if any node has a free GPU. Raises InsufficientResources if the groups do not fit.
    """
    if device == "auto":
        device = "cuda" if any(resources.get("GPU", 0) >= 1 for _, resources in nodes) else "cpu"
    resource = "GPU" if device == "cuda" else "CPU"
    free = [int(resources.get(resource, 0)) for _, resources in nodes]
    if sum(free) < groups * tp:
        raise InsufficientResources(_shortage(resource, groups, tp, [name for name, _ in nodes], free), resource)
    strategies = []
    for _ in range(groups):
        # The ranks of a group exchange tensors in every layer, so one node should hold them all. Of the nodes that can
        # hold them, take the one with the fewest free resources.
        candidates = [amount for amount in free if amount >= tp]
        if not candidates:
            break
        free[free.index(min(candidates))] -= tp
        strategies.append("STRICT_PACK")
    spread = groups - len(strategies)
    return PlacementPlan(device, {resource: 1.0}, (*strategies, *("PACK",) * spread))


def _shortage(resource: str, groups: int, tp: int, names: Sequence[str], free: Sequence[int]) -> str:
    needed, total = groups * tp, sum(free)
    offering = sorted(((amount, name) for name, amount in zip(names, free, strict=True) if amount), reverse=True)
    shown = [f"{amount} on {name}" for amount, name in offering[:_SHOWN_NODES]]
    if len(offering) > _SHOWN_NODES:
        shown.append(f"others on {len(offering) - _SHOWN_NODES} more")
    where = f" ({', '.join(shown)})" if shown else ""
    return (
        f"{counted(groups, 'group')} with tp {tp} {'needs' if groups == 1 else 'need'} {counted(needed, resource)}, "
        f"and this Ray cluster has {total} free on {counted(len(free), 'node')}{where}: {needed - total} missing"
    )
