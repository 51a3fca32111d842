"""The Helm chart: every example renders to valid objects, and bad values are refused."""

import importlib.util
import json
import re
import shlex
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from jsonschema import Draft202012Validator

from coatcheck.cluster.config.serve_config import ServeConfig
from tests.helm.chart import CHART, VALUES, helm, refusal, render

_OTHERS = {"RayCluster", "ServiceMonitor", "PrometheusRule"}  # not Kubernetes' own kinds
_GROUP_NEEDS = {"groupName", "minReplicas", "maxReplicas", "template"}
_GROUP_KNOWS = _GROUP_NEEDS | {"replicas", "numOfHosts", "rayStartParams"}
_CLUSTER_KNOWS = {
    *("rayVersion", "headGroupSpec", "workerGroupSpecs", "authOptions", "gcsFaultToleranceOptions"),
    *("enableInTreeAutoscaling", "autoscalerOptions"),
}


@pytest.mark.parametrize("values", VALUES)
def test_lint(values: str) -> None:
    """`helm lint` finds no fault."""
    done = helm("lint", "--strict", "--quiet", str(CHART), "-f", str(CHART / "values" / f"{values}.yaml"))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("values", VALUES)
def test_objects_are_valid(values: str) -> None:
    """Kubernetes' kinds, and the pods that the operator will make, have no unknown or missing field."""
    rendered = render(values)
    plain = [one for (kind, _), one in rendered.objects.items() if kind not in _OTHERS]
    pods: list[dict[str, Any]] = [
        {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": "pod", **template["metadata"]},
            "spec": template["spec"],
        }
        for template in rendered.templates
    ]
    for one in plain + pods:
        kubernetes_validate.validate(one, "1.34", strict=True)
    assert len(pods) == 3 and {"ConfigMap", "Service", "ServiceAccount", "NetworkPolicy"} <= {
        one["kind"] for one in plain
    }


@pytest.mark.parametrize("values", VALUES)
def test_ray_cluster_has_what_its_definition_requires(values: str) -> None:
    """A head template, and of each worker group its name, bounds and template, and nothing that the definition does not
    know; Ray's parameters are strings."""
    cluster = render(values).cluster
    assert cluster.keys() <= _CLUSTER_KNOWS and cluster["headGroupSpec"].keys() == {
        "rayStartParams",
        "headService",
        "template",
    }
    assert cluster["headGroupSpec"]["template"]["spec"]["containers"][0]["name"] == "ray-head"
    for group in cluster["workerGroupSpecs"]:
        assert _GROUP_NEEDS <= group.keys() <= _GROUP_KNOWS
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())


@pytest.mark.parametrize("values", VALUES)
def test_settings_are_those_of_serve(values: str, tmp_path: Path) -> None:
    """`coatcheck serve --config` takes the file that the chart writes, and has as many ranks as the pods hold."""
    rendered = render(values)
    file = tmp_path / "serve.yaml"
    file.write_text(rendered.one("ConfigMap")["data"]["serve.yaml"])
    config = ServeConfig.build({}, file)
    group = rendered.group("worker")
    resource = "num-gpus" if config.device == "cuda" else "num-cpus"
    pods = group["replicas"] * group["numOfHosts"]
    assert int(group["rayStartParams"][resource]) * pods == config.groups * config.tp
    routers = rendered.group("router")["replicas"]
    assert config.router_per_node  # so that a router more or less needs no other setting
    assert (("PodDisruptionBudget", "demo-coatcheck-router") in rendered.objects) == (routers > 1)
    assert (config.grpc_host, config.http_host, config.router_resource) == ("0.0.0.0", "0.0.0.0", "coatcheck_router")
    # Ray's autoscaler drops the first and the last character; the operator trims quotes; then both read JSON.
    written = rendered.group("router")["rayStartParams"]["resources"]
    assert written[0] == written[-1] == "'" and json.loads(written[1:-1]) == {"coatcheck_router": 1}
    assert shlex.split(written) == [written[1:-1]]


