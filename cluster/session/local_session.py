"""LocalSession: one run of `coatcheck serve --no-ray`, from the first process until everything has ended."""

import asyncio
import contextlib
import logging
import os
import shutil
import tempfile
import time
from pathlib import Path

from coatcheck.cluster.config.exposure import describe_exposure
from coatcheck.cluster.config.serve_config import ServeConfig
from coatcheck.cluster.local.local_cluster import LocalCluster
from coatcheck.cluster.plural import counted
from coatcheck.cluster.session.serve_console import ServeConsole, discard_stderr
from coatcheck.cluster.session.serve_lines import USUAL_CONNECT_SECONDS, GroupNotices, ProgressBars, ready_line
from coatcheck.cluster.session.stop_signals import EXIT_STOPPED, StopSignals
from coatcheck.proto.errors import Unavailable
from coatcheck.proto.log_lines import configure_logging
from coatcheck.router.access.connection_limits import raise_open_files_limit

_POLL_SECONDS = 0.02
_WATCH_SECONDS = 0.5


class LocalSession:
    """Starts the cluster, waits until everything serves, waits for a signal, and stops.

    The router and the ranks log to files in a new folder. It is deleted at the end unless the run has failed.
    """

    def __init__(self, config: ServeConfig, signals: StopSignals) -> None:
        self._config = config
        self._signals = signals
        self._console = ServeConsole()
        self._began = time.monotonic()
        if warning := describe_exposure(config):
            self._print(f"warning: {warning}")

    def run(self) -> int:
        """Serve until a signal. Returns the exit code. Raises CoatcheckError if the cluster cannot serve."""
        # mkdtemp makes the folder private, which crash records need.
        folder = Path(tempfile.mkdtemp(prefix=f"coatcheck-serve-{os.getpid()}-"))
        self._signals.folder_to_delete = folder
        log = (folder / "router.log").open("w")
        try:
            configure_logging(self._config.log_format, stream=log, router="router-0")
            raise_open_files_limit()
            code = asyncio.run(self._serve(folder))
            logging.shutdown()
        finally:
            with contextlib.suppress(OSError):  # the disk is full
                log.close()
        shutil.rmtree(folder, ignore_errors=True)
        discard_stderr()
        return code

    async def _serve(self, folder: Path) -> int:
        config, cluster = self._config, LocalCluster(self._config, folder)
        groups, ranks = counted(config.groups, "group"), counted(config.tp, "rank")
        self._print(f"starting {groups} of {ranks} on {cluster.device}, without Ray, logs in {folder}")
        has_served = False
        try:
            await cluster.start()
            if await self._wait_until_ready(cluster):
                has_served = True
                self._signals.ends_at_once = False
                self._print(ready_line(config, cluster.state))
                await self._watch_until_signal(cluster)
                await self._drain(cluster)
        finally:
            is_killed = self._signals.kill_requested.is_set()
            await cluster.stop(now=is_killed or not has_served)
        return 0 if has_served and not self._signals.kill_requested.is_set() else EXIT_STOPPED

    async def _wait_until_ready(self, cluster: LocalCluster) -> bool:
        """Show the progress of each rank until the router uses every group. Returns False if a signal comes first."""
        printed, serving_since = "", 0.0
        with ProgressBars(self._console) as bars:
            while not self._signals.drain_requested.is_set():
                state = cluster.state
                bars.update_bars(state)
                if state.failure:
                    raise Unavailable(state.failure)
                if cluster.is_ready:
                    return True
                stage = state.stage
                if state.is_ready:
                    serving_since = serving_since or time.monotonic()
                    if time.monotonic() > serving_since + USUAL_CONNECT_SECONDS:
                        missing = await cluster.find_missing_connection()
                        stage = f"still waiting: {missing}" if missing else stage
                if stage not in (printed, ""):
                    printed = stage
                    self._print(f"{printed} (after {time.monotonic() - self._began:.1f} s)")
                await asyncio.sleep(_POLL_SECONDS)
        return False

    async def _watch_until_signal(self, cluster: LocalCluster) -> None:
        """Print a line when the state or reason of a group changes."""
        groups = GroupNotices(cluster.state)
        while not self._signals.drain_requested.is_set():
            if failure := cluster.state.failure:
                raise Unavailable(failure)
            for notice in groups.describe_changes(cluster.state):
                self._print(notice.line)
            await asyncio.sleep(_WATCH_SECONDS)

    async def _drain(self, cluster: LocalCluster) -> None:
        """Return once the running requests have ended or a second signal has come."""
        again = "press Ctrl-C" if self._console.is_terminal else "send the signal"
        self._print(f"draining: running requests end first; {again} again to stop at once")
        drained = asyncio.ensure_future(cluster.drain())
        while not (drained.done() or self._signals.kill_requested.is_set()):
            await asyncio.wait([drained], timeout=_POLL_SECONDS)
        drained.cancel()

    def _print(self, line: str) -> None:
        self._console.print(line, soft_wrap=True, markup=False)
