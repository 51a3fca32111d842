"""open_adapters() checks the adapters of --lora-modules against the model. load_fingerprints() checks that all ranks
have the same adapters. Both run before weights are read."""

from collections.abc import Callable, Mapping, Sequence

import torch

from coatcheck.kernels import native
from coatcheck.kernels.gpu_properties import TRITON_DEVICES
from coatcheck.proto.errors import InvalidConfig, InvalidModel
from coatcheck.workers.core.lora_module import LoadedAdapter, LoraModule
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.lora.adapter import Adapter


def open_adapters(
    modules: Sequence[LoraModule],
    shapes: Mapping[str, tuple[int, int]],
    text_name: Callable[[str], str | None],
    *,
    device: torch.device,
    dtype: torch.dtype,
) -> list[Adapter]:
    """The adapters of `modules`, in order. `shapes`: see Adapter.check_base. `text_name`: see Adapter.open.

    Raises InvalidConfig if adapters cannot be served on `device` in `dtype`, InvalidModel for an adapter that cannot be
    served, or that does not fit the model.
    """
    if not modules:
        return []
    if device.type not in TRITON_DEVICES and (dtype not in native.TYPES or native.library() is None):
        raise InvalidConfig(
            "lora-modules on CPU need bfloat16 or float32 and the native kernels (here: "
            f"{dtype}, {native.native_status()}); set --dtype, or install with a C compiler"
        )
    adapters = [Adapter.open(module, text_name) for module in modules]
    for adapter in adapters:
        adapter.check_base(shapes)
    return adapters


def load_fingerprints(adapters: Sequence[Adapter], communicator: Communicator) -> tuple[LoadedAdapter, ...]:
    """The adapters with their fingerprints. A collective: every rank of a group calls it with its own files.

    Raises InvalidModel if the files of two ranks differ. Each host reads its own directory, and slices of two versions
    of an adapter would give wrong tokens.
    """
    loaded = tuple(LoadedAdapter(adapter.name, adapter.fingerprint()) for adapter in adapters)
    for adapter, own in zip(adapters, loaded, strict=True):
        everyone = communicator.all_gather_json({"fingerprint": own.fingerprint})
        others = [rank for rank, theirs in enumerate(everyone) if theirs != everyone[0]]
        if others:
            raise InvalidModel(
                f"lora-modules {adapter.name}: rank 0 and rank {others[0]} have different files in "
                f"{adapter.file.parent}; copy the same adapter to every host"
            )
    return loaded
