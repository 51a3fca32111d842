"""check_adapters: refuses LoRA adapters that ranks would refuse, before Ray starts. No torch.

Only ranks know which linears may be adapted. The check here compares the headers of the adapter and of the model.
"""

from pathlib import Path

from coatcheck.cluster.config.serve_config import ServeConfig
from coatcheck.proto.errors import InvalidConfig
from coatcheck.proto.json_file import read_json_object
from coatcheck.workers.checkpoint.safetensors_headers import read_entries
from coatcheck.workers.checkpoint.text_tower import is_multimodal, text_tensor_name
from coatcheck.workers.lora.adapter import Adapter


def check_adapters(config: ServeConfig) -> None:
    """Raise InvalidConfig or InvalidModel, with the adapter's name and what to change.

    If `serve` joins a Ray cluster, only the names are checked: its hosts may have other files.
    """
    for name, path in config.adapters:
        if name in (config.model_name, *config.model_aliases):
            raise InvalidConfig(f"lora-modules {name}={path} has the name of the model; give the adapter another name")
    if not config.adapters or config.ray_address is not None:
        return
    if config.device == "cuda":
        raise InvalidConfig(
            "lora-modules: adapters are served on CPUs alone; use --device cpu, or merge the adapter into its base "
            "model"
        )
    directory = Path(config.model_source)
    values = read_json_object(directory / "config.json") or {}
    dtype = (values.get("dtype") or values.get("torch_dtype")) if config.dtype == "auto" else config.dtype
    if dtype == "float16":
        raise InvalidConfig("lora-modules need bfloat16 or float32, not float16; set --dtype")
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
