"""Model: transformers' own code for a checkpoint, over the paged KV pool, as one rank of a group holds it.

`forward` turns flattened tokens into hidden states, `logits` hidden states into logits. Which tokens share a step,
where their KV lies and what is sampled is decided elsewhere.
"""

import os
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from coatcheck.proto.errors import InvalidConfig, InvalidModel
from coatcheck.proto.generation_config import check_end_tokens, end_token_ids
from coatcheck.workers.attention.attention import AttentionLayer, KVPools
from coatcheck.workers.attention.attention_metadata import AttentionMetadata, LogitsIndices
from coatcheck.workers.attention.attention_probe import probe_attention
from coatcheck.workers.checkpoint.checkpoint import Checkpoint
from coatcheck.workers.checkpoint.sharding_plan import ShardingPlan, plan_sharding
from coatcheck.workers.checkpoint.weight_loader import Progress, load_weights
from coatcheck.workers.core.model_spec import LayerSpec, ModelSpec
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.distributed.tp_shard import TpShard
from coatcheck.workers.model.batch_invariance import check_deterministic
from coatcheck.workers.model.fusion import FusedBody, fuse
from coatcheck.workers.model.lm_head import LmHead, probe_head
from coatcheck.workers.model.meta_model import build_meta_model, check_complete, choose_dtype, read_config
from coatcheck.workers.model.packed_linears import pack_linears, record_weight_reads
from coatcheck.workers.model.parallel_layers import apply_tensor_parallel
from coatcheck.workers.model.rope_scaling import choose_max_model_len

Body = Callable[[Tensor, Tensor, AttentionMetadata, KVPools, LogitsIndices | None], Tensor]


class Model:
    """One rank's model. Every rank calls the same methods with the same tokens."""

    def __init__(
        self,
        spec: ModelSpec,
        body: Body,
        head: LmHead,
        directory: Path,
        *,
        deterministic: bool,
        supports_cuda_graphs: bool = False,
    ) -> None:
        self.spec = spec
        self.directory = directory  # of its checkpoint
        self.deterministic = deterministic
        self.supports_cuda_graphs = supports_cuda_graphs  # whether a CUDA graph can hold its forward pass
        self._body = body
        self._head = head

    @torch.inference_mode()
    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        metadata: AttentionMetadata,
        kv: KVPools,
        wanted: LogitsIndices | None = None,
    ) -> Tensor:
        """int64 [T], int64 [T] -> [T, hidden_size], or [R, hidden_size] of those wanted; writes all tokens' KV.

        The final norm is applied.
        """
        return self._body(input_ids, positions, metadata, kv, wanted)

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden_size] -> float32 [R, vocab_size], of all ranks, soft-capped or scaled as the model does."""
        return self._head.logits(hidden)


class TransformersBody:
    """The base model called as transformers wrote it, but for packed linears and each layer's sliding window."""

    def __init__(
        self, base: nn.Module, layers: Sequence[LayerSpec], *, batch_invariant: bool, keep: Collection[nn.Module]
    ) -> None:
        self.base = base
        self._sliding_windows = tuple(layer.sliding_window for layer in layers)
        pack_linears(base, batch_invariant=batch_invariant, keep=keep)

    def __call__(
        self,
        input_ids: Tensor,
        positions: Tensor,
        metadata: AttentionMetadata,
        kv: KVPools,
        wanted: LogitsIndices | None,
    ) -> Tensor:
        hidden: Tensor = self.base(
            input_ids=input_ids.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            attention_metadata=metadata,
            kv_pools=kv,
            sliding_windows=self._sliding_windows,
        ).last_hidden_state
        return hidden[0] if wanted is None else hidden[0, wanted.tokens]


@dataclass(frozen=True, slots=True)
class BuiltModel:
    """A model without weights that a rank can serve. `calls`: its attention layers. `plan`: the rank's part of each
    tensor. `unpackable_linears`: linears whose weight or sizes the model's own code reads."""

    causal: PreTrainedModel
    calls: list[AttentionLayer]
    unpackable_linears: Collection[nn.Module]
    plan: ShardingPlan
    dtype: torch.dtype
    max_model_len: int


