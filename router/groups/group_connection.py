"""GroupConnection: the one long-lived stream between this router and a group.

The connection sends submissions and aborts, delivers outputs to the submissions and KV events to the prefix index, and
keeps the group's last load report. When the stream breaks, or the group sends nothing for too long, every submission
fails at once. The connection then attaches again, with backoff, until it is closed. A group is ejected if it is slow,
is not the expected one, or sends impossible messages: its stream ends, and the reason is kept for the status.
"""

import asyncio
import hashlib
import json
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import grpc

from coatcheck.proto.contract import CONTRACT, VERSION, contract_mismatch
from coatcheck.proto.errors import Overloaded, error_of
from coatcheck.proto.stubs.coatcheck_pb2 import GetModelResponse
from coatcheck.proto.stubs.worker_pb2 import (
    Abort,
    FailureNotice,
    FromGroup,
    Hello,
    Refused,
    Registration,
    ResetPrefixCache,
    Returned,
    SnapshotRequest,
    ToGroup,
)
from coatcheck.proto.tracing import NO_TRACE_CONTEXT
from coatcheck.router.config import RouterConfig
from coatcheck.router.groups.attach_log import AttachLog
from coatcheck.router.groups.group_endpoint import GroupEndpoint
from coatcheck.router.groups.group_failures import FailureCause, GroupEjected, GroupFailures
from coatcheck.router.groups.group_load import GroupLoad
from coatcheck.router.groups.group_stream import GroupSilent, GroupStream
from coatcheck.router.groups.load_table import LoadTable
from coatcheck.router.groups.open_submissions import OpenSubmissions
from coatcheck.router.groups.request import Request
from coatcheck.router.groups.submission import Submission
from coatcheck.router.routing.prefix_index import EventOutcome, PrefixIndex
from coatcheck.router.routing.routing_cost import Decision

_log = logging.getLogger(__name__)
_FIRST_BACKOFF, _LONGEST_BACKOFF = 0.05, 2.0  # seconds between two attempts to attach


