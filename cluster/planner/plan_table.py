"""plan_tables: a Sizing as tables for a terminal."""

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from coatcheck.cluster.planner.sizing import Sizing


def plan_tables(sizing: Sizing) -> Group:
    """Whether the requested sequences fit, the memory that they take, and the same for other settings."""
    context, concurrency = sizing.context, sizing.settings.concurrency
    bandwidth = f"{sizing.settings.bandwidth / 1e12:g} TB/s"
    parts: list[RenderableType] = [_answer(sizing)]
    for title, table in (
        ("Bytes of one token", _layers(sizing)),
        ("Memory", _memory(sizing)),
        ("By kv-dtype", _kv_dtypes(sizing)),
        (f"With other KV heads: {concurrency:,} sequences of {context:,} tokens", _variants(sizing)),
        (f"By block size: lengths {sizing.lengths.source}", _block_sizes(sizing)),
        (f"Lower bound of a decode step: {context:,} tokens each, {bandwidth}", _floors(sizing)),
    ):
        parts += [Text(f"\n{title}", style="bold"), table]
    parts.insert(-2, _paging(sizing))
    parts += [Text(f"note: {note}", style="yellow") for note in sizing.notes]
    return Group(*parts)


def size(count: float) -> str:
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= factor:
            return f"{count / factor:,.1f} {unit}".replace(".0 ", " ")
    return f"{count:,.0f} B"


def duration(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f} µs" if seconds < 1e-3 else f"{seconds * 1e3:,.2f} ms"


def _answer(sizing: Sizing) -> Text:
    settings, cache = sizing.settings, sizing.cache
    fits = sizing.sequences >= settings.concurrency
    text = Text()
    text.append(f"{sizing.shape.name}: {sizing.sequences:,} sequences of {sizing.context:,} tokens fit at once", "bold")
    ranks = "one GPU" if cache.tp == 1 else f"{cache.tp} GPUs"
    text.append(f" on {ranks} of {size(settings.gpu_memory)}, kv-dtype {cache.whole.kv_dtype}.\n")
    if fits:
        text.append(
            f"The requested {settings.concurrency:,} fit, with room for {sizing.longest_context:,} tokens each."
        )
    else:
        text.append(f"The requested {settings.concurrency:,} do not fit", "bold red")
        text.append(f"; {settings.concurrency:,} sequences of {sizing.longest_context:,} tokens would fit. ")
        text.append("Raise --tp or --gpu-memory, choose a smaller --kv-dtype, or lower --context or --concurrency.")
    return text


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, show_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right")
    return table


def _layers(sizing: Sizing) -> Table:
    cache, tp = sizing.cache, sizing.cache.tp
    table = _table("layers", "KV heads", "elements", "all heads once", "per rank")
    for layer, count in sizing.layer_kinds():
        dims = f"{layer.head_dim} + {layer.value_dim}" if layer.value_dim else f"{layer.head_dim} latent"
        window = f", window {layer.sliding_window:,}" if layer.sliding_window else ""
        whole, rank = sizing.layer_bytes(layer, 1), sizing.layer_bytes(layer, tp)
        table.add_row(f"each of {count}{window}", str(layer.num_kv_heads), dims, f"{whole:,.0f}", f"{rank:,.0f}")
    whole, rank = cache.whole.bytes_per_token, cache.rank.bytes_per_token
    scales = cache.whole.scale_bytes_per_token
    table.add_row(f"all {len(cache.layers)}", "", "", f"{whole:,.0f}", f"{rank:,.0f}", style="bold")
    if scales:
        table.add_row("of that, scales", "", "", f"{scales:,.0f}", f"{cache.rank.scale_bytes_per_token:,.0f}")
    return table


def _memory(sizing: Sizing) -> Table:
    cache, context, concurrency = sizing.cache, sizing.context, sizing.settings.concurrency
    table = _table("", "all heads once", "per rank")
    table.add_row("weights", size(sizing.weight_bytes), size(sizing.budget.rank_weight_bytes))
    pool = sizing.num_blocks * cache.rank.bytes_per_block
    what = f"KV pool, {sizing.num_blocks:,} blocks of {cache.block_size} tokens"
    table.add_row(what, "", size(pool))
    for count in (1, concurrency) if concurrency > 1 else (1,):
        what = "one sequence" if count == 1 else f"{count:,} sequences"
        whole, rank = cache.sequence_bytes(context), cache.rank_sequence_bytes(context)
        table.add_row(f"{what} of {context:,} tokens", size(count * whole), size(count * rank))
    if any(layer.sliding_window for layer in cache.layers):
        windowed = cache.windowed_sequence_bytes(context)
        table.add_row("one, without blocks outside of windows", size(windowed), "")
    return table


def _kv_dtypes(sizing: Sizing) -> Table:
    table = _table("kv-dtype", "bytes a token", "of them scales", "blocks", "sequences")
    for name, cache, num_blocks in sizing.by_kv_dtype():
        table.add_row(
            name,
            f"{cache.whole.bytes_per_token:,.0f}",
            f"{cache.whole.scale_bytes_per_token:,.0f}",
            f"{num_blocks:,}",
            f"{sizing.sequences_of(num_blocks, sizing.context):,}",
        )
    return table


def _variants(sizing: Sizing) -> Table:
    context, concurrency = sizing.context, sizing.settings.concurrency
    table = _table("attention", "KV heads", "bytes a token", "all heads once", "per rank")
    for variant in sizing.variants():
        if variant.cache is None:
            table.add_row(variant.name, str(variant.kv_heads), "-", "-", f"tp {sizing.cache.tp} does not divide it")
            continue
        whole, rank = variant.cache.sequence_bytes(context), variant.cache.rank_sequence_bytes(context)
        table.add_row(
            variant.name,
            str(variant.kv_heads),
            f"{variant.cache.whole.bytes_per_token:,.0f}",
            size(concurrency * whole),
            size(concurrency * rank),
        )
    return table


def _block_sizes(sizing: Sizing) -> Table:
    table = _table("block size", "wasted", "sequences that fit")
    for block_size, waste, fit in sizing.by_block_size():
        table.add_row(str(block_size), f"{waste:.2%}", f"{fit:,}")
    return table


def _paging(sizing: Sizing) -> Text:
    lengths, block_size = sizing.lengths, sizing.cache.block_size
    paged = lengths.fit_paged(sizing.num_blocks, block_size)
    reserved = lengths.fit_reserved(sizing.num_blocks, block_size, sizing.context)
    ratio = f"{paged / reserved:.1f} times the {reserved:,}" if reserved else "none fit"
    left_out = f" {lengths.left_out:,} longer ones are not counted." if lengths.left_out else ""
    return Text(
        f"Paged, {paged:,} sequences of these lengths (mean {lengths.mean:,.0f}) fit: {ratio} with "
        f"{sizing.context:,} tokens reserved for each.{left_out}"
    )


def _floors(sizing: Sizing) -> Table:
    table = _table("sequences", "weights", "KV", "step", "tokens/s")
    for floor in sizing.floors():
        beyond = " (do not fit)" if floor.batch > sizing.sequences else ""
        table.add_row(
            f"{floor.batch:,}{beyond}",
            duration(floor.weights_seconds),
            duration(floor.kv_seconds),
            duration(floor.seconds),
            f"{floor.tokens_per_second:,.0f}",
        )
    return table
