"""The choice of an attention backend: one refusal, with what to change, for each thing that does not fit."""

from dataclasses import replace
from typing import Any

import pytest

from coatcheck.proto.errors import InvalidConfig
from coatcheck.workers.core.attention_selector import LIBRARIES, backend_name, check_backend_host, check_backend_model
from coatcheck.workers.core.kv_dtype import KvDtype
from coatcheck.workers.core.model_spec import LayerSpec

_LAYER = LayerSpec(32, 8, 128)
_MODEL: dict[str, Any] = {
    "layers": (_LAYER, replace(_LAYER, sliding_window=4096, softcap=50.0)),
    "dtype": "bfloat16",
    "kv_dtype": KvDtype.BFLOAT16,
    "deterministic": False,
    "has_sinks": False,
}
_LATENT = LayerSpec(16, 1, 576, v_head_dim=0, rope_head_dim=64)


def test_auto_is_triton() -> None:
    """auto never chooses a library that no GPU has run."""
    assert backend_name("auto") == backend_name("triton") == "triton"
    assert [backend_name(name) for name in LIBRARIES] == ["flashinfer", "fa3"]
    with pytest.raises(InvalidConfig, match="attention-backend is 'xformers'; use auto, triton, flashinfer or fa3"):
        backend_name("xformers")


@pytest.mark.parametrize("name", ["flashinfer", "fa3"])
def test_windows_and_soft_caps_are_served(name: str) -> None:
    """Layers with windows and soft-caps pass, also before dtype and pool are known; triton takes everything."""
    check_backend_model(name, **_MODEL)
    check_backend_model(name, **{**_MODEL, "dtype": None, "kv_dtype": None})
    worst = {"layers": (_LATENT,), "kv_dtype": KvDtype.INT4, "deterministic": True, "has_sinks": True}
    for setting in ("auto", "triton"):
        check_backend_model(setting, **{**_MODEL, **worst})


@pytest.mark.parametrize("name", ["flashinfer", "fa3"])
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"layers": (_LATENT,)}, "does not read latent caches (MLA) here; use --attention-backend triton"),
        ({"has_sinks": True}, "is not called with attention sinks here, and the model has them; use"),
        ({"dtype": "float32"}, "and the model is float32; set --dtype bfloat16, or use --attention-backend triton"),
        ({"kv_dtype": KvDtype.FP8}, "as a pool of kv-dtype fp8 has; leave --kv-dtype out, or use"),
        ({"kv_dtype": KvDtype.INT4}, "as a pool of kv-dtype int4 has; leave --kv-dtype out, or use"),
        ({"kv_dtype": KvDtype.FLOAT16}, "dtype bfloat16, and the pool is float16; leave --kv-dtype out, or use"),
        ({"layers": (_LAYER, replace(_LAYER, head_dim=100))}, "and the model has 100; use --attention-backend triton"),
        ({"layers": (replace(_LAYER, v_head_dim=64),)}, "values as wide as keys, and the model has 64 and 128; use"),
        ({"deterministic": True}, "differ in their last bits; leave --deterministic out, or use"),
    ],
)
def test_a_model_that_does_not_fit_is_refused(name: str, changed: dict[str, Any], message: str) -> None:
    """Each thing that a library cannot do is named with what to change."""
    with pytest.raises(InvalidConfig) as refused:
        check_backend_model(name, **{**_MODEL, **changed})
    assert str(refused.value).startswith(f"attention-backend {name} ")
    assert message in str(refused.value)


def test_head_sizes_differ_between_the_libraries() -> None:
    """FlashAttention-3 takes 96 elements a head, and FlashInfer does not."""
    layers = {**_MODEL, "layers": (replace(_LAYER, head_dim=96),)}
    check_backend_model("fa3", **layers)
    with pytest.raises(InvalidConfig, match="takes a head_dim of 64, 128 or 256, and the model has 96"):
        check_backend_model("flashinfer", **layers)


@pytest.mark.parametrize(
    ("setting", "changed", "message"),
    [
        ("triton", {"device": "cpu"}, "attention-backend triton is for GPUs, and the device is a CPU; leave"),
        ("flashinfer", {"device": "cpu"}, "is for NVIDIA GPUs, and the device is a CPU; use"),
        ("fa3", {"device": "hip", "capabilities": [(9, 4)]}, "is for NVIDIA GPUs, and the device is an AMD GPU; use"),
        ("flashinfer", {"capabilities": [(9, 0), (7, 5)]}, "compute capability 8.0 or later, and the GPU has 7.5; use"),
        ("fa3", {"capabilities": [(8, 0)]}, "compute capability 9.0 (H100, H200), and the GPU has 8.0; use"),
        ("fa3", {"capabilities": [(10, 0)]}, "compute capability 9.0 (H100, H200), and the GPU has 10.0; use"),
        ("flashinfer", {"is_installed": False}, "no module flashinfer); install it on every host with `pip install"),
        ("fa3", {"is_installed": False}, "no module flash_attn_interface); build FlashAttention's folder hopper/"),
    ],
)
def test_a_host_that_does_not_fit_is_refused(setting: str, changed: dict[str, Any], message: str) -> None:
    """A CPU, an AMD GPU, an old or a newer GPU and an absent library are refused by name."""
    host: dict[str, Any] = {"device": "cuda", "capabilities": [(9, 0)], "is_installed": True}
    check_backend_host("fa3", **host)
    check_backend_host("auto", **{**host, "device": "cpu", "is_installed": False})
    with pytest.raises(InvalidConfig) as refused:
        check_backend_host(setting, **{**host, **changed})
    assert message in str(refused.value)
