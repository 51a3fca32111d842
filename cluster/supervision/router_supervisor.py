"""RouterSupervisor: keeps one router running, and sends it the list of groups and its changes."""

import asyncio
import logging
from contextlib import suppress
from dataclasses import replace
from typing import TypeVar

from ray.exceptions import RayActorError, RayError, RayTaskError

from coatcheck.cluster.ray_cluster import launch, ray_kv
from coatcheck.cluster.ray_cluster.actor_handles import RouterHandle
from coatcheck.cluster.ray_cluster.cluster_state import RouterState
from coatcheck.cluster.supervision.poll_interval import PollInterval
from coatcheck.cluster.supervision.rank_actors import summarize_error
from coatcheck.cluster.supervision.rank_end import HANG_SECONDS, read_log_tail
from coatcheck.cluster.supervision.versioned_group_list import VersionedGroupList
from coatcheck.proto.errors import CoatcheckError, Unavailable
from coatcheck.proto.stubs.coatcheck_pb2 import StatusResponse
from coatcheck.router.config import RouterConfig
from coatcheck.router.groups.group_list import NO_LIST

_ANSWER_SECONDS = 5.0
# Several short waits instead of a long one: a supervisor that was suspended itself reads the answer before it has
# counted all waits.
_WAIT_SECONDS = 0.5
_RESTART_SECONDS = 0.5
# `restart_router` fails after this many failed starts in a row. The first may fail because the port of the former
# process is not free yet.
_MAX_FAILED_STARTS = 3
# `restart_router` fails if the new process does not serve within this time. A start takes a few seconds of CPU time, so
# the time is enough even with a hundredth of a core.
_START_SECONDS = 600.0

T = TypeVar("T")

_log = logging.getLogger(__name__)


class _SettingsChanged(Exception):
    """The settings changed while a process started with the former ones."""


