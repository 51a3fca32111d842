"""What operators add to the pods of each role, and where downloads from the hub are kept."""

import json
from typing import Any

import kubernetes_validate
import pytest

from tests.helm.chart import CHART, helm, render, rendered_objects

ROLES = ("head", "router", "worker")


def pod_of(role: str, values: dict[str, Any], example: str = "two-nodes") -> dict[str, Any]:
    """The pod template of a role with these values of the role; the others' templates must not change."""
    plain = render(example)
    flags = [part for name, value in values.items() for part in ("--set-json", f"{role}.{name}={json.dumps(value)}")]
    done = helm("template", "demo", str(CHART), "-f", str(CHART / "values" / f"{example}.yaml"), *flags)
    assert done.returncode == 0, done.stderr
    templates = rendered_objects(done.stdout).templates
    for name, before, after in zip(ROLES, plain.templates, templates, strict=True):
        assert (before == after) == (name != role)
    template = templates[ROLES.index(role)]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod", **template["metadata"]}}
    kubernetes_validate.validate({**pod, "spec": template["spec"]}, "1.34", strict=True)
    return template


@pytest.mark.parametrize("role", ROLES)
def test_each_role_takes_what_a_pod_takes(role: str) -> None:
    """Variables, volumes, containers, labels, placement and classes reach the pods of the role alone."""
    spread = {"maxSkew": 1, "topologyKey": "zone", "whenUnsatisfiable": "ScheduleAnyway"}
    values: dict[str, Any] = {
        "env": [{"name": "NCCL_IB_HCA", "value": "mlx5"}, {"name": "TRITON_CACHE_DIR", "value": "/mine"}],
        "envFrom": [{"configMapRef": {"name": "nccl"}}],
        "volumes": [{"name": "data", "emptyDir": {}}],
        "volumeMounts": [{"name": "data", "mountPath": "/data"}],
        "initContainers": [{"name": "first", "image": "i"}],
        "sidecars": [{"name": "beside", "image": "i"}],
        "podLabels": {"team": "search"},
        "podAnnotations": {"note": "1"},
        "nodeSelector": {"pool": "p"},
        "topologySpreadConstraints": [spread],
        "runtimeClassName": "nvidia",
        "priorityClassName": "high",
        "capabilities": ["IPC_LOCK"],
    }
    template = pod_of(role, values)
    spec = template["spec"]
    ray, *others = spec["containers"]
    env = {one["name"]: one.get("value") for one in ray["env"]}
    assert env["NCCL_IB_HCA"] == "mlx5" and env["TRITON_CACHE_DIR"] == "/mine"
    assert len(env) == len(ray["env"])  # a name that is given twice is refused by some clients
    assert ray["envFrom"] == values["envFrom"] and values["volumeMounts"][0] in ray["volumeMounts"]
    assert ray["securityContext"]["capabilities"] == {"drop": ["ALL"], "add": ["IPC_LOCK"]}
    assert values["volumes"][0] in spec["volumes"] and spec["initContainers"] == values["initContainers"]
    assert others[-1] == values["sidecars"][0]
    assert template["metadata"]["labels"]["team"] == "search" and template["metadata"]["annotations"] == {"note": "1"}
    for field in ("nodeSelector", "topologySpreadConstraints", "runtimeClassName", "priorityClassName"):
        assert spec[field] == values[field]


def test_a_label_replaces_the_charts_own() -> None:
    """As a variable does; a key that stands twice in an object is refused by Kubernetes."""
    name = "app.kubernetes.io/name"
    assert pod_of("router", {"podLabels": {name: "front"}})["metadata"]["labels"][name] == "front"
    env = pod_of("head", {"env": [{"name": "RAY_AUTH_MODE", "value": "k8s"}]})["spec"]["containers"][1]["env"]
    assert [one["value"] for one in env if one["name"] == "RAY_AUTH_MODE"] == ["k8s"]


def test_a_user_that_the_platform_assigns() -> None:
    """No user or group is set, such as OpenShift wants it; the rest of the Pod Security profile stays. The variable
    USER names a user that no /etc/passwd has."""
    for template in render("eight-gpus", "security.setUser=false").templates:
        security = template["spec"]["securityContext"]
        assert security == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
        env = {one["name"]: one.get("value") for one in template["spec"]["containers"][0]["env"]}
        assert env["USER"] == "coatcheck"


