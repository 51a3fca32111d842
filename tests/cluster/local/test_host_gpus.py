"""The device of a cluster without Ray, and the GPU of each rank."""

from pathlib import Path

import pytest

from coatcheck.cluster.config.serve_config import ServeConfig
from coatcheck.cluster.local import host_gpus
from coatcheck.proto.errors import InvalidConfig


def choose(device: str, found: int, devices: Path, *, tp: int = 2) -> tuple[str, list[str]]:
    """The choice for one group on a host where torch finds `found` GPUs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_gpus, "_count_gpus", lambda: found)
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        config = ServeConfig.build({"model": "m/m", "no_ray": True, "device": device, "tp": tp})
        return host_gpus.choose_gpus(config, devices)


@pytest.fixture
def devices(tmp_path: Path) -> Path:
    """A /dev with the device file of a GPU."""
    (tmp_path / "nvidia0").touch()
    return tmp_path


def test_a_host_without_gpus_is_not_asked(tmp_path: Path) -> None:
    """Without a device file of a GPU, and with --device cpu, the device is cpu, whatever torch would find."""
    assert choose("auto", 8, tmp_path) == ("cpu", [])
    assert choose("cpu", 8, tmp_path) == ("cpu", [])


def test_each_rank_has_a_gpu_of_its_own(devices: Path) -> None:
    """auto takes as many GPUs as there are ranks, and CPUs if torch finds none."""
    assert choose("auto", 8, devices) == ("cuda", ["0", "1"])
    assert choose("auto", 0, devices) == ("cpu", [])


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_too_few_gpus_are_refused(devices: Path, device: str) -> None:
    """With fewer GPUs than ranks the error has both numbers and what to change."""
    with pytest.raises(InvalidConfig, match="need 4 GPUs, and torch finds 2 on this host; lower --groups or --tp"):
        choose(device, 2, devices, tp=4)


@pytest.mark.parametrize(
    ("visible", "names"),
    [(None, ["0", "1"]), ("3,5", ["3", "5"]), ("GPU-a, GPU-b,GPU-c", ["GPU-a", "GPU-b"])],
)
def test_gpus_have_the_names_of_the_environment(visible: str | None, names: list[str]) -> None:
    """If CUDA_VISIBLE_DEVICES names GPUs, ranks get these."""
    assert host_gpus.name_gpus(visible, 2) == names
