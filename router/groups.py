"""Groups: the groups that this router knows, their links, and the prefix index that they feed.

The supervisor says which exist, the links find out which answer, and `place` sends a request to the cheapest that can
hold it. It does not know tokens' text or clients.
"""

import asyncio
import random
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet

from ..proto.coatcheck_pb2 import GetModelResponse
from ..proto.errors import Unavailable
from ..proto.worker_pb2 import Registration
from .audit import Audit
from .config import RouterConfig
from .eligibility import able_to_hold, equal, holds, kind, require_time
from .fair_queue import Served
from .group_address import GroupAddress
from .group_link import GroupLink
from .laggards import Laggards
from .line import Line
from .losses import Losses
from .placement import Placement
from .policy import Candidate, Decision, choose
from .prefix_index import PrefixIndex
from .prefix_match import NOTHING, Match
from .quarantine import Quarantine
from .request import Request
from .retry_budget import RetryBudget
from .ticket import Ejected

_NO_GROUP = "no worker group is serving; try again shortly"
_NO_EQUAL = "its worker group is lost, and none that could go on with it is serving; try again shortly"


class Groups:
    """Owns the links and the index."""

    def __init__(self, config: RouterConfig, rng: random.Random | None = None) -> None:
        self.index = PrefixIndex()
        self.audit = Audit()
        self.line = Line(config.max_queued)
        self.losses = Losses()
        self.retries = RetryBudget()
        self.model: GetModelResponse | None = None  # of the last group that registered; it outlives the group
        # By name, so that a group that is lost and started again stays drained.
        self.draining: set[str] = set()
        self._config = config
        self._rng = rng or random.Random()
        self._links: dict[str, GroupLink] = {}
        self._absent: dict[str, GroupAddress] = {}  # known, but with nothing to attach to
        self._version = 0  # of the newest list
        self._changed = asyncio.Event()
        self._laggards = Laggards()
        self._quarantine = Quarantine()

    @property
    def links(self) -> Iterable[GroupLink]:
        """One per group that has an address, attached or not."""
        return self._links.values()

    @property
    def absent(self) -> Iterable[GroupAddress]:
        """Groups that are starting or lost."""
        return self._absent.values()

    def link(self, name: str) -> GroupLink | None:
        """By name; None for a group that has no link."""
        return self._links.get(name)

    async def set(self, addresses: Sequence[GroupAddress], version: int = 0) -> None:
        """Replaces what the supervisor knows: links to new groups open, links to groups gone or lost close at once.

        A list older than the newest is ignored, since lists may overtake each other: versions grow, over a
        supervisor's restart too. 0 is always taken.
        """
        if version and version < self._version:
            return
        self._version = max(version, self._version)
        wanted = {address.name: address for address in addresses if address.address and address.state != "lost"}
        self._absent = {address.name: address for address in addresses if address.name not in wanted}
        self.draining &= {*wanted, *self._absent}
        closing = []
        for name, link in list(self._links.items()):
            if name not in wanted or wanted[name].address != link.address.address:
                closing.append(self._links.pop(name).close("its supervisor has taken it away"))
        for name, address in wanted.items():
            if name in self._links:
                self._links[name].address = address
            else:
                self._links[name] = GroupLink(
                    address, self._config, self.index, self.notify, self.line.move, self._judge, self.losses
                )
        await asyncio.gather(*closing)
        for address in addresses:
            if address.predecessor is not None:
                self.losses.learn(address.name, address.restarts - 1, address.predecessor)
        self.notify()

    async def close(self) -> None:
        """Ends every link."""
        await self.set([])

    @property
    def next_change(self) -> asyncio.Event:
        """Set once, when next a group comes or goes, or somebody begins to drain. Look after taking it, then wait."""
        return self._changed

    def serving(self) -> list[tuple[GroupLink, Registration]]:
        """Groups that take new work."""
        return [
            (link, link.registration)
            for link in self._links.values()
            if link.registration is not None and link.name not in self.draining and link.address.state != "draining"
        ]

    async def enter(
        self,
        request: Request,
        attempt: int = 0,
        delivered: Mapping[int, Sequence[int]] | None = None,
        *,
        wait_seconds: float = 0.0,
        like: GetModelResponse | None = None,
        bounded: bool = True,
    ) -> tuple[Placement, Served]:
        """As `place`, for one that waits for its turn, and until some group has room for it.

        Waits `wait_seconds` for a first group that serves; once in line it stays, whatever happens to the groups.
        Raises Overloaded where there is no room in line, Unavailable and NeverFits.
        """

        def place() -> Placement | None:
            serving = self._serving_like(request, like)
            if not serving:
                return None
            holding = serving if like is not None else able_to_hold(serving, request)
            if not any(link.load.has_room for link, _ in holding):
                return None
            full = {link.name for link, _ in holding if link.load.refuses}
            return self._place(request, attempt, delivered or {}, serving, full)

        if like is None and not len(self.line):
            await self._await_group(wait_seconds)
        return await self.line.placed(request, place, lambda: self._least_seconds(request, like), bounded=bounded)

    async def place(
        self,
        request: Request,
        attempt: int = 0,
        delivered: Mapping[int, Sequence[int]] | None = None,
        *,
        wait_seconds: float = 0.0,
        like: GetModelResponse | None = None,
        avoid: AbstractSet[str] = frozenset(),
        suspicion: int = 0,
    ) -> Placement:
        """Sends a request to the cheapest group, and to one not in `avoid` if another is there. Waits that long for
        one; raises Unavailable when none has come, NeverFits when those that serve can never hold it.

        With `like` the request has begun: only a group that is equal to it and large enough counts as serving, since
        one that held the request may come back.

        `suspicion`: its level, which says where it may run; see Quarantine.
        """
        delivered = delivered or {}
        loop = asyncio.get_running_loop()
        until = loop.time() + wait_seconds
        try:
            tokens = sum(map(len, delivered.values()))
            with self._quarantine.turn(suspicion, tokens, kind(like) if like is not None else None) as turn:
                while True:
                    change = self.next_change
                    serving = self._serving_like(request, like)
                    if suspicion:
                        levels = (((link, reg), link.tickets.suspicion) for link, reg in serving)
                        serving = self._quarantine.places(suspicion, turn, levels)
                    if serving:
                        placement = self._place(request, attempt, delivered, serving, avoid)
                        placement.ticket.suspicion = suspicion
                        return placement
                    try:
                        async with asyncio.timeout_at(until):
                            await change.wait()
                    except TimeoutError:
                        raise Unavailable(_NO_GROUP if like is None else _NO_EQUAL) from None
        finally:
            if self._quarantine.waiting:  # there may be a place for the next one, also where this one's client has gone
                self.notify()

    def _serving_like(self, request: Request, like: GetModelResponse | None) -> list[tuple[GroupLink, Registration]]:
        """Those that serve; for one that has begun on `like`, only those that can go on with it."""
        serving = self.serving()
        if like is None:
            return serving
        return [(link, reg) for link, reg in serving if equal(like, reg.model) and holds(reg, request)]

    def _least_seconds(self, request: Request, like: GetModelResponse | None) -> float:
        """How long its prompt takes on the group that holds most of it; 0 while none serves."""
        serving = self._serving_like(request, like)
        if not serving:
            return 0.0
        return min(terms.prefill + terms.restore for terms in self._decide(request, serving).terms)

    async def _await_group(self, wait_seconds: float) -> None:
        """Returns once a group serves; raises Unavailable when none does in time."""
        try:
            async with asyncio.timeout(wait_seconds):
                while not self.serving():
                    await self.next_change.wait()
        except TimeoutError:
            raise Unavailable(_NO_GROUP) from None

    def _place(
        self,
        request: Request,
        attempt: int,
        delivered: Mapping[int, Sequence[int]],
        serving: list[tuple[GroupLink, Registration]],
        avoid: AbstractSet[str],
    ) -> Placement:
        passage = request.passage
        if passage is not None:
            passage.routing()
        eligible = [(link, reg) for link, reg in able_to_hold(serving, request) if link.name not in avoid]
        decision = self._decide(request, eligible or able_to_hold(serving, request))
        link = self._links[decision.group]
        assert link.registration is not None, "what serves is attached"
        model = link.registration.model
        chosen = decision.chosen
        if not attempt and not delivered:
            require_time(request, decision, asyncio.get_running_loop().time())
        if passage is not None:
            passage.routed(decision, attempt)
        uncached = len(request.prompt_token_ids) - chosen.cached_tokens
        ticket = link.submit(request, attempt, delivered, uncached)
        expectation = self.index.expect(link.name, request.chain(model))
        return Placement(link, ticket, decision, model, self.index, expectation, self.audit)

    def explain(self, request: Request) -> Decision:
        """Where `place` would send it now, and nothing is sent. Raises Unavailable and NeverFits as that does."""
        serving = self.serving()
        if not serving:
            raise Unavailable(_NO_GROUP)
        return self._decide(request, able_to_hold(serving, request))

    def _decide(self, request: Request, eligible: list[tuple[GroupLink, Registration]]) -> Decision:
        # Groups of one model share their block names; one walk along the chain matches them all.
        matched: dict[tuple[str, str, int], dict[str, Match]] = {}
        candidates: list[Candidate] = []
        for link, registration in eligible:
            model = registration.model
            named = (model.name, model.fingerprint, model.block_size)
            if named not in matched:
                # A prompt whose log-probabilities are wanted is computed whole, whatever is cached.
                whole = request.sampling.prompt_logprobs is not None
                matched[named] = {} if whole else self.index.matched_blocks(request.chain(model))
            candidates.append(link.load.candidate(link.name, matched[named].get(link.name, NOTHING)))
        return choose(
            candidates,
            len(request.prompt_token_ids),
            self._rng,
            regret=self.index.regret.rate,
            in_line=len(self.line),
            session=request.session_id,
        )

    def notify(self) -> None:
        """Something about who takes new work has changed; wakes whoever waits for that."""
        for _, registration in self.serving():
            self.model = registration.model
        self._changed.set()
        self._changed = asyncio.Event()
        if not self.serving():
            for link in self._links.values():
                link.recall()
        self.line.move()

    def _judge(self, link: GroupLink) -> Ejected | None:
        """Whether it is too slow, now that it has reported, to be kept beside the others."""
        status = link.load.last.status
        if link.registration is None or not status.running or not self._laggards.suspects(status.slowness):
            return None
        peers = [
            other.load.last.status.slowness
            for other, registration in self.serving()
            if other is not link and equal(registration.model, link.registration.model)
        ]
        return self._laggards.judge(link.name, status.slowness, peers, asyncio.get_running_loop().time())
