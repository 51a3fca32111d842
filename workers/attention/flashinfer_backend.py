"""FlashInferBackend: attention by FlashInfer's BatchPrefillWithPagedKVCacheWrapper, for prompts and decodes.

The library reads the pool in place: layout "HND", a pair of [num_blocks, kv_heads, block_size, head_dim] with equal
strides. It takes a sequence's pages as `indptr`, `indices` and `last_page_len` instead of a block table:

    indptr [S + 1]          where each sequence's pages begin in `indices`
    indices [indptr[S]]     the blocks of all sequences, in order
    last_page_len [S]       tokens in each sequence's last page, 1 to block_size

`plan` divides a step's work on the host, from the lengths alone, before the kernels are queued. Only the device has the
block tables, so the first layer of a step gathers `indices` there (page_indices.py).

A wrapper holds its plan in its own memory, 8 MiB on the GPU and 8 MiB pinned. So each kind of layers has its own
wrappers, and each shape of a CUDA graph, too. Steps of decodes are captured. Steps with chunks of prompts run without a
graph.

No GPU has run this file. tests/workers/attention/test_attention_backends.py binds its calls to the library's
signatures, and compares them with the float32 reference through a wrapper that reads the documented layout.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from itertools import accumulate, cycle
from typing import Any, Self
from weakref import ref

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from coatcheck.kernels.attention.page_indices import gather_pages
from coatcheck.kernels.gpu_properties import gpu_properties
from coatcheck.kernels.kv.kv_cache import KVCache
from coatcheck.proto.errors import InvalidConfig
from coatcheck.workers.attention.attention import AttentionLayer, kind_of
from coatcheck.workers.attention.attention_backend import StepShape
from coatcheck.workers.attention.attention_metadata import AttentionMetadata, AttentionPlans, LayerKind, LibraryPlan

_LEAST_WORKSPACE = 128 << 20  # bytes; what FlashInfer recommends
# FlashInfer's template for Hopper does not split a sequence's keys over programs. So it gets only steps in which every
# sequence has at least this many queries.
_UNDIVIDED_QUERIES = 128


@dataclass(frozen=True, slots=True)
class PageLists:
    """A step's lengths as FlashInfer reads them. `qo_indptr` [S + 1]: the first query of each sequence. `kv_indptr`:
    `indptr` above."""

    qo_indptr: list[int]
    kv_indptr: list[int]
    last_page_len: list[int]

    @classmethod
    def of(cls, q_lens: Sequence[int], seq_lens: Sequence[int], block_size: int) -> Self:
        """Padding has length 0 and counts as one token, so that the kernels read a block that exists."""
        lens = [max(length, 1) for length in seq_lens]
        pages = [-(-length // block_size) for length in lens]
        return cls(
            list(accumulate(q_lens, initial=0)),
            list(accumulate(pages, initial=0)),
            [length - (count - 1) * block_size for length, count in zip(lens, pages, strict=True)],
        )


def pick_template(q_lens: Sequence[int]) -> str:
    """FlashInfer's argument `backend`: "auto" takes the template for Hopper on Hopper GPUs; "fa2" splits keys."""
    return "auto" if min(q_lens, default=0) >= _UNDIVIDED_QUERIES else "fa2"


