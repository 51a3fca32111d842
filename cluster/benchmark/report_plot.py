"""plot_report: a run as a picture of four panels. Needs matplotlib, the `plot` extra."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from coatcheck.cluster.benchmark.report import Report, RequestSample
from coatcheck.proto.errors import InvalidConfig


def check_plot(path: Path) -> None:
    """Raise InvalidConfig if matplotlib is missing or `path` cannot be written, before a run starts."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError:
        raise InvalidConfig("--plot needs matplotlib: pip install matplotlib") from None
    formats = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix[1:].lower() not in formats:
        raise InvalidConfig(f"--plot {path}: the name must end in one of .{', .'.join(sorted(formats))}")
    if not path.parent.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK) or path.is_dir():
        raise InvalidConfig(f"--plot {path} cannot be written; name a file in an existing directory")


def plot_report(report: Report, samples: Sequence[RequestSample], path: Path) -> None:
    """Write the picture to `path`. Call `check_plot` before the run."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    FigureCanvasAgg(figure)
    ((first, gaps), (rate, running)) = figure.subplots(2, 2)
    _plot_distribution(first, "time to the first token", [sample.ttft for sample in samples])
    _plot_distribution(gaps, "gap between messages (ITL)", [gap for sample in samples for gap in sample.gaps])
    _plot_throughput(rate, samples, report.seconds)
    _plot_in_flight(running, samples, report.seconds)
    figure.suptitle(
        f"{report.succeeded} of {report.requests} requests · {report.output_tokens_per_second:.0f} output tokens/s · "
        f"TTFT p50 {report.ttft_ms.p50:.0f} ms, p99 {report.ttft_ms.p99:.0f} ms"
        if report.ttft_ms
        else "no request was answered"
    )
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise InvalidConfig(f"cannot write the plot {path}: {error}") from None


def _plot_distribution(axes: Any, title: str, seconds: Sequence[float]) -> None:
    axes.set(title=title, xlabel="milliseconds", ylabel="share of all", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    if not seconds:
        return
    values = np.sort(np.asarray(seconds)) * 1000
    axes.step(values, np.arange(1, values.size + 1) / values.size, where="post")
    for share in (50, 99):
        at = float(np.percentile(values, share))
        axes.axvline(at, linestyle=":", color="grey")
        # The label of p99 is left of its line, which may be at the right edge.
        side = "right" if share == 99 else "left"
        axes.annotate(f" p{share}: {at:.{0 if at >= 10 else 1}f} ", (at, 0.04), color="dimgrey", ha=side)


def _plot_throughput(axes: Any, samples: Sequence[RequestSample], seconds: float) -> None:
    axes.set(title="output", xlabel="seconds", ylabel="tokens/s")
    axes.grid(alpha=0.3)
    arrivals = [arrival for sample in samples for arrival in sample.arrivals]
    # About sixty bars of at least 0.1 s.
    width = max(0.1, seconds / 60)
    edges = np.arange(0.0, seconds + width, width)
    counts, _ = np.histogram([at for at, _ in arrivals], bins=edges, weights=[count for _, count in arrivals])
    axes.stairs(counts / width, edges, fill=True, alpha=0.6)
    axes.set_ylim(bottom=0)


def _plot_in_flight(axes: Any, samples: Sequence[RequestSample], seconds: float) -> None:
    axes.set(title="requests in flight", xlabel="seconds", ylabel="requests")
    axes.grid(alpha=0.3)
    for label, ends in (("answered", [s.last for s in samples]), ("first token came", [s.first for s in samples])):
        times = np.concatenate([[s.due for s in samples], ends])
        steps = np.concatenate([np.ones(len(samples)), -np.ones(len(samples))])
        order = np.argsort(times, kind="stable")
        name = "waiting or decoding" if label == "answered" else "waiting for the first token"
        axes.step(np.append(times[order], seconds), np.append(np.cumsum(steps[order]), 0), where="post", label=name)
    axes.set_ylim(bottom=0)
    axes.legend()
