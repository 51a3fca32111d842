"""Model: a checkpoint's model over the paged KV pool, as one rank of a group holds it.

load_model   config.json -> modules without weights -> this rank's slices -> tensor-parallel, packed, fused
forward      flattened tokens of many requests -> hidden states
logits       hidden states -> logits
"""

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from coatcheck.kernels.layers.experts import PackedExperts
from coatcheck.kernels.layers.linear import PackedLinear
from coatcheck.kernels.lora.lora_step import LoraStep
from coatcheck.proto.generation_config import check_end_tokens, end_token_ids
from coatcheck.workers.attention.attention import AttentionLayer, AttentionStep, LayerCaches, layer_index, use_step
from coatcheck.workers.attention.attention_metadata import AttentionMetadata, LogitsIndices
from coatcheck.workers.attention.state_layers import StateLayer
from coatcheck.workers.checkpoint.checkpoint import Checkpoint
from coatcheck.workers.checkpoint.model_alias import sparse_attention_note
from coatcheck.workers.checkpoint.weight_loader import Progress, load_weights
from coatcheck.workers.core.attention_selector import check_backend_model
from coatcheck.workers.core.kv_dtype import choose_kv_dtype
from coatcheck.workers.core.lora_module import LoraModule
from coatcheck.workers.core.model_spec import ModelSpec
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.distributed.tp_shard import TpShard
from coatcheck.workers.lora.attach_adapters import LoraTarget, attach_adapters
from coatcheck.workers.lora.open_adapters import load_fingerprints, open_adapters
from coatcheck.workers.model.fusion import fuse
from coatcheck.workers.model.linear_attention import adapt_state_layer
from coatcheck.workers.model.lm_head import LmHead
from coatcheck.workers.model.meta_model import PreparedModel, adaptable_linears, check_complete, prepare_model
from coatcheck.workers.model.model_rules import check_mla_shard
from coatcheck.workers.model.module_adapters import create_on_device, make_rows_independent, replace_waiting_experts
from coatcheck.workers.model.packed_linears import choose_code_kind, describe_activations, pack_linears
from coatcheck.workers.model.parallel_layers import apply_tensor_parallel
from coatcheck.workers.model.sparse_mlp import packable_experts, replace_experts


class Body(Protocol):
    """The part of a model before its head: embedding, layers and final norm."""

    def __call__(
        self,
        input_ids: Tensor,
        positions: Tensor,
        metadata: AttentionMetadata,
        layer_caches: LayerCaches,
        logits_indices: LogitsIndices | None,
    ) -> Tensor:
        """The hidden states after the final norm: `Model.forward` describes arguments and result."""

    def experts(self) -> Sequence[PackedExperts]:
        """The experts of each layer that has experts."""

    def linears(self) -> Sequence[PackedLinear]:
        """Every linear of the layers."""

    def lora_targets(self) -> dict[str, LoraTarget]:
        """The linears that can have LoRA adapters, by name within the base model."""

    @property
    def lora_step(self) -> LoraStep:
        """The adapter of each row of the current step."""


