"""VersionedGroupList: the list of groups that the supervisor sends to routers, with a version for each change.

`update_for` returns what a router needs to get the newest version: the changes since the version that it holds, or the
whole list. An update is pickled once for all routers that hold the same version.
"""

import pickle
import random
import time
from collections.abc import Sequence

from coatcheck.cluster.ray_cluster.cluster_state import GroupState
from coatcheck.router.groups.group_endpoint import GroupEndpoint
from coatcheck.router.groups.group_list import NO_LIST, GroupListUpdate, GroupListVersion


class VersionedGroupList:
    """`epoch`: see GroupListVersion; by default the time, which is later for each start of a supervisor."""

    def __init__(self, epoch: int | None = None) -> None:
        self._epoch = time.time_ns() if epoch is None else epoch
        self._number = 0  # of changes; 0: the groups are not known yet
        self._states: dict[str, GroupState] = {}
        self._endpoints: dict[str, GroupEndpoint] = {}
        # name -> number of its last change, in the order of changes; a removed group has no endpoint
        self._changed_at: dict[str, int] = {}
        self._pickled: dict[int | None, bytes] = {}  # updates to the present version, by base

    @property
    def version(self) -> GroupListVersion:
        """NO_LIST until the first `set_states`."""
        return GroupListVersion(self._epoch, self._number) if self._number else NO_LIST

    def set_states(self, states: Sequence[GroupState]) -> bool:
        """Replace the list by `states`, of all groups. Return whether routers must learn of a change."""
        changed = [state for state in states if self._states.get(state.name) is not state]
        before, self._states = self._states, {state.name: state for state in states}
        names = [name for name in before if name not in self._states]
        for name in names:
            del self._endpoints[name]
        for state in changed:
            endpoint = make_endpoint(state)
            if self._endpoints.get(state.name) != endpoint:
                self._endpoints[state.name] = endpoint
                names.append(state.name)
        if not names and self._number:
            return False
        self._number += 1
        self._pickled.clear()
        for name in names:
            self._changed_at.pop(name, None)  # to insert it at the end
            self._changed_at[name] = self._number
        return True

    def update_for(self, held: GroupListVersion) -> bytes | None:
        """The pickled update for a router that holds the list `held`; None if that list is this one, or if the groups
        are not known yet.

        A version above this list's comes from an earlier supervisor whose clock was ahead. This list then takes a
        higher epoch, because routers ignore lower ones. The step is random: the earlier supervisor may have raised its
        epoch too, and two lists must not have the same version.
        """
        if not self._number or held == self.version:
            return None
        if held > self.version:
            self._epoch = held.epoch + random.randint(1, 10**9)
            self._pickled.clear()
        base = held.number if held.epoch == self._epoch else None
        if base not in self._pickled:
            self._pickled[base] = pickle.dumps(self._make_update(base))
        return self._pickled[base]

    def _make_update(self, base: int | None) -> GroupListUpdate:
        if base is None:
            return GroupListUpdate(self.version, tuple(self._endpoints.values()))
        names = []
        for name, number in reversed(self._changed_at.items()):
            if number <= base:
                break
            names.append(name)
        endpoints = tuple(self._endpoints[name] for name in names if name in self._endpoints)
        removed = tuple(name for name in names if name not in self._endpoints)
        return GroupListUpdate(self.version, endpoints, base, removed)


def make_endpoint(state: GroupState) -> GroupEndpoint:
    """The entry of a group in the list that routers receive."""
    return GroupEndpoint(
        name=state.name,
        address=state.address,
        state="lost" if state.state == "failed" else state.state,
        reason=state.reason,
        restarts=state.restarts,
        incarnation=state.incarnation,
        previous_crash=state.previous_crash,
        last_failure=state.last_failure,
    )
