"""What the KubeRay operator and Helm do with the objects after they are rendered."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from tests.helm.chart import CHART, helm, render, rendered_objects


def test_redis_is_cleaned_after_an_uninstall() -> None:
    """The operator's cleanup job runs with the head pod's account and volumes. Helm removes the release's account and
    ConfigMap first, so the account is kept and the ConfigMap may be missing."""
    with_redis, without = render("two-nodes"), render("eight-gpus")
    account = with_redis.one("ServiceAccount")["metadata"]
    assert account["annotations"] == {"helm.sh/resource-policy": "keep"}
    assert "annotations" not in without.one("ServiceAccount")["metadata"]
    for rendered, optional in ((with_redis, True), (without, False)):
        (settings,) = (one for one in rendered.templates[0]["spec"]["volumes"] if one["name"] == "settings")
        assert settings["configMap"]["optional"] is optional


def test_the_head_has_the_account_that_is_given() -> None:
    """With the autoscaler too: the operator binds a named account to the role, and makes one only without a name.
    `default`, which every pod of the namespace has, is not bound."""
    scales = ("autoscaling.enabled=true", "autoscaling.maxReplicas=2")
    named = render("eight-gpus", *scales, "serviceAccount.create=false", "serviceAccount.name=ours")
    assert named.templates[0]["spec"]["serviceAccountName"] == "ours"
    assert "serviceAccountName" not in render("eight-gpus", *scales, "serviceAccount.create=false").templates[0]["spec"]


@pytest.mark.parametrize(("values", "made"), [("eight-gpus", True), ("two-nodes", False)])
def test_the_head_is_not_evicted_without_redis(values: str, made: bool) -> None:
    """Its loss would end every group. With Redis it may go."""
    rendered = render(values)
    budget = rendered.objects.get(("PodDisruptionBudget", "demo-coatcheck-head"))
    assert (budget is not None) == made
    if budget:
        labels = {"ray.io/cluster": "demo-coatcheck", "ray.io/node-type": "head"}
        assert budget["spec"]["minAvailable"] == 1 and budget["spec"]["selector"]["matchLabels"] == labels
        off = render(values, "head.disruptionBudget=false").objects
        assert ("PodDisruptionBudget", "demo-coatcheck-head") not in off


def test_groups_over_several_hosts_are_not_evicted_by_halves() -> None:
    """The only group loses no pod; of several groups one pod at a time may go, and with it one group."""
    only = render("two-nodes").one("PodDisruptionBudget", "demo-coatcheck-worker")["spec"]
    assert only["minAvailable"] == 2
    two = render("two-nodes", "model.groups=2").one("PodDisruptionBudget", "demo-coatcheck-worker")["spec"]
    assert two["minAvailable"] == 3


def test_a_version_with_a_plus_gives_valid_labels(tmp_path: Path) -> None:
    """OCI packaging adds build metadata after a plus, which no label may have."""
    shutil.copytree(CHART, tmp_path / "chart")
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text()) | {"version": "1.2.3+b4", "appVersion": "1.2.3+b4"}
    (tmp_path / "chart" / "Chart.yaml").write_text(yaml.safe_dump(chart))
    done = helm("template", "demo", str(tmp_path / "chart"), "-f", str(CHART / "values" / "cpu.yaml"))
    assert done.returncode == 0, done.stderr
    for made in filter(None, yaml.safe_load_all(done.stdout)):
        labels = made["metadata"]["labels"]
        assert (labels["helm.sh/chart"], labels["app.kubernetes.io/version"]) == ("coatcheck-1.2.3_b4", "1.2.3_b4")
    assert rendered_objects(done.stdout).container("worker")["image"] == "coatcheck:1.2.3_b4"


def test_long_names_of_two_releases_differ() -> None:
    """Names are cut for what the operator makes of them; two releases in one namespace get no object of the same name,
    and their dashboards have each an id, without which Grafana reads neither."""
    names: set[tuple[str, str]] = set()
    ids: set[str] = set()
    for number in (1, 2):
        file = str(CHART / "values" / "cpu.yaml")
        done = helm("template", f"{'a' * 52}{number}", str(CHART), "-f", file, "--set", "grafana.dashboard=true")
        made = rendered_objects(done.stdout).objects
        assert all(len(name) <= 63 for _, name in made)
        assert not names & made.keys()
        names |= made.keys()
        (board,) = (one["data"]["coatcheck.json"] for (_, name), one in made.items() if name.endswith("-dashboard"))
        loaded = json.loads(board)
        ids |= {loaded["uid"], loaded["title"]}
        (job,) = (one for one in loaded["templating"]["list"] if one["name"] == "job")
        assert ("Service", *job["current"]["value"]) in made  # the job that Prometheus names after the Service
    assert len(ids) == 4


def test_the_test_pod_runs_where_routers_do() -> None:
    """It pulls the image with the same secrets, tolerates the same taints and needs the same nodes."""
    settings = ("image.pullSecrets[0]=registry", "router.nodeSelector.pool=front", "router.tolerations[0].key=front")
    rendered = render("one-gpu", *settings)
    pod, router = rendered.one("Pod", "demo-coatcheck-generate")["spec"], rendered.group("router")["template"]["spec"]
    for field in ("imagePullSecrets", "nodeSelector", "tolerations", "serviceAccountName"):
        assert pod[field] == router[field]
    assert pod["imagePullSecrets"] == [{"name": "registry"}]


def test_prometheus_gets_no_admin_key() -> None:
    """The ServiceMonitor names the key with the role monitor."""
    rendered = render("eight-gpus")
    (endpoint,) = rendered.one("ServiceMonitor")["spec"]["endpoints"]
    assert endpoint["authorization"]["credentials"] == {"name": "monitor-key", "key": "key"}


@pytest.mark.parametrize("role", ["head", "router", "worker"])
def test_a_number_as_a_secret_stays_a_name(role: str) -> None:
    """Names that YAML would read as numbers are quoted."""
    numbers = ("apiKeys.name", "adminKey.name", "hubToken.name", "tls.secretName", "storage.existingClaim")
    flags = [part for name in numbers for part in ("--set-string", f"{name}=123")]
    file = str(CHART / "values" / "one-gpu.yaml")
    done = helm("template", "demo", str(CHART), "-f", file, "--set-string", f"{role}.priorityClassName=7", *flags)
    assert done.returncode == 0, done.stderr
    (cluster,) = (one for one in yaml.safe_load_all(done.stdout) if one and one["kind"] == "RayCluster")
    for group in (cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]):
        spec = group["template"]["spec"]
        for volume in spec["volumes"]:
            assert volume.get("secret", {}).get("secretName", "123") == "123"
            assert volume.get("persistentVolumeClaim", {}).get("claimName", "123") == "123"
        assert spec.get("priorityClassName", "7") == "7"


def test_a_changed_value_reaches_the_cluster() -> None:
    """The operator replaces no pod for a changed ConfigMap. `serve` follows the mounted file, which must be a folder's:
    Kubernetes never updates a file that is mounted by itself. The head is not ready until all is applied."""
    serve = render("two-nodes").templates[0]["spec"]["containers"][1]
    (settings,) = (mount for mount in serve["volumeMounts"] if mount["name"] == "settings")
    assert settings["mountPath"] == "/etc/coatcheck" and "subPath" not in settings
    words = serve["args"][0].split()
    assert words[words.index("--config") + 1] == "/etc/coatcheck/serve.yaml" and "--apply" in words
    assert serve["readinessProbe"]["exec"]["command"] == ["test", "-f", words[words.index("--ready-file") + 1]]


def test_workers_find_a_head_that_is_not_ready() -> None:
    """Else no worker could join, and the head would never become ready."""
    service = render("cpu").cluster["headGroupSpec"]["headService"]["spec"]
    assert service == {"clusterIP": "None", "publishNotReadyAddresses": True}


@pytest.mark.parametrize("changed", ["router.replicas=2", "autoscaling.enabled=true"])
def test_scaling_changes_nothing_that_a_cluster_cannot_change(changed: str) -> None:
    """A router more, or the autoscaler, leaves the settings as they are."""
    before, after = (
        render("cpu", *flags).one("ConfigMap")["data"] for flags in ((), (changed, "autoscaling.maxReplicas=2"))
    )
    assert before == after