@pytest.mark.parametrize(("values", "gpus"), [("one-gpu", "1"), ("eight-gpus", "4"), ("two-nodes", "8")])
def test_gpus_are_requested_and_limited(values: str, gpus: str) -> None:
    """A worker pod requests as many GPUs as its raylet offers."""
    rendered = render(values)
    resources = rendered.container("worker")["resources"]
    assert resources["requests"]["nvidia.com/gpu"] == resources["limits"]["nvidia.com/gpu"] == gpus
    assert rendered.group("worker")["rayStartParams"]["num-gpus"] == gpus


def test_cpu_asks_for_no_gpu() -> None:
    """Without GPUs no pod requests the GPU resource."""
    assert "nvidia.com/gpu" not in str(render("cpu").objects)


@pytest.mark.parametrize("values", VALUES)
def test_pods_are_confined(values: str) -> None:
    """Nothing runs as root, writes to the image or gains privileges, as Pod Security's profile restricted wants it; so
    too the pod of `helm test`. /dev/shm is sized."""
    rendered = render(values)
    allowed = {"name", "configMap", "emptyDir", "ephemeral", "persistentVolumeClaim", "projected", "secret"}
    for spec in (rendered.one("Pod", "demo-coatcheck-generate")["spec"], *(pod["spec"] for pod in rendered.templates)):
        assert spec["securityContext"]["runAsUser"] > 0 and spec["securityContext"]["runAsNonRoot"]
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert all(volume.keys() <= allowed for volume in spec["volumes"])
        for container in spec["containers"]:
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    for template in rendered.templates:
        spec = template["spec"]
        assert spec["securityContext"]["runAsNonRoot"] and not spec["automountServiceAccountToken"]
        shared = next(volume for volume in spec["volumes"] if volume["name"] == "shm")
        assert shared["emptyDir"]["medium"] == "Memory" and shared["emptyDir"]["sizeLimit"]
        for container in spec["containers"]:
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] and not security["allowPrivilegeEscalation"]
            assert {"/tmp", "/dev/shm", "/cache"} <= {mount["mountPath"] for mount in container["volumeMounts"]}


def test_probes_and_grace() -> None:
    """Router pods are ready when health says so, may drain as long as told; a worker has ten minutes to join."""
    rendered = render("eight-gpus")
    router, worker = rendered.container("router"), rendered.container("worker")
    assert router["readinessProbe"]["httpGet"] == {"path": "/health", "port": "http", "scheme": "HTTPS"}
    assert "coatcheck drain" in router["lifecycle"]["preStop"]["exec"]["command"][-1]
    assert rendered.group("router")["template"]["spec"]["terminationGracePeriodSeconds"] > 600
    assert worker["startupProbe"]["periodSeconds"] * worker["startupProbe"]["failureThreshold"] >= 600
    assert "readinessProbe" not in worker


@pytest.mark.parametrize("values", VALUES)
def test_selectors_match_what_the_operator_labels(values: str) -> None:
    """Service, budget and policies select by the labels that the operator puts on the pods."""
    rendered = render(values)
    names = {"ray.io/cluster": "demo-coatcheck"}
    assert rendered.one("Service")["spec"]["selector"] == names | {"ray.io/group": "router"}
    policy = rendered.one("NetworkPolicy", "demo-coatcheck-router")["spec"]["podSelector"]["matchLabels"]
    assert policy == names | {"ray.io/group": "router"}
    worker = rendered.group("worker")
    pods = worker["replicas"] * worker["numOfHosts"]
    budget = rendered.objects.get(("PodDisruptionBudget", "demo-coatcheck-worker"))
    assert (budget is not None) == (pods > 1)
    if budget:
        assert budget["spec"]["selector"]["matchLabels"] == names | {"ray.io/group": "worker"}
        assert budget["spec"]["minAvailable"] == (pods if worker["replicas"] == 1 else pods - 1)


