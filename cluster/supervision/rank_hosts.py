"""RankHosts: on which nodes the ranks of all groups have their places, since ranks on one node share its cores.

Nodes come and go, and places with them: whoever starts a group says where it is now. It does not know Ray.
"""

from collections import Counter
from collections.abc import Sequence


class RankHosts:
    """`busiest` is what a group's ranks are told of those beside them."""

    def __init__(self) -> None:
        self._hosts: dict[str, tuple[str, ...]] = {}

    def note(self, group: str, hosts: Sequence[str]) -> None:
        """One host per rank; none for a group that is gone."""
        self._hosts[group] = tuple(hosts)

    def of(self, group: str) -> tuple[str, ...]:
        """The host of each rank of the group; empty if the group has no placement."""
        return self._hosts.get(group, ())

    def busiest(self, group: str) -> int:
        """Ranks of all groups on the host that has most of them, among the group's own."""
        ranks = Counter(host for hosts in self._hosts.values() for host in hosts)
        return max((ranks[host] for host in self._hosts.get(group, ())), default=0)
