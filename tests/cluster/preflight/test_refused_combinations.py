"""What does not fit together is refused before Ray starts: a model and a setting, or a model and this Python."""

import subprocess
import sys
from pathlib import Path

import pytest

from coatcheck.cluster.config.serve_config import ServeConfig
from coatcheck.cluster.preflight.model import check_model
from coatcheck.proto.errors import InvalidConfig, InvalidModel
from tests.cluster.broken_models import edit_config, whole_model
from tests.workers.checkpoints import tiny_checkpoint


def test_what_a_hybrid_model_cannot_have_is_refused(tmp_path: Path) -> None:
    """A host tier, which would stay empty, and a convolution that kernels do not compute."""
    path = tiny_checkpoint("qwen3-next", tmp_path)
    check_model(ServeConfig.build({"model": str(path)}))
    with pytest.raises(InvalidConfig, match="leave --host-kv-memory out"):
        check_model(ServeConfig.build({"model": str(path), "host_kv_memory": "1GiB"}))
    with pytest.raises(InvalidConfig, match="tp 8 does not divide the key heads of linear attention .4."):
        check_model(ServeConfig.build({"model": str(path), "tp": 8}))
    edit_config(path, linear_conv_kernel_dim=9)
    with pytest.raises(InvalidModel, match="linear_conv_kernel_dim 9 cannot be served"):
        check_model(ServeConfig.build({"model": str(path)}))


def test_settings_that_do_not_fit_layers_with_a_state_are_refused(tmp_path: Path) -> None:
    """Short convolutions are not divided over ranks, and the kernels of GPUs and the C kernels of --deterministic
    compute heads of certain sizes."""
    path = str(tiny_checkpoint("lfm2", tmp_path, num_attention_heads=4))
    check_model(ServeConfig.build({"model": path, "device": "cpu", "deterministic": True}))
    with pytest.raises(InvalidConfig, match="tp 2 would divide short convolutions over ranks, .*; use tp 1"):
        check_model(ServeConfig.build({"model": path, "tp": 2}))
    check_model(ServeConfig.build({"model": path, "device": "cuda"}))
    nets = tiny_checkpoint("qwen3.5", tmp_path)
    edit_config(nets, linear_key_head_dim=24)
    check_model(ServeConfig.build({"model": str(nets), "device": "cpu"}))
    with pytest.raises(
        InvalidConfig, match="multiples of 16 and at most 256 .here: 24, 32.; leave --deterministic out"
    ):
        check_model(ServeConfig.build({"model": str(nets), "device": "cpu", "deterministic": True}))
    with pytest.raises(InvalidConfig, match="powers of two from 16 on, .*; set --device cpu"):
        check_model(ServeConfig.build({"model": str(nets), "device": "cuda"}))


@pytest.mark.parametrize("flag", ["-OO", "-O"])
def test_a_python_without_docstrings_is_refused(tmp_path: Path, flag: str) -> None:
    """transformers builds no model with -OO or PYTHONOPTIMIZE=2; -O is served."""
    model = whole_model(tmp_path)
    code = (
        "from coatcheck.cluster.preflight.model import check_model; "
        "from coatcheck.cluster.config.serve_config import ServeConfig; "
        f"check_model(ServeConfig.build({{'model': {str(model)!r}}}))"
    )
    done = subprocess.run([sys.executable, flag, "-c", code], capture_output=True, text=True, timeout=110)
    assert done.returncode == (flag == "-OO"), done.stderr
    assert ("set PYTHONOPTIMIZE=1, or unset it" in done.stderr) == (flag == "-OO"), done.stderr
