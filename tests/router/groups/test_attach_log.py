"""AttachLog: a group to which a router cannot attach is in its log once for each cause, with what to check."""

import asyncio
import logging

import pytest

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.router.groups import attach_log
from coatcheck.router.groups.attach_log import AttachLog, what_to_check
from tests.router.fake_group import FakeGroup
from tests.router.router_under_test import StartRouter

_REFUSED = "UNAVAILABLE: failed to connect to all addresses; last error: ipv4:10.0.0.1:{}: Connection refused"


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Logged(logging.Handler):
    """Sets `event` at each line."""

    def __init__(self) -> None:
        super().__init__()
        self.event = asyncio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.event.set()


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The lines logged since the last call."""
    messages = [record.getMessage() for record in caplog.records if record.name == attach_log.__name__]
    caplog.clear()
    return messages


def test_each_cause_is_logged_once_in_five_minutes(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing in the first five seconds, as a group that starts again refuses connections. Then one line for each
    cause, whatever numbers it contains, and again after five minutes."""
    clock = Clock()
    log = AttachLog("g0", clock)
    for port in range(40):
        log.record_failure("10.0.0.1:7000", _REFUSED.format(port))
        clock.now += 0.1
    assert not lines(caplog)
    for port in range(400):
        clock.now += 0.5
        log.record_failure("10.0.0.1:7000", _REFUSED.format(port))
    (line,) = lines(caplog)
    assert "group g0: this router cannot attach to it at 10.0.0.1:7000" in line and "attempts in 5 s" in line
    assert "Connection refused; no process listens at 10.0.0.1:7000" in line and "coatcheck logs" in line
    log.record_failure("10.0.0.1:7000", "UNIMPLEMENTED: Method not found!")
    (line,) = lines(caplog)
    assert "what listens at 10.0.0.1:7000 is no group" in line
    clock.now += 300.0
    log.record_failure("10.0.0.1:7000", _REFUSED.format(1))
    assert len(lines(caplog)) == 1


def test_an_attach_after_logged_failures_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """The line says how long the group was missing. A group that attaches at once is not mentioned."""
    clock = Clock()
    log = AttachLog("g0", clock)
    log.record_attached()
    log.record_failure("10.0.0.1:7000", "UNAVAILABLE: Socket closed")
    log.record_attached()
    assert not lines(caplog)
    for _ in range(3):
        log.record_failure("10.0.0.1:7000", "UNAVAILABLE: Socket closed")
        clock.now += 10.0
    assert len(lines(caplog)) == 1
    log.record_attached()
    assert lines(caplog) == ["group g0 is attached, after 3 failures in 30 s"]


def test_ejections_for_one_reason_are_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """A group with another model is ejected every two seconds."""
    clock = Clock()
    log = AttachLog("g0", clock)
    for _ in range(100):
        log.record_ejection("the group serves model 'a', not 'b'")
        clock.now += 2.0
    log.record_ejection("the group registered without a block size")
    assert lines(caplog) == [
        "group g0 is ejected: the group serves model 'a', not 'b'",
        "group g0 is ejected: the group registered without a block size",
    ]


@pytest.mark.parametrize(("reason", "check"), [
    ("UNAVAILABLE: Ssl handshake failed: SSL_ERROR_SSL: WRONG_VERSION_NUMBER", "one set of TLS options"),
    ("UNAVAILABLE: Ssl handshake failed: CERTIFICATE_VERIFY_FAILED", "is not one of this cluster"),
    ("UNAVAILABLE: errors resolving nowhere:5: Domain name not found", "resolve the name"),
    ("UNAVAILABLE: connection attempt timed out before receiving SETTINGS frame", "firewall"),
    ("UNAVAILABLE: ipv4:10.0.0.1:7: Failed to connect to remote host: No route to host", "firewall"),
    ("UNIMPLEMENTED: Received http2 header with status: 404", "is no group"),
    ("the group ended the stream", "accepts connections and closes them"),
    ("INTERNAL: anything else", "the log of the group's rank 0"),
])  # fmt: skip
def test_a_cause_says_what_to_check(reason: str, check: str) -> None:
    """Each kind of failure that gRPC reports has its own advice."""
    assert check in what_to_check(reason)


async def test_a_router_logs_that_it_cannot_attach(
    start_router: StartRouter, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No process listens at the group's address: the router's log says so once, and says that the group has come."""
    monkeypatch.setattr(attach_log, "_GRACE_SECONDS", 0.3)
    group = FakeGroup("g0")
    endpoint = await group.start()
    await group.kill()
    router = await start_router()
    router.groups.append(group)
    attach_log._log.addHandler(logged := Logged())
    await router.server.set_groups([endpoint])
    async with asyncio.timeout(MAX_WAIT_SECONDS):
        await logged.event.wait()
    attach_log._log.removeHandler(logged)
    await asyncio.sleep(1.0)  # further attempts
    (line,) = lines(caplog)
    assert "refused" in line and f"no process listens at {endpoint.address}" in line
    await group.start()
    await router.wait_for_groups(1)
    (line,) = lines(caplog)
    assert "group g0 is attached, after" in line
