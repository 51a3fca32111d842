"""Dispatcher: sends requests to groups: to the cheapest that can hold them, at once or when their turn has come.

New requests wait in the line until a group has room. One that has begun, and has lost its group, goes on wherever it
can, past the line; where it may have ended that group itself, the quarantine says where, and when. It does not know
links' streams, tokens' text or clients.
"""

import asyncio
import random
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from coatcheck.proto.errors import Unavailable
from coatcheck.proto.stubs.coatcheck_pb2 import GetModelResponse
from coatcheck.proto.stubs.worker_pb2 import Registration
from coatcheck.router.access.tenant import Tenant
from coatcheck.router.groups.eligibility import EligibleGroups, able_to_hold, equal, holds, kind, require_time
from coatcheck.router.groups.group_connection import GroupConnection
from coatcheck.router.groups.group_registry import GroupRegistry
from coatcheck.router.groups.request import Request
from coatcheck.router.groups.retry_budget import RetryBudget
from coatcheck.router.routing.hit_prediction import HitPrediction
from coatcheck.router.routing.prefix_match import NOTHING, PrefixMatch
from coatcheck.router.routing.routing_cost import Candidate, Decision, choose
from coatcheck.router.serving.admission_queue import AdmissionQueue
from coatcheck.router.serving.assignment import Assignment
from coatcheck.router.serving.fair_queue import Served
from coatcheck.router.serving.poison_quarantine import PoisonQuarantine, places

_NO_GROUP = "no worker group is serving; try again shortly"
_NO_EQUAL = "its worker group is lost, and none that could go on with it is serving; try again shortly"


