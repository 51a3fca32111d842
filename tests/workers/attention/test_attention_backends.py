"""FlashInfer and FlashAttention-3 as backends: the arrays and options that they get, and the tokens that come out.

The libraries run on GPUs alone. Functions that read the documented layout stand in for them (reference_libraries.py).
Where a library is installed, every recorded call is bound to its real signature.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from coatcheck.cluster.config.serve_config import ServeConfig
from coatcheck.cluster.preflight.machine import check_attention_backend
from coatcheck.kernels.attention.page_indices import gather_pages
from coatcheck.kernels.attention.paged_attention import paged_attention_reference
from coatcheck.kernels.kv.kv_cache import KVCache
from coatcheck.proto.errors import InvalidConfig
from coatcheck.workers.attention.attention import AttentionLayer, attend_cache, kind_of
from coatcheck.workers.attention.attention_backend import AttentionBackend, StepShape
from coatcheck.workers.attention.attention_metadata import AttentionMetadata
from coatcheck.workers.attention.fa3_backend import Fa3Backend, choose_num_splits
from coatcheck.workers.attention.flashinfer_backend import FlashInferBackend, PageLists, pick_template, workspace_bytes
from coatcheck.workers.core.attention_selector import LIBRARIES
from coatcheck.workers.core.group_config import GroupConfig
from coatcheck.workers.distributed.communicator import Communicator
from coatcheck.workers.model.model import load_model
from coatcheck.workers.rank_loading import check_attention_library
from coatcheck.workers.runner.graph_shapes import GraphSizes
from tests.kernels.attention_batch import Batch, close
from tests.workers.attention.reference_libraries import Calls, flash_attn_interface, flashinfer
from tests.workers.checkpoints import tiny_checkpoint
from tests.workers.runner.padded_steps import load, make_runner, serve

BACKENDS = ["flashinfer", "fa3"]
_MODULES = {"flashinfer": "flashinfer", "fa3": "flash_attn_interface"}
_LAYERS = {
    "full": AttentionLayer(4, 2, 64, module="a", scale=0.11),
    "window": AttentionLayer(4, 2, 64, module="b", scale=0.125, sliding_window=21),
    "one key": AttentionLayer(4, 2, 64, module="c", scale=0.125, sliding_window=1),
    "soft-cap": AttentionLayer(4, 2, 64, module="d", scale=0.3, softcap=5.0),
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The calls of both libraries, which the references replace."""
    made: Calls = []
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer(made))
    monkeypatch.setitem(sys.modules, "flash_attn_interface", flash_attn_interface(made))
    return made


def make_backend(name: str, layer: AttentionLayer, batch: Batch) -> AttentionBackend:
    if name == "fa3":
        return Fa3Backend([layer])
    return FlashInferBackend([layer], [batch.cache], batch.q.dtype, batch.block_tables)


def metadata_of(batch: Batch, plans: Any) -> AttentionMetadata:
    slots = torch.zeros(len(batch.q), dtype=torch.int64)
    return AttentionMetadata(slots, batch.block_tables, batch.seq_lens, batch.cu_seqlens_q, plans=plans)


def expected(q: Tensor, cache: KVCache, layer: AttentionLayer, metadata: AttentionMetadata) -> Tensor:
    out = torch.zeros(q.shape)
    paged_attention_reference(
        q, cache, metadata.block_tables, metadata.seq_lens, metadata.cu_seqlens_q, layer.scale, layer.sliding_window,
        layer.softcap, None, out,
    )  # fmt: skip
    return out


@pytest.mark.parametrize("layer", _LAYERS.values(), ids=_LAYERS)
@pytest.mark.parametrize("name", BACKENDS)
@pytest.mark.parametrize(
    "lengths",
    [[(1, 1)], [(1, 33), (1, 16), (1, 7)], [(40, 40), (1, 100), (5, 21), (17, 64)], [(130, 150), (128, 128)]],
    ids=["one", "decodes", "mixed", "chunks"],
)
def test_a_step_equals_the_reference(
    name: str, layer: AttentionLayer, lengths: list[tuple[int, int]], calls: Calls
) -> None:
    """Decodes, chunks behind a prefix and whole prompts, over shuffled blocks of a pool with free strides, give what
    the float32 reference gives; with windows and soft-caps too."""
    batch = Batch(lengths, 4, 2, 64, torch.float16)
    backend = make_backend(name, layer, batch)
    metadata = metadata_of(batch, backend.make_plans(*(list(part) for part in zip(*lengths, strict=True))))
    want = expected(batch.q, batch.cache, layer, metadata)
    for _ in range(2):  # the second layer of a kind
        close(attend_cache(batch.q, batch.cache, layer, metadata), want)


