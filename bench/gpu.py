"""Errors and speeds of the kernels and the engine on a GPU, compared with torch, in one table.

    python bench/gpu.py --out DIR --only correct,decode,prefill,behind
    python bench/gpu.py --out DIR --resume --only rows,sampling,engine,steps
    python bench/gpu.py --out DIR --resume --only linears,w8a8,adapters,experts,latents,delta,mamba
    python bench/gpu.py --out DIR --resume --only tiers,all_reduce,ranks,deterministic,flex

Each of these calls takes less than nine minutes. Every part has its own process and time limit (LIMITS in
gpu_cases/parts.py). Without --only all parts run in one call.

The script needs torch, triton, transformers and this checkout. It needs neither Ray nor gRPC, and Coatcheck need not be
installed. The table is printed and saved (DIR/gpu.json and DIR/gpu.md) row by row, so that an interrupted run keeps its
rows, and --resume continues it. If a part fails or is killed, the table has a row FAILED, the other parts still run,
and the exit code is 1. `--device cpu --quick` runs every part with small shapes, to test the script itself. `--only
tune` tries other launch parameters.
"""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def make_importable() -> None:
    """Make this checkout the package `coatcheck`, under any folder name and beside any installed version."""
    spec = importlib.util.spec_from_file_location(
        "coatcheck", ROOT / "__init__.py", submodule_search_locations=[str(ROOT)]
    )
    assert spec is not None and spec.loader is not None
    sys.modules["coatcheck"] = package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)


if __name__ == "__main__":
    make_importable()
    from coatcheck.bench.gpu_cases.parts import main

    sys.exit(main(sys.argv[1:]))
