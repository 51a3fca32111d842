"""GroupListUpdate: what the supervisor sends to a router when the list of groups has changed; it is pickled.

A router gets the whole list once, and after that only changes. Every update has a version. A router ignores an update
that is older than its list, and changes to a list that it does not have; its answer is the version that it holds, and
the supervisor sends what is missing. Updates may therefore be lost, repeated, or overtake each other.
"""

from dataclasses import dataclass

from coatcheck.router.groups.group_endpoint import GroupEndpoint


@dataclass(frozen=True, order=True)
class GroupListVersion:
    """Orders the lists of all supervisors of a cluster. `epoch`: one for each start of a supervisor; a later one has a
    higher epoch. `number`: counts that supervisor's changes from 1."""

    epoch: int = 0
    number: int = 0


NO_LIST = GroupListVersion()  # of a router that has no list yet; lower than every version


@dataclass(frozen=True)
class GroupListUpdate:
    """Brings a router's list of groups to `version`.

    `endpoints`: all groups if `base` is None; else the groups that were added or changed since the list of number
    `base` in the same epoch. `removed`: names of the groups that were removed since then.
    """

    version: GroupListVersion
    endpoints: tuple[GroupEndpoint, ...]
    base: int | None = None
    removed: tuple[str, ...] = ()

    def applies_to(self, held: GroupListVersion) -> bool:
        """Whether a router that holds the list `held` should apply this update.

        `held` may be newer than `base`: this update has every group that changed after `base`, as it is at `version`.
        """
        if self.version <= held:
            return False
        return self.base is None or (self.version.epoch == held.epoch and self.base <= held.number)