class RouterSupervisor:
    """Supervises one router.

    `address` (gRPC) and `http_address` are host:port while the router serves, else "". `failure`: why the router will
    never serve, else "". `has_served`: whether any router has served; if so, this router is always restarted.
    `groups`: the list of groups that the router is to know. `poll_interval`: between two looks at the router.
    `resource`: a Ray resource of the nodes where it may run. `node`: the id of the node where it must run.
    """

    def __init__(
        self,
        config: RouterConfig,
        groups: VersionedGroupList,
        poll_interval: PollInterval,
        *,
        has_served: bool,
        resource: str | None = None,
        node: str | None = None,
    ) -> None:
        self.address = ""
        self.http_address = ""
        self.failure = ""
        self.has_served = has_served
        self.missing_groups: tuple[str, ...] = ()  # that the router should use, and is not connected to
        self._config = config
        self._resource = resource
        self._node = node
        self._actor: RouterHandle | None = None
        self._groups = groups
        self._poll_interval = poll_interval
        self._configuration = ""
        self._held = NO_LIST  # the list that the router has, as far as is known
        self._is_stale = asyncio.Event()  # set when the router may lack a change
        # `restart_router` waits for it. Set when the new process serves, when too many starts have failed, and when the
        # router is removed.
        self._restart_ended = asyncio.Event()
        self._failed_starts = 0  # in a row
        self._log = ""  # path of the new process's log on its host; "" until the process answers, and if it was found
        self._is_draining = False
        self._is_restarting = False  # by `restart_router`
        self._is_removed = False
        self._end = ("starting", "")  # the state while the router does not serve, and the reason if it is lost
        self._last_failure = ""
        self._restarts = 0

    @property
    def state(self) -> RouterState:
        """The router's state, for ClusterState."""
        if self.address:
            state, reason = "draining" if self._is_draining else "serving", ""
        else:
            state, reason = self._end
        return RouterState(self._config.name, state, self.address, reason, self._restarts, self._last_failure)

    def restore_ports(self) -> None:
        """Make the next start listen at the ports that the router chose under a former supervisor."""
        grpc_port = ray_kv.read_number(ray_kv.grpc_port_key(self._config.name))
        http_port = ray_kv.read_number(ray_kv.http_port_key(self._config.name))
        if grpc_port and not self._config.port:
            self._config = replace(self._config, port=grpc_port)
        if http_port and self._config.http_port == 0:
            self._config = replace(self._config, http_port=http_port)

    def forget_ports(self) -> None:
        """Delete the ports that the next supervisor would restore, and the mark of a restart."""
        ray_kv.delete_value(ray_kv.restart_key(self._config.name))
        ray_kv.delete_value(ray_kv.grpc_port_key(self._config.name))
        ray_kv.delete_value(ray_kv.http_port_key(self._config.name))

    async def supervise_router(self) -> None:
        """Keep the router running until cancelled. Returns only if a router that has never served cannot start."""
        while True:
            sending = None
            try:
                actor = await self._start()
                sending = asyncio.create_task(self._send_updates(actor))
                await self._watch(actor)
            except _SettingsChanged:
                self._kill()
                await asyncio.sleep(_RESTART_SECONDS)
                continue
            except (RayError, TimeoutError, ValueError) as error:  # ValueError: Ray has not freed its name yet
                _log.error("the router has ended: %r", error)
                cause = error.cause if isinstance(error, RayTaskError) else None
                self._record_end(error)
                if not self.has_served:
                    self.failure = str(cause) if isinstance(cause, CoatcheckError) else f"router: {cause or error}"
            finally:
                if sending is not None:
                    sending.cancel()
            self.address = self.http_address = ""
            self.missing_groups = ()
            self._kill()
            if not self.has_served:
                return
            await asyncio.sleep(_RESTART_SECONDS)

    def send_groups(self) -> None:
        """Send the router the changes of the list of groups that it does not have yet. Does not wait for an answer."""
        self._is_stale.set()

    def set_config(self, config: RouterConfig) -> None:
        """Use these settings from the next start on, at the same ports."""
        self._config = replace(config, port=self._config.port, http_port=self._config.http_port)

    def set_configuration(self, text: str) -> None:
        """Make `text` the router's StatusResponse.configuration, also after its next start. Does not wait for an
        answer."""
        if text != self._configuration:
            self._configuration = text
            self._send_configuration()

    async def drain_router(self) -> bool:
        """Refuse new requests and wait for the running ones. Returns whether the router is drained."""
        if self._actor is None:
            return True
        with suppress(RayError):
            return await self._actor.drain.remote(None)
        return False

    async def restart_router(self, drain_seconds: float, announce_seconds: float) -> None:
        """Replace the router's process by a new one at the same address. Returns once the new process serves.

        For `announce_seconds` the old process accepts requests, but its health check says that it drains. Then it
        refuses new requests, and its running requests have `drain_seconds` to end. Raises Unavailable if the router
        does not serve now, if the old process is lost before it has drained, if 3 starts in a row fail, if the new
        process does not serve within 600 s, or if the router's node leaves. After an error `supervise_router` still
        starts the router, unless its node has left.
        """
        actor = self._actor  # `_actor` is None, or another process, if this one is lost meanwhile
        if actor is None or not self.address:
            raise Unavailable(f"{self._config.name} does not serve; wait until it does")
        self._is_draining = self._is_restarting = True
        ray_kv.write_number(ray_kv.restart_key(self._config.name), 1)
        try:
            if announce_seconds and hasattr(actor, "announce_drain"):  # a router of an older version has none
                await actor.announce_drain.remote()
                await asyncio.sleep(announce_seconds)
            await actor.drain.remote(drain_seconds)
        except RayError as error:
            self._is_restarting = False  # a process that has refused the call serves on
            with suppress(RayError, TimeoutError):
                await self._undo_drain(actor)
            ray_kv.delete_value(ray_kv.restart_key(self._config.name))
            what = "did not drain" if isinstance(error, RayTaskError) else "was lost before it had drained"
            raise Unavailable(f"{self._config.name} {what}: {_explain_end(error, '')}; try again") from None
        self._failed_starts = 0
        self._restart_ended.clear()
        await self.stop_router(now=False)
        await _wait_in_parts(asyncio.ensure_future(self._restart_ended.wait()), _START_SECONDS)
        if self._is_removed:
            raise Unavailable(f"{self._config.name} is gone with its node")
        if not self.address:
            raise Unavailable(f"{self._config.name} does not start again: {self._why_not_serving()}")

    async def remove_router(self) -> None:
        """Kill the process for good, because its node is gone. A `restart_router` that waits for the next process
        fails."""
        self._is_removed = True
        self._restart_ended.set()
        await self.stop_router(now=True)
        self.forget_ports()

    async def stop_router(self, *, now: bool) -> None:
        """End the router's process. `now`: kill it at once."""
        actor = self._actor
        if actor is not None and not now:
            with suppress(RayError, TimeoutError):
                async with asyncio.timeout(_ANSWER_SECONDS):
                    await actor.stop.remote()
        if self._actor is actor:  # else `supervise_router` has seen the end, and has started the next process
            self._kill()

    async def read_status(self) -> StatusResponse | None:
        """The router's status; None if it does not answer within 5 s."""
        if self._actor is not None:
            with suppress(RayError, TimeoutError):
                async with asyncio.timeout(_ANSWER_SECONDS):
                    return await self._actor.status.remote()
        return None

    async def _start(self) -> RouterHandle:
        """Find the running router, or start it. Return once it serves. Raises _SettingsChanged if `set_config` was
        called while a process started: a rollout restarts only routers that serve."""
        config = self._config
        self._log = ""
        actor = launch.find_router(config.name)
        is_new = actor is None
        if actor is None:
            actor = launch.start_router(config, self._resource, self._node)
        self._actor = actor
        try:
            if is_new:
                with suppress(RayTaskError):  # an older version of the router is installed, which has no such method
                    self._log = await actor.log_file.remote()
            address, http_address = await (_start_router(actor) if is_new else _adopt_router(actor))
        except RayError:
            self._failed_starts += is_new  # a process that was found has ended, which is no failed start
            raise
        if is_new and self._config != config:
            raise _SettingsChanged
        if not is_new and ray_kv.read_number(ray_kv.restart_key(config.name)):
            _log.warning("the former supervisor ended while it restarted %s; its drain is undone", config.name)
            await self._undo_drain(actor)
        ray_kv.delete_value(ray_kv.restart_key(config.name))
        self._keep_ports(address, http_address)
        self.http_address = http_address
        self.address = address
        self._is_draining = self._is_restarting = False
        self._last_failure = self._end[1]
        self._restarts += self._end[0] != "starting"
        self._end = ("starting", "")
        self._failed_starts = 0
        self._restart_ended.set()
        self.has_served = True
        self._send_configuration()
        self._held = NO_LIST
        self.send_groups()
        return actor

    async def _undo_drain(self, actor: RouterHandle) -> None:
        """Have a router accept new requests again, because its restart has not come to its end. Raises RayError if the
        process has ended, and TimeoutError if it does not answer or is of an older version, which cannot do this."""
        if not hasattr(actor, "undo_drain"):
            raise TimeoutError("it was drained for a restart that did not come to its end")
        async with asyncio.timeout(_ANSWER_SECONDS):
            await actor.undo_drain.remote()

    def _keep_ports(self, address: str, http_address: str) -> None:
        """Keep the ports, which clients know, for the next process, also under another supervisor."""
        port = int(address.rpartition(":")[2])
        http_port = int(http_address.rpartition(":")[2]) if http_address else None
        if not self._config.port:
            ray_kv.write_number(ray_kv.grpc_port_key(self._config.name), port)
        if http_port and not self._config.http_port:
            ray_kv.write_number(ray_kv.http_port_key(self._config.name), http_port)
        self._config = replace(self._config, port=port, http_port=http_port)

    async def _watch(self, actor: RouterHandle) -> None:
        """Raises RayError once the router's process has ended, TimeoutError once it hangs.

        A busy router is not restarted, because a restart ends all of its streams. If the router's list of groups is not
        the supervisor's, the changes are sent again: an update may be lost, or come from a former supervisor.
        """
        while True:
            await asyncio.sleep(self._poll_interval.next_wait())
            report = await _answer_in_time(asyncio.ensure_future(actor.report.remote()))
            if report is None:
                continue
            if report.heartbeat.hang_reason:
                raise TimeoutError(report.heartbeat.hang_reason)
            self.missing_groups = report.missing
            self._is_draining = self._is_restarting or report.is_draining
            if report.groups != self._groups.version:
                self._held = report.groups
                self.send_groups()

    async def _send_updates(self, actor: RouterHandle) -> None:
        """Send each change of the list of groups, in order and one at a time. Changes that come before the router has
        answered are sent together."""
        while True:
            await self._is_stale.wait()
            self._is_stale.clear()
            try:
                while (update := self._groups.update_for(self._held)) is not None:
                    async with asyncio.timeout(_ANSWER_SECONDS):
                        self._held = await actor.update_groups.remote(update)
            except (RayError, TimeoutError) as error:  # the next report tells which list the router has
                _log.warning("%s did not take a change of its groups: %r", self._config.name, error)

    def _record_end(self, error: Exception) -> None:
        """Set the state that is reported until the router serves again. `error`: why its process ended or did not
        start."""
        if self.address and self._is_draining and not isinstance(error, TimeoutError):
            self._end = ("ended", "")
        elif self.has_served:
            self._end = ("lost", _explain_end(error, "" if self.address else self._log))
        if self._failed_starts >= _MAX_FAILED_STARTS:
            self._restart_ended.set()

    def _why_not_serving(self) -> str:
        """Why the router does not serve when `restart_router` gives up."""
        reason = self._end[1]  # of the last start that failed, or ""
        if self._failed_starts >= _MAX_FAILED_STARTS:
            return f"{reason}; {self._failed_starts} starts in a row failed, and the supervisor tries again and again"
        waited = f"within {_START_SECONDS:g} s"
        before = f"; the start before failed: {reason}" if reason else ""
        if self._log:
            return f"its process runs, but does not serve {waited} (log: {self._log}{_last_lines(self._log)}){before}"
        return f"no process of it has answered {waited}; `ray status` shows whether Ray has room for it{before}"

    def _send_configuration(self) -> None:
        # A router of an older version has no such method.
        if self._actor is not None and self.address and hasattr(self._actor, "set_configuration"):
            self._actor.set_configuration.remote(self._configuration)

    def _kill(self) -> None:
        if self._actor is not None:
            launch.kill_actor(self._actor)
            self._actor = None


