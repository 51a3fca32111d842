"""Layers that keep a state. Gated delta nets are part of DecoderLayer; other kinds stay in transformers' own layers.

LinearAttention is called as MultiHeadAttention is. It has two linears: one for q, k, v and z, one for the b and a of
each value head. The four linears of Qwen3.5 and the six of OLMo Hybrid are merged into these two. Qwen3-Next has the
same two, with their rows grouped by key head. The rows are reordered here. Kimi Linear computes z and a over a
bottleneck each, so it has four linears.

`adapt_state_layer` replaces the forward of transformers' short convolution (LFM2), Mamba-2 or Mamba mixer, or lightning
attention (MiniMax). The module's projections stay. Between them our kernels compute all tokens of a step, each sequence
with the state in its slot. The gated delta nets of OLMo Hybrid, whose other layers DecoderLayer does not compute,
become LinearAttention there.
"""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from coatcheck.kernels.kv.recurrent_state import RecurrentState, StateRows
from coatcheck.kernels.layers.linear import PackedLinear
from coatcheck.kernels.linear_attention.gated_delta_net import GatedDeltaNet
from coatcheck.kernels.linear_attention.lightning_attention import LightningAttention
from coatcheck.kernels.linear_attention.mamba2 import GatedNorm, Mamba2
from coatcheck.kernels.linear_attention.selective_scan import SelectiveScan
from coatcheck.kernels.linear_attention.short_conv import Convolution, ShortConv
from coatcheck.workers.attention.attention import current_step
from coatcheck.workers.attention.attention_metadata import AttentionMetadata, LogitsIndices
from coatcheck.workers.core.model_spec import (
    DeltaNetSpec,
    LightningSpec,
    Mamba2Spec,
    MambaSpec,
    ShortConvSpec,
    StateSpec,
)
from coatcheck.workers.distributed.tensor_slice import Range
from coatcheck.workers.model.packed_linears import pack_merged, pack_reordered


class LinearAttention:
    """A gated delta net without its output projection: [T, hidden] -> [T, value_heads * value_dim]."""

    def __init__(self, module: Any, spec: DeltaNetSpec, *, batch_invariant: bool) -> None:
        """`module`: transformers' gated delta net with this rank's weights. `spec`: with this rank's heads."""
        self._projections: _Projections | _BottleneckProjections
        if spec.has_channel_decays:
            self._projections = _BottleneckProjections(module, batch_invariant=batch_invariant)
        else:
            self._projections = _Projections(module, spec, batch_invariant=batch_invariant)
        norm = module.o_norm if hasattr(module, "o_norm") else module.norm
        decay = module.forget_gate if spec.has_channel_decays else module
        dt_bias = decay.dt_bias.detach()
        self._net = GatedDeltaNet(
            conv=module.conv1d.weight.detach().squeeze(1),
            a_log=decay.A_log.detach().flatten(),
            dt_bias=dt_bias.view(spec.value_heads, spec.key_dim) if spec.has_channel_decays else dt_bias,
            norm=norm.weight.detach(),
            eps=norm.variance_epsilon,
            key_heads=spec.key_heads,
            key_dim=spec.key_dim,
            batch_invariant=batch_invariant,
            beta_scale=2.0 if getattr(module, "allow_neg_eigval", False) else 1.0,
            has_sigmoid_gate=getattr(norm, "activation", "silu") == "sigmoid",
        )

    def __call__(
        self,
        x: Tensor,
        rotary: object,
        metadata: AttentionMetadata,
        state: RecurrentState,
        logits_indices: LogitsIndices | None,
    ) -> Tensor:
        """x [T, hidden] -> [T, value_heads * value_dim], or only the rows of `logits_indices`, if given. All T tokens
        are computed, because the state needs them. `rotary` is not used."""
        assert metadata.state_slots is not None, "the step of a hybrid model has slots"
        rows = StateRows(metadata.state_slots, metadata.seq_lens, metadata.cu_seqlens_q, metadata.max_query_len)
        out = self._net(*self._projections(x), state, rows)
        return out if logits_indices is None else out[logits_indices.tokens]

    def linears(self) -> list[PackedLinear]:
        return self._projections.linears


class _Projections:
    """x [T, hidden] -> qkvz and ba, by one linear each. gated_delta_net.py has their columns."""

    def __init__(self, module: Any, spec: DeltaNetSpec, *, batch_invariant: bool) -> None:
        if hasattr(module, "in_proj_qkvz"):
            self._qkvz = pack_reordered(module.in_proj_qkvz, _qkvz_rows(spec), batch_invariant=batch_invariant)
            self._ba = pack_reordered(module.in_proj_ba, _ba_rows(spec), batch_invariant=batch_invariant)
        else:
            is_olmo = hasattr(module, "g_proj")
            qkvz = ("q_proj", "k_proj", "v_proj", "g_proj") if is_olmo else ("in_proj_qkv", "in_proj_z")
            ba = ("b_proj", "a_proj") if is_olmo else ("in_proj_b", "in_proj_a")
            self._qkvz = pack_merged(module, "in_proj_qkvz", qkvz, batch_invariant=batch_invariant)
            self._ba = pack_merged(module, "in_proj_ba", ba, batch_invariant=batch_invariant)
        self.linears = [self._qkvz, self._ba]

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self._qkvz(x), self._ba(x)


