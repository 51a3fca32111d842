"""ServeSession: one run of `coatcheck serve`, from its connecting to Ray until everything that it started has ended.

Ray is imported once the settings are known to make sense. It does not know flags.
"""

import math
import re
import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

from rich.console import Console

from coatcheck.cluster.commands.ray_watch import RayWatch
from coatcheck.cluster.commands.ready_line import ready_line
from coatcheck.cluster.commands.stop_signals import EXIT_STOPPED, StopSignals
from coatcheck.cluster.config.exposure import warn_of_exposure
from coatcheck.cluster.config.serve_config import ServeConfig
from coatcheck.cluster.plural import counted
from coatcheck.cluster.ray_cluster.local_ray import forget_ended, publish_token, ray_folder
from coatcheck.cluster.ray_cluster.native_stderr import redirect_native_stderr
from coatcheck.cluster.ray_cluster.process_tree import adopt_orphans, end_descendants
from coatcheck.cluster.ray_cluster.ray_environment import (
    confine_local_ray,
    environment_token,
    extend_reconnect_timeout,
    quiet_driver,
)
from coatcheck.cluster.ray_cluster.ray_start import RayStart
from coatcheck.proto.contract import disagreement
from coatcheck.proto.errors import InvalidConfig, Unavailable
from coatcheck.workers.host.disk_space import describe_full_disk

if TYPE_CHECKING:
    from coatcheck.cluster.supervision.cluster_state import ClusterState, GroupState

_POLL_SECONDS = 0.1
_WATCH_SECONDS = 0.5
_SILENT_SECONDS = 300.0  # without an answer from the supervisor, whose process a busy host starts in minutes
_DEAD_SECONDS = 60.0  # the same, where Ray will not start that process
_ANSWER_SECONDS = 10.0  # for one call to the supervisor; then the call is repeated
_STOPPING_SECONDS = 5.0  # the same, once a signal has come
_STOP_SECONDS = 15.0
_END_SECONDS = 1.0  # for what has been told to end, or sees that Ray is gone
_ATTACHES_SECONDS = 3.0  # a router to a group that serves, with time to spare


