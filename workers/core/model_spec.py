"""ModelSpec: what the scheduler, the pool and the router need to know of a model, and nothing of its weights."""

from dataclasses import dataclass
from typing import Final

_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One attention layer as one rank holds it. `sliding_window` 0: full attention. `softcap` 0: none.

    `v_head_dim` None: as `head_dim`. 0: nothing apart is stored for values, which lie in the keys (MLA's latent cache).
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int = 0
    softcap: float = 0.0
    v_head_dim: int | None = None

    @property
    def value_dim(self) -> int:
        """Elements of V per token and head."""
        return self.head_dim if self.v_head_dim is None else self.v_head_dim


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model as one of `tp` ranks sees it.

    `fingerprint` names the weights (for block hashes and failover among equals); `weight_bytes` are this rank's.
    """

    name: str
    architecture: str
    vocab_size: int
    max_model_len: int
    dtype: str
    fingerprint: str
    eos_token_ids: tuple[int, ...]
    layers: tuple[LayerSpec, ...]
    tp: int
    weight_bytes: int

    @property
    def attention_crossover(self) -> int:
        """The context at which a token's attention (4 * context * heads * head_dim FLOPs a layer) costs as much as
        its linears (2 FLOPs a weight)."""
        weights = self.weight_bytes / _BYTES[self.dtype]
        return max(1, int(weights / (2 * sum(layer.num_heads * layer.head_dim for layer in self.layers))))
