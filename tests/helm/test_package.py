"""The chart as a package in an OCI registry: what is pushed renders as the folder does."""

from pathlib import Path

from tests.helm.chart import CHART, helm, render, rendered_objects
from tests.helm.oci_registry import oci_registry


def test_a_pushed_chart_renders_as_the_folder_does(tmp_path: Path) -> None:
    """`helm package`, `helm push`, and `helm template` from the registry, with an image by its digest."""
    done = helm("package", str(CHART), "--destination", str(tmp_path))
    assert done.returncode == 0, done.stderr
    (package,) = tmp_path.glob("coatcheck-*.tgz")
    digest = f"image.digest=sha256:{'0' * 64}"
    with oci_registry() as address:
        done = helm("push", str(package), f"oci://{address}/charts", "--plain-http")
        assert done.returncode == 0, done.stderr
        values = ["-f", str(CHART / "values" / "eight-gpus.yaml"), "--set", digest]
        version = package.stem.removeprefix("coatcheck-")
        done = helm(
            "template", "demo", f"oci://{address}/charts/coatcheck", "--version", version, "--plain-http", *values
        )
    assert done.returncode == 0, done.stderr
    pushed = rendered_objects(done.stdout)
    assert pushed == render("eight-gpus", digest)
    assert pushed.container("worker")["image"] == f"coatcheck@sha256:{'0' * 64}"