class _BottleneckProjections:
    """As _Projections, for Kimi Linear: z and a have two linears each, the first of which are merged with that of b."""

    def __init__(self, module: Any, *, batch_invariant: bool) -> None:
        gate = module.forget_gate
        first = SimpleNamespace(f_a_proj=gate.f_a_proj, g_a_proj=module.g_a_proj, b_proj=module.b_proj)
        self._sizes = [linear.weight.shape[0] for linear in vars(first).values()]
        self._qkv = pack_merged(module, "qkv_proj", ("q_proj", "k_proj", "v_proj"), batch_invariant=batch_invariant)
        self._first = pack_merged(first, "fgb_proj", tuple(vars(first)), batch_invariant=batch_invariant)
        self._a = PackedLinear(gate.f_b_proj.weight, batch_invariant=batch_invariant)
        self._z = PackedLinear(module.g_b_proj.weight, batch_invariant=batch_invariant)
        self.linears = [self._qkv, self._first, self._a, self._z]

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        f, g, b = (part.contiguous() for part in self._first(x).split_with_sizes(self._sizes, dim=1))
        return torch.cat((self._qkv(x), self._z(g)), dim=1), torch.cat((b, self._a(f)), dim=1)


def _qkvz_rows(spec: DeltaNetSpec) -> list[Range]:
    """The ranges of rows of Qwen3-Next's in_proj_qkvz, which is grouped by key head, in the order q, k, v, z."""
    k, v = spec.key_dim, spec.value_heads // spec.key_heads * spec.value_dim
    return list(_grouped_rows(spec.key_heads, (k, k, v, v)))


def _ba_rows(spec: DeltaNetSpec) -> list[Range]:
    group = spec.value_heads // spec.key_heads
    return list(_grouped_rows(spec.key_heads, (group, group)))


def _grouped_rows(groups: int, sizes: tuple[int, ...]) -> Iterator[Range]:
    """The ranges of rows in the order of their parts. The rows are stored group by group. Each group has len(sizes)
    parts; part i has sizes[i] rows."""
    for part, size in enumerate(sizes):
        for group in range(groups):
            start = group * sum(sizes) + sum(sizes[:part])
            yield start, start + size


def adapt_state_layer(module: Any, spec: StateSpec, cache_index: int, *, batch_invariant: bool) -> None:
    """Replace the forward of `module`, which has this rank's weights. `cache_index`: the index of its state in
    LayerCaches."""
    if isinstance(spec, MambaSpec):
        module.forward = _MambaForward(module, spec, cache_index)
        return
    if isinstance(spec, DeltaNetSpec):
        module.forward = _DeltaNetForward(module, spec, cache_index, batch_invariant=batch_invariant)
        return
    if isinstance(spec, LightningSpec):
        module.forward = _LightningForward(module, spec, cache_index, batch_invariant=batch_invariant)
        return
    mixer: ShortConv | Mamba2
    if isinstance(spec, ShortConvSpec):
        mixer = ShortConv(_read_convolution(module.conv), batch_invariant=batch_invariant)
    else:
        assert isinstance(spec, Mamba2Spec)
        mixer = _read_mamba2(module, spec, batch_invariant=batch_invariant)
    module.forward = _MixerForward(module, mixer, cache_index)


class _MixerForward:
    """[1, T, hidden] -> [1, T, hidden]. `cache_index`: the index of the state in LayerCaches."""

    def __init__(self, module: Any, mixer: ShortConv | Mamba2, cache_index: int) -> None:
        self._module, self._mixer, self._cache_index = module, mixer, cache_index
        # falcon_h1 multiplies the input by a number, and the projection's output by a vector.
        self._input_factor = getattr(module, "ssm_in_multiplier", None)
        self._factors: Tensor | None = getattr(module, "mup_vector", None)

    def __call__(self, hidden_states: Tensor, *others: Any, **ignored: Any) -> Tensor:
        state, rows = _current_state(self._cache_index)
        if self._input_factor is not None:
            hidden_states = hidden_states * self._input_factor
        wide: Tensor = self._module.in_proj(hidden_states)
        if self._factors is not None:
            wide = wide * self._factors
        out: Tensor = self._module.out_proj(self._mixer(wide[0], state, rows)[None])
        return out


