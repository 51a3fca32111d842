"""ServeSession: one run of `coatcheck serve`, from the connection to Ray until everything that it started has ended.

Ray is imported by the methods, not here: the command sets Ray's environment variables first.
"""

import math
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, TypeVar

from coatcheck.cluster.config.exposure import describe_exposure
from coatcheck.cluster.config.serve_config import ServeConfig
from coatcheck.cluster.plural import counted
from coatcheck.cluster.ray_cluster.local_ray import delete_stale_tokens, publish_token, ray_folder
from coatcheck.cluster.ray_cluster.process_tree import adopt_orphans, kill_descendants
from coatcheck.cluster.ray_cluster.ray_environment import (
    configure_local_ray,
    environment_token,
    extend_reconnect_timeout,
    silence_ray_driver,
)
from coatcheck.cluster.ray_cluster.ray_log import redirect_native_stderr
from coatcheck.cluster.ray_cluster.ray_start import RayStart
from coatcheck.cluster.session.apply_settings import ApplySettings
from coatcheck.cluster.session.ray_watch import RayWatch
from coatcheck.cluster.session.serve_console import ServeConsole, discard_stderr
from coatcheck.cluster.session.serve_lines import (
    USUAL_CONNECT_SECONDS,
    GroupNotices,
    Notice,
    ProgressBars,
    RouterNotices,
    niceness_warning,
    ready_line,
)
from coatcheck.cluster.session.stop_signals import EXIT_STOPPED, StopSignals
from coatcheck.proto.contract import contract_mismatch
from coatcheck.proto.errors import InvalidConfig, Unavailable
from coatcheck.workers.host.disk_space import describe_full_disk

if TYPE_CHECKING:
    from ray import ObjectRef

    from coatcheck.cluster.ray_cluster.actor_handles import SupervisorHandle
    from coatcheck.cluster.ray_cluster.cluster_state import ClusterState

T = TypeVar("T")

_POLL_SECONDS = 0.1
_WATCH_SECONDS = 0.5
_ANSWER_SECONDS = 10.0  # a call to the supervisor that takes longer is repeated
_SILENT_SECONDS = 300.0  # limit of all repetitions: a busy host may need minutes to start the supervisor's process
_DEAD_SECONDS = 60.0  # the same limit if Ray reports the supervisor dead, or this node's raylet has ended
_SIGNALLED_SECONDS = 5.0  # the same limit once a signal has come
_STOP_SECONDS = 15.0
_KILL_GRACE_SECONDS = 1.0  # for processes that end by themselves because Ray has ended


