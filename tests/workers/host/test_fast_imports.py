"""import_transformers: what a rank imports of torch, and what still works afterwards. Each test is a new process."""

import subprocess
import sys
from pathlib import Path

_COUNT = "import sys; heavy = [name for name in ('torch._dynamo', 'sympy') if name in sys.modules]"


def run(*lines: str) -> str:
    """What a new process prints that runs these lines after the import."""
    program = "\n".join(
        ("from coatcheck.workers.host.fast_imports import import_transformers", "import_transformers()", *lines)
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip() + done.stderr.strip()


def test_a_rank_loads_no_compiler() -> None:
    """A rank's modules, a model's own code, building a model on meta and probing its attention and head load neither
    torch's compiler nor sympy."""
    modules = "import coatcheck.workers.rank, transformers.models.llama.modeling_llama"
    model = Path(__file__).parents[3] / "demo" / "model"
    prepare = f"servable.find_refusal({str(model)!r}, tp=1, dtype='auto', max_model_len=None, deterministic_on=None, "
    prepare += "expert_parallel=False, verify=False)"
    lines = (modules, _COUNT, "print(heavy)", "from coatcheck.workers import servable", f"assert {prepare} is None")
    assert run(*lines, _COUNT, "print(heavy)").splitlines() == ["[]", "[]"]


def test_torch_is_as_it_was() -> None:
    """Afterwards torch's decorators and its compiler are the real ones, and torch.distributed is available."""
    assert (
        run(
            "import torch, torch.distributed",
            "real = torch.compiler.disable.__module__, torch.compiler.allow_in_graph.__module__",
            "print(*real, torch._dynamo.allow_in_graph.__module__, torch.distributed.is_available())",
        )
        == "torch.compiler torch.compiler torch._dynamo.decorators True"
    )


def test_masks_that_are_mapped_over_indices_work() -> None:
    """A mask function that transformers maps over indices gives the same mask as without the faster import."""
    mask = (
        "import torch; from transformers.masking_utils import and_masks, causal_mask_function, sdpa_mask",
        "odd = lambda batch, head, query, key: torch.arange(9)[key] % 2 == 0",
        "mask = and_masks(causal_mask_function, odd)",
        "made = sdpa_mask(1, 4, 4, mask_function=mask, use_vmap=True, allow_is_causal_skip=False)",
        "print(made[0, 0].int().tolist())",
    )
    assert run(*mask) == "[[1, 0, 0, 0], [1, 0, 0, 0], [1, 0, 1, 0], [1, 0, 1, 0]]"


def test_a_transformers_that_needs_the_compiler_gets_it() -> None:
    """If the import fails without the compiler, transformers is imported as a whole, with a warning."""
    program = f"""
import sys, logging
logging.basicConfig(format="%(message)s")
class Finder:
    def find_spec(self, name, path, target=None):
        if name == "transformers.masking_utils":
            import torch
            torch._dynamo.reset
sys.meta_path.insert(0, Finder())
from coatcheck.workers.host.fast_imports import import_transformers
import_transformers()
from transformers import LlamaForCausalLM
{_COUNT}; print(heavy)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "['torch._dynamo', 'sympy']" and "starts later" in done.stderr
