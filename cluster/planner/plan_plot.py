"""plot_sizing: a Sizing as a picture of four panels. Needs matplotlib, the `plot` extra."""

from pathlib import Path
from typing import Any

from coatcheck.cluster.planner.capacity import KvCacheSpec
from coatcheck.cluster.planner.sizing import Sizing
from coatcheck.proto.errors import InvalidConfig
from coatcheck.workers.core.kv_dtype import KV_DTYPES

_STEPS = 24  # points along a logarithmic axis


def plot_sizing(sizing: Sizing, path: Path) -> None:
    """Write the picture to `path`. Raise InvalidConfig without matplotlib, or if the file cannot be written."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise InvalidConfig("--plot needs matplotlib: pip install matplotlib") from None
    figure = Figure(figsize=(11, 7.5), layout="constrained")
    FigureCanvasAgg(figure)
    ((fits, heads), (waste, step_times)) = figure.subplots(2, 2)
    _plot_sequences(fits, sizing)
    _plot_kv_heads(heads, sizing)
    _plot_waste(waste, sizing)
    _plot_step_times(step_times, sizing)
    figure.suptitle(
        f"{sizing.shape.name} · tp {sizing.cache.tp} · {sizing.settings.gpu_memory / 2**30:,.0f} GiB a GPU · "
        f"{sizing.sequences:,} sequences of {sizing.context:,} tokens in {sizing.cache.whole.kv_dtype}"
    )
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise InvalidConfig(f"cannot write the plot {path}: {error}") from None


def _plot_sequences(axes: Any, sizing: Sizing) -> None:
    axes.set(title="sequences that fit, by kv-dtype", xlabel="tokens of each", xscale="log", yscale="log")
    axes.grid(alpha=0.3)
    longest = max(sizing.context, sizing.shape.max_model_len or 0)
    contexts = _log_spaced(min(256, longest), longest)
    names: dict[int, list[str]] = {}  # kv-dtypes of one size share a line
    for row in sizing.kv_dtype_rows():
        names.setdefault(row["num_blocks"], []).append(row["kv_dtype"])
    for num_blocks, same in names.items():
        whole = sizing.cache
        cache = KvCacheSpec.of(whole.layers, whole.shard, whole.block_size, KV_DTYPES[same[0]])
        fits = [sizing.count_sequences(cache, num_blocks, cache.count_blocks(context)) for context in contexts]
        counts = [count or float("nan") for count in fits]
        axes.plot(contexts, counts, label=", ".join(same))
    axes.axvline(sizing.context, linestyle=":", color="grey")
    axes.axhline(sizing.settings.concurrency, linestyle=":", color="grey")
    axes.legend()


def _plot_kv_heads(axes: Any, sizing: Sizing) -> None:
    concurrency, context = sizing.settings.concurrency, sizing.context
    axes.set(title=f"KV of {concurrency:,} × {context:,} tokens", xlabel="GiB, all heads once")
    axes.grid(alpha=0.3, axis="x")
    rows = [row for row in reversed(sizing.variant_rows()) if row["concurrent_bytes"] is not None]
    names = [row["name"].replace(", ", ",\n") for row in rows]
    bars = axes.barh(names, [row["concurrent_bytes"] / 2**30 for row in rows], alpha=0.7)
    axes.bar_label(bars, fmt="{:,.1f}", padding=3)
    axes.margins(x=0.15)


def _plot_waste(axes: Any, sizing: Sizing) -> None:
    rows = sizing.block_size_rows()
    axes.set(title=f"slots wasted, lengths {sizing.lengths.source}", xlabel="block size", ylabel="percent")
    axes.grid(alpha=0.3, axis="y")
    bars = axes.bar([str(row["block_size"]) for row in rows], [row["waste"] * 100 for row in rows], alpha=0.7)
    axes.bar_label(bars, fmt="{:.2g}%")
    axes.margins(y=0.1)


def _plot_step_times(axes: Any, sizing: Sizing) -> None:
    axes.set(
        title=f"lower bound of a decode step, {sizing.settings.bandwidth / 1e12:g} TB/s", xlabel="sequences",
        ylabel="milliseconds", xscale="log",
    )  # fmt: skip
    axes.grid(alpha=0.3)
    batches = _log_spaced(1, max(sizing.sequences, sizing.settings.concurrency, 2))
    rows = [sizing.step_time_row(batch) for batch in batches]
    weights, kv = ([row[field] * 1e3 for row in rows] for field in ("weights_seconds", "kv_seconds"))
    axes.stackplot(batches, weights, kv, labels=["weights", f"KV of {sizing.context:,} tokens each"], alpha=0.7)
    if 0 < sizing.sequences < batches[-1]:
        axes.axvline(sizing.sequences, linestyle=":", color="red", label="what fits")
    axes.legend(loc="upper left")


def _log_spaced(first: int, last: int) -> list[int]:
    """Up to 25 distinct integers from `first` to `last`, evenly spaced on a logarithmic axis."""
    ratio = last / first
    return sorted({round(first * ratio ** (step / _STEPS)) for step in range(_STEPS + 1)})