@pytest.mark.parametrize("name", BACKENDS)
def test_tokens_that_need_logits_have_a_plan_of_their_own(name: str, calls: Calls) -> None:
    """Both plans of a step are made before its layers run. The last layer's queries are a part of the step's, and a
    sequence may have none of them."""
    lengths, layer = [(5, 21), (3, 40), (1, 8)], _LAYERS["full"]
    batch = Batch(lengths, 4, 2, 64, torch.float16)
    backend = make_backend(name, layer, batch)
    last = backend.make_plans([1, 0, 1], [21, 40, 8])
    whole = metadata_of(batch, backend.make_plans([5, 3, 1], [21, 40, 8]))
    close(attend_cache(batch.q, batch.cache, layer, whole), expected(batch.q, batch.cache, layer, whole))
    starts = torch.tensor([0, 1, 1, 2], dtype=torch.int32)
    part = AttentionMetadata(whole.slot_mapping, batch.block_tables, batch.seq_lens, starts, plans=last)
    q = batch.q[[4, 8]]
    close(attend_cache(q, batch.cache, layer, part), expected(q, batch.cache, layer, part))


@pytest.mark.parametrize("name", BACKENDS)
def test_a_step_whose_tokens_need_no_logits_runs_nothing_for_them(name: str, calls: Calls) -> None:
    """The chunk of a prompt that does not end in this step leaves the last layer no query. The libraries are not
    called."""
    layer, batch = _LAYERS["full"], Batch([(5, 21)], 4, 2, 64, torch.float16)
    backend = make_backend(name, layer, batch)
    before = len(calls)
    metadata = metadata_of(batch, backend.make_plans([0], [21]))
    assert attend_cache(batch.q[:0], batch.cache, layer, metadata).shape == (0, 4, 64)
    assert len(calls) == before


@pytest.mark.parametrize("name", BACKENDS)
def test_a_captured_step_reads_fixed_buffers(name: str, calls: Calls) -> None:
    """A view is made once for a shape. Each packed step with padding then gives the reference's results, without new
    buffers."""
    layer, shape = _LAYERS["window"], StepShape(4, True, False)
    first = Batch([(1, 33), (1, 16), (1, 90), (1, 1)], 4, 2, 64, torch.float16)
    backend = make_backend(name, layer, first)
    plans = backend.view(shape, torch.empty(backend.num_ints(shape), dtype=torch.int32))
    assert list(plans) == [kind_of(layer)]
    for lens in ([33, 16, 90, 1], [5, 64]):
        batch = Batch([(1, length) for length in lens], 4, 2, 64, torch.float16)
        padding = 4 - len(lens)
        packed = backend.pack(shape, [1] * 4, [*lens, *[0] * padding])
        assert len(packed) == backend.num_ints(shape)
        q = torch.cat((batch.q, batch.q[:1].expand(padding, -1, -1)))
        tables = torch.cat((batch.block_tables, batch.block_tables[:1].expand(padding, -1)))
        seq_lens = torch.tensor([*lens, *[0] * padding], dtype=torch.int32)
        slots, starts = torch.zeros(4, dtype=torch.int64), torch.arange(5, dtype=torch.int32)
        metadata = AttentionMetadata(slots, tables, seq_lens, starts, plans=plans)
        have = attend_cache(q, batch.cache, layer, metadata)[: len(lens)]
        close(have, expected(q, batch.cache, layer, metadata)[: len(lens)])