class Model:
    """One rank's model. Every rank calls the same methods with the same tokens.

    `directory`: of the checkpoint. `supports_cuda_graphs`: whether a CUDA graph can capture the collectives.
    `shards_logits`: whether `shard_logits` can be called. `note`: a limit of the model that users must know, or "".
    `lora_step`: while its `use` is open, `forward` adds the LoRA adapters of the rows.
    """

    def __init__(
        self,
        spec: ModelSpec,
        body: Body,
        head: LmHead,
        directory: Path,
        *,
        deterministic: bool,
        supports_cuda_graphs: bool = False,
        shards_logits: bool = False,
        note: str = "",
    ) -> None:
        self.spec = spec
        self.directory = directory
        self.deterministic = deterministic
        self.supports_cuda_graphs = supports_cuda_graphs
        self.shards_logits = shards_logits
        self.note = note
        self.lora_step = body.lora_step
        self._body = body
        self._head = head

    @torch.inference_mode()
    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        metadata: AttentionMetadata,
        layer_caches: LayerCaches,
        logits_indices: LogitsIndices | None = None,
    ) -> Tensor:
        """input_ids, positions: int64 [T] -> hidden states after the final norm, [T, hidden_size].

        Stores keys and values of all T tokens in `layer_caches`. With `logits_indices`, returns only the hidden states
        of its R tokens, [R, hidden_size].
        """
        return self._body(input_ids, positions, metadata, layer_caches, logits_indices)

    @torch.inference_mode()
    def compile_products(self, max_tokens: int) -> None:
        """Launch every kernel variant of experts and linears that a step of `max_tokens` can need once. Modules of one
        variant share their kernels."""
        heads = [module for module in self._head.model.modules() if isinstance(module, PackedLinear)]
        linears = {linear.variant: linear for linear in (*self._body.linears(), *heads)}
        experts = {layer.variant: layer for layer in self._body.experts()}
        for linear in linears.values():
            linear.compile_kernels()
        for layer in experts.values():
            layer.compile_kernels(max_tokens)

    def padding_bytes(self) -> int:
        """Bytes of zeros that fill the tiles of linears and experts; `spec.weight_bytes` does not count them."""
        heads = [module for module in self._head.model.modules() if isinstance(module, PackedLinear)]
        packed: set[PackedLinear | PackedExperts] = {*self._body.linears(), *heads, *self._body.experts()}
        return sum(module.padding_bytes for module in packed)

    def describe_activations(self) -> str:
        """How activations are quantised, or why they are not although the checkpoint asks for it. "" if it does not."""
        linears = [linear.activations for linear in self._body.linears()]
        experts = [choice for experts in self._body.experts() for choice in experts.activations]
        return describe_activations([*linears, *experts])

    def expert_tokens(self) -> list[int]:
        """[how many tokens chose expert i, summed over all layers that have an expert i]. Empty without experts, and if
        they are not counted."""
        counts = [experts.chosen for experts in self._body.experts() if experts.chosen is not None]
        most = max(map(len, counts), default=0)
        padded = [pad(count, (0, most - len(count))) for count in counts]
        total: list[int] = torch.stack(padded).sum(0).tolist() if padded else []
        return total

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden_size] -> float32 [R, vocab_size] of the whole vocabulary, soft-capped or scaled as the model
        does."""
        return self._head.logits(hidden)

    @torch.inference_mode()
    def shard_logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden_size] -> float32 [R, rows]: as `logits`, of this rank's rows of the vocabulary
        (TpShard.vocab_rows) alone."""
        return self._head.shard_logits(hidden)