class ServeSession:
    """Connects to Ray, starts or finds the supervisor, waits until everything serves, waits for a signal, and stops."""

    def __init__(
        self,
        config: ServeConfig,
        signals: StopSignals,
        record: Callable[[Notice], None],
        applies: ApplySettings | None = None,
    ) -> None:
        """`record`: records a notice as an event. `applies`: changes the settings of a running cluster. Without it a
        cluster with other settings is refused."""
        self._config = config
        self._record = record
        self._applies = applies
        self._signals = signals
        self._starts_ray = config.ray_address is None
        self._console = ServeConsole()
        self._supervisor: SupervisorHandle | None = None
        self._token_file = ExitStack()  # lets other commands find a local Ray
        self._native_stderr = ExitStack()  # redirects what Ray's C++ code prints
        self._ray_watch = RayWatch(self._console, signals)
        self._reconnect_seconds = 0.0  # how long the head of a joined cluster may be gone
        self._has_served = False
        self._began = time.monotonic()
        if warning := describe_exposure(config):
            self._print(f"warning: {warning}")

    def run(self) -> int:
        """Serve until a signal. Returns the exit code. Raises CoatcheckError if the cluster cannot serve."""
        silence_ray_driver()
        if self._starts_ray:
            configure_local_ray()
        else:
            self._reconnect_seconds = extend_reconnect_timeout()
        try:
            self._connect_to_ray()
            supervisor = self._find_or_start_supervisor()
            self._supervisor = supervisor
            self._publish_token()
            state = self._wait_until_ready(supervisor)
            if state is not None:
                self._has_served = True
                self._announce(Notice(ready_line(self._config, state), "Serving"))
                for address in state.grpc_addresses[1:]:
                    self._print(f"another router at {address}")
                self._watch_until_signal(supervisor, state)
                self._drain_routers(supervisor)
        finally:
            self._stop()
            discard_stderr()
        return 0 if self._has_served and not self._signals.kill_requested.is_set() else EXIT_STOPPED

    def _connect_to_ray(self) -> None:
        address = self._config.ray_address
        self._print(f"connecting to Ray at {address}" if address else "starting Ray")
        RayStart(self._config, self._console).wait_until_connected()
        self._signals.install_handlers()  # again: Ray has installed its own
        from coatcheck.cluster.ray_cluster.ray_connection import head_address, log_folder

        logs = log_folder()
        self._native_stderr.enter_context(redirect_native_stderr(logs))
        if self._starts_ray:
            self._ray_watch.watch_local_ray(logs)
        else:
            self._ray_watch.watch_joined_ray(head_address(), self._reconnect_seconds)

    def _find_or_start_supervisor(self) -> "SupervisorHandle":
        from coatcheck.cluster.ray_cluster import launch
        from coatcheck.cluster.ray_cluster.placement_plan import InsufficientResources, plan_placement
        from coatcheck.cluster.ray_cluster.ray_connection import head_address
        from coatcheck.cluster.supervision.supervisor import Supervisor

        config = self._config
        if running := launch.find_supervisor():
            self._check_running_cluster(running)
            self._signals.ends_at_once = False
            return running
        try:
            plan = plan_placement(config.device, config.groups, config.tp, launch.free_resources())
        except InsufficientResources as error:
            raise error.for_serve(own_ray=self._starts_ray) from None
        groups, ranks = counted(config.groups, "group"), counted(config.tp, "rank")
        where = f", on a Ray at {head_address()}" if self._starts_ray else ""
        self._print(f"starting {groups} of {ranks} on {plan.device}{where} ({self._elapsed()})")
        self._signals.ends_at_once = False
        return launch.start_supervisor(Supervisor, config, plan)

    def _check_running_cluster(self, supervisor: "SupervisorHandle") -> None:
        """Raises InvalidConfig unless the running cluster has this version's contract and these settings."""
        contract, version = self._call(supervisor.get_contract.remote)
        if difference := contract_mismatch("the running cluster", contract, version):
            raise InvalidConfig(difference)
        if self._applies is not None:
            self._applies.send(supervisor, self._config, self._send_config, self._announce)
            return
        running = self._call(supervisor.get_config.remote)
        check_same_settings(running, self._config)
        if running.groups != self._config.groups:
            self._print(
                f"this cluster has {counted(running.groups, 'group')}, which stay; "
                f"`coatcheck scale --groups {self._config.groups}` changes it"
            )

    def _send_config(self, supervisor: "SupervisorHandle", config: ServeConfig) -> str:
        """Send these settings to the supervisor. Returns why it refuses them; "" if it does not."""
        return self._call(lambda: supervisor.apply_config.remote(config))

    def _publish_token(self) -> None:
        """Write the file with which other commands of this user find a local Ray. Call it once `ends_at_once` is False:
        then the file is always removed."""
        from coatcheck.cluster.ray_cluster.ray_connection import head_address

        if not self._starts_ray or self._signals.drain_requested.is_set():
            return
        try:
            delete_stale_tokens(ray_folder())
            self._token_file.enter_context(publish_token(ray_folder(), head_address(), environment_token()))
        except OSError as error:
            self._print(f"warning: `coatcheck restart` will not find this Ray: {error}")

    def _wait_until_ready(self, supervisor: "SupervisorHandle") -> "ClusterState | None":
        """Show the progress of each rank until every router uses every group. Returns None if a signal comes first."""
        printed, warned, serving_since = "", False, None
        with ProgressBars(self._console) as bars:
            while not self._signals.drain_requested.wait(_POLL_SECONDS):
                state = self._call(supervisor.get_state.remote)
                bars.update_bars(state)
                if state.failure:
                    raise Unavailable(state.failure)
                if self._applies is not None:
                    self._applies.poll(supervisor, state, self._send_config, self._announce, has_served=False)
                if not (warned or self._starts_ray) and (warning := niceness_warning(state)):
                    warned = True
                    self._print(f"warning: {warning}")
                stage = state.stage
                if state.is_ready:
                    serving_since = serving_since or time.monotonic()
                    missing = self._call(supervisor.find_missing_connection.remote)
                    if not missing:
                        return state
                    if time.monotonic() > serving_since + USUAL_CONNECT_SECONDS:
                        stage = f"still waiting: {missing}"
                if stage not in (printed, ""):
                    printed = stage
                    self._print(f"{stage} ({self._elapsed()})")
        return None

    def _watch_until_signal(self, supervisor: "SupervisorHandle", state: "ClusterState") -> None:
        """Print a line when the state of a group or router changes, and when this host's disk is full."""
        from coatcheck.cluster.ray_cluster.ray_connection import log_folder

        logs, was_full = log_folder(), False
        groups, routers = GroupNotices(state), RouterNotices(state)
        while not self._signals.drain_requested.wait(_WATCH_SECONDS):
            full = describe_full_disk(logs)
            if full and not was_full:
                self._announce(Notice(f"warning: {full}; running processes go on", "DiskFull", is_warning=True))
            was_full = bool(full)
            state = self._call(supervisor.get_state.remote)
            if state.failure:
                raise Unavailable(state.failure)
            if self._applies is not None:
                self._applies.poll(supervisor, state, self._send_config, self._announce, has_served=True)
            for notice in (*groups.describe_changes(state), *routers.describe_changes(state)):
                self._announce(notice)

    def _drain_routers(self, supervisor: "SupervisorHandle") -> None:
        again = "press Ctrl-C" if self._console.is_terminal else "send the signal"
        notice = f"draining: running requests end first; {again} again to stop at once"
        if not self._console.is_terminal:  # where `status` prints nothing
            self._print(notice)
        with self._console.status(notice):
            self._wait_for(supervisor.drain_routers.remote())

    def _stop(self) -> None:
        """End everything that the session started, and disconnect from Ray. A local Ray ends with all its processes."""
        import ray

        if self._starts_ray:
            adopt_orphans()
        self._token_file.close()
        self._stop_supervisor()
        self._ray_watch.stop()
        # Nothing is left to clean up. Ray may take long to disconnect, so a signal may end the process at once.
        self._signals.ends_at_once = True
        ray.shutdown()
        self._native_stderr.close()
        if self._starts_ray:
            # Ray kills a raylet that does not end within a second. The raylet's agents then try for a minute to reach
            # the head, which has ended too.
            kill_descendants(_KILL_GRACE_SECONDS)

    def _stop_supervisor(self) -> None:
        """End the routers and the ranks, then the supervisor."""
        import ray
        from ray.exceptions import RayError

        from coatcheck.cluster.ray_cluster import launch

        if self._supervisor is None:
            return
        with suppress(RayError):  # Ray is gone, and with it everything that ran on it
            if self._has_served and not self._signals.kill_requested.is_set():
                self._wait_for(self._supervisor.stop_all.remote(False), _STOP_SECONDS)
            elif not self._starts_ray:  # on a local Ray everything ends with Ray
                ray.wait([self._supervisor.stop_all.remote(True)], timeout=_STOP_SECONDS)
            launch.kill_actor(self._supervisor)

    def _wait_for(self, answer: "ObjectRef[T]", seconds: float = math.inf) -> None:
        """Wait for the answer, for at most `seconds`, or until a second signal comes."""
        import ray

        deadline = time.monotonic() + seconds
        while not ray.wait([answer], timeout=_POLL_SECONDS)[0]:
            if self._signals.kill_requested.is_set() or time.monotonic() > deadline:
                return

    def _call(self, send: "Callable[[], ObjectRef[T]]") -> T:
        """The result of a call to the supervisor, which `send` sends, again after 10 s without an answer. Meanwhile a
        line is printed every 10 s.

        Raises Unavailable after 300 s; after 60 s if the supervisor is dead or this node's raylet has ended; after 5 s
        if a signal has come.
        """
        import ray
        from ray.exceptions import ActorDiedError, GetTimeoutError, RayError

        from coatcheck.cluster.ray_cluster.ray_connection import is_raylet_listening

        began = printed = time.monotonic()
        while True:
            answer = send()
            sent = time.monotonic()
            try:
                while not ray.wait([answer], timeout=_POLL_SECONDS)[0]:
                    if time.monotonic() > sent + _ANSWER_SECONDS or self._has_timed_out(began, _SILENT_SECONDS):
                        raise GetTimeoutError
                return ray.get(answer)
            except RayError as error:  # such as: Ray is starting or restarting the supervisor
                if time.monotonic() > printed + _ANSWER_SECONDS:
                    printed = time.monotonic()
                    self._print(f"the supervisor's process does not answer yet, still waiting ({self._elapsed()})")
                is_dead = isinstance(error, ActorDiedError) or not is_raylet_listening()
                if self._has_timed_out(began, _DEAD_SECONDS if is_dead else _SILENT_SECONDS):
                    if not self._starts_ray:
                        self._supervisor = None  # the cluster keeps running, because only a supervisor can end it
                    raise Unavailable(f"the supervisor does not answer: {_silence_reason(error)}") from None
                time.sleep(_POLL_SECONDS)

    def _has_timed_out(self, began: float, seconds: float) -> bool:
        """Whether `seconds` have passed since `began`, or 5 s if a signal has come."""
        return time.monotonic() > began + (_SIGNALLED_SECONDS if self._signals.drain_requested.is_set() else seconds)

    def _announce(self, notice: Notice) -> None:
        """Print a notice, and record it."""
        self._print(notice.line)
        self._record(notice)

    def _print(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, markup=False)

    def _elapsed(self) -> str:
        return f"after {time.monotonic() - self._began:.1f} s"


def check_same_settings(running: ServeConfig, wanted: ServeConfig) -> None:
    """Raises InvalidConfig unless the running cluster has the wanted settings. Three settings are ignored: the address
    of Ray, which has many spellings; the number of groups, which `coatcheck scale` changes; the time limit of a
    start."""
    ignored = ("ray_address", "groups", "ray_start_timeout")
    if running != wanted.model_copy(update={name: getattr(running, name) for name in ignored}):
        raise InvalidConfig(
            f"this Ray cluster already serves {running.model_name} with other settings; "
            "stop that `coatcheck serve` first"
        )


def _silence_reason(error: Exception) -> str:
    from coatcheck.cluster.ray_cluster.ray_connection import is_raylet_listening, log_folder

    if not is_raylet_listening():
        return "this host's Ray node (its raylet) has ended; start it again, then this command, which finds what runs"
    return describe_full_disk(log_folder()) or type(error).__name__