class Dispatcher:
    """`line` is moved by whoever knows that a group may have room (see Groups)."""

    def __init__(self, groups: GroupRegistry, line: AdmissionQueue, rng: random.Random | None = None) -> None:
        self.audit = HitPrediction()
        self.line = line
        self.retries = RetryBudget()
        self._groups = groups
        self._rng = rng or random.Random()
        self._quarantine = PoisonQuarantine()

    async def enter(
        self,
        request: Request,
        attempt: int = 0,
        delivered: Mapping[int, Sequence[int]] | None = None,
        *,
        wait_seconds: float = 0.0,
        like: GetModelResponse | None = None,
        bounded: bool = True,
    ) -> tuple[Assignment, Served]:
        """As `place`, for one that waits for its turn, and until some group has room for it.

        Waits `wait_seconds` for a first group that serves; once in line it stays, whatever happens to the groups.
        Raises Overloaded where there is no room in line, DeadlineExceeded, Unavailable and NeverFits.
        """

        def place() -> Assignment | None:
            serving = self._serving_like(request, like)
            if not serving:
                return None
            holding = serving if like is not None else able_to_hold(serving, request)
            if not any(link.load.has_room for link, _ in holding):
                return None
            full = {link.name for link, _ in holding if link.load.is_full}
            return self._place(request, attempt, delivered or {}, serving, full)

        if like is None and not len(self.line):
            await self._await_group(wait_seconds)
        return await self.line.placed(
            request,
            place,
            lambda: self._eligible_groups(request, like),
            lambda: self._least_seconds(request, like),
            bounded=bounded,
        )

    def require_room(self, tenant: Tenant, priority: int, deadline: float | None) -> None:
        """As Line.require_room, before the prompt is known: assumes that every group can take the request."""
        if len(self.line):
            now = asyncio.get_running_loop().time()
            self.line.require_room(tenant, priority, now, deadline, EligibleGroups.of(self._groups.serving()))

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
    ) -> Assignment:
        """Sends a request to the cheapest group, and to one not in `avoid` if another is there. Waits that long for
        one; raises Unavailable when none has come, NeverFits when those that serve can never hold it.

        With `like` the request has begun: only a group that is equal to it and large enough counts as serving, since
        one that held the request may come back.

        `suspicion`: its level, which says where it may run; see Quarantine.
        """
        delivered = delivered or {}
        try:
            async with asyncio.timeout(wait_seconds):
                while True:
                    change = self._groups.next_change
                    serving = self._serving_like(request, like)
                    if serving and suspicion:
                        serving = await self._quarantined(request, like, suspicion, sum(map(len, delivered.values())))
                    if serving:
                        placement = self._place(request, attempt, delivered, serving, avoid)
                        placement.ticket.suspicion = suspicion
                        return placement
                    await change.wait()
        except TimeoutError:
            raise Unavailable(_NO_GROUP if like is None else _NO_EQUAL) from None

    def explain(self, request: Request) -> Decision:
        """Where `place` would send it now, and nothing is sent. Raises Unavailable and NeverFits as that does."""
        serving = self._groups.serving()
        if not serving:
            raise Unavailable(_NO_GROUP)
        return self._decide(request, able_to_hold(serving, request))

    async def _quarantined(
        self, request: Request, like: GetModelResponse | None, level: int, tokens: int
    ) -> list[tuple[GroupConnection, Registration]]:
        """Where one so suspect may run, as soon as there is such a group and its turn has come; empty once none of
        those that serve could go on with it at all. What is returned holds until whoever asked waits for anything."""
        with self._quarantine.turn(level, tokens, kind(like) if like is not None else None) as is_next:
            while True:
                await is_next.wait()
                change = self._groups.next_change
                serving = self._serving_like(request, like)
                free = places(level, (((link, reg), link.tickets.suspicion) for link, reg in serving))
                if free or not serving:
                    return free
                await change.wait()

    def _serving_like(
        self, request: Request, like: GetModelResponse | None
    ) -> list[tuple[GroupConnection, Registration]]:
        """Those that serve; for one that has begun on `like`, only those that can go on with it."""
        serving = self._groups.serving()
        if like is None:
            return serving
        return [(link, reg) for link, reg in serving if equal(like, reg.model) and holds(reg, request)]

    def _eligible_groups(self, request: Request, like: GetModelResponse | None) -> EligibleGroups:
        holding = ((link, reg) for link, reg in self._serving_like(request, like) if holds(reg, request))
        return EligibleGroups.of(holding, has_begun=like is not None)

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
                while not self._groups.serving():
                    await self._groups.next_change.wait()
        except TimeoutError:
            raise Unavailable(_NO_GROUP) from None

    def _place(
        self,
        request: Request,
        attempt: int,
        delivered: Mapping[int, Sequence[int]],
        serving: list[tuple[GroupConnection, Registration]],
        avoid: AbstractSet[str],
    ) -> Assignment:
        passage = request.passage
        if passage is not None:
            passage.routing()
        able = able_to_hold(serving, request)
        decision = self._decide(request, [(link, reg) for link, reg in able if link.name not in avoid] or able)
        link, registration = next((link, reg) for link, reg in able if link.name == decision.group)
        chosen, model = decision.chosen, registration.model
        if not attempt and not delivered:
            require_time(request, decision, asyncio.get_running_loop().time())
        if passage is not None:
            passage.routed(decision, attempt)
        uncached = len(request.prompt_token_ids) - chosen.cached_tokens
        ticket = link.submit(request, attempt, delivered, uncached)
        index = self._groups.index
        expectation = index.expect(link.name, request.chain(model))
        return Assignment(link, ticket, decision, model, index, expectation, self.audit)

    def _decide(self, request: Request, eligible: list[tuple[GroupConnection, Registration]]) -> Decision:
        # Groups of one model share their block names; one walk along the chain matches them all.
        matched: dict[tuple[str, str, int], dict[str, PrefixMatch]] = {}
        candidates: list[Candidate] = []
        for link, registration in eligible:
            model = registration.model
            named = (model.name, model.fingerprint, model.block_size)
            if named not in matched:
                # A prompt whose log-probabilities are wanted is computed whole, whatever is cached.
                whole = request.sampling.prompt_logprobs is not None
                matched[named] = {} if whole else self._groups.index.matched_blocks(request.chain(model))
            candidates.append(link.load.candidate(link.name, matched[named].get(link.name, NOTHING)))
        return choose(
            candidates,
            len(request.prompt_token_ids),
            self._rng,
            regret=self._groups.index.regret.rate,
            in_line=len(self.line),
            session=request.session_id,
        )
