"""ModelSpec: what the scheduler, the KV pool and the router need to know about a model."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Final

from coatcheck.kernels.linear_attention.state_sizes import scan_matrix_shape
from coatcheck.workers.core.lora_module import LoadedAdapter

_NEVER: Final = 1 << 80  # tokens; 1 + length / _NEVER rounds to 1 for every length
_MATRIX_ITEMSIZE: Final = 4  # matrices of states are float32, whatever the model's dtype


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One attention layer. The numbers of heads are those of one rank, or of all ranks together.

    `sliding_window`: in tokens; 0 for full attention.
    `softcap`: the limit of the logit soft-capping; 0 for none.
    `v_head_dim`: elements of V per head, as the pool stores it; None if equal to `head_dim`. 0 for latent attention
    (MLA), whose values are part of the keys and are not stored again.
    `rope_head_dim`: the last elements of a latent-attention key. They are rotated, shared by all heads, and no part of
    the value. 0 for other attention.
    `unpadded_v_dim`: elements of V in the model, if the pool pads V with zeros to the length of K; otherwise 0.
    `token_shards`: the number of ranks that divide the tokens of each block (--mla-shard tokens). 1: every rank stores
    every token. `token_shard`: the index of this rank's part.
    `kv_source`: the index of the earlier layer whose keys and values this layer reads (Gemma 3n and 4). None: the layer
    stores its own.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    sliding_window: int = 0
    softcap: float = 0.0
    v_head_dim: int | None = None
    rope_head_dim: int = 0
    token_shards: int = 1
    token_shard: int = 0
    unpadded_v_dim: int = 0
    kv_source: int | None = None

    @property
    def is_latent(self) -> bool:
        """Whether the cache stores latents (MLA), one for all heads."""
        return self.rope_head_dim > 0

    @property
    def stored_dims(self) -> tuple[int, int]:
        """Elements of the two rows that the cache stores per token and KV head: K and V, or latent and rotary key."""
        if self.is_latent:
            return self.head_dim - self.rope_head_dim, self.rope_head_dim
        return self.head_dim, self.value_dim

    @property
    def value_dim(self) -> int:
        """Elements of V per token and head, as the pool stores it."""
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def output_dim(self) -> int:
        """Elements of one head's output. 0 for latent attention."""
        return self.unpadded_v_dim or self.value_dim


@dataclass(frozen=True, slots=True)
class StateSpec(ABC):
    """A layer that keeps a state of fixed size for each sequence, in place of keys and values or beside them.

    Heads and channels are those of one rank, or of all ranks together. `layer`: the layer's index in the model.
    """

    layer: int

    @property
    @abstractmethod
    def window(self) -> tuple[int, int]:
        """Shape of the last inputs of the convolution, (tokens, channels), stored in the model's dtype."""

    @property
    @abstractmethod
    def matrix(self) -> tuple[int, int, int] | None:
        """Shape of the recurrence's state, (heads, rows, columns), stored in float32; None without a recurrence."""

    @property
    @abstractmethod
    def inner_size(self) -> int:
        """Width of the output projection's input."""

    def bytes_per_sequence(self, itemsize: int) -> int:
        """Bytes of one sequence's state. `itemsize`: bytes of an element of the model's dtype."""
        matrix = 0 if self.matrix is None else math.prod(self.matrix)
        return math.prod(self.window) * itemsize + matrix * _MATRIX_ITEMSIZE