class ServeSession:
    """One run of the command."""

    def __init__(self, config: ServeConfig, signals: StopSignals) -> None:
        self._config = config
        self._signals = signals
        self._console = Console(stderr=True, highlight=False)
        self._supervisor: Any = None
        self._notes = ExitStack()  # left for other commands; taken back at the end
        self._native_stderr = ExitStack()  # redirects what Ray's C++ code prints
        self._ray_watch = RayWatch(self._console, signals)
        self._patience = 0.0  # seconds that the head of a joined cluster may be gone
        self._has_served = False
        self._began = time.monotonic()
        if warning := warn_of_exposure(config):
            self._say(f"warning: {warning}")

    def run(self) -> int:
        """Returns the exit status; raises CoatcheckError for what keeps the cluster from serving."""
        quiet_driver()
        if self._config.ray_address is None:
            confine_local_ray()
        else:
            self._patience = extend_reconnect_timeout()

        try:
            self._connect()
            self._watch_ray()
            self._supervisor = self._find_or_start_supervisor()
            self._note_own_ray()  # after that, since until then a signal ends all at once and puts nothing away
            state = self._wait_until_ready()
            if state is not None:
                self._has_served = True
                self._say(ready_line(self._config, state))
                for more in state.routers[1:]:
                    self._say(f"another router at {more}")
                self._watch(state)
                self._drain()
        finally:
            self._leave()
        return 0 if self._has_served and not self._signals.forced.is_set() else EXIT_STOPPED

    def _leave(self) -> None:
        """Ends what has been started. On our own Ray that is everything."""
        import ray

        is_own = self._config.ray_address is None
        if is_own:
            adopt_orphans()
        self._notes.close()
        self._stop()
        self._ray_watch.stop()
        # Nothing is left to clean up. Ray may take long to disconnect, so a signal may end the process at once.
        self._signals.ends_at_once = True
        ray.shutdown()
        self._native_stderr.close()
        if is_own:
            # Ray gives its raylet a second. One that needs longer is killed, and what it has started finds out by
            # itself: its agents first try for a minute to tell a head that is gone as well.
            end_descendants(_END_SECONDS)

    def _connect(self) -> None:
        address = self._config.ray_address
        self._say(f"connecting to Ray at {address}" if address else "starting Ray")
        RayStart(self._config, self._console).run()
        self._signals.install()

    def _watch_ray(self) -> None:
        from coatcheck.cluster.ray_cluster import launch

        logs = launch.log_folder()
        self._native_stderr.enter_context(redirect_native_stderr(logs))
        if self._config.ray_address is None:
            self._ray_watch.start_own(logs)
        else:
            self._ray_watch.start_joined(launch.ray_address(), self._patience)

    def _find_or_start_supervisor(self) -> Any:
        from coatcheck.cluster.ray_cluster import launch
        from coatcheck.cluster.ray_cluster.rank_placement import NoRoom, choose_placement
        from coatcheck.cluster.supervision.supervisor import Supervisor

        config = self._config
        if running := launch.find_actor(launch.SUPERVISOR):
            state: ClusterState = self._call_supervisor("state", running)
            if refusal := disagreement("the supervisor of this cluster", state.contract, state.version):
                raise InvalidConfig(refusal)
            found = self._call_supervisor("config", running)
            launch.require_same(found, config)
            if found.groups != config.groups:
                now = counted(found.groups, "group")
                self._say(f"this cluster has {now}, which stay; `coatcheck scale --groups {config.groups}` changes it")
            self._signals.ends_at_once = False
            return running
        try:
            placement = choose_placement(config.device, config.groups, config.tp, launch.free_resources())
        except NoRoom as error:
            raise error.at_start(own_ray=config.ray_address is None) from None
        groups, ranks = counted(config.groups, "group"), counted(config.tp, "rank")
        where = f", on a Ray at {launch.ray_address()}" if config.ray_address is None else ""
        self._say(f"starting {groups} of {ranks} on {placement.device}{where} ({self._elapsed()})")
        self._signals.ends_at_once = False
        return launch.start_supervisor(Supervisor, config, placement)

    def _note_own_ray(self) -> None:
        from coatcheck.cluster.ray_cluster import launch

        if self._config.ray_address is not None or self._signals.asked.is_set():
            return
        try:
            forget_ended(ray_folder())
            self._notes.enter_context(publish_token(ray_folder(), launch.ray_address(), environment_token()))
        except OSError as error:
            self._say(f"warning: `coatcheck restart` will not find this Ray: {error}")

    def _wait_until_ready(self) -> "ClusterState | None":
        """Shows each rank's progress; None when told to stop before everything serves."""
        from coatcheck.cluster.commands.progress_bars import ProgressBars

        said, since = "", None  # since when all serve, and a router has yet to find out
        with ProgressBars(self._console) as bars:
            while not self._signals.asked.wait(_POLL_SECONDS):
                state = self._state()
                bars.show(state)
                if state.failure:
                    raise Unavailable(state.failure)
                stage = state.stage
                if state.is_ready:
                    since = since or time.monotonic()
                    missed = self._call_supervisor("misses")
                    if not missed:
                        return state
                    if time.monotonic() > since + _ATTACHES_SECONDS:
                        stage = f"still waiting: {missed}"
                if stage not in (said, ""):
                    said = stage
                    self._say(f"{said} ({self._elapsed()})")
        return None

    def _watch(self, state: "ClusterState") -> None:
        """Until told to stop, prints a line when a group's state or reason changes, and when this host's disk is
        full."""
        from coatcheck.cluster.ray_cluster import launch

        logs, was_full = launch.log_folder(), False
        known = {group.name: _comparable_state(group) for group in state.groups}
        while not self._signals.asked.wait(_WATCH_SECONDS):
            full = describe_full_disk(logs)
            if full and not was_full:
                self._say(f"warning: {full}; running processes go on")
            was_full = bool(full)
            state = self._state()
            if state.failure:
                raise Unavailable(state.failure)
            for group in state.groups:
                if known.get(group.name) != _comparable_state(group) and group.state != "starting":
                    known[group.name] = _comparable_state(group)
                    reason = f": {group.reason}" if group.reason else ""
                    self._say(f"{group.name} is {group.state}{reason}")

    def _drain(self) -> None:
        with self._console.status("draining: running requests end first; once more to stop at once"):
            self._wait_for(self._supervisor.drain.remote())

    def _stop(self) -> None:
        """Ends everything that the supervisor holds, then the supervisor."""
        import ray
        from ray.exceptions import RayError

        if self._supervisor is None:
            return
        with suppress(RayError):  # of a Ray that is gone: then so is all that ran on it
            if self._has_served and not self._signals.forced.is_set():
                self._wait_for(self._supervisor.stop.remote(), _STOP_SECONDS)
            elif self._config.ray_address is not None:  # on our own Ray everything ends with it
                ray.wait([self._supervisor.stop.remote(now=True)], timeout=_STOP_SECONDS)
            ray.kill(self._supervisor)

    def _wait_for(self, answer: Any, seconds: float = math.inf) -> None:
        """Until the answer is there, a second signal comes or the time is up."""
        import ray

        deadline = time.monotonic() + seconds
        while not ray.wait([answer], timeout=_POLL_SECONDS)[0]:
            if self._signals.forced.is_set() or time.monotonic() > deadline:
                return

    def _say(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, markup=False)

    def _elapsed(self) -> str:
        return f"after {time.monotonic() - self._began:.1f} s"

    def _state(self) -> "ClusterState":
        state: ClusterState = self._call_supervisor("state")
        return state

    def _call_supervisor(self, what: str, supervisor: Any = None) -> Any:
        """Calls a method of the supervisor and returns the result; prints a line every 10 s until then. Raises
        Unavailable after five minutes, after one if Ray will not start it, or after 5 s if a signal has come."""
        import ray
        from ray.exceptions import ActorDiedError, GetTimeoutError, RayError

        from coatcheck.cluster.ray_cluster import launch

        began = said = time.monotonic()
        while True:
            answer = getattr(supervisor or self._supervisor, what).remote()
            sent = time.monotonic()
            try:
                while not ray.wait([answer], timeout=_POLL_SECONDS)[0]:
                    if time.monotonic() > sent + _ANSWER_SECONDS or self._has_timed_out(began, _SILENT_SECONDS):
                        raise GetTimeoutError
                return ray.get(answer)
            except RayError as error:  # such as: Ray is starting or restarting the supervisor
                if time.monotonic() > said + _ANSWER_SECONDS:
                    said = time.monotonic()
                    self._say(f"the supervisor's process does not answer yet, still waiting ({self._elapsed()})")
                is_dead = isinstance(error, ActorDiedError) or not launch.is_raylet_listening()
                if self._has_timed_out(began, _DEAD_SECONDS if is_dead else _SILENT_SECONDS):
                    if self._config.ray_address is not None:
                        self._supervisor = None  # the cluster goes on: without a supervisor nothing can end it
                    raise Unavailable(f"the supervisor does not answer: {_silence_reason(error)}") from None
                time.sleep(_POLL_SECONDS)

    def _has_timed_out(self, began: float, patience: float) -> bool:
        """Whether a call first made at `began` has waited for `patience` seconds, or for 5 if a signal has come."""
        return time.monotonic() > began + (_STOPPING_SECONDS if self._signals.asked.is_set() else patience)


def _silence_reason(error: Exception) -> str:
    from coatcheck.cluster.ray_cluster import launch

    if not launch.is_raylet_listening():
        return "this host's Ray node (its raylet) has ended; start it again, then this command, which finds what runs"
    return describe_full_disk(launch.log_folder()) or type(error).__name__


def _comparable_state(group: "GroupState") -> tuple[str, str]:
    """A group's state and reason without the parts in brackets (numbers, log files), which differ from one restart to
    the next."""
    return group.state, re.sub(r" \([^()]*\)", "", group.reason)
