"""`coatcheck serve --kubernetes-events`: what becomes an event of the pod, over HTTPS, as Kubernetes' API has it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from coatcheck.cluster.ray_cluster.cluster_state import ClusterState, GroupState
from coatcheck.cluster.session import kubernetes_events
from coatcheck.cluster.session.kubernetes_events import pod_events
from coatcheck.cluster.session.serve_lines import GroupNotices, Notice
from coatcheck.proto.errors import InvalidConfig, Unavailable
from tests.cluster.running_server import coatcheck
from tests.cluster.session.kubernetes_api import KubernetesApi, kubernetes_api

REFUSED = Notice("error: a running cluster cannot change tp from 1 to 2", "SettingsRefused", is_warning=True)


@pytest.fixture
def api(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubernetesApi]:
    """A server of Kubernetes' API. Another attempt comes at once."""
    monkeypatch.setattr(kubernetes_events, "_PAUSES", (0.0, 0.0, 0.0))
    monkeypatch.setattr(kubernetes_events, "_CLOSE_SECONDS", 60.0)
    with kubernetes_api(tmp_path) as api:
        yield api


def record(api: KubernetesApi, *notices: Notice) -> list[str]:
    """Record notices as one run of `serve` does. Returns the warnings."""
    said: list[str] = []
    with pod_events(said.append, api.environment, api.account) as send:
        for notice in notices:
            send(notice)
    return said


def test_a_refusal_is_an_event_of_the_pod(api: KubernetesApi) -> None:
    """With the pod's identity, so that `kubectl describe pod` shows it, and no line without a reason."""
    assert not record(api, Notice("connecting to Ray"), REFUSED)
    (event,) = api.events.values()
    assert event["involvedObject"] == {
        "apiVersion": "v1",
        "kind": "Pod",
        "name": "demo-head-x",
        "namespace": "llm",
        "uid": "uid-of-the-pod",
    }
    assert (event["type"], event["reason"], event["count"]) == ("Warning", "SettingsRefused", 1)
    assert event["message"] == "a running cluster cannot change tp from 1 to 2"


def test_a_lost_group_is_counted(api: KubernetesApi) -> None:
    """Each loss with its cause, also by a `serve` that starts again; log files and numbers in brackets make no new
    event, another cause does."""
    serving = GroupState("group-0", "serving")
    for number in (1, 2):
        notices = GroupNotices(ClusterState(groups=(serving,)))
        lost = GroupState("group-0", "lost", reason=f"rank 0 has ended: its process died (log: /tmp/{number}.err)")
        again = GroupState("group-0", "serving", last_failure=lost.reason)
        assert not record(
            api,
            *notices.describe_changes(ClusterState(groups=(lost,))),
            *notices.describe_changes(ClusterState(groups=(again,))),
        )
    by_reason = {event["reason"]: event for event in api.events.values()}
    assert by_reason.keys() == {"GroupLost", "GroupServing"}
    assert by_reason["GroupLost"]["count"] == by_reason["GroupServing"]["count"] == 2
    assert by_reason["GroupLost"]["type"] == "Warning" and by_reason["GroupServing"]["type"] == "Normal"
    message = "group-0 is lost: rank 0 has ended: its process died (log: /tmp/2.err)"
    assert by_reason["GroupLost"]["message"] == message
    record(api, Notice("group-0 is lost: rank 1 has ended", "GroupLost", is_warning=True))
    assert len(api.events) == 3


def test_an_error_that_ends_serve(api: KubernetesApi) -> None:
    """It is recorded, and raised as before."""
    with pytest.raises(Unavailable), pod_events(print, api.environment, api.account):
        raise Unavailable("no node has 8 GPUs")
    (event,) = api.events.values()
    assert (event["reason"], event["message"]) == ("ServeFailed", "no node has 8 GPUs")


def test_the_token_is_read_each_time(api: KubernetesApi) -> None:
    """Kubernetes replaces it while `serve` runs."""
    with pod_events(print, api.environment, api.account) as send:
        (api.account / "token").write_text("second")
        send(REFUSED)
    assert [code for _, code in api.calls] == [201]


def test_an_api_server_that_is_busy_for_a_moment(api: KubernetesApi) -> None:
    """Further attempts follow, and nothing is said."""
    said: list[str] = []
    with pod_events(said.append, api.environment, api.account) as send:
        api.refusals = [503, 429]
        send(REFUSED)
        while not api.events:
            pass
    assert not said and [code for _, code in api.calls] == [503, 429, 201]


def test_an_account_that_may_not(api: KubernetesApi) -> None:
    """One warning with Kubernetes' own reason and what to change; `serve` goes on."""
    api.refusals = [403] * 8
    other = Notice("group-0 is lost", "GroupLost", is_warning=True)
    (warning,) = record(api, REFUSED, other)
    assert "events is forbidden: the account cannot create events" in warning
    assert "create, get and patch events" in warning and not api.events


def test_a_long_message_is_cut(api: KubernetesApi) -> None:
    """Kubernetes takes 1,024 bytes."""
    record(api, Notice("é" * 2000, "Serving"))
    (event,) = api.events.values()
    assert event["message"] == "é" * 512


def test_outside_a_pod(tmp_path: Path) -> None:
    """Refused at once, with what is missing."""
    environment = dict.fromkeys(("KUBERNETES_SERVICE_HOST", "KUBERNETES_SERVICE_PORT", "POD_NAME", "POD_UID"), "")
    done = coatcheck("serve", str(tmp_path), "--kubernetes-events", environment=environment)
    assert done.returncode == 2 and "needs KUBERNETES_SERVICE_HOST, KUBERNETES_SERVICE_PORT, POD_NAME" in done.stderr
    whole = dict.fromkeys(environment, "1")
    with pytest.raises(InvalidConfig, match="needs the token of a service account"), pod_events(print, whole, tmp_path):
        pass