def test_two_nodes() -> None:
    """A group over two hosts is one replica of two pods on hosts of their own; Redis keeps the head's state."""
    rendered = render("two-nodes")
    worker = rendered.group("worker")
    assert (worker["replicas"], worker["numOfHosts"]) == (1, 2)
    apart = worker["template"]["spec"]["affinity"]["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert apart[0]["topologyKey"] == "kubernetes.io/hostname"
    fault_tolerance = rendered.cluster["gcsFaultToleranceOptions"]
    assert fault_tolerance["redisAddress"] == "redis:6379"
    assert fault_tolerance["redisPassword"]["valueFrom"]["secretKeyRef"] == {"name": "redis", "key": "password"}
    assert rendered.cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


@pytest.mark.parametrize("values", ["eight-gpus", "two-nodes"])
def test_production_examples_have_two_routers_on_two_nodes(values: str) -> None:
    """Where there are two nodes; one of the two always serves, also while a node is emptied."""
    rendered = render(values)
    router = rendered.group("router")
    assert router["replicas"] == router["minReplicas"] == 2
    (rule,) = router["template"]["spec"]["affinity"]["podAntiAffinity"][
        "preferredDuringSchedulingIgnoredDuringExecution"
    ]
    term = rule["podAffinityTerm"]
    assert term["topologyKey"] == "kubernetes.io/hostname"
    assert term["labelSelector"]["matchLabels"] == rendered.one("Service")["spec"]["selector"]
    budget = rendered.one("PodDisruptionBudget", "demo-coatcheck-router")["spec"]
    assert budget["minAvailable"] == 1 and budget["selector"]["matchLabels"] == term["labelSelector"]["matchLabels"]


def test_credentials_are_mounted_for_serve(tmp_path: Path) -> None:
    """Secrets are mounted where the settings say, in the router's pods alone; its own commands bring what they need."""
    rendered = render("eight-gpus", "tls.clientCaKey=ca.crt")
    file = tmp_path / "serve.yaml"
    file.write_text(rendered.one("ConfigMap")["data"]["serve.yaml"])
    config = ServeConfig.build({}, file)
    router = rendered.container("router")
    mounts = {mount["mountPath"] for mount in router["volumeMounts"]}
    for path in (config.tls_cert, config.tls_key, config.tls_client_ca, config.api_keys):
        assert path is not None and str(Path(path).parent) in mounts
    assert not mounts & {"/etc/coatcheck-keys"} & {m["mountPath"] for m in rendered.container("worker")["volumeMounts"]}
    names = {one["name"] for one in router["env"]}
    assert {"COATCHECK_TLS_CA", "COATCHECK_TLS_CERT", "COATCHECK_TLS_KEY"} <= names
    # The drain asks this pod's own router, by the name that the certificate has.
    drain = router["lifecycle"]["preStop"]["exec"]["command"][-1]
    (alias,) = rendered.group("router")["template"]["spec"]["hostAliases"]
    assert alias == {"ip": "127.0.0.1", "hostnames": ["demo-coatcheck"]} and "--address demo-coatcheck:50051 " in drain
    ports = {port["name"]: port["appProtocol"] for port in rendered.one("Service")["spec"]["ports"]}
    assert ports == {"grpc": "https", "http": "https"}


def test_ray_has_a_token() -> None:
    """The operator makes it; `coatcheck serve`, which it does not know, reads the same secret."""
    rendered = render("one-gpu")
    assert rendered.cluster["authOptions"] == {"mode": "token"}
    serve = rendered.templates[0]["spec"]["containers"][1]
    token = next(one for one in serve["env"] if one["name"] == "RAY_AUTH_TOKEN")
    assert token["valueFrom"]["secretKeyRef"] == {"name": "demo-coatcheck", "key": "auth_token"}
    assert "authOptions" not in render("one-gpu", "ray.tokenAuth=false").cluster


def test_autoscaling() -> None:
    """Ray's autoscaler is version 2, never takes the groups' places, and runs under the release's account."""
    rendered = render("eight-gpus", "autoscaling.enabled=true", "autoscaling.maxReplicas=3")
    assert rendered.cluster["enableInTreeAutoscaling"] and rendered.cluster["autoscalerOptions"]["version"] == "v2"
    worker = rendered.group("worker")
    assert (worker["minReplicas"], worker["maxReplicas"]) == (2, 3)
    head = rendered.templates[0]["spec"]
    assert head["serviceAccountName"] == "demo-coatcheck" and head["automountServiceAccountToken"]
    # What the operator adds to the head pod is as confined as the rest of it.
    options = rendered.cluster["autoscalerOptions"]
    added = {"name": "autoscaler", "image": "i", **{key: options[key] for key in options if key != "version"}}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "head"}}
    kubernetes_validate.validate({**pod, "spec": {**head, "containers": [added]}}, "1.34", strict=True)
    assert added["securityContext"] == head["containers"][0]["securityContext"]
    assert {mount["name"] for mount in added["volumeMounts"]} <= {volume["name"] for volume in head["volumes"]}