@dataclass(frozen=True, slots=True)
class DeltaNetSpec(StateSpec):
    """One gated delta net. A key head serves value_heads / key_heads consecutive value heads.

    `conv_size`: tokens that the convolution before the recurrence reads. `has_channel_decays`: each channel of a key
    has its own decay (Kimi Delta Attention), and projections over a bottleneck of `value_dim` give decays and gates.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_size: int
    has_channel_decays: bool = False

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    @property
    def window(self) -> tuple[int, int]:
        return self.conv_size - 1, self.conv_channels

    @property
    def matrix(self) -> tuple[int, int, int]:
        return self.value_heads, self.key_dim, self.value_dim

    @property
    def inner_size(self) -> int:
        return self.value_heads * self.value_dim


@dataclass(frozen=True, slots=True)
class ShortConvSpec(StateSpec):
    """One gated short convolution (LFM2), whose state is its last inputs. `conv_size`: tokens that it reads."""

    channels: int
    conv_size: int

    @property
    def window(self) -> tuple[int, int]:
        return self.conv_size - 1, self.channels

    @property
    def matrix(self) -> None:
        return None

    @property
    def inner_size(self) -> int:
        return self.channels


@dataclass(frozen=True, slots=True)
class Mamba2Spec(StateSpec):
    """One Mamba-2 mixer. `groups`: the number of groups of heads; the heads of a group share B and C. `norm_size`: the
    number of elements whose mean square the gated norm takes; 0 without that norm."""

    heads: int
    head_dim: int
    groups: int
    state_size: int
    conv_size: int
    norm_size: int

    @property
    def conv_channels(self) -> int:
        """Channels of the convolution: x, B and C."""
        return self.inner_size + 2 * self.groups * self.state_size

    @property
    def window(self) -> tuple[int, int]:
        return self.conv_size - 1, self.conv_channels

    @property
    def matrix(self) -> tuple[int, int, int]:
        return self.heads, self.head_dim, self.state_size

    @property
    def inner_size(self) -> int:
        return self.heads * self.head_dim


@dataclass(frozen=True, slots=True)
class MambaSpec(StateSpec):
    """One Mamba mixer (the first version: selective scan). `state_size`: elements of a channel's state. `dt_rank`: the
    width from which dt is projected."""

    channels: int
    state_size: int
    dt_rank: int
    conv_size: int

    @property
    def window(self) -> tuple[int, int]:
        return self.conv_size - 1, self.channels

    @property
    def matrix(self) -> tuple[int, int, int]:
        """(groups of up to 16 channels, state_size, channels of a group)."""
        return scan_matrix_shape(self.channels, self.state_size)

    @property
    def inner_size(self) -> int:
        return self.channels


@dataclass(frozen=True, slots=True)
class LightningSpec(StateSpec):
    """One lightning attention: linear attention whose heads have a fixed decay each. `first_head`: the index of this
    rank's first head among those of all ranks, because the decays differ."""

    heads: int
    head_dim: int
    first_head: int = 0

    @property
    def window(self) -> tuple[int, int]:
        return 0, 3 * self.inner_size

    @property
    def matrix(self) -> tuple[int, int, int]:
        return self.heads, self.head_dim, self.head_dim

    @property
    def inner_size(self) -> int:
        return self.heads * self.head_dim


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model as one of `tp` ranks holds it.

    `fingerprint`: identifies the weights, for block hashes and for failover between equal groups.
    `layers`: the attention layers. `state_layers`: the layers that keep a state for each sequence.
    `num_weights`: parameters on this rank. `weight_bytes`: bytes of the weights and of the LoRA adapters on this rank.
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
    num_weights: int
    weight_bytes: int
    state_layers: tuple[StateSpec, ...] = ()
    adapters: tuple[LoadedAdapter, ...] = ()

    def adapter_index(self, name: str) -> int:
        """The index that a StepPlan has for the adapter, from 1; 0 for "", no adapter. Raises ValueError for an unknown
        name."""
        return [adapter.name for adapter in self.adapters].index(name) + 1 if name else 0

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of one sequence on one rank; 0 for a model with attention in every layer."""
        return state_bytes(self.state_layers, self.dtype)

    @property
    def attention_crossover(self) -> int:
        """The context length in tokens at which attention takes as long as the linears.

        Per token, attention takes 4 * context * heads * head_dim FLOPs a layer (MLA: with absorbed projections), and
        the linears take 2 FLOPs a weight. Without attention: a length that no context has.
        """
        if not self.layers:
            return _NEVER
        return max(1, int(self.num_weights / (2 * sum(layer.num_heads * layer.head_dim for layer in self.layers))))


def state_bytes(layers: tuple[StateSpec, ...], dtype: str) -> int:
    """Bytes of one sequence's states in all `layers`. `dtype`: of the model, by torch's name."""
    return sum(layer.bytes_per_sequence(4 if dtype == "float32" else 2) for layer in layers)