@pytest.mark.parametrize("name", BACKENDS)
def test_a_model_says_the_same_tokens(name: str, calls: Calls, tmp_path: Path) -> None:
    """Requests through engine, runner and a model with windows in some layers: chunked prompts, mixed steps, decodes,
    prefix blocks that are evicted, with and without padded steps. The tokens are those of the kernels."""
    path = tiny_checkpoint("gemma2", tmp_path, head_dim=64, sliding_window=8)
    model = load(path, "float16")  # the C library has no float16, so every layer calls attend_cache
    sizes = GraphSizes((2, 4, 8), (6, 12))
    plain, none = serve(make_runner(model, GraphSizes()))
    assert none == []
    for graph_sizes in (GraphSizes(), sizes):
        runner = make_runner(model, graph_sizes, attention_backend=name)
        runner.graphs.capture()
        runner.pool.fill_(255)
        said, padded = serve(runner)
        assert said == plain
        assert bool(padded) == bool(graph_sizes.decodes)
        has_chunks = any(shape is not None and shape.has_wide for shape in padded)
        assert has_chunks == (name == "fa3" and graph_sizes is sizes)
    assert {call for call, _, _ in calls} == (
        {"flash_attn_with_kvcache"} if name == "fa3" else {"__init__", "plan", "run"}
    )


@given(
    rows=st.lists(st.tuples(st.integers(0, 9), st.integers(0, 200)), min_size=1, max_size=12),
    size=st.sampled_from([8, 16, 64]),
)
@settings(deadline=None)
def test_page_lists_name_every_key_once(rows: list[tuple[int, int]], size: int) -> None:
    """A sequence's pages have its length in tokens, and padding has one token."""
    lists = PageLists.of([q for q, _ in rows], [length for _, length in rows], size)
    assert lists.qo_indptr[0] == lists.kv_indptr[0] == 0
    for row, (q_len, seq_len) in enumerate(rows):
        assert lists.qo_indptr[row + 1] - lists.qo_indptr[row] == q_len
        pages = lists.kv_indptr[row + 1] - lists.kv_indptr[row]
        assert 1 <= lists.last_page_len[row] <= size
        assert (pages - 1) * size + lists.last_page_len[row] == max(seq_len, 1)


def test_pages_are_gathered_from_the_used_part_of_each_row() -> None:
    """Rows of different lengths, one of them empty, out of a table with a wider stride."""
    tables = torch.arange(60, dtype=torch.int32).reshape(4, 15)[:, :12]
    indices = torch.full((16,), -1, dtype=torch.int32)
    gather_pages(tables, torch.tensor([0, 12, 12, 13, 15], dtype=torch.int32), indices)
    assert indices.tolist() == [*range(12), 30, 45, 46, -1]


def test_splits_are_bounded_by_their_memory() -> None:
    """Decodes get 32 splits at most, and a long chunk few or one; partial results stay below 128 MiB."""
    assert [choose_num_splits(tokens, 32, 128) for tokens in (1, 256, 512, 2048, 8192)] == [32, 32, 16, 4, 1]
    assert choose_num_splits(65536, 128, 256) == 1


def test_the_pool_leaves_room_for_splits(calls: Calls) -> None:
    """The largest step of a start has one split. What others take is counted: 128 MiB, and a float for each row."""
    assert Fa3Backend([_LAYERS["full"]]).unmeasured_bytes == (128 << 20) + (128 << 20) // 64


def test_the_workspace_holds_the_largest_plan() -> None:
    """At least what FlashInfer recommends. 512 decodes with 64 heads over 8 need 768 tiles of 16 rows, and a divided
    chunk with one KV head 264 tiles of 128."""
    assert workspace_bytes(_LAYERS["full"], 8, 132) == 128 << 20
    large = AttentionLayer(64, 8, 128, module="", scale=1.0)
    assert workspace_bytes(large, 512, 132) == 768 * 16 * 64 * 129 * 4 + (1 << 20)
    single = AttentionLayer(16, 1, 128, module="", scale=1.0)
    assert workspace_bytes(single, 8, 132) == 264 * 128 * 16 * 129 * 4 + (1 << 20)


def test_steps_of_long_chunks_take_the_template_for_hopper() -> None:
    """That template does not divide keys, so a decode or a short chunk behind a long prefix does not take it."""
    assert [pick_template(lens) for lens in ([128, 500], [1, 500], [1], [0, 1])] == ["auto", "fa2", "fa2", "fa2"]


def test_layers_of_one_kind_with_two_scales_are_refused(calls: Calls) -> None:
    """FlashInfer plans with one scale, so layers that share a plan must share it."""
    batch = Batch([(1, 5)], 4, 2, 64, torch.float16)
    layers = [_LAYERS["full"], _LAYERS["soft-cap"]]
    with pytest.raises(InvalidConfig, match="and those of d differ; use --attention-backend triton"):
        FlashInferBackend(layers, [batch.cache] * 2, batch.q.dtype, batch.block_tables)