class _DeltaNetForward:
    """[1, T, hidden] -> [1, T, hidden] of a gated delta net with an `o_proj`. Its other linears become children of
    `module` with the name `projections`. `cache_index`: the index of the state in LayerCaches."""

    def __init__(self, module: Any, spec: DeltaNetSpec, cache_index: int, *, batch_invariant: bool) -> None:
        self._module, self._cache_index = module, cache_index
        self._net = LinearAttention(module, spec, batch_invariant=batch_invariant)
        for name, child in list(module.named_children()):
            if isinstance(child, nn.Linear) and name != "o_proj":
                delattr(module, name)
        module.projections = nn.ModuleList(self._net.linears())

    def __call__(self, hidden_states: Tensor, *others: Any, **ignored: Any) -> Tensor:
        step = current_step()
        state = step.layer_caches[self._cache_index]
        assert isinstance(state, RecurrentState)
        out: Tensor = self._module.o_proj(self._net(hidden_states[0], None, step.metadata, state, None)[None])
        return out


class _MambaForward:
    """[1, T, hidden] -> [1, T, hidden]. `cache_index`: the index of the state in LayerCaches.

    `dt_proj` loses its bias, which the scan adds in float32: a bfloat16 near -5 is rounded by up to 2%.
    """

    def __init__(self, module: Any, spec: MambaSpec, cache_index: int) -> None:
        self._module, self._cache_index = module, cache_index
        self._sizes = spec.dt_rank, spec.state_size, spec.state_size
        self._scan = SelectiveScan(
            conv=_read_convolution(module.conv1d),
            a_log=module.A_log.detach(),
            dt_bias=module.dt_proj.bias.detach(),
            skip=module.D.detach(),
        )
        module.dt_proj.bias = None

    def __call__(self, hidden_states: Tensor, *others: Any, **ignored: Any) -> Tensor:
        module, (state, rows) = self._module, _current_state(self._cache_index)
        wide: Tensor = module.in_proj(hidden_states)[0]
        x, gate = wide.chunk(2, dim=1)
        x = self._scan.convolve(x, state, rows)
        dt, b, c = module.x_proj(x).split(self._sizes, dim=1)
        if hasattr(module, "dt_layernorm"):  # jamba, falcon_mamba
            dt, b, c = module.dt_layernorm(dt), module.b_layernorm(b), module.c_layernorm(c)
        dt = module.dt_proj(dt.contiguous())
        out = self._scan.scan(x, dt, torch.cat((b, c), dim=1), gate, state, rows)
        projected: Tensor = module.out_proj(out[None])
        return projected


class _LightningForward:
    """[1, T, hidden] -> [1, T, hidden]. `cache_index`: the index of the state in LayerCaches."""

    def __init__(self, module: Any, spec: LightningSpec, cache_index: int, *, batch_invariant: bool) -> None:
        self._module, self._cache_index = module, cache_index
        weight: Tensor = module.norm.weight
        slopes: Tensor = module.get_slope_rate().flatten()[spec.first_head : spec.first_head + spec.heads]
        self._lightning = LightningAttention(
            slopes.float().to(weight.device), spec.head_dim, weight.dtype, batch_invariant=batch_invariant
        )

    def __call__(self, hidden_states: Tensor, *others: Any, **ignored: Any) -> tuple[Tensor, None]:
        module, (state, rows) = self._module, _current_state(self._cache_index)
        out = self._lightning(module.qkv_proj(hidden_states)[0], state, rows)
        gated: Tensor = torch.sigmoid(module.output_gate(hidden_states)) * module.norm(out[None])
        return module.out_proj(gated), None


def _current_state(cache_index: int) -> tuple[RecurrentState, StateRows]:
    """A layer's states, and the slots of the step that runs. `cache_index`: the index of the state in LayerCaches."""
    step = current_step()
    metadata, state = step.metadata, step.layer_caches[cache_index]
    assert metadata.state_slots is not None, "the step of a hybrid model has slots"
    assert isinstance(state, RecurrentState)
    return state, StateRows(metadata.state_slots, metadata.seq_lens, metadata.cu_seqlens_q, metadata.max_query_len)


def _read_mamba2(module: Any, spec: Mamba2Spec, *, batch_invariant: bool) -> Mamba2:
    norm = None
    if spec.norm_size:
        norm = GatedNorm(
            weight=module.norm.weight.detach(),
            eps=module.norm.variance_epsilon,
            groups=spec.inner_size // spec.norm_size,
            norm_before_gate=getattr(module.norm, "norm_before_gate", False),
        )
    return Mamba2(
        conv=_read_convolution(module.conv1d),
        a_log=module.A_log.detach(),
        dt_bias=module.dt_bias.detach(),
        skip=module.D.detach(),
        norm=norm,
        dt_limits=module.time_step_limit,
        groups=spec.groups,
        head_dim=spec.head_dim,
        state_size=spec.state_size,
        batch_invariant=batch_invariant,
    )


def _read_convolution(conv: nn.Conv1d) -> Convolution:
    return Convolution(conv.weight.detach().squeeze(1), None if conv.bias is None else conv.bias.detach())
