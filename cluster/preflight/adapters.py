"""check_adapters: refuses LoRA adapters that ranks would refuse, before Ray starts. No torch.

Only the rank knows which linears its kernels compute; what the headers of both files show is checked here.
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

    All but the names is skipped if `serve` joins a Ray cluster, whose hosts may have other files.
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
    if config.dtype == "float16":
        raise InvalidConfig("lora-modules need bfloat16 or float32; set --dtype")
    directory = Path(config.model_source)
    values = read_json_object(directory / "config.json") or {}
    adapters = [
        Adapter.open(module, text_tensor_name if is_multimodal(values) else lambda name: name)
        for module in config.adapters
    ]
    if not directory.is_dir() or "quantization_config" in values or is_multimodal(values):
        return  # the names and shapes of the files are not those of the linears
    shapes = {
        name.removesuffix(".weight"): (entry.shape[0], entry.shape[1])
        for name, entry in read_entries(directory).items()
        if name.endswith(".weight") and len(entry.shape) == 2
    }
    prefixes = {name.partition(".")[0] for name in shapes}
    for adapter in adapters:
        # Files may have another prefix than transformers' modules: backbone in nemotron_h, none in a model without its
        # head. The rank, which has the modules, checks such adapters.
        if prefixes & {name.partition(".")[0] for name in adapter.modules}:
            adapter.check_base(shapes)
