"""FlashInfer and FlashAttention-3 as their documentation describes them, in float32 on a CPU.

Each reads keys and values through the arrays that it is given, so a wrong array gives a wrong result. The functions
keep the arguments of every call, which a test binds to the signatures of the real libraries.
"""

from __future__ import annotations

import math
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

Calls = list[tuple[str, tuple[Any, ...], dict[str, Any]]]


def attend(q: Tensor, k: Tensor, v: Tensor, *, scale: float, causal: bool, left: int, softcap: float) -> Tensor:
    """q [n, heads, dim], k, v [len, kv_heads, dim] of one sequence -> [n, heads, dim]; the last query sees all keys.

    `left`: keys before a query's own position that it sees; -1 for all."""
    groups = q.shape[1] // k.shape[1]
    keys, values = (x.float().repeat_interleave(groups, dim=1).transpose(0, 1) for x in (k, v))
    scores = scale * (q.float().transpose(0, 1) @ keys.transpose(1, 2))
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    position = torch.arange(len(k) - len(q), len(k))[:, None]
    key = torch.arange(len(k))[None]
    hidden = (key > position) & causal
    if left >= 0:
        hidden |= key < position - left
    return (scores.masked_fill(hidden, -math.inf).softmax(-1) @ values).transpose(0, 1).to(q.dtype)


def flash_attn_interface(calls: Calls) -> ModuleType:
    """FlashAttention-3's module: pages are [num_blocks, page_size, kv_heads, dim], found by page_table."""

    def flash_attn_with_kvcache(q: Tensor, k_cache: Tensor, v_cache: Tensor, **options: Any) -> Tensor:
        calls.append(("flash_attn_with_kvcache", (q, k_cache, v_cache), options))
        assert k_cache.stride(-1) == v_cache.stride(-1) == q.stride(-1) == 1
        table, lens, starts = options["page_table"], options["cache_seqlens"], options["cu_seqlens_q"]
        assert table.dtype == lens.dtype == starts.dtype == torch.int32 and table.stride(-1) == 1
        assert len(table) == len(lens) == len(starts) - 1 and starts[-1] == len(q)
        assert len(q) and starts.diff().max() <= options["max_seqlen_q"] and options["num_splits"] >= 1
        out = torch.zeros(q.shape, dtype=q.dtype)
        for row, length in enumerate(lens.tolist()):
            first, last = starts[row], starts[row + 1]
            if length == 0 or first == last:
                continue
            pages = table[row, : -(-length // k_cache.shape[1])].long()
            k, v = (part[pages].flatten(0, 1)[:length] for part in (k_cache, v_cache))
            left, right = options["window_size"]
            assert right == (-1 if left < 0 else 0)
            out[first:last] = attend(
                q[first:last], k, v, scale=options["softmax_scale"], causal=options["causal"], left=left,
                softcap=options["softcap"],
            )  # fmt: skip
        return out

    module = ModuleType("flash_attn_interface")
    module.flash_attn_with_kvcache = flash_attn_with_kvcache  # type: ignore[attr-defined]
    return module


def flashinfer(calls: Calls) -> ModuleType:
    """FlashInfer's module: pages are [num_blocks, kv_heads, page_size, dim] (HND), found by indptr and indices."""

    class BatchPrefillWithPagedKVCacheWrapper:
        def __init__(self, workspace: Tensor, layout: str, **options: Any) -> None:
            calls.append(("__init__", (workspace, layout), options))
            assert workspace.dtype == torch.uint8 and layout == "HND"
            self.buffers = options if options.pop("use_cuda_graph", False) else None
            self.backend = options["backend"]

        def plan(self, **options: Any) -> None:
            calls.append(("plan", (), options))
            starts, indptr, last = (
                options[name] for name in ("qo_indptr", "paged_kv_indptr", "paged_kv_last_page_len")
            )
            assert starts.dtype == indptr.dtype == last.dtype == torch.int32
            assert len(starts) == len(indptr) == len(last) + 1 and starts[0] == indptr[0] == 0
            assert all(1 <= length <= options["page_size"] for length in last.tolist())
            assert (indptr.diff() >= 1).all() and starts[-1] > 0
            self.options, self.starts, self.indptr, self.last = options, starts, indptr, last
            self.indices = options["paged_kv_indices"]
            if self.buffers is not None:  # what a graph reads has fixed addresses, and sequences a fixed number
                assert len(self.indices) <= len(self.buffers["paged_kv_indices_buf"])
                self.buffers["qo_indptr_buf"].copy_(starts)
                self.buffers["paged_kv_indptr_buf"].copy_(indptr)
                self.buffers["paged_kv_last_page_len_buf"].copy_(last)
                self.buffers["paged_kv_indices_buf"][: len(self.indices)] = self.indices
                self.starts, self.indptr, self.indices, self.last = (
                    self.buffers[f"{name}_buf"]
                    for name in ("qo_indptr", "paged_kv_indptr", "paged_kv_indices", "paged_kv_last_page_len")
                )

        def run(self, q: Tensor, pages: tuple[Tensor, Tensor], *, out: Tensor) -> Tensor:
            calls.append(("run", (q, pages), {"out": out}))
            options, size = self.options, self.options["page_size"]
            k_cache, v_cache = pages
            assert k_cache.stride() == v_cache.stride() and k_cache.shape[2] == size
            assert (q.shape[1], k_cache.shape[1]) == (options["num_qo_heads"], options["num_kv_heads"])
            assert q.shape[2] == k_cache.shape[3] == options["head_dim_qk"] and len(q) == self.starts[-1]
            assert q.dtype == options["q_data_type"] and k_cache.dtype == options["kv_data_type"]
            for row, last in enumerate(self.last.tolist()):
                first, end = self.starts[row], self.starts[row + 1]
                chosen = self.indices[self.indptr[row] : self.indptr[row + 1]].long()
                length = (len(chosen) - 1) * size + last
                k, v = (part[chosen].transpose(1, 2).flatten(0, 1)[:length] for part in pages)
                if first < end:
                    out[first:end] = attend(
                        q[first:end], k, v, scale=options["sm_scale"], causal=options["causal"],
                        left=options["window_left"], softcap=options["logits_soft_cap"] or 0.0,
                    )  # fmt: skip
            return out

    module = ModuleType("flashinfer")
    module.BatchPrefillWithPagedKVCacheWrapper = BatchPrefillWithPagedKVCacheWrapper  # type: ignore[attr-defined]
    return module