def load_model(
    path_or_id: str | os.PathLike[str],
    *,
    communicator: Communicator,
    dtype: str = "auto",
    quantization: str = "auto",
    activation_quantization: str = "auto",
    device: torch.device | str,
    max_model_len: int | None = None,
    deterministic: bool = False,
    expert_parallel: bool = False,
    mla_shard: str = "replicate",
    attention_backend: str = "auto",
    kv_dtype: str = "auto",
    lora_modules: Sequence[LoraModule] = (),
    progress: Progress | None = None,
    check_memory: Callable[[int], None] | None = None,
) -> Model:
    """Load this rank's slices of a checkpoint, from a directory or the hub. All ranks of a group call this together.

    `quantization`: int8, int4 or fp8 quantises linears and experts of an unquantised checkpoint, not head and routers.
    `activation_quantization`: `auto` quantises activations on GPUs if the checkpoint asks for it, `dynamic` quantises
    the activations of all 8-bit weights, `off` quantises none.
    `deterministic`: a token's hidden state has the same bits in any batch, in prefill and decode, with a cached prefix
    or without. `expert_parallel`: each rank holds whole experts instead of a part of each.
    `mla_shard`: `tokens` divides latents (MLA) over the ranks, `replicate` stores all of them on each.
    `attention_backend`, `kv_dtype`: as in GroupConfig. They are only checked against the model.
    `lora_modules`: LoRA adapters to load; `spec.adapters` has them in this order.
    `progress(done_bytes, total_bytes)`: called while weights are read. `check_memory(weight_bytes)`: called before,
    with a lower bound of the bytes of this rank's weights.
    Raises InvalidModel for a checkpoint that cannot be served, InvalidConfig for a setting that does not fit it.
    """
    device = torch.device(device)
    shard = TpShard(communicator.rank, communicator.size, divides_latents=mla_shard == "tokens")
    with Checkpoint.open(os.fspath(path_or_id)) as checkpoint:
        prepared = prepare_model(
            checkpoint,
            shard,
            dtype=dtype,
            device=device,
            max_model_len=max_model_len,
            deterministic_on=device if deterministic else None,
            expert_parallel=expert_parallel,
        )
        causal = prepared.causal
        _check_attention(prepared, attention_backend, kv_dtype, mla_shard, deterministic=deterministic)
        shapes = adaptable_linears(prepared)
        adapters = open_adapters(lora_modules, shapes, checkpoint.text_name, device=device, dtype=prepared.dtype)
        loaded_adapters = load_fingerprints(adapters, communicator)
        weights = load_weights(
            causal,
            checkpoint,
            prepared.plan.slices,
            device,
            progress,
            check_memory,
            prepared.unpackable_linears,
            packable_experts(causal),
            quantise_to=choose_code_kind(quantization, checkpoint, device, prepared.dtype),
            activation_quantization=activation_quantization,
        )
        fingerprint = _fingerprint(checkpoint, quantization, activation_quantization)
        directory = checkpoint.directory
        eos_token_ids = _eos_token_ids(directory, causal.config)
    check_complete(causal)
    layers = tuple(shard.shard_layer(layer) for layer in prepared.layers)
    states = [replace(state, spec=shard.shard_state(state.spec)) for state in prepared.states]
    body = _build_body(prepared, layers, states, communicator, batch_invariant=deterministic)
    lora_bytes = attach_adapters(adapters, _lora_targets(causal, body), prepared.plan.slices, body.lora_step)
    head = LmHead(causal)
    pack_linears(head.model, batch_invariant=deterministic, exclude=prepared.unpackable_linears)
    spec = ModelSpec(
        name=checkpoint.name,
        architecture=type(causal).__name__,
        vocab_size=causal.config.vocab_size,
        max_model_len=prepared.max_model_len,
        dtype=str(prepared.dtype).removeprefix("torch."),
        fingerprint=fingerprint,
        eos_token_ids=eos_token_ids,
        layers=layers,
        tp=shard.size,
        num_weights=weights.count,
        weight_bytes=weights.bytes + lora_bytes,
        state_layers=tuple(state.spec for state in states),
        adapters=loaded_adapters,
    )
    return Model(
        spec,
        body,
        head,
        directory,
        deterministic=deterministic,
        supports_cuda_graphs=communicator.supports_cuda_graphs,
        shards_logits=head.can_shard(communicator, prepared.dtype, device),
        note="" if (topk := getattr(causal.config, "index_topk", None)) is None else sparse_attention_note(topk),
    )


def _check_attention(
    prepared: PreparedModel, attention_backend: str, kv_dtype: str, mla_shard: str, *, deterministic: bool
) -> None:
    """Raise InvalidConfig if the model's attention does not fit the settings; see `load_model`."""
    if mla_shard == "tokens":
        check_mla_shard(prepared.causal.config.model_type, any(layer.is_latent for layer in prepared.layers))
    dtype = str(prepared.dtype).removeprefix("torch.")
    check_backend_model(
        attention_backend,
        prepared.layers,
        dtype=dtype,
        kv_dtype=choose_kv_dtype(kv_dtype, dtype),
        deterministic=deterministic,
        has_sinks=any(layer.has_sinks for layer in prepared.layers),
    )


def _fingerprint(checkpoint: Checkpoint, quantization: str, activation_quantization: str) -> str:
    """Identifies the weights and how they are quantised, for block hashes and for failover between equal groups."""
    parts = [checkpoint.fingerprint()]
    if quantization != "auto":
        parts.append(quantization)
    if activation_quantization != "auto":
        parts.append(f"a-{activation_quantization}")
    return "-".join(parts)