def workspace_bytes(layer: AttentionLayer, max_decodes: int, processors: int) -> int:
    """Bytes for the partial results of any step: float32 [tiles, rows of a tile, heads, head_dim + 1].

    `max_decodes`: sequences in the largest captured step. `processors`: streaming multiprocessors of the GPU. The
    bounds are those of FlashInfer's scheduler.cuh: a step whose keys are split has at most two tiles of up to 128 rows
    for each processor; a captured step has as many tiles as its decodes can need. The library refuses a plan that needs
    more.
    """
    group = layer.num_heads // layer.num_kv_heads
    rows = 16 if group <= 16 else 64 if group <= 64 else 128
    captured = (-(-max_decodes * group // rows) + max_decodes) * rows
    divided = -(-2 * processors // layer.num_kv_heads) * 128
    return max(_LEAST_WORKSPACE, max(captured, divided) * layer.num_heads * (layer.head_dim + 1) * 4 + (1 << 20))


class StepPages:
    """The `indices` of a step on the device, which its first layer fills. `indptr`: int32 [S + 1]."""

    def __init__(self, indptr: Tensor, indices: Tensor) -> None:
        self.indices = indices
        self._indptr = indptr
        self._tables: ref[Tensor] | None = None

    def fill(self, block_tables: Tensor) -> None:
        """Gather the indices from the block tables, once for each tensor. All layers of a step pass the same tensor."""
        if self._tables is None or self._tables() is not block_tables:
            gather_pages(block_tables, self._indptr, self.indices)
            self._tables = ref(block_tables)


class PlannedWrapper:
    """One of FlashInfer's wrappers. Its plan is copied to the device from one pinned buffer, which `plan` overwrites.
    So
    `plan` first waits until the previous plan has been copied."""

    def __init__(self, wrapper: Any, options: Mapping[str, Any], *, on_gpu: bool) -> None:
        self.wrapper = wrapper
        self._options = options
        self._copied = torch.cuda.Event() if on_gpu else None

    def plan(self, lists: PageLists, indices: Tensor) -> None:
        """Plan a step. `indices`: int32, the tensor that StepPages will fill; an empty tensor for a CUDA graph, which
        has its own buffer."""
        if self._copied is not None:
            self._copied.synchronize()
        qo_indptr, kv_indptr, last_page_len = (
            torch.tensor(values, dtype=torch.int32, pin_memory=self._copied is not None)
            for values in (lists.qo_indptr, lists.kv_indptr, lists.last_page_len)
        )
        self.wrapper.plan(
            qo_indptr=qo_indptr,
            paged_kv_indptr=kv_indptr,
            paged_kv_indices=indices,
            paged_kv_last_page_len=last_page_len,
            **self._options,
        )
        if self._copied is not None:
            self._copied.record()


def plan_options(layer: AttentionLayer, cache: KVCache, dtype: torch.dtype) -> dict[str, Any]:
    """The arguments of the library's `plan` that are the same in every step. `dtype`: of the queries."""
    return dict(
        num_qo_heads=layer.num_heads,
        num_kv_heads=layer.num_kv_heads,
        head_dim_qk=layer.head_dim,
        page_size=cache.block_size,
        causal=True,
        sm_scale=layer.scale,
        window_left=layer.sliding_window - 1 if layer.sliding_window else -1,  # without the query's own key
        logits_soft_cap=layer.softcap,
        q_data_type=dtype,
        kv_data_type=cache.dtype,
    )


@dataclass(frozen=True, slots=True)
class FlashInferPlan(LibraryPlan):
    """`wrapper`: FlashInfer's, already planned for the step."""

    wrapper: Any
    pages: StepPages

    def attend(
        self,
        q: Tensor,
        cache: KVCache,
        metadata: AttentionMetadata,
        *,
        scale: float,
        sliding_window: int,
        softcap: float,
    ) -> Tensor:
        self.pages.fill(metadata.block_tables)
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        self.wrapper.run(q, (cache.k, cache.v), out=out)
        return out


class FlashInferBackend:
    """`layers`, `caches`: of this rank. `dtype`: of the queries. `block_tables`: the runner's, int32 [max_num_seqs,
    blocks of the longest sequence].

    The constructor imports the library. Raises InvalidConfig if layers with equal heads and windows differ in scale or
    soft-cap.
    """

    warm_up_lengths: Sequence[int] = (2, _UNDIVIDED_QUERIES)
    short_queries = (1, 1)
    captures_chunks = False
    unmeasured_bytes = 0  # the constructor allocates the workspace

    def __init__(
        self, layers: Sequence[AttentionLayer], caches: Sequence[KVCache], dtype: torch.dtype, block_tables: Tensor
    ) -> None:
        self._device, self._on_gpu = block_tables.device, block_tables.device.type == "cuda"
        self._block_size = caches[0].block_size
        self._max_pages = block_tables.numel()
        self._options: dict[LayerKind, dict[str, Any]] = {}
        for layer, cache in zip(layers, caches, strict=True):
            options = plan_options(layer, cache, dtype)
            if self._options.setdefault(kind_of(layer), options) != options:
                raise InvalidConfig(
                    "attention-backend flashinfer takes one scale and soft-cap for layers with equal heads, and those "
                    f"of {layer.module} differ; use --attention-backend triton"
                )
        self._wrapper_type = import_module("flashinfer").BatchPrefillWithPagedKVCacheWrapper
        size = max(
            workspace_bytes(layer, len(block_tables), gpu_properties(self._device).processors) for layer in layers
        )
        self._workspace = torch.empty(size, dtype=torch.uint8, device=self._device)  # one for all wrappers
        # A step has up to two plans (see `make_plans`), so two wrappers alternate.
        self._turns = {
            (kind, template): cycle([self._make_wrapper(kind, backend=template) for _ in range(2)])
            for kind in self._options
            for template in ("fa2", "auto")
        }
        self._captured: dict[StepShape, list[PlannedWrapper]] = {}
        self._captured_indices: Tensor | None = None

    def make_plans(self, q_lens: Sequence[int], seq_lens: Sequence[int]) -> AttentionPlans:
        lists, template = PageLists.of(q_lens, seq_lens, self._block_size), pick_template(q_lens)
        indices = torch.empty(lists.kv_indptr[-1], dtype=torch.int32, device=self._device)
        indptr = torch.tensor(lists.kv_indptr, dtype=torch.int32, pin_memory=self._on_gpu)
        pages = StepPages(indptr.to(self._device, non_blocking=True), indices)
        plans = {}
        for kind in self._options:
            planned = next(self._turns[kind, template])
            if lists.qo_indptr[-1]:  # without queries nothing runs (see attend_cache)
                planned.plan(lists, indices)
            plans[kind] = FlashInferPlan(planned.wrapper, pages)
        return plans

    def num_ints(self, shape: StepShape) -> int:
        return 0

    def pack(self, shape: StepShape, q_lens: Sequence[int], seq_lens: Sequence[int]) -> NDArray[np.int32]:
        lists = PageLists.of(q_lens, seq_lens, self._block_size)
        for planned in self._captured[shape]:
            planned.plan(lists, torch.empty(0, dtype=torch.int32, device=self._device))
        return np.empty(0, np.int32)

    def view(self, shape: StepShape, packed: Tensor) -> AttentionPlans:
        if self._captured_indices is None:  # shared: graphs run one after another, and each fills it first
            self._captured_indices = torch.zeros(self._max_pages, dtype=torch.int32, device=self._device)
        qo_indptr, kv_indptr, last_page_len = (
            torch.zeros(shape.num_tokens + more, dtype=torch.int32, device=self._device) for more in (1, 1, 0)
        )
        made = {
            kind: self._make_wrapper(
                kind,
                backend="fa2",
                use_cuda_graph=True,
                qo_indptr_buf=qo_indptr,
                paged_kv_indptr_buf=kv_indptr,
                paged_kv_indices_buf=self._captured_indices,
                paged_kv_last_page_len_buf=last_page_len,
            )
            for kind in self._options
        }
        self._captured[shape] = list(made.values())
        pages = StepPages(kv_indptr, self._captured_indices)
        return {kind: FlashInferPlan(planned.wrapper, pages) for kind, planned in made.items()}

    def _make_wrapper(self, kind: LayerKind, **options: Any) -> PlannedWrapper:
        wrapper = self._wrapper_type(self._workspace, "HND", **options)
        return PlannedWrapper(wrapper, self._options[kind], on_gpu=self._on_gpu)
