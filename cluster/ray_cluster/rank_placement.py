"""Where ranks go: device, resources per rank, and whether a Ray cluster has room. Pure: nodes come in as numbers."""

from collections.abc import Mapping
from dataclasses import dataclass

from coatcheck.cluster.plural import counted
from coatcheck.proto.errors import InvalidConfig

Resources = Mapping[str, float]

_SHOWN_NODES = 8


class NoRoom(InvalidConfig):
    """Groups that do not fit: the message says what is missing, and where. What helps is for whoever asked to say."""

    def __init__(self, message: str, resource: str = "CPU") -> None:
        super().__init__(message)
        self.resource = resource

    def at_start(self, *, own_ray: bool) -> InvalidConfig:
        """As `coatcheck serve` says it."""
        remedy = "serve on a Ray cluster with more (--ray-address)" if own_ray else "add nodes"
        cpus = ", or use --device cpu" if self.resource == "GPU" else ""
        return InvalidConfig(f"{self}; lower --groups or --tp, or {remedy}{cpus}")

    def at_growth(self, before: int, groups: int, *, own_ray: bool) -> InvalidConfig:
        """As `coatcheck scale` says it, when so many serve and so many were asked for."""
        if not own_ray:
            remedy = "ask for fewer, or add nodes"
        elif self.resource == "CPU":
            remedy = (
                "this Ray is `coatcheck serve`'s own, with places for what that was started with: start it again with "
                f"--groups {groups}, or with --max-groups {groups}, or on a Ray cluster with more (--ray-address)"
            )
        else:
            remedy = "it is `coatcheck serve`'s own, on one host: serve on a Ray cluster with more (--ray-address)"
        return InvalidConfig(f"{counted(before, 'group')} serve, and more have no room: {self}; {remedy}")


@dataclass(frozen=True)
class RankPlacement:
    """One group's bundles are `tp` times `bundle`. `strategies` has one for each group, in the order in which they
    are to be reserved: STRICT_PACK, all on one node, comes first, then PACK, over several."""

    device: str
    bundle: dict[str, float]
    strategies: tuple[str, ...]


def choose_placement(device: str, groups: int, tp: int, nodes: Mapping[str, Resources]) -> RankPlacement:
    """`nodes`: what each has free, by its name. Raises NoRoom when the groups do not fit."""
    if device == "auto":
        device = "cuda" if any(node.get("GPU", 0) >= 1 for node in nodes.values()) else "cpu"
    resource = "GPU" if device == "cuda" else "CPU"
    free = {name: int(node.get(resource, 0)) for name, node in nodes.items()}
    if sum(free.values()) < groups * tp:
        raise NoRoom(_too_small(resource, groups, tp, free), resource)
    strategies = []
    for _ in range(groups):
        # Ranks of a group talk in every layer: one node where one can hold them, and of those the fullest.
        holding = [name for name, amount in free.items() if amount >= tp]
        if not holding:
            break
        free[min(holding, key=lambda name: free[name])] -= tp
        strategies.append("STRICT_PACK")
    spread = groups - len(strategies)
    return RankPlacement(device, {resource: 1.0}, (*strategies, *("PACK",) * spread))


def _too_small(resource: str, groups: int, tp: int, free: Mapping[str, int]) -> str:
    needed, there = groups * tp, sum(free.values())
    offering = sorted(((amount, name) for name, amount in free.items() if amount), reverse=True)
    shown = [f"{amount} on {name}" for amount, name in offering[:_SHOWN_NODES]]
    if len(offering) > _SHOWN_NODES:
        shown.append(f"others on {len(offering) - _SHOWN_NODES} more")
    where = f" ({', '.join(shown)})" if shown else ""
    return (
        f"{counted(groups, 'group')} with tp {tp} {'needs' if groups == 1 else 'need'} {counted(needed, resource)}, "
        f"and this Ray cluster has {there} free on {counted(len(free), 'node')}{where}: {needed - there} missing"
    )
