"""open_adapters(): the adapters of --lora-modules, all checked against the model before weights are read."""

from collections.abc import Callable, Mapping, Sequence

import torch

from coatcheck.kernels import native
from coatcheck.proto.errors import InvalidConfig
from coatcheck.workers.core.lora_module import LoraModule
from coatcheck.workers.lora.adapter import Adapter


def open_adapters(
    modules: Sequence[LoraModule],
    shapes: Mapping[str, tuple[int, int]],
    text_name: Callable[[str], str | None],
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> list[Adapter]:
    """Open every adapter. `shapes`, `text_name`: see Adapter.check_base and Adapter.open.

    Raises InvalidConfig if adapters cannot be served on `device` in `dtype`, InvalidModel for an adapter that is not
    served, or that does not fit the model.
    """
    if not modules:
        return []
    if device.type != "cpu":
        raise InvalidConfig(
            "lora-modules: adapters are served on CPUs alone, because the CUDA graphs of a step have none; use "
            "--device cpu, or merge the adapter into its base model"
        )
    if dtype not in native.TYPES or native.library() is None:
        raise InvalidConfig(
            f"lora-modules need bfloat16 or float32 and the native kernels (here: {dtype}, {native.native_status()}); "
            "set --dtype, or install with a C compiler"
        )
    adapters = [Adapter.open(module, text_name) for module in modules]
    for adapter in adapters:
        adapter.check_base(shapes)
    return adapters
