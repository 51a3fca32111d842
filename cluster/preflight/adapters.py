"""check_adapters: refuses LoRA adapters that ranks would refuse, before Ray starts. No torch.

Only ranks know which linears can have adapters. The check here compares the headers of the adapter and of the model.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coatcheck.cluster.config.serve_config import ServeConfig
from coatcheck.cluster.preflight.machine import has_gpu_file
from coatcheck.proto.errors import InvalidConfig
from coatcheck.proto.json_file import read_json_object
from coatcheck.workers.checkpoint.safetensors_headers import read_entries
from coatcheck.workers.checkpoint.text_tower import is_multimodal, text_config, text_tensor_name
from coatcheck.workers.lora.adapter import Adapter


def check_adapters(config: ServeConfig, devices: Path = Path("/dev")) -> None:
    """Raise InvalidConfig or InvalidModel, with the adapter's name and what to change.

    If `serve` joins a Ray cluster, only the names are checked: its hosts may have other files and devices. `devices`:
    the folder with the device files of GPUs.
    """
    for name, path in config.adapters:
        if name in (config.model_name, *config.model_aliases):
            raise InvalidConfig(f"lora-modules {name}={path} has the name of the model; give the adapter another name")
    if not config.adapters or config.ray_address is not None:
        return
    directory = Path(config.model_source)
    values = read_json_object(directory / "config.json") or {}
    dtype = _named_dtype(values) if config.dtype == "auto" else config.dtype
    on_gpu = config.device == "cuda" or (config.device == "auto" and has_gpu_file(devices))
    if dtype == "float16" and not on_gpu:
        raise InvalidConfig("lora-modules on CPU need bfloat16 or float32, not float16; set --dtype")
    adapters = [
        Adapter.open(module, text_tensor_name if is_multimodal(values) else lambda name: name)
        for module in config.adapters
    ]
    if not directory.is_dir() or "quantization_config" in values or is_multimodal(values):
        return  # the names and shapes of the files are not those of the linears
    shapes = {
        name.removesuffix(".weight"): (entry.shape[0], entry.shape[1])
        for name, entry in read_entries(directory).items()
        if name.endswith(".weight") and len(entry.shape) == 2 and ".experts." not in name
    }
    prefixes = {name.partition(".")[0] for name in shapes}
    for adapter in adapters:
        # Files may have another prefix than transformers' modules: backbone in nemotron_h, none in a model without its
        # head. The rank, which has the modules, checks such adapters.
        if prefixes & {name.partition(".")[0] for name in adapter.modules}:
            adapter.check_base(shapes)


def _named_dtype(config: Mapping[str, Any]) -> object:
    """The dtype in a config.json, which may be that of a multimodal model; None without one."""
    text = text_config(config)
    found = (part.get(name) for part in (config, text) if isinstance(part, dict) for name in ("dtype", "torch_dtype"))
    return next(filter(None, found), None)
