"""ApplySettings: sends the settings of `coatcheck serve --apply` to the running cluster, and again when their file
changes."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from coatcheck.cluster.config.serve_config import ServeConfig
from coatcheck.cluster.session.serve_lines import Notice
from coatcheck.proto.errors import InvalidConfig

if TYPE_CHECKING:
    from coatcheck.cluster.ray_cluster.actor_handles import SupervisorHandle
    from coatcheck.cluster.ray_cluster.cluster_state import ClusterState


class SendConfig(Protocol):
    """Sends the settings to the supervisor. Returns why the supervisor refuses them; "" if it does not."""

    def __call__(self, supervisor: "SupervisorHandle", config: ServeConfig, /) -> str: ...


class ApplySettings:
    """`file`: the --config file, if one was given. `read`: reads flags and file again; raises InvalidConfig.
    `ready_file`: a file that exists while the cluster serves with these settings, for a readiness probe."""

    def __init__(self, file: Path | None, read: Callable[[], ServeConfig], ready_file: Path | None) -> None:
        self._file = file
        self._read = read
        self._ready_file = ready_file
        self._text: str | None = None  # what `_read_text` returns if the file cannot be read now
        self._text = self._last_text = self._read_text()
        self._has_warned = False
        self._error = ""  # why the file is invalid, as it was read last
        self._announced = ""  # the last `state.configuration` that was announced

    def send(
        self, supervisor: "SupervisorHandle", config: ServeConfig, send: SendConfig, announce: Callable[[Notice], None]
    ) -> None:
        """Send `config` to a running cluster. If the supervisor refuses it, announce why; the cluster then keeps its
        settings. Raises InvalidConfig if the cluster runs a version without --apply."""
        if not hasattr(supervisor, "apply_config"):
            raise InvalidConfig("the running cluster is of a version without --apply; run `coatcheck restart` first")
        if refusal := send(supervisor, config):
            announce(Notice(f"error: {refusal}", "SettingsRefused", is_warning=True))

    def poll(
        self,
        supervisor: "SupervisorHandle",
        state: "ClusterState",
        send: SendConfig,
        announce: Callable[[Notice], None],
        *,
        has_served: bool,
    ) -> None:
        """Send the settings if their file has changed. Announce each change of `state.configuration` once, except a
        refusal, which `send` has announced.

        `has_served`: every group has served since this command began. `ready_file` is not created before.
        """
        text = self._read_text()
        is_stable, self._last_text = text == self._last_text, text
        # A program may have emptied the file, and be about to write it: a text without a newline at its end counts from
        # the second time on. An empty file would give the cluster the defaults of all settings.
        if text != self._text and (is_stable or (text or "").endswith("\n")):
            self._text = text
            self._error = ""
            try:
                config = self._read()
            except InvalidConfig as error:
                self._error = str(error)
                announce(Notice(f"error: {error}; the cluster keeps its settings", "SettingsInvalid", is_warning=True))
            else:
                announce(Notice("the settings have changed"))
                self.send(supervisor, config, send, announce)
                return  # `state` is older than the new settings
        if state.configuration != self._announced and not state.configuration.startswith("refused"):
            announce(_describe(state))
        self._announced = state.configuration
        try:
            self._mark_ready(has_served and not (state.configuration or self._error))
        except OSError as error:  # such as a full disk; raised from here, it would end the whole cluster
            if not self._has_warned:
                self._has_warned = True
                announce(Notice(f"warning: --ready-file cannot be changed: {error}"))

    def _read_text(self) -> str | None:
        """The content of the file. Its modification time is not enough: Kubernetes replaces a link to its folder."""
        if self._file is None:
            return None
        try:
            return self._file.read_text()
        except (OSError, ValueError):  # such as while the file is being replaced
            return self._text

    def _mark_ready(self, is_ready: bool) -> None:
        if self._ready_file is not None:
            if is_ready:
                self._ready_file.touch()
            else:
                self._ready_file.unlink(missing_ok=True)


def _describe(state: "ClusterState") -> Notice:
    if not state.configuration:
        return Notice("settings: all are in use", "SettingsApplied")
    return Notice(f"settings: {state.configuration}", "SettingsPending", is_warning=bool(state.obstacle))