def _eos_token_ids(directory: Path, config: Any) -> tuple[int, ...]:
    """The end-of-sequence ids of generation_config.json (chat models may have several), or else of config.json.

    Ids outside the vocabulary are dropped: some files have -1, and the logits have no such column.
    """

    def in_vocabulary(tokens: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(token for token in tokens if 0 <= token < config.vocab_size)

    return in_vocabulary(end_token_ids(directory)) or in_vocabulary(check_end_tokens(directory, config.eos_token_id))


def _build_body(
    prepared: PreparedModel,
    layers: Sequence[AttentionLayer],
    states: Sequence[StateLayer],
    communicator: Communicator,
    *,
    batch_invariant: bool,
) -> Body:
    """Make the loaded model tensor-parallel, and pack its layers. `layers`, `states`: with this rank's heads."""
    causal: Any = prepared.causal
    if communicator.size > 1:
        apply_tensor_parallel(causal, prepared.plan, layers, causal.config.vocab_size, communicator)
    return fuse(causal, layers, states, communicator, batch_invariant=batch_invariant) or TransformersBody(
        causal, layers, states, batch_invariant=batch_invariant, unpackable=prepared.unpackable_linears
    )


def _lora_targets(causal: Any, body: Body) -> dict[str, LoraTarget]:
    """The linears that can have LoRA adapters, by name within the causal model."""
    prefix = next(name for name, module in causal.named_modules() if module is causal.base_model)
    return {f"{prefix}.{name}".lstrip("."): target for name, target in body.lora_targets().items()}


class TransformersBody:
    """transformers' base model with PackedLinears and PackedExperts, for architectures that are not in fusion.py."""

    def __init__(
        self,
        causal: Any,
        layers: Sequence[AttentionLayer],
        states: Sequence[StateLayer],
        *,
        batch_invariant: bool,
        unpackable: Collection[nn.Module],
    ) -> None:
        self.base: nn.Module = causal.base_model
        self._model_type: str = causal.config.model_type
        self.lora_step = LoraStep()
        self._layers = layers
        self._cache_indices = {layer_index(causal.get_submodule(layer.module)): i for i, layer in enumerate(layers)}
        for cache_index, state in enumerate(states, len(layers)):
            module = causal.get_submodule(state.module)
            adapt_state_layer(module, state.spec, cache_index, batch_invariant=batch_invariant)
        replace_experts(self.base, batch_invariant=batch_invariant)
        pack_linears(self.base, batch_invariant=batch_invariant, exclude=unpackable)
        if batch_invariant:
            make_rows_independent(self.base)
        replace_waiting_experts(self.base, batch_invariant=batch_invariant)

    def __call__(
        self,
        input_ids: Tensor,
        positions: Tensor,
        metadata: AttentionMetadata,
        layer_caches: LayerCaches,
        logits_indices: LogitsIndices | None,
    ) -> Tensor:
        step = AttentionStep(metadata, self._layers, self._cache_indices, layer_caches)
        with use_step(step), create_on_device(self._model_type, input_ids.device):
            hidden: Tensor = self.base(
                input_ids=input_ids.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False
            ).last_hidden_state
        return hidden[0] if logits_indices is None else hidden[0, logits_indices.tokens]

    def experts(self) -> list[PackedExperts]:
        """The experts of each layer that has some."""
        return [module for module in self.base.modules() if isinstance(module, PackedExperts)]

    def linears(self) -> list[PackedLinear]:
        """Every linear of the layers."""
        return [module for module in self.base.modules() if isinstance(module, PackedLinear)]

    def lora_targets(self) -> dict[str, LoraTarget]:
        """The linears that can have LoRA adapters, by name within the base model."""
        linears = {name: module for name, module in self.base.named_modules() if isinstance(module, PackedLinear)}
        # A row-parallel linear is the child `linear` of its wrapper.
        return {
            name.removesuffix(".linear"): LoraTarget(linear, 0, linear.weight_shape[0])
            for name, linear in linears.items()
        }