async def _start_router(actor: RouterHandle) -> tuple[str, str]:
    """Have the router serve. Returns its addresses of gRPC and HTTP."""
    return await actor.start.remote(), await actor.http_address.remote()


async def _adopt_router(actor: RouterHandle) -> tuple[str, str]:
    """The addresses of a router that a former supervisor has started. Raises TimeoutError if it hangs: then it would
    never answer."""
    addresses = asyncio.ensure_future(_start_router(actor))
    try:
        while not (await asyncio.wait([addresses], timeout=_WAIT_SECONDS))[0]:
            report = await _answer_in_time(asyncio.ensure_future(actor.report.remote()))
            if report is not None and report.heartbeat.hang_reason:
                raise TimeoutError(report.heartbeat.hang_reason)
        return addresses.result()
    finally:
        addresses.cancel()


async def _answer_in_time(answer: asyncio.Future[T]) -> T:
    """The router's answer. Raises TimeoutError if the router has not answered after HANG_SECONDS."""
    if await _wait_in_parts(answer, HANG_SECONDS):
        return answer.result()
    raise TimeoutError(f"its process has not answered for {HANG_SECONDS:g} s")


async def _wait_in_parts(future: asyncio.Future[T], seconds: float) -> bool:
    """Wait at most `seconds`. Returns whether `future` is done; if not, it is cancelled."""
    try:
        for _ in range(round(seconds / _WAIT_SECONDS)):
            if (await asyncio.wait([future], timeout=_WAIT_SECONDS))[0]:
                return True
        return False
    finally:
        future.cancel()


def _explain_end(error: Exception, log: str) -> str:
    """Why a router's process ended, hangs or did not start. `log`: its log file, or "". If the process has died, the
    result has the last lines of the log, because no exception says why."""
    cause = error.cause if isinstance(error, RayTaskError) else error
    if isinstance(cause, CoatcheckError | TimeoutError):
        return str(cause)
    if isinstance(cause, RayActorError) and cause.actor_init_failed:
        return str(cause).strip().splitlines()[-1]  # of the traceback
    last_lines = "" if isinstance(error, RayTaskError) else _last_lines(log)
    return summarize_error(cause) + (f" (log: {log}{last_lines})" if log else "")


def _last_lines(log: str) -> str:
    return f"; its last lines: {tail}" if (tail := read_log_tail(log)) else ""
