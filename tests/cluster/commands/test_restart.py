"""coatcheck restart: what it does if a router does not serve. tests/system restarts whole clusters."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from coatcheck.cluster.commands import restart
from coatcheck.cluster.ray_cluster.cluster_state import ClusterState
from coatcheck.proto.errors import NotFound, Unavailable


class Supervisor:
    """Reports these router addresses, one tuple after another, and records which routers are restarted."""

    def __init__(self, addresses: list[tuple[str, ...]]) -> None:
        self.restarted: list[str] = []
        states: Iterator[tuple[str, ...]] = iter(addresses)
        last = addresses[-1]
        self.get_state = SimpleNamespace(remote=lambda: ClusterState(grpc_addresses=next(states, last)))
        self.restart_router = SimpleNamespace(remote=lambda address, drain: self.restarted.append(address))
        self.restart_group = SimpleNamespace(remote=lambda group, drain: None)


@pytest.fixture(autouse=True)
def answers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls of the supervisor return their results instead of references."""
    monkeypatch.setattr(ray, "get", lambda result, **_: result)


def restart_routers(supervisor: Any) -> None:
    restart._restart_groups(supervisor, ["group-0"], 1.0, routers=True)


def test_routers_are_restarted_once_all_serve() -> None:
    """A router that starts is waited for. Then each is restarted, one after another."""
    supervisor = Supervisor([(), (), ("10.0.0.1:50051", "10.0.0.2:50051")])
    restart_routers(supervisor)
    assert supervisor.restarted == ["10.0.0.1:50051", "10.0.0.2:50051"]


def test_a_router_that_does_not_serve_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """No router is restarted, and the error says so."""
    monkeypatch.setattr(restart, "_ADOPT_SECONDS", 0.0)
    supervisor = Supervisor([()])
    with pytest.raises(Unavailable, match="no router was restarted, because one does not serve"):
        restart_routers(supervisor)
    assert supervisor.restarted == []


def test_a_group_that_is_removed_meanwhile_is_passed_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The autoscaler removes a group while an earlier one restarts: the rolling restart goes on. A group that the user
    has named must exist."""
    restarted: list[str] = []

    def restart_group(group: str, drain: float) -> None:
        if group == "group-1":
            raise NotFound("there is no group 'group-1'; there are group-0")
        restarted.append(group)

    supervisor: Any = Supervisor([("10.0.0.1:50051",)])
    supervisor.restart_group = SimpleNamespace(remote=restart_group)
    names = ["group-0", "group-1", "group-2"]
    supervisor.get_config = SimpleNamespace(remote=lambda: SimpleNamespace(group_names=names))
    monkeypatch.setattr(restart, "_restart_supervisor", lambda supervisor: None)
    restart._restart_groups(supervisor, [], 1.0, routers=True)
    assert restarted == ["group-0", "group-2"] and supervisor.restarted == ["10.0.0.1:50051"]
    assert "group-1 was removed meanwhile" in capsys.readouterr().out
    with pytest.raises(NotFound):
        restart._restart_groups(supervisor, ["group-1"], 1.0, routers=False)
