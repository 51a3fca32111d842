"""The events that `serve` records on Kubernetes: the rights, the token and the identity of the pod."""

from pathlib import Path
from typing import Any

import pytest

from coatcheck.cluster.session.kubernetes_events import Pod
from tests.helm.chart import VALUES, Rendered, render


def serve_container(rendered: Rendered) -> dict[str, Any]:
    """The container of `coatcheck serve` in the head pod."""
    found: dict[str, Any] = rendered.templates[0]["spec"]["containers"][1]
    return found


@pytest.mark.parametrize("values", VALUES)
def test_serve_may_record_events_and_nothing_else(values: str) -> None:
    """Its account may create, get and patch events; the role is not named like that of KubeRay's autoscaler."""
    rendered = render(values)
    name = "demo-coatcheck-events"
    assert rendered.one("Role", name)["rules"] == [
        {"apiGroups": [""], "resources": ["events"], "verbs": ["create", "get", "patch"]}
    ]
    binding = rendered.one("RoleBinding", name)
    assert binding["roleRef"] == {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name}
    account = rendered.templates[0]["spec"]["serviceAccountName"]
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account, "namespace": "default"}]
    assert serve_container(rendered)["args"][0].count(" --kubernetes-events ") == 1


@pytest.mark.parametrize("scales", [(), ("autoscaling.enabled=true", "autoscaling.maxReplicas=2")])
def test_only_serve_has_the_token(scales: tuple[str, ...]) -> None:
    """Where `serve` looks for it, with the certificate authority and the namespace, as Kubernetes mounts it."""
    rendered = render("eight-gpus", *scales)
    (volume,) = (one for one in rendered.templates[0]["spec"]["volumes"] if one["name"] == "api-token")
    sources = volume["projected"]["sources"]
    paths = [item["path"] for one in sources for part in one.values() for item in part.get("items", [part])]
    assert paths == ["token", "ca.crt", "namespace"]
    mounts = {
        container["name"]: mount["mountPath"]
        for template in rendered.templates
        for container in template["spec"]["containers"]
        for mount in container["volumeMounts"]
        if mount["name"] == "api-token"
    }
    assert mounts == {"serve": "/var/run/secrets/kubernetes.io/serviceaccount"}


def test_serve_knows_its_pod() -> None:
    """With the variables that Kubernetes sets in every container, these are all that `serve` needs."""
    by_field = {
        one["name"]: one["valueFrom"]["fieldRef"]["fieldPath"]
        for one in serve_container(render("cpu"))["env"]
        if "fieldRef" in one.get("valueFrom", {})
    }
    assert by_field["POD_NAME"] == "metadata.name" and by_field["POD_UID"] == "metadata.uid"


def test_the_api_of_a_cluster_with_ipv6(tmp_path: Path) -> None:
    """Its address is put in brackets; the namespace is that of the mounted file."""
    (tmp_path / "namespace").write_text("llm\n")
    variables = {"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}
    pod = Pod.find({**variables, "POD_NAME": "head", "POD_UID": "u"}, tmp_path)
    assert (pod.namespace, pod.api) == ("llm", "https://[fd00::1]:443")


@pytest.mark.parametrize("settings", [("events.enabled=false",), ("serviceAccount.create=false",)])
def test_without_events(settings: tuple[str, ...]) -> None:
    """Switched off, or under the account `default`, which every pod of the namespace has: no right and no token."""
    rendered = render("one-gpu", *settings)
    assert ("Role", "demo-coatcheck-events") not in rendered.objects
    assert ("RoleBinding", "demo-coatcheck-events") not in rendered.objects
    assert "--kubernetes-events" not in serve_container(rendered)["args"][0]
    assert not any(one["name"] == "api-token" for one in rendered.templates[0]["spec"]["volumes"])