def test_who_may_reach_the_router() -> None:
    """Every peer may connect to the router, or only the peers in `networkPolicy.from` and the pod of `helm test`."""
    anybody = render("cpu").one("NetworkPolicy", "demo-coatcheck-router")["spec"]["ingress"]
    assert [port["port"] for port in anybody[0]["ports"]] == ["grpc", "http"] and "from" not in anybody[0]
    named = render("cpu", "networkPolicy.from[0].namespaceSelector.matchLabels.team=web")
    clients, tests = named.one("NetworkPolicy", "demo-coatcheck-router")["spec"]["ingress"][0]["from"]
    assert clients == {"namespaceSelector": {"matchLabels": {"team": "web"}}}
    labels = named.one("Pod", "demo-coatcheck-generate")["metadata"]["labels"]
    assert tests["podSelector"]["matchLabels"].items() <= labels.items()


def test_every_setting_of_serve_can_be_given() -> None:
    """`settings` accepts every setting of serve that the chart does not write itself, and no other name."""
    written = set()
    for values, flags in (("eight-gpus", ("tls.clientCaKey=ca.crt", "model.servedName=m")), ("cpu", ())):
        written |= yaml.safe_load(render(values, *flags).one("ConfigMap")["data"]["serve.yaml"]).keys()
    schema = json.loads((CHART / "values.schema.json").read_text())
    offered = schema["properties"]["settings"]["properties"].keys()
    given = {*yaml.safe_load((CHART / "values" / "cpu.yaml").read_text())["settings"], "host_kv_memory"}
    # On the command line of the container, or never on Kubernetes.
    assert offered | (written - given) | {"ray_address", "no_ray"} == ServeConfig.model_fields.keys()
    assert not offered & (written - given)


@pytest.mark.parametrize(
    ("value", "is_accepted"),
    [
        ("sql=/a/sql", True),
        ("sql=/a/sql,chat=/a/v=2", True),
        (["sql=/a/sql", {"name": "chat", "path": "/a/chat"}], True),
        ("sql", False),
        ([], False),
        (["sql"], False),
        ([{"name": "chat"}], False),
    ],
)
def test_adapters_are_a_text_or_a_list(value: object, is_accepted: bool) -> None:
    """The schema of settings.lora_modules accepts the forms that serve reads from a YAML file."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    part = schema["properties"]["settings"]["properties"]["lora_modules"]
    assert Draft202012Validator(part).is_valid(value) is is_accepted
    if is_accepted:
        assert ServeConfig.build({"model": "m", "lora_modules": value}).adapters[0].name == "sql"


def test_every_value_is_explained() -> None:
    """Each value has a comment above it, except for the two fields of a reference to a secret."""
    lines = (CHART / "values.yaml").read_text().splitlines()
    values = [(lines[index - 1], line) for index, line in enumerate(lines) if re.match(r"( {2})?\w+: \S", line)]
    bare = [line.split(":")[0].strip() for before, line in values if "# --" not in before]
    assert len(values) > 40 and set(bare) == {"name", "key"}


def test_the_readme_says_what_the_values_are() -> None:
    """The chart's README is what `python helm/make_readme.py` writes, and has every value."""
    spec = importlib.util.spec_from_file_location("make_readme", CHART.parent / "make_readme.py")
    assert spec and spec.loader
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    assert (CHART / "README.md").read_text() == made.describe()
    names = {name for name, _, _ in made.explained_values()}
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert {name.split(".")[0] for name in names} == values.keys() and {"router.env", "hubCache.kind"} <= names


