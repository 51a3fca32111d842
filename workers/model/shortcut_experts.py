"""ShortcutExperts: the experts of a LongCat-Flash layer, which lie beside its two attentions and two MLPs.

    x1  = x  + attention_0(norm(x))      h = norm(x1)
    x2  = x1 + mlp_0(h)
    x3  = x2 + attention_1(norm(x2))
    out = x3 + mlp_1(norm(x3)) + experts(h)

Each half of such a layer is a DecoderLayer. The MLP of the first half computes the experts. The MLP of the second half
adds their output.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from torch import Tensor

from coatcheck.workers.attention.attention_metadata import LogitsIndices
from coatcheck.workers.model.sparse_mlp import MixtureOfExperts


class ShortcutExperts:
    """Computes the experts in the first half of a layer, and holds their output until the second half.

    As with an MLP, each rank computes its part of the output. The second half's all-reduce adds the parts.
    """

    def __init__(self, block: Any, *, batch_invariant: bool) -> None:
        """`block`: transformers' module, one that `is_known_block` accepts."""
        self.moe = MixtureOfExperts(block, batch_invariant=batch_invariant)
        self._output: Tensor | None = None

    def compute(self, h: Tensor) -> None:
        """Compute and hold the experts' output for h [T, hidden]."""
        self._output = self.moe(h)

    def select_rows(self, logits_indices: LogitsIndices) -> None:
        """Keep only the rows of these tokens."""
        assert self._output is not None, "the first half computes the experts"
        self._output = self._output[logits_indices.tokens]

    def add_to(self, x: Tensor) -> Tensor:
        """Return x plus the output, and forget the output."""
        output, self._output = self._output, None
        assert output is not None, "the first half computes the experts"
        return x + output


def has_halves(layer: Any) -> bool:
    """Whether transformers' decoder layer has the form above."""
    return all(hasattr(layer, name) for name in ("mlps", "mlp", "self_attn")) and len(layer.mlps) == 2


def halves_of(
    layer: Any, *, batch_invariant: bool
) -> Iterator[tuple[Any, ShortcutExperts | None, ShortcutExperts | None]]:
    """For each half: an object with the attributes of an ordinary decoder layer, the experts that it computes or None,
    and the experts whose output it adds or None."""
    experts = ShortcutExperts(layer.mlp, batch_invariant=batch_invariant)
    for index, (to_compute, to_add) in enumerate(((experts, None), (None, experts))):
        half = SimpleNamespace(
            self_attn=layer.self_attn[index],
            mlp=layer.mlps[index],
            input_layernorm=layer.input_layernorm[index],
            post_attention_layernorm=layer.post_attention_layernorm[index],
        )
        yield half, to_compute, to_add