class GroupConnection:
    """`registration` is empty while the group is not attached. Create it inside an event loop.

    `on_change` is called when the group attaches or is lost, and when the suspicion of one of its requests changes (see
    PoisonSuspicion). `on_room` is called when the group may have room for another request. `detect_outlier` is called
    after each load report; it returns a GroupEjected if the group is too slow to be kept.
    """

    def __init__(
        self,
        endpoint: GroupEndpoint,
        config: RouterConfig,
        index: PrefixIndex,
        loads: LoadTable,
        failures: GroupFailures,
        *,
        on_change: Callable[[], None],
        on_room: Callable[[], None],
        detect_outlier: Callable[["GroupConnection"], GroupEjected | None],
    ) -> None:
        self.endpoint = endpoint
        self.registration = Registration()
        self.group_kind = b""  # of the registered group; see the function group_kind
        self.load = GroupLoad(self.registration)
        self.index = index
        self._loads = loads
        self.submissions = OpenSubmissions()
        self.detach_reason = endpoint.reason  # why the group is not attached
        self.ejections = 0
        self.last_ejection = ""  # reason of the last ejection
        self.on_change = on_change
        self.on_room = on_room
        self._detect_outlier = detect_outlier
        self._failures = failures
        self._config = config
        self._failure_notice = FailureNotice()  # of the present stream; empty if the group has sent none
        self._is_slow = False  # ejected because it is slow, and not attached since
        self._attach_log = AttachLog(endpoint.name)
        self._is_closed = False
        self._pause_ended = asyncio.Event()
        self._stream = self._new_stream()
        self._last_id = 0
        self._task = asyncio.create_task(self._run(), name=f"connection to {endpoint.name}")

    @property
    def name(self) -> str:
        return self.endpoint.name

    @property
    def is_attached(self) -> bool:
        """Whether the group has registered on the present stream."""
        return bool(self.registration.group)

    @property
    def model(self) -> GetModelResponse:
        """The model that the group serves."""
        return self.registration.model

    def submit(
        self,
        request: Request,
        decision: Decision,
        attempt: int = 0,
        delivered: Mapping[int, Sequence[int]] | None = None,
        trace_context: Mapping[str, str] = NO_TRACE_CONTEXT,
        *,
        may_return: bool = False,
    ) -> Submission:
        """Sends a request to the group, which must be attached.

        `attempt`: number of groups that the request has lost. `delivered`: output tokens by choice that the group must
        not send again. `may_return`: the group may send the request back if other routers have filled its queue.
        """
        assert self.is_attached, f"group {self.name} is not attached"
        self._last_id += 1
        max_queued_tokens = self.load.max_queued_tokens(decision.chosen.queued_tokens) if may_return else None
        submission = Submission(self, request, decision, self._last_id, attempt)
        self.submissions.add(submission)
        message = request.to_submit(
            submission.id,
            attempt,
            delivered or {},
            submission.uncached_tokens,
            trace_context,
            max_queued_tokens=max_queued_tokens,
            now=asyncio.get_running_loop().time(),
        )
        self._stream.send(ToGroup(submit=message))
        return submission

    def send_abort(self, id: int, choice: int | None) -> None:
        """Tells the group to abort a choice of a submission, or all of them if `choice` is None."""
        self._stream.send(ToGroup(abort=Abort(id=id, choice=choice)))

    def reset_prefix_cache(self) -> None:
        """Tells the group to evict every cached block that no running request uses."""
        self._stream.send(ToGroup(reset_prefix_cache=ResetPrefixCache()))

    def request_snapshot(self, reason: str) -> None:
        """Asks the group for all the blocks that it holds; its snapshot replaces them in the index."""
        _log.warning("group %s: %s; asking for a snapshot", self.name, reason)
        self._stream.send(ToGroup(snapshot=SnapshotRequest()))

    def end_ejection_pause(self) -> None:
        """Ends the pause of a group that was ejected because it is slow. Called when no other group serves."""
        self._pause_ended.set()

    async def close(self, reason: str) -> None:
        """Ends the stream for good; its submissions fail."""
        self.detach_reason = reason
        self._is_closed = True  # if gRPC swallows the cancellation, the stream ends with an error of gRPC
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def _run(self) -> None:
        backoff = _FIRST_BACKOFF
        while not self._is_closed:
            try:
                if await self._attach():
                    backoff = _FIRST_BACKOFF
                else:
                    backoff = min(backoff * 2, _LONGEST_BACKOFF)
                    self._attach_log.record_failure(self.endpoint.address, self.detach_reason)
            except GroupEjected as error:
                if self._is_closed:
                    return
                self._attach_log.record_ejection(str(error), error.__cause__)
                backoff = _LONGEST_BACKOFF  # the next attempt will most likely find the same group
                await self._wait_for_end_of_pause(error.pause)
            if not self._is_closed:
                await asyncio.sleep(backoff * random.uniform(0.5, 1.0))

    async def _wait_for_end_of_pause(self, seconds: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._pause_ended.wait()

    async def _attach(self) -> bool:
        """Runs one stream until it ends; returns whether the group had registered. Raises GroupEjected."""
        self._stream = self._new_stream()
        self._failure_notice = FailureNotice()
        try:
            self._stream.send(ToGroup(hello=Hello(router=self._config.name, contract=CONTRACT, version=VERSION)))
            await self._stream.read(self._receive)
            self.detach_reason = "the group ended the stream"
        except grpc.aio.AioRpcError as error:
            self.detach_reason = f"{error.code().name}: {error.details()}"
        except GroupSilent as silent:
            self._record_ejection(str(silent))
        except GroupEjected as error:
            self._record_ejection(str(error))
            self._is_slow = bool(error.pause)
            raise
        except Exception as error:  # whatever a group sends, this router continues to serve the others
            self._record_ejection(f"its stream could not be read: {error}")
            raise GroupEjected(self.detach_reason) from error  # an immediate attempt would fail in the same way
        finally:
            attached = self._drop_group()
        return attached

    def _new_stream(self) -> GroupStream:
        config = self._config
        return GroupStream(self.endpoint, config.cluster_certificate, config.silence_seconds, config.hang_seconds)

    def _receive(self, message: FromGroup) -> None:
        match message.WhichOneof("message"):
            case "batch":
                self.submissions.deliver(message.batch.outputs)
            case "events":
                self._handle_outcome(self.index.apply_events(self.name, message.events))
            case "load":
                self.load.apply_report(message.load, asyncio.get_running_loop().time())
                if (ejected := self._detect_outlier(self)) is not None:
                    raise ejected
                self.on_room()
            case "snapshot":
                self._handle_outcome(self.index.apply_snapshot(self.name, message.snapshot))
            case "refused":
                self._handle_refusal(message.refused)
            case "returned":
                self._handle_return(message.returned)
            case "failure_notice":
                self._failure_notice = message.failure_notice
            case "registration":
                self._handle_registration(message.registration)

    def _handle_registration(self, registration: Registration) -> None:
        size = registration.model.block_size
        other_size = self.index.other_block_size(self.name, size)
        if reason := registration_problem(registration, self.endpoint, self._config.model_name, other_size):
            raise GroupEjected(reason)
        self.registration = registration
        self.group_kind = group_kind(registration.model)
        self._attach_log.record_attached()
        self.detach_reason = ""
        self._is_slow = False
        self._pause_ended.clear()
        self.load.leave_table()
        capacity = registration.num_blocks + registration.host_blocks
        slot = self.index.add_group(
            self.name, registration.epoch, capacity, size, keeps_states=registration.keeps_states
        )
        self.load = GroupLoad(registration, self._loads, slot)
        self.on_change()

    def _handle_refusal(self, refused: Refused) -> None:
        submission = self.submissions.get(refused.id)
        if submission is not None and submission.attempt == refused.attempt:
            self.submissions.remove(submission)
            error = error_of(refused.code, refused.message)
            if isinstance(error, Overloaded):
                self.load.record_refusal()
            submission.fail(error)

    def _handle_return(self, returned: Returned) -> None:
        submission = self.submissions.get(returned.id)
        if submission is not None and submission.attempt == returned.attempt:
            self.submissions.remove(submission)
            submission.record_return(returned.queued_prefill_tokens)

    def _handle_outcome(self, outcome: EventOutcome) -> None:
        if outcome is EventOutcome.SNAPSHOT_NEEDED:
            self.request_snapshot("its KV events have a gap")
        elif outcome is EventOutcome.IMPOSSIBLE:
            raise GroupEjected("the group reports more cached blocks than it has")

    def _record_ejection(self, reason: str) -> None:
        self.ejections += 1
        self.detach_reason = self.last_ejection = reason

    def _drop_group(self) -> bool:
        """Fails every submission and drops every block of the group, because its stream has ended. Returns whether the
        group had registered."""
        attached = self.is_attached
        if self._failure_notice.reason:
            self.detach_reason = f"it failed: {self._failure_notice.reason}"
        self.registration = Registration()
        self.load.leave_table()
        self.load = GroupLoad(self.registration)
        self.index.remove_group(self.name)
        if attached:
            reason = f"group {self.name} is lost: {self.detach_reason}"
            loss = self._failures.record_loss(self.name, self.endpoint.incarnation, reason, self._failure_cause())
            self.submissions.fail_all(loss, self._failure_notice.unstarted)
            self.on_change()
        return attached

    def _failure_cause(self) -> FailureCause:
        if self._failure_notice.reason:
            return FailureCause.CRASH
        if self._is_slow or self.endpoint.state == "draining":  # the supervisor stops a group after its drain
            return FailureCause.PLANNED
        return FailureCause.UNKNOWN


def group_kind(model: GetModelResponse) -> bytes:
    """16 bytes that are equal for groups between which a stream may move. Up to rounding these groups compute the same
    logits; with --deterministic, the same tp and the same kind of machine the logits are equal bit for bit. The bytes
    are part of resume tickets, so all routers of a cluster must compute the same."""
    parts = (model.name, model.fingerprint, sorted(adapters_key(model)), model.dtype, model.kv_dtype, model.block_size)
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).digest()


def adapters_key(model: GetModelResponse) -> frozenset[tuple[str, str]]:
    """Equal for models with the same LoRA adapters under the same names."""
    return frozenset((adapter.name, adapter.fingerprint) for adapter in model.adapters)


def registration_problem(
    registration: Registration, endpoint: GroupEndpoint, model_name: str, other_block_size: int
) -> str:
    """Why a group that has registered cannot be used; "" if it can. `other_block_size`: the block size of the other
    groups if theirs differs, else 0."""
    if registration.group != endpoint.name:
        return f"{endpoint.address} is group {registration.group!r}, not {endpoint.name!r}"
    if reason := contract_mismatch("the group", registration.contract, registration.version):
        return reason
    if registration.model.name != model_name:
        return f"the group serves model {registration.model.name!r}, not {model_name!r}"
    if not registration.model.block_size:
        return "the group registered without a block size"
    if other_block_size:
        return (
            f"the group's blocks hold {registration.model.block_size} tokens, those of the groups beside it "
            f"{other_block_size}; serve all of them with one block size"
        )
    return ""