def test_schema_and_values_name_the_same() -> None:
    """Every value is in the schema, which refuses all others; every name in the schema has its default."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    assert schema["properties"].keys() - {"global"} == values.keys()
    for name, part in schema["properties"].items():
        if "$ref" in part:
            part = schema["definitions"][part["$ref"].rpartition("/")[2]]
        if part["type"] == "object" and name not in ("global", "settings"):
            assert part["properties"].keys() == values[name].keys()
            assert part["additionalProperties"] is False
            assert set(part["required"]) == values[name].keys()  # --set name.key=null would be a template's fault


@pytest.mark.parametrize(
    ("values", "setting", "said"),
    [
        ("one-gpu", "model.grops=2", "grops"),
        ("one-gpu", "replicas=2", "replicas"),
        ("one-gpu", "settings.kv_dtyp=int8", "kv_dtyp"),
        ("one-gpu", "settings.kv_dtype=int5", "kv_dtype"),
        ("one-gpu", "settings.root_path=/v1", "root_path"),
        ("one-gpu", "worker.resources.request.cpu=8", "request"),
        ("one-gpu", "worker.tolerations[0].kee=gpu", "kee"),
        ("one-gpu", "networkPolicy.from[0].podSelektor.app=web", "podSelektor"),
        ("one-gpu", "model.name=", "name"),
        ("one-gpu", "worker.startupSeconds=60", "startupSeconds"),
        ("one-gpu", "security.runAsUser=0", "runAsUser"),
        ("one-gpu", "ray.version=latest", "version"),
        ("eight-gpus", "worker.gpus=6", "worker.gpus is 6, not a multiple of model.tp 4; set it to 4"),
        ("eight-gpus", "worker.gpus=12", "a pod holds 3 groups, and model.groups 2 is not a multiple"),
        ("two-nodes", "worker.gpus=4", "set model.tp to that (it is 16), or worker.gpus to 8"),
        ("two-nodes", "worker.hosts=3", "does not divide over worker.hosts 3"),
        ("eight-gpus", "storage.existingClaim=", "nothing is mounted there; set storage.existingClaim"),
        ("eight-gpus", "storage.mountPath=/data", "is not below storage.mountPath /data"),
        ("cpu", "model.name=org/model", "model.inImage needs an absolute path"),
        ("cpu", "service.httpPort=50051", "service.grpcPort and service.httpPort are both 50051"),
        ("cpu", "security.insecure=false", "anybody who reaches the router could send requests"),
        ("one-gpu", "tls.clientCaKey=ca.crt", "tls.clientCaKey needs tls.secretName"),
        ("one-gpu", "adminKey.name=", "apiKeys needs adminKey"),
        ("eight-gpus", "autoscaling.enabled=true", "autoscaling.maxReplicas is 1; the groups need 2"),
    ],
)
def test_bad_values_are_refused(values: str, setting: str, said: str) -> None:
    """A typo, a wrong type or values that do not agree are refused when rendering, by name and with what to change."""
    assert said in refusal(values, setting)
