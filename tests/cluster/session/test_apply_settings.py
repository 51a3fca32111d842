"""`coatcheck serve --apply`: when settings are sent again, what is said, and when the file of readiness exists."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from coatcheck.cluster.config.serve_config import ServeConfig
from coatcheck.cluster.ray_cluster.cluster_state import ClusterState
from coatcheck.cluster.session.apply_settings import ApplySettings
from coatcheck.cluster.session.serve_lines import Notice
from coatcheck.proto.errors import InvalidConfig
from tests.cluster.running_server import coatcheck

SUPERVISOR: Any = SimpleNamespace(apply_config=None)


class Session:
    """What a session of `serve` does with ApplySettings. `sent`: settings that the supervisor got; `lines`: what was
    said; `refusal`: what the supervisor answers."""

    def __init__(self, folder: Path) -> None:
        self.file, self.ready_file = folder / "serve.yaml", folder / "ready"
        self.file.write_text("model: m\n")
        self.sent: list[ServeConfig] = []
        self.lines: list[str] = []
        self.events: list[tuple[str, bool]] = []
        self.refusal = ""
        self._applies = ApplySettings(self.file, lambda: ServeConfig.build({}, self.file), self.ready_file)

    def poll(self, configuration: str = "", obstacle: str = "", *, has_served: bool = True) -> None:
        state = ClusterState(configuration=configuration, obstacle=obstacle)
        self._applies.poll(SUPERVISOR, state, self._send, self._say, has_served=has_served)

    def _say(self, notice: Notice) -> None:
        self.lines.append(notice.line)
        if notice.reason:
            self.events.append((notice.reason, notice.is_warning))

    def _send(self, supervisor: object, config: ServeConfig) -> str:
        self.sent.append(config)
        return self.refusal


@pytest.fixture
def session(tmp_path: Path) -> Session:
    return Session(tmp_path)


def test_a_changed_file_is_sent_once(session: Session) -> None:
    """By its content: a file that is written again without a change is not sent."""
    session.poll()
    session.file.write_text("model: m\n")
    session.poll()
    assert not session.sent
    session.file.write_text("model: m\nmax-queued: 5\n")
    session.poll()
    session.poll()
    assert [config.max_queued for config in session.sent] == [5] and session.lines == ["the settings have changed"]


def test_readiness(session: Session) -> None:
    """The file exists once the cluster has served, and goes while settings are refused, wrong or not all in use."""
    session.poll(has_served=False)
    assert not session.ready_file.exists()
    session.poll()
    assert session.ready_file.exists()
    for configuration in ("refused: no", "waits for a restart of group-0 for kv-memory"):
        session.poll(configuration)
        assert not session.ready_file.exists()
    session.poll()
    assert session.ready_file.exists()
    session.file.write_text("model: m\nno-such: 1\n")
    session.poll()
    session.poll()
    assert not session.ready_file.exists() and not session.sent


def test_progress_and_errors_are_said_once(session: Session) -> None:
    """What waits, that all is in use, why settings are refused, and why a file is no configuration."""
    for configuration in ("waits for x", "waits for x", ""):
        session.poll(configuration)
    assert session.lines == ["settings: waits for x", "settings: all are in use"]
    session.refusal = "a running cluster cannot change tp"
    session.file.write_text("model: m\ntp: 2\n")
    for _ in range(3):
        session.poll("refused: a running cluster cannot change tp")
    assert session.lines[2:] == ["the settings have changed", "error: a running cluster cannot change tp"]
    session.file.write_text("model: m\nno-such: 1\n")
    for _ in range(2):
        session.poll("refused: a running cluster cannot change tp")
    assert len(session.lines) == 5 and "unknown setting 'no_such'" in session.lines[4]


def test_what_becomes_an_event(session: Session) -> None:
    """A refusal, a file that is no configuration, and a wait for an obstacle are warnings; progress is normal."""
    session.poll("waits for a restart of group-0 for kv-memory")
    session.poll("waits for 3 groups instead of 2 (no room)", "no room")
    session.poll()
    session.refusal = "a running cluster cannot change tp"
    session.file.write_text("model: m\ntp: 2\n")
    session.poll()
    session.file.write_text("model: m\nno-such: 1\n")
    session.poll("refused: a running cluster cannot change tp")
    assert session.events == [
        ("SettingsPending", False),
        ("SettingsPending", True),
        ("SettingsApplied", False),
        ("SettingsRefused", True),
        ("SettingsInvalid", True),
    ]


def test_a_file_that_is_being_replaced_changes_nothing(session: Session) -> None:
    """Kubernetes replaces a link; for a moment there may be no file."""
    session.file.unlink()
    session.poll()
    assert not session.sent and not session.lines


def test_a_supervisor_of_an_older_version(tmp_path: Path) -> None:
    """It cannot apply settings; the command that replaces it is named."""
    applies = ApplySettings(None, lambda: ServeConfig.build({"model": "m"}), None)
    with pytest.raises(InvalidConfig, match="run `coatcheck restart` first"):
        applies.send(cast(Any, object()), ServeConfig.build({"model": "m"}), lambda *_: "", lambda _: None)


@pytest.mark.parametrize(
    ("flags", "said"),
    [(["--apply"], "give --ray-address"), (["--ready-file", "r", "--ray-address", "h:1"], "give --apply too")],
)
def test_flags_that_belong_together(flags: list[str], said: str, tmp_path: Path) -> None:
    """Half of a choice is refused at once."""
    done = coatcheck("serve", str(tmp_path), *flags)
    assert done.returncode == 2 and said in done.stderr


def test_a_file_that_is_being_written_is_not_sent(session: Session) -> None:
    """A program that replaces the content empties the file first. An empty file is sent only if it stays so."""
    session.file.write_text("")
    session.poll()
    session.file.write_text("model: m\ngroups: 3\n")
    session.poll()
    assert [config.groups for config in session.sent] == [3] and session.lines == ["the settings have changed"]
    session.file.write_text("model: m")
    session.poll()
    session.poll()
    assert [config.groups for config in session.sent] == [3, 1]


def test_a_ready_file_that_cannot_be_made_ends_nothing(session: Session) -> None:
    """`serve` says it once and serves on: an error would end the whole cluster."""
    session.ready_file.parent.joinpath("ready").mkdir()
    session.poll("waits for a restart of group-0 for kv-memory")
    session.poll("waits for a restart of group-0 for kv-memory")
    assert len([line for line in session.lines if line.startswith("warning: --ready-file cannot be changed")]) == 1
