"""Values that a cluster would refuse, or fail with later, are refused when rendering, with what to change."""

import re
from pathlib import Path

import pytest

from tests.helm.chart import CHART, helm, helm_error, refusal, render, rendered_objects


@pytest.mark.parametrize(
    ("values", "settings", "said"),
    [
        ("one-gpu", ("settings.max_groups=1", "model.groups=2"), "settings.max_groups is 1, and model.groups 2"),
        ("one-gpu", ("settings.max_groups=4",), "set autoscaling.enabled, and autoscaling.maxReplicas to 4"),
        (
            "one-gpu",
            ("settings.max_groups=4", "autoscaling.enabled=true", "autoscaling.maxReplicas=2"),
            "needs 4 worker replicas, and autoscaling.maxReplicas is 2; set it to 4",
        ),
        ("one-gpu", ("settings.kv_memory=lots",), "'/settings/kv_memory'"),
        ("one-gpu", ("settings.host_kv_memory=4 gigs",), "'/settings/host_kv_memory'"),
        ("one-gpu", ("model.name=./model",), "model.name ./model is neither an absolute path nor a Hugging"),
        ("one-gpu", ("model.name=models/llama/8b",), "model.name models/llama/8b is neither"),
        ("one-gpu", ("worker.resources.requests.memory=33Gi",), "worker.resources requests 33Gi memory, above its"),
        ("one-gpu", ("router.resources.limits.cpu=500m",), "router.resources requests 2 cpu, above its limit 500m"),
        ("one-gpu", ("head.serveResources.requests.memory=2049Mi",), "head.serveResources requests 2049Mi memory"),
        ("one-gpu", ("worker.sharedMemory=33Gi",), "worker.sharedMemory is 33Gi, above the pod's memory limit 32Gi"),
        ("one-gpu", ("worker.sharedMemory=4096",), "'/worker/sharedMemory'"),
        ("one-gpu", ("worker.sharedMemory=16K",), "'/worker/sharedMemory'"),
        ("one-gpu", ("worker.sharedMemory=4Ki",), "worker.sharedMemory is 4Ki, less than a mebibyte; give it with a"),
        ("one-gpu", ("worker.resources.limits.memory=33e9",), "worker.resources requests 32Gi memory, above its limit"),
        ("one-gpu", ("worker.resources.limits.memory=1e",), "'/worker/resources/limits/memory'"),
        ("one-gpu", ("worker.resources.limits.memory=1.Ei5",), "'/worker/resources/limits/memory'"),
        ("one-gpu", ("worker.resources.limits.memory=-64Gi",), "'/worker/resources/limits/memory'"),
        ("one-gpu", ("storage.cacheSize=0.0Gi",), "'/storage/cacheSize'"),
        ("one-gpu", ("storage.cacheSize=0Gi",), "'/storage/cacheSize'"),
        ("one-gpu", ("worker.resources.limits.memory=1.2.3Gi",), "'/worker/resources/limits/memory'"),
        ("one-gpu", ("worker.resources.limits.memory=32GB",), "'/worker/resources/limits/memory'"),
        ("eight-gpus", ("storage.mountPath=/tmp",), "storage.mountPath /tmp would hide files"),
        ("eight-gpus", ("storage.mountPath=/cache/models",), "would hide files of the image or of the chart in /cache"),
        ("one-gpu", ("worker.gpuResource=gpu",), "'/worker/gpuResource'"),
        ("one-gpu", (r"worker.resources.limits.nvidia\.com/gpu=2",), "the chart sets it from worker.gpus: remove it"),
        ("one-gpu", ("router.httpPort=8080",), "router.httpPort is 8080, where Ray may listen in the same pod"),
        ("one-gpu", ("router.grpcPort=52365",), "router.grpcPort is 52365, where Ray may listen"),
        ("one-gpu", ("router.grpcPort=10002",), "router.grpcPort is 10002, where Ray may listen"),
        ("one-gpu", ("router.httpPort=80",), "'/router/httpPort'"),
        ("one-gpu", ("router.httpPort=50051",), "router.grpcPort and router.httpPort are both 50051"),
        ("one-gpu", ("worker.resources=null",), "missing property 'resources'"),
        ("one-gpu", ("apiKeys.name=Tenants!",), "'/apiKeys/name'"),
        ("eight-gpus", ("monitorKey.name=",), "serviceMonitor with apiKeys needs monitorKey"),
        ("one-gpu", ("fullnameOverride=1st",), "set fullnameOverride"),
        ("one-gpu", ("image.repository=registry:5000/coatcheck:v1",), "give it without tag and digest"),
        ("one-gpu", ("image.tag=1.0+cuda",), "image.tag 1.0+cuda is no tag"),
        ("one-gpu", ("router.podLabels.team=two words",), "podLabels/team"),
        ("one-gpu", (r"router.podLabels.ray\.io/group=x",), "which the KubeRay operator sets; remove it"),
        ("one-gpu", ("worker.env[0].name=A", "worker.env[0].value=1"), "got number, want string"),
        ("one-gpu", ("worker.env[0].name=A", "worker.env[1].name=A"), "pod has the variable A twice; remove one"),
        ("one-gpu", ("worker.volumes[0].name=tmp",), "the pod has a volume of that name already"),
        (
            "one-gpu",
            ("head.volumeMounts[0].name=d", "head.volumeMounts[0].mountPath=/d"),
            "mounts the volume d, which the pod does not have; add it to head.volumes",
        ),
        (
            "one-gpu",
            ("worker.volumeMounts[0].name=cache", "worker.volumeMounts[0].mountPath=/tmp/"),
            "two volumes are mounted at /tmp",
        ),
        ("one-gpu", ("router.sidecars[0].name=logs", "router.sidecars[0].image=i"), "the router's pod are named logs"),
        ("one-gpu", ("router.sidecars[0].name=a", "router.sidecars[0].comand=i"), "comand"),
        ("one-gpu", ("worker.topologySpreadConstraints[0].maxSkw=1",), "maxSkw"),
        ("one-gpu", ("worker.resources.requests.rdma/hca=1",), "takes no request without the same limit"),
        ("eight-gpus", ("storage.mountPath=/models/../tmp",), "'/storage/mountPath'"),
        ("eight-gpus", ("storage.mountPath=/var",), "storage.mountPath /var would hide files"),
        ("one-gpu", ("serviceAccount.name=default",), "cannot create the account `default`"),
        ("one-gpu", ("redis.password.name=r",), "redis.password needs redis.address"),
        ("one-gpu", ("settings.lora_modules=a=models/a",), "has the path models/a, which is not absolute"),
        ("cpu", (r"settings.lora_modules=a=/models/a\,b=b",), "has the path b, which is not absolute"),
        ("cpu", ("settings.lora_modules[0].name=a", "settings.lora_modules[0].path=./a"), "has the path ./a, which"),
        ("eight-gpus", ("settings.host_kv_memory=65GiB",), "65GiB in each of the 4 rank(s) of a pod is above"),
        ("one-gpu", ("settings.host_kv_memory=34360000000",), "is above the pod's memory limit 32Gi; lower it"),
        ("cpu", ("settings.kv_memory=5 gb",), "settings.kv_memory 5 gb in each of the 1 rank(s)"),
    ],
)  # fmt: skip
def test_refused(values: str, settings: tuple[str, ...], said: str) -> None:
    """The message names the value, and what to change where the schema cannot."""
    assert said in refusal(values, *settings)


