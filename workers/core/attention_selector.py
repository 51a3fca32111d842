"""The choice of a group's attention backend, and its checks against model, KV pool and host. Pure; imports no torch.

    triton       Coatcheck's Triton kernels on a GPU. The default: every model, dtype, quantised pool and GPU that
                 Coatcheck serves, --deterministic, and one plan for steps that mix prompts and decodes
    flashinfer   FlashInfer's paged prefill kernels (flashinfer-python)
    fa3          FlashAttention-3 (the package flash_attn_interface), for Hopper GPUs

`auto` is `triton`. On a CPU the name is `triton` too, and the kernels are those of kernels/csrc. No GPU has run
flashinfer or fa3 from this project, so `auto` never chooses them. The backends themselves are in workers/attention, and
triton's is in workers/runner.

The limits are those that the libraries' sources state (FlashInfer 0.7.2, FlashAttention's hopper/ of August 2026).
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final, Literal

from coatcheck.proto.errors import InvalidConfig
from coatcheck.workers.core.kv_dtype import KvDtype
from coatcheck.workers.core.model_spec import LayerSpec

AttentionBackendSetting = Literal["auto", "triton", "flashinfer", "fa3"]
Capability = tuple[int, int]  # of an NVIDIA GPU: (9, 0) for an H100

# The `model_type`s whose attention has sinks. For checks that know config.json alone.
MODEL_TYPES_WITH_SINKS: Final = frozenset({"gpt_oss", "mimo_v2_flash"})
NEVER_RUN: Final = "no GPU has run it from Coatcheck; its calls are tested against its documented interface alone"


@dataclass(frozen=True, slots=True)
class AttentionLibrary:
    """A library that computes attention in place of Coatcheck's kernels.

    `module`: the name that Python imports. `install`: how to get the library. `head_dims`, `capabilities`: what
    `fits_head_dim` and `fits_capability` accept, in words for errors.
    """

    module: str
    install: str
    fits_head_dim: Callable[[int], bool]
    head_dims: str
    fits_capability: Callable[[Capability], bool]
    capabilities: str


LIBRARIES: Final[dict[str, AttentionLibrary]] = {
    "flashinfer": AttentionLibrary(
        "flashinfer",
        "install it on every host with `pip install 'flashinfer-python>=0.6.18'`",
        lambda dim: dim in (64, 128, 256),
        "64, 128 or 256",
        lambda capability: capability >= (8, 0),
        "8.0 or later",
    ),
    "fa3": AttentionLibrary(
        "flash_attn_interface",
        "build FlashAttention's folder hopper/ on every host; PyPI has no wheel with paged KV",
        lambda dim: dim % 8 == 0 and dim <= 256,
        "a multiple of 8 up to 256",
        lambda capability: capability == (9, 0),
        "9.0 (H100, H200)",
    ),
}
_DTYPES: Final = ("bfloat16", "float16")


def backend_name(setting: str) -> str:
    """The backend that a setting chooses. Raises InvalidConfig for an unknown setting."""
    if setting not in ("auto", "triton", *LIBRARIES):
        raise InvalidConfig(f"attention-backend is {setting!r}; use auto, triton, {' or '.join(LIBRARIES)}")
    return "triton" if setting == "auto" else setting


def installed_libraries() -> list[str]:
    """The keys of LIBRARIES whose module Python finds on this host. Imports none of them."""
    return [name for name, library in LIBRARIES.items() if find_spec(library.module) is not None]


def check_backend_model(
    setting: str,
    layers: Collection[LayerSpec],
    *,
    dtype: str | None,
    kv_dtype: KvDtype | None,
    deterministic: bool,
    has_sinks: bool,
) -> None:
    """Raise InvalidConfig if the backend of `setting` cannot serve these layers or this KV pool.

    `dtype`: of the model; None skips the checks of it. `kv_dtype`: of the KV pool; None skips the checks of it.
    """
    if (name := backend_name(setting)) == "triton":
        return
    library = LIBRARIES[name]
    if not layers:
        raise _refusal(name, "has nothing to compute: no layer of the model has attention")
    if any(layer.is_latent for layer in layers):
        raise _refusal(name, "does not read latent caches (MLA) here")
    if has_sinks:
        raise _refusal(name, "is not called with attention sinks here, and the model has them")
    if dtype is not None and dtype not in _DTYPES:
        raise _refusal(name, f"computes in bfloat16 and float16, and the model is {dtype}", "set --dtype bfloat16")
    if kv_dtype is not None and kv_dtype.is_quantised:
        raise _refusal(
            name,
            f"has no kernel for a scale per token and head, as a pool of kv-dtype {kv_dtype} has",
            "leave --kv-dtype out",
        )
    if dtype is not None and kv_dtype is not None and kv_dtype != dtype:
        raise _refusal(
            name, f"needs keys in the queries' dtype {dtype}, and the pool is {kv_dtype}", "leave --kv-dtype out"
        )
    for layer in layers:
        if not library.fits_head_dim(layer.head_dim):
            raise _refusal(name, f"takes a head_dim of {library.head_dims}, and the model has {layer.head_dim}")
        if layer.output_dim != layer.head_dim:
            raise _refusal(
                name,
                f"is called with values as wide as keys, and the model has {layer.output_dim} and {layer.head_dim}",
            )
    if deterministic:
        raise _refusal(
            name,
            "chooses tiles by the number of queries, so a decode and a prefill differ in their last bits",
            "leave --deterministic out",
        )


def check_backend_host(setting: str, *, device: str, capabilities: Sequence[Capability], is_installed: bool) -> None:
    """Raise InvalidConfig if the backend of `setting` cannot run on a host.

    `device`: cpu, cuda or hip (AMD). `capabilities`: of the host's GPUs. `is_installed`: whether Python finds the
    backend's library on the host.
    """
    if (name := backend_name(setting)) == "triton":
        if setting == "triton" and device == "cpu":
            raise InvalidConfig(
                "attention-backend triton is for GPUs, and the device is a CPU; leave --attention-backend out"
            )
        return
    library = LIBRARIES[name]
    if device != "cuda":
        owner = "a CPU" if device == "cpu" else "an AMD GPU"
        raise _refusal(name, f"is for NVIDIA GPUs, and the device is {owner}")
    for capability in capabilities:
        if not library.fits_capability(capability):
            shown = ".".join(map(str, capability))
            raise _refusal(name, f"needs compute capability {library.capabilities}, and the GPU has {shown}")
    if not is_installed:
        raise _refusal(name, f"is not installed (Python finds no module {library.module})", library.install)


def _refusal(name: str, reason: str, change: str = "") -> InvalidConfig:
    advice = f"{change}, or " if change else ""
    return InvalidConfig(f"attention-backend {name} {reason}; {advice}use --attention-backend triton")