def build_model(
    checkpoint: Checkpoint,
    shard: TpShard,
    *,
    dtype: str,
    device: torch.device,
    max_model_len: int | None,
    deterministic_on: torch.device | None,
) -> BuiltModel:
    """Builds a checkpoint's model on the meta device, its computed buffers on `device`; reads no weight.

    `deterministic_on`: the device on which the model must be deterministic; None: it need not be. Raises InvalidModel
    for an architecture that cannot be served, InvalidConfig for a setting that does not fit it.
    """
    config = read_config(checkpoint.directory)
    stored = checkpoint.dtype_of(next(iter(checkpoint.entries)))
    model_dtype = choose_dtype(dtype, config, stored)
    length = choose_max_model_len(config, max_model_len)
    causal = build_meta_model(config, model_dtype, device, length)
    with record_weight_reads(causal) as unpackable_linears:
        calls = probe_attention(causal, length)
        probe_head(causal)
    if deterministic_on is not None:
        check_deterministic(causal, calls, model_dtype, deterministic_on)
        if unpackable_linears:
            raise InvalidConfig(
                f"deterministic: the code of {config.model_type} reads weights of its linears directly, so our "
                "batch-invariant kernels cannot compute them; serve it without --deterministic"
            )
    named: dict[Any, str] = {module: name for name, module in causal.named_modules()}
    lm_head: Any = causal.get_output_embeddings
    plan = plan_sharding(
        {name: tuple(tensor.shape) for name, tensor in causal.state_dict().items()},
        causal.tp_plan,
        calls,
        named[causal.get_input_embeddings()],
        named[lm_head()],
        shard,
    )
    for name in (named[linear] for linear in unpackable_linears):
        if f"{name}.weight" in plan.cuts:
            raise InvalidModel(
                f"the code of {config.model_type} reads the weight of {name} directly, of which each rank would hold "
                "only a part; serve it with tp 1"
            )
    return BuiltModel(causal, calls, unpackable_linears, plan, model_dtype, length)


def load_model(
    path_or_id: str | os.PathLike[str],
    *,
    communicator: Communicator,
    dtype: str = "auto",
    device: torch.device | str,
    max_model_len: int | None = None,
    deterministic: bool = False,
    progress: Progress | None = None,
) -> Model:
    """Reads this rank's slices of a checkpoint, local or from the hub.

    `progress(done_bytes, total_bytes)` follows the reading. Raises InvalidModel for a checkpoint that cannot be served,
    InvalidConfig for a setting that does not fit it. `deterministic`: a token's hidden state is the same bits whatever
    shares its step, in prefill and in decode, with a cached prefix and without.
    """
    device = torch.device(device)
    with Checkpoint.open(os.fspath(path_or_id)) as checkpoint:
        shard = TpShard(communicator.rank, communicator.size)
        built = build_model(
            checkpoint,
            shard,
            dtype=dtype,
            device=device,
            max_model_len=max_model_len,
            deterministic_on=device if deterministic else None,
        )
        causal, calls, plan, config = built.causal, built.calls, built.plan, built.causal.config
        weight_bytes = load_weights(causal, checkpoint, plan.cuts, device, progress)
        fingerprint = checkpoint.fingerprint()
        directory = checkpoint.directory
        end_tokens = _end_tokens(directory, config)
    check_complete(causal)
    if shard.size > 1:
        apply_tensor_parallel(causal, plan, calls, config.vocab_size, communicator)
    layers = tuple(_layer_spec(call, shard) for call in calls)
    body = fuse(causal, calls, layers, batch_invariant=deterministic) or TransformersBody(
        causal.base_model, layers, batch_invariant=deterministic, keep=built.unpackable_linears
    )
    head = LmHead(causal)
    pack_linears(head.model, batch_invariant=deterministic, keep=built.unpackable_linears)
    spec = ModelSpec(
        name=checkpoint.name,
        architecture=type(causal).__name__,
        vocab_size=config.vocab_size,
        max_model_len=built.max_model_len,
        dtype=str(built.dtype).removeprefix("torch."),
        fingerprint=fingerprint,
        eos_token_ids=end_tokens,
        layers=layers,
        tp=shard.size,
        weight_bytes=weight_bytes,
    )
    supports_cuda_graphs = isinstance(body, FusedBody) and body.is_dense and communicator.supports_cuda_graphs
    return Model(spec, body, head, directory, deterministic=deterministic, supports_cuda_graphs=supports_cuda_graphs)


def _end_tokens(directory: Path, config: Any) -> tuple[int, ...]:
    """The ids in generation_config.json (chat models may have several), else in config.json. Ids outside the vocabulary
    are dropped: some files have -1, and the logits have no such column."""

    def in_vocabulary(tokens: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(token for token in tokens if 0 <= token < config.vocab_size)

    return in_vocabulary(end_token_ids(directory)) or in_vocabulary(check_end_tokens(directory, config.eos_token_id))


def _layer_spec(call: AttentionLayer, shard: TpShard) -> LayerSpec:
    heads, kv_heads = shard.local_heads(call)
    return LayerSpec(heads, kv_heads, call.head_dim, call.sliding_window, call.softcap)
