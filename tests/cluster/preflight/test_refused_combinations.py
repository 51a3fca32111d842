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
    edit_config(path, linear_conv_kernel_dim=9)
    with pytest.raises(InvalidModel, match="linear_conv_kernel_dim 9 cannot be served"):
        check_model(ServeConfig.build({"model": str(path)}))


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