@pytest.mark.parametrize("release", ["1demo", "demo.two"])
def test_a_release_whose_services_would_be_refused(release: str) -> None:
    """Helm allows release names that begin with a digit or have dots; a Service of that name could not be made."""
    assert f"the release {release} gives Services the name {release}-coatcheck" in helm_error("cpu", release)


@pytest.mark.parametrize(
    "settings",
    [
        ("model.name=gpt2",),
        ("settings.kv_memory=50%",),
        ("settings.kv_memory=4GiB",),
        ("settings.kv_memory=200GiB",),  # of the GPU's memory
        ("settings.host_kv_memory=0.9",),
        ("settings.host_kv_memory=90%",),
        ("settings.host_kv_memory=32gib",),
        ("settings.lora_modules[0]=a=/models/a", "settings.lora_modules[1]=b=/models/=b"),
        ("worker.resources.requests.memory=32768Mi",),
        ("worker.resources.limits.cpu=8000m",),
        ("settings.max_groups=2", "autoscaling.enabled=true", "autoscaling.maxReplicas=2"),
        ("image.repository=registry:5000/team/coatcheck", "image.tag=v1.0"),
        ("worker.resources.limits.rdma/hca=1", "worker.resources.requests.rdma/hca=1"),
        ("worker.resources.limits.rdma/hca=1k", "worker.resources.requests.rdma/hca=1000"),
        ("worker.resources.limits.memory=1E",),
        ("worker.resources.limits.memory=+40e9",),
        ("worker.resources.requests.cpu=500000000n",),
        ("worker.resources.requests.cpu=.5",),
    ],
)
def test_allowed(settings: tuple[str, ...]) -> None:
    """Values beside those that are refused are rendered."""
    assert render("one-gpu", *settings).cluster


