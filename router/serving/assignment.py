"""Assignment: a request on a group, from the moment that it is sent until nobody takes from it any more.

It keeps what was expected of the group's cache, until the group says what it found. It does not know text or clients.
"""

from coatcheck.proto.stubs.coatcheck_pb2 import GetModelResponse
from coatcheck.proto.stubs.worker_pb2 import Cached
from coatcheck.router.groups.group_connection import GroupConnection
from coatcheck.router.groups.submission import Ticket
from coatcheck.router.routing.hit_prediction import HitPrediction
from coatcheck.router.routing.pending_prefixes import PendingPrefix
from coatcheck.router.routing.prefix_index import PrefixIndex
from coatcheck.router.routing.routing_cost import Decision


class Assignment:
    """The ticket, the link to close it on, and why it is there."""

    __slots__ = ("_audit", "_expectation", "_index", "_link", "decision", "model", "ticket")

    def __init__(
        self,
        link: GroupConnection,
        ticket: Ticket,
        decision: Decision,
        model: GetModelResponse,
        index: PrefixIndex,
        expectation: PendingPrefix | None,
        audit: HitPrediction,
    ) -> None:
        self._link = link
        self._index = index
        self._expectation = expectation
        self._audit = audit
        self.ticket = ticket
        self.decision = decision
        self.model = model

    def computed(self, cached: Cached) -> None:
        """The group has computed the prompt, and found so much of it; choices after the first change nothing."""
        self._link.computed(self.ticket)
        if self._expectation is None:
            return
        self._settle()
        foreseen, found = self.decision.chosen.cached_tokens, cached.device_tokens + cached.host_tokens
        if self._audit.record(self._link.name, foreseen, found):
            self._link.ask_snapshot("its cached tokens differ from what its events say")

    def close(self, finished: bool) -> None:
        """Nobody takes from the ticket any more; unless the group has finished, it is told."""
        self._settle()
        self._link.close_ticket(self.ticket, finished)

    def suspect(self, level: int) -> None:
        """How suspect the request is from now on; see Suspicion."""
        self._link.suspect(self.ticket, level)

    def _settle(self) -> None:
        if self._expectation is not None:
            self._index.settle(self._expectation)
            self._expectation = None
