"""plan_tables: a Sizing as tables for a terminal."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rich import box
from rich.console import Group
from rich.table import Table
from rich.text import Text

from coatcheck.cluster.planner.sizing import Sizing


def plan_tables(sizing: Sizing) -> Group:
    """Whether the requested sequences fit, the memory that they take, and the same for other settings."""
    context, concurrency = sizing.context, sizing.settings.concurrency
    bandwidth = f"{sizing.settings.bandwidth / 1e12:g} TB/s"
    does_not_divide = f"tp {sizing.cache.tp} does not divide it"
    kv_dtypes = _table(
        sizing.kv_dtype_rows(),
        ("kv-dtype", "kv_dtype", str),
        ("bytes a token", "bytes_per_token", _number),
        ("of them scales", "scale_bytes_per_token", _number),
        ("blocks", "num_blocks", _number),
        ("sequences", "sequences", _number),
    )
    heads = sizing.variant_rows()
    variants = _table(
        heads,
        ("attention", "name", str),
        ("KV heads", "kv_heads", str),
        ("bytes a token", "bytes_per_token", lambda count: "-" if count is None else _number(count)),
        ("all heads once", "concurrent_bytes", lambda count: "-" if count is None else size(count)),
        ("per rank", "rank_concurrent_bytes", lambda count: does_not_divide if count is None else size(count)),
    )
    block_sizes = _table(
        sizing.block_size_rows(),
        ("block size", "block_size", str),
        ("wasted", "waste", "{:.2%}".format),
        ("sequences that fit", "sequences", _number),
    )
    step_times = _table(
        sizing.step_time_rows(),
        ("sequences", "batch", lambda batch: f"{batch:,}{' (do not fit)' if batch > sizing.sequences else ''}"),
        ("weights", "weights_seconds", duration),
        ("KV", "kv_seconds", duration),
        ("step", "seconds", duration),
        ("tokens/s", "tokens_per_second", _number),
    )
    return Group(
        _answer(sizing),
        *_titled("Bytes of one token", _layers(sizing)),
        *_titled("Memory", _memory(sizing)),
        *_titled("By kv-dtype", kv_dtypes),
        *(_titled(f"With other KV heads: {concurrency:,} sequences of {context:,} tokens", variants) if heads else ()),
        *_titled(f"By block size: lengths {sizing.lengths.source}", block_sizes),
        _paging(sizing),
        *_titled(f"Lower bound of a decode step: {context:,} tokens each, {bandwidth}", step_times),
        *(Text(f"note: {note}", style="yellow") for note in sizing.notes),
    )


def _titled(title: str, table: Table) -> tuple[Text, Table]:
    return Text(f"\n{title}", style="bold"), table


def _number(count: float) -> str:
    return f"{count:,.0f}"


def size(count: float) -> str:
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= factor:
            return f"{count / factor:,.1f} {unit}".replace(".0 ", " ")
    return f"{count:,.0f} B"


def duration(seconds: float) -> str:
    return f"{seconds * 1e6:,.0f} µs" if seconds < 1e-3 else f"{seconds * 1e3:,.2f} ms"


def _answer(sizing: Sizing) -> Text:
    settings, cache = sizing.settings, sizing.cache
    text = Text()
    text.append(f"{sizing.shape.name}: {sizing.sequences:,} sequences of {sizing.context:,} tokens fit at once", "bold")
    ranks = "one GPU" if cache.tp == 1 else f"{cache.tp} GPUs"
    text.append(f" on {ranks} of {size(settings.gpu_memory)}, kv-dtype {cache.whole.kv_dtype}.\n")
    if sizing.sequences >= settings.concurrency:
        maximum = sizing.shape.max_model_len
        room = f"{sizing.longest_context:,} tokens"
        if maximum is not None and sizing.longest_context >= maximum >= sizing.context:
            room = f"the model's maximum of {maximum:,} tokens"
        text.append(f"--concurrency {settings.concurrency:,} fits, with room for {room} each.")
    else:
        text.append(f"--concurrency {settings.concurrency:,} does not fit", "bold red")
        text.append(f"; {settings.concurrency:,} sequences of {sizing.longest_context:,} tokens would fit. ")
        text.append("Raise --tp or --gpu-memory, choose a smaller --kv-dtype, or lower --context or --concurrency.")
    if settings.context is None:
        text.append(f"\n{_default_context(sizing)}")
    return text


def _default_context(sizing: Sizing) -> str:
    """Where the context comes from if --context is not given."""
    maximum = sizing.shape.max_model_len
    if maximum == sizing.context:
        return f"--context is not given: it is the model's maximum, {maximum:,} tokens."
    known = f"; the model's maximum is {maximum:,}" if maximum is not None else ""
    return f"--context is not given: its default is {sizing.context:,} tokens{known}."


def _table(rows: Iterable[Mapping[str, Any]], *columns: tuple[str, str, Callable[[Any], str]]) -> Table:
    """A line for each row. A column is its heading, the row's field, and the field's text."""
    table = _empty_table(*(heading for heading, _, _ in columns))
    for row in rows:
        table.add_row(*(show(row[field]) for _, field, show in columns))
    return table


def _empty_table(*headings: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, show_edge=False)
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="left" if index == 0 else "right")
    return table


def _layers(sizing: Sizing) -> Table:
    whole, rank = sizing.cache.whole, sizing.cache.rank
    table = _empty_table("layers", "KV heads", "elements", "all heads once", "per rank")
    for row in sizing.layer_rows():
        dims = f"{row['head_dim']} + {row['value_dim']}" if row["value_dim"] else f"{row['head_dim']} latent"
        window = f", window {row['sliding_window']:,}" if row["sliding_window"] else ""
        sizes = _number(row["bytes_per_token"]), _number(row["rank_bytes_per_token"])
        table.add_row(f"each of {row['count']}{window}", str(row["kv_heads"]), dims, *sizes)
    sizes = _number(whole.bytes_per_token), _number(rank.bytes_per_token)
    table.add_row(f"all {len(sizing.cache.stored_layers)}", "", "", *sizes, style="bold")
    if whole.scale_bytes_per_token:
        sizes = _number(whole.scale_bytes_per_token), _number(rank.scale_bytes_per_token)
        table.add_row("of that, scales", "", "", *sizes)
    return table


def _memory(sizing: Sizing) -> Table:
    cache, context, concurrency = sizing.cache, sizing.context, sizing.settings.concurrency
    table = _empty_table("", "all heads once", "per rank")
    table.add_row("weights", size(sizing.weight_bytes), size(sizing.rank_weight_bytes))
    pool = sizing.num_blocks * cache.rank.bytes_per_block
    what = f"KV pool, {sizing.num_blocks:,} blocks of {cache.block_size} tokens"
    table.add_row(what, "", size(pool))
    for count in (1, concurrency) if concurrency > 1 else (1,):
        what = "one sequence" if count == 1 else f"{count:,} sequences"
        whole, rank = cache.sequence_bytes(context), cache.rank_sequence_bytes(context)
        table.add_row(f"{what} of {context:,} tokens", size(count * whole), size(count * rank))
    if sizing.rank_state_bytes:
        table.add_row(f"states of {concurrency:,} sequences", "", size(concurrency * sizing.rank_state_bytes))
    if any(layer.sliding_window for layer in cache.layers):
        windowed = cache.windowed_sequence_bytes(context)
        table.add_row("one, without blocks outside of windows", size(windowed), "")
    return table


def _paging(sizing: Sizing) -> Text:
    lengths, paged, reserved = sizing.lengths, sizing.paged_sequences, sizing.reserved_sequences
    ratio = f"{paged / reserved:.1f} times the {reserved:,}" if reserved else "none fit"
    left_out = f" {lengths.left_out:,} longer ones are not counted." if lengths.left_out else ""
    return Text(
        f"Paged, {paged:,} sequences of these lengths (mean {lengths.mean:,.0f}) fit: {ratio} with "
        f"{sizing.context:,} tokens reserved for each.{left_out}"
    )