@pytest.mark.parametrize(
    ("quantity", "size"),
    [
        ("0.5Gi", 2**29),
        (".5Gi", 2**29),
        ("1.Gi", 2**30),
        ("+1Gi", 2**30),
        ("512Mi", 2**29),
        ("1e9", 10**9),
        ("1E9", 10**9),
        ("12e+8", 12 * 10**8),
        ("5E-3Gi", None),
        ("500M", 5 * 10**8),
        ("2G", 2 * 10**9),
        ("1.5Ti", 3 * 2**39),
        ("1P", 10**15),
        ("1Ei", 2**60),
        ("128974848", 128974848),
        ("128974848000m", 128974848),
    ],
)
def test_sizes_are_quantities_of_kubernetes(tmp_path: Path, quantity: str, size: int | None) -> None:
    """A size may have every form of a quantity of Kubernetes, as a text and, if YAML reads it so, as a number."""
    for form in (quantity, f'"{quantity}"'):
        file = tmp_path / "values.yaml"
        file.write_text(f"storage: {{cacheSize: {form}}}\nworker: {{sharedMemory: 1e9}}\nmodel: {{name: gpt2}}\n")
        done = helm("template", "demo", str(CHART), "-f", str(CHART / "values" / "one-gpu.yaml"), "-f", str(file))
        if size is None:
            assert "'/storage/cacheSize'" in done.stderr
            continue
        assert done.returncode == 0, done.stderr
        assert f" --max-download {size} " in done.stdout  # what `serve` gets, in bytes
        # Quoted: YAML would read 1e9 as a number.
        sizes = set(re.findall('sizeLimit: "(.*)"}', done.stdout))
        assert sizes <= {"512Mi", "1000000000", quantity, str(size)} and sizes & {quantity, str(size)}


def test_a_number_with_a_fraction_becomes_a_text(tmp_path: Path) -> None:
    """The operator's definition of a RayCluster takes an integer or a text as a quantity, and no number like 0.5."""
    file = tmp_path / "values.yaml"
    file.write_text("worker: {resources: {requests: {cpu: 0.5, memory: 1.5e+9}, limits: {cpu: 2, memory: 64Gi}}}")
    done = helm("template", "demo", str(CHART), "-f", str(CHART / "values" / "one-gpu.yaml"), "-f", str(file))
    assert done.returncode == 0, done.stderr
    resources = rendered_objects(done.stdout).container("worker")["resources"]
    assert resources["requests"] == {"cpu": "0.5", "memory": 1500000000, "nvidia.com/gpu": "1"}
    assert resources["limits"] == {"cpu": 2, "memory": "64Gi", "nvidia.com/gpu": "1"}