def test_affinity_is_added_to_the_charts_own() -> None:
    """A rule of another kind stands beside the chart's; one of the same kind replaces it."""
    nodes: dict[str, Any] = {
        "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchFields": []}]}
    }
    both = pod_of("worker", {"affinity": {"nodeAffinity": nodes}})["spec"]["affinity"]
    assert both["nodeAffinity"] == nodes
    own = both["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert own[0]["topologyKey"] == "kubernetes.io/hostname"
    softer: dict[str, Any] = {"requiredDuringSchedulingIgnoredDuringExecution": []}
    replaced = pod_of("worker", {"affinity": {"podAntiAffinity": softer}})["spec"]["affinity"]
    assert replaced == {"podAntiAffinity": softer}


@pytest.mark.parametrize(
    ("kind", "flags", "volume", "everywhere"),
    [
        ("create", (), {"persistentVolumeClaim": {"claimName": "demo-coatcheck-hub"}}, True),
        ("claim", ("hubCache.existingClaim=c",), {"persistentVolumeClaim": {"claimName": "c"}}, True),
        ("node", (), {"hostPath": {"path": "/var/cache/coatcheck", "type": "DirectoryOrCreate"}}, False),
        ("ephemeral", (), None, False),
    ],
)
def test_downloads_outlive_a_pod(kind: str, flags: tuple[str, ...], volume: Any, everywhere: bool) -> None:
    """HF_HOME is on the volume of that kind: in workers always, in the others if all pods share it."""
    rendered = render("one-gpu", f"hubCache.kind={kind}", "hubCache.storageClassName=fast", *flags)
    for template, expected in zip(rendered.templates, (everywhere, everywhere, True), strict=True):
        spec = template["spec"]
        found = [one for one in spec["volumes"] if one["name"] == "hub"]
        mounts = [one["mountPath"] for one in spec["containers"][0]["volumeMounts"] if one["name"] == "hub"]
        assert (len(found), mounts) == ((1, ["/cache/hub"]) if expected else (0, []))
        if found and volume:
            assert found[0] == {"name": "hub", **volume}
    if kind == "ephemeral":
        claim = found[0]["ephemeral"]["volumeClaimTemplate"]["spec"]
        assert claim["storageClassName"] == "fast" and claim["resources"]["requests"]["storage"] == "500Gi"
    made = rendered.objects.get(("PersistentVolumeClaim", "demo-coatcheck-hub"))
    assert (made is not None) == (kind == "create")
    if made:
        kubernetes_validate.validate(made, "1.34", strict=True)
        assert made["spec"]["accessModes"] == ["ReadWriteMany"] and made["spec"]["storageClassName"] == "fast"
        # A download that took hours stays; and the job that cleans Redis after an uninstall mounts it.
        assert made["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}


def test_a_checkpoint_that_no_pod_could_keep_is_refused() -> None:
    """`serve` gets the size of a pod's own disk, in bytes, where pods download there; else no limit."""
    for expected, values, flags in (
        (" --max-download 107374182400 ", "one-gpu", ()),
        (" --max-download 1500000000000 ", "one-gpu", ("storage.cacheSize=1.5T",)),
        ("", "one-gpu", ("hubCache.kind=create",)),
        ("", "eight-gpus", ()),  # a path in a claim
    ):
        script = render(values, *flags).templates[0]["spec"]["containers"][1]["args"][0]
        assert expected in script and ("--max-download" in script) == bool(expected)


def test_an_image_by_digest() -> None:
    """Every container and the test pod then run that image, whatever the tag says later."""
    digest = f"sha256:{'0a' * 32}"
    rendered = render("cpu", f"image.digest={digest}", "image.repository=registry/coatcheck")
    pods = [template["spec"] for template in rendered.templates]
    pods.append(rendered.one("Pod", "demo-coatcheck-generate")["spec"])
    assert {one["image"] for spec in pods for one in spec["containers"]} == {f"registry/coatcheck@{digest}"}


def test_pull_secrets_in_either_form() -> None:
    """Names, or objects as in a pod."""
    rendered = render("cpu", "image.pullSecrets[0]=one", "image.pullSecrets[1].name=two")
    for template in rendered.templates:
        assert template["spec"]["imagePullSecrets"] == [{"name": "one"}, {"name": "two"}]


def test_kubectl_logs_shows_ranks_and_routers() -> None:
    """A container of every pod prints Ray's files, from the folder that it shares with Ray's container, and ends at
    SIGTERM. It can be left out."""
    for template in render("eight-gpus").templates:
        containers = {one["name"]: one for one in template["spec"]["containers"]}
        assert containers["logs"]["command"] == ["tini", "--", "coatcheck", "logs", "--follow"]
        ray = template["spec"]["containers"][0]
        (shared,) = (mount for mount in ray["volumeMounts"] if mount["mountPath"] == "/tmp/ray")
        assert shared in containers["logs"]["volumeMounts"]
    for template in render("eight-gpus", "logs.enabled=false").templates:
        assert "logs" not in {one["name"] for one in template["spec"]["containers"]}


def test_groups_of_devices() -> None:
    """Every container may open what these groups may, such as /dev/kfd."""
    for template in render("one-gpu", "security.supplementalGroups={44,109}").templates:
        assert template["spec"]["securityContext"]["supplementalGroups"] == [44, 109]
    assert "supplementalGroups" not in render("one-gpu").templates[0]["spec"]["securityContext"]


def test_cores_of_ranks_on_cpus() -> None:
    """The example limits them, with time to spare for Ray's processes: a rank's threads are the whole cores of the
    limit. Without a limit the notes say what a pod then takes."""
    example = render("cpu")
    assert int(example.group("worker")["rayStartParams"]["num-cpus"]) == 1
    assert example.container("worker")["resources"]["limits"]["cpu"] == "1500m"
    said = "Without worker.resources.limits.cpu each worker pod takes"
    for values, flags, expected in (
        ("cpu", (), False),
        ("cpu", ("worker.resources.limits=null",), True),
        ("one-gpu", (), False),
    ):
        file = str(CHART / "values" / f"{values}.yaml")
        settings = [part for flag in flags for part in ("--set", flag)]
        done = helm("install", "demo", str(CHART), "-f", file, "--dry-run=client", *settings)
        assert done.returncode == 0, done.stderr
        assert (said in done.stdout) == expected