def test_a_rank_refuses_before_it_reads_weights(tmp_path: Path) -> None:
    """A model or a pool that a backend cannot serve is refused while no weight is read."""
    path, read = tiny_checkpoint("llama", tmp_path, head_dim=16), list[int]()

    def load_with(**options: Any) -> None:
        load_model(
            path, communicator=Communicator(), device="cpu", progress=lambda done, total: read.append(done), **options
        )

    for options, said in (
        (dict(attention_backend="flashinfer", dtype="bfloat16"), "takes a head_dim of 64, 128 or 256"),
        (dict(attention_backend="fa3", dtype="float32"), "the model is float32; set --dtype bfloat16"),
        (dict(attention_backend="fa3", dtype="bfloat16", kv_dtype="fp8"), "pool of kv-dtype fp8"),
        (dict(attention_backend="fa3", dtype="bfloat16", deterministic=True), "leave --deterministic out"),
    ):
        with pytest.raises(InvalidConfig, match=said):
            load_with(**options)
    assert not read
    load_with(attention_backend="triton", dtype="bfloat16", kv_dtype="fp8")
    assert read


def test_a_library_that_cannot_be_imported_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A rank names an absent library, one that raises at import, and a device without GPUs. auto needs none."""
    config = GroupConfig("g", "m", "m")
    check_attention_library(config, torch.device("cpu"))
    with pytest.raises(InvalidConfig, match="fa3 is for NVIDIA GPUs, and the device is a CPU"):
        check_attention_library(replace(config, attention_backend="fa3"), torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.version, "hip", None)
    library = LIBRARIES["fa3"].module
    (tmp_path / f"{library}.py").write_text("raise OSError('libcudart.so.12: cannot open\\nmore')")
    gpu, chosen = torch.device("cuda", 0), replace(config, attention_backend="fa3")
    if importlib.util.find_spec(library) is None:
        with pytest.raises(InvalidConfig, match=f"is not installed .Python finds no module {library}.; build Flash"):
            check_attention_library(chosen, gpu)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InvalidConfig, match="cannot be imported .OSError: libcudart.so.12: cannot open.; build"):
        check_attention_library(chosen, gpu)


def test_serve_asks_for_the_library_before_ray_starts(tmp_path: Path) -> None:
    """On this host, which has the device file of a GPU or not. A Ray cluster has other hosts, whose ranks check."""
    (tmp_path / "nvidia0").touch()
    config = ServeConfig.build({"model": "m/m", "attention_backend": "fa3"})
    with pytest.raises(InvalidConfig, match="is for NVIDIA GPUs, and the device is a CPU"):
        check_attention_backend(config, tmp_path / "none")
    if importlib.util.find_spec("flash_attn_interface") is None:
        with pytest.raises(InvalidConfig, match="is not installed"):
            check_attention_backend(config, tmp_path)
    check_attention_backend(config.model_copy(update={"ray_address": "auto"}), tmp_path)
    check_attention_backend(config.model_copy(update={"attention_backend": "triton"}), tmp_path)


@pytest.mark.parametrize("name", BACKENDS)
def test_calls_fit_the_real_signatures(name: str, request: pytest.FixtureRequest) -> None:
    """Every call that the other tests show to be right binds to the signature of the installed library."""
    if importlib.util.find_spec(_MODULES[name]) is None:
        pytest.skip(f"{_MODULES[name]} is not installed")
    library = importlib.import_module(_MODULES[name])
    owner = library if name == "fa3" else library.BatchPrefillWithPagedKVCacheWrapper
    made: Calls = request.getfixturevalue("calls")
    batch, layer = Batch([(1, 33), (130, 140)], 4, 2, 64, torch.float16), _LAYERS["window"]
    backend = make_backend(name, layer, batch)
    plans = backend.make_plans([1, 130], [33, 140])
    attend_cache(batch.q, batch.cache, layer, metadata_of(batch, plans))
    backend.view(StepShape(2, True, False), torch.empty(0, dtype=torch.int32))
    backend.pack(StepShape(2, True, False), [1, 1], [33, 0])
    assert made
    for call, positional, options in made:
        own = positional if name == "fa3" else (None, *positional)
        inspect.signature(getattr(owner, call)).bind(*own, **options)
