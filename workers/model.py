"""Model: transformers' own code for a checkpoint, over the paged KV pool, as one rank of a group holds it.

`forward` turns flattened tokens into hidden states, `logits` hidden states into logits. Which tokens share a step,
where their KV lies and what is sampled is decided elsewhere.
"""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from ..proto.errors import InvalidModel
from .attention import AttentionCall, KVPools, probe_attention
from .attention_metadata import AttentionMetadata
from .checkpoint import Checkpoint
from .communicator import Communicator
from .determinism import check_deterministic
from .fusion import FusedBody, fuse
from .head import Head, probe_head
from .model_spec import LayerSpec, ModelSpec
from .packing import pack_linears
from .parallel import parallelise
from .rotary_scaling import choose_max_model_len
from .shard import Shard
from .sharding import plan_sharding
from .skeleton import build_skeleton, check_complete, choose_dtype, read_config
from .wanted import Wanted
from .weights import Progress, load_weights

Body = Callable[[Tensor, Tensor, AttentionMetadata, KVPools, Wanted | None], Tensor]


class Model:
    """One rank's model. Every rank calls the same methods with the same tokens."""

    def __init__(
        self, spec: ModelSpec, body: Body, head: Head, directory: Path, *, deterministic: bool, capturable: bool = False
    ) -> None:
        self.spec = spec
        self.directory = directory  # of its checkpoint
        self.deterministic = deterministic
        self.capturable = capturable  # whether a CUDA graph can hold its forward pass
        self._body = body
        self._head = head

    @torch.inference_mode()
    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        metadata: AttentionMetadata,
        kv: KVPools,
        wanted: Wanted | None = None,
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
    """The base model called as transformers wrote it, but for packed linears."""

    def __init__(self, base: nn.Module, *, fixed_rows: bool) -> None:
        self.base = base
        pack_linears(base, fixed_rows=fixed_rows)

    def __call__(
        self, input_ids: Tensor, positions: Tensor, metadata: AttentionMetadata, kv: KVPools, wanted: Wanted | None
    ) -> Tensor:
        hidden: Tensor = self.base(
            input_ids=input_ids.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            use_cache=False,
            attention_metadata=metadata,
            kv_pools=kv,
        ).last_hidden_state
        return hidden[0] if wanted is None else hidden[0, wanted.tokens]


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
        config = read_config(checkpoint.directory)
        stored = checkpoint.dtype_of(next(iter(checkpoint.entries)))
        model_dtype = choose_dtype(dtype, config, stored)
        length = choose_max_model_len(config, max_model_len)
        causal = build_skeleton(config, model_dtype, device, length)
        calls = probe_attention(causal)
        probe_head(causal)
        if deterministic:
            check_deterministic(causal, calls, model_dtype, device)
        named: dict[Any, str] = {module: name for name, module in causal.named_modules()}
        lm_head: Any = causal.get_output_embeddings
        plan = plan_sharding(
            {name: tuple(tensor.shape) for name, tensor in causal.state_dict().items()},
            causal.tp_plan,
            calls,
            named[causal.get_input_embeddings()],
            named[lm_head()],
            shard := Shard(communicator.rank, communicator.size),
        )
        weight_bytes = load_weights(causal, checkpoint, plan.cuts, device, progress)
        fingerprint = checkpoint.fingerprint()
        directory = checkpoint.directory
        end_tokens = _end_tokens(directory, config)
    check_complete(causal)
    if shard.size > 1:
        parallelise(causal, plan, calls, config.vocab_size, communicator)
    layers = tuple(_layer_spec(call, shard) for call in calls)
    body = fuse(causal, calls, layers, fixed_rows=deterministic) or TransformersBody(
        causal.base_model, fixed_rows=deterministic
    )
    head = Head(causal)
    pack_linears(head.model, fixed_rows=deterministic)
    spec = ModelSpec(
        name=checkpoint.name,
        architecture=type(causal).__name__,
        vocab_size=config.vocab_size,
        max_model_len=length,
        dtype=str(model_dtype).removeprefix("torch."),
        fingerprint=fingerprint,
        eos_token_ids=end_tokens,
        layers=layers,
        tp=shard.size,
        weight_bytes=weight_bytes,
    )
    capturable = isinstance(body, FusedBody) and body.is_dense and communicator.capturable
    return Model(spec, body, head, directory, deterministic=deterministic, capturable=capturable)


def _end_tokens(directory: Path, config: Any) -> tuple[int, ...]:
    """generation_config.json says it better where there is one: chat models end turns with more than one token."""
    chosen = config.eos_token_id
    if (directory / "generation_config.json").exists():
        try:
            chosen = GenerationConfig.from_pretrained(directory).eos_token_id or chosen
        except (OSError, TypeError, ValueError) as error:
            raise InvalidModel(f"{directory}/generation_config.json cannot be read: {error}") from error
    tokens = () if chosen is None else tuple(chosen) if isinstance(chosen, list) else (chosen,)
    if not all(isinstance(token, int) for token in tokens):
        raise InvalidModel(f"{directory}: eos_token_id is {chosen!r}; it must be a token id or a list of them")
    return tokens


def _layer_spec(call: AttentionCall, shard: Shard) -> LayerSpec:
    heads, kv_heads = shard.local_heads(call)
    return LayerSpec(heads, kv_heads, call.head_dim, call.sliding_window, call.softcap)
