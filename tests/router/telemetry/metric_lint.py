"""Checks metrics against the rules of Prometheus' linter and naming guide that concern names and types."""

from collections.abc import Iterable, Iterator

from prometheus_client import Metric

# Base units, and what counts things.
_UNITS = ("seconds", "bytes", "ratio", "tokens", "info")
_OTHER_UNITS = ("milliseconds", "ms", "us", "minutes", "hours", "percent", "kb", "mb", "kib", "mib", "gib", "perc")
# Gauges without a unit: counts of things that are there now, and flags.
_COUNTS = ("requests", "sequences", "blocks", "slots", "snapshots", "state", "healthy", "accepting", "second")
_RESERVED = ("_total", "_count", "_sum", "_bucket")


def complaints(metrics: Iterable[Metric]) -> Iterator[str]:
    """One line for each violation; `process_*` are left out, because prometheus_client defines them."""
    seen: set[str] = set()
    for metric in metrics:
        name, words = metric.name, metric.name.split("_")
        if name.startswith("process_"):
            continue
        if name in seen:
            yield f"{name} is there twice"
        seen.add(name)
        if words[0] != "coatcheck" or name != name.lower():
            yield f"{name}: not coatcheck_ in small letters"
        if not metric.documentation.endswith("."):
            yield f"{name}: its help is no sentence"
        if any(word in _OTHER_UNITS for word in words):
            yield f"{name}: not in a base unit"
        if name.endswith(_RESERVED):
            yield f"{name}: ends in what a type adds"
        if metric.type == "histogram" and not name.endswith("_seconds"):
            yield f"{name}: a histogram without a unit"
        if metric.type == "gauge" and words[-1] not in (*_UNITS, *_COUNTS):
            yield f"{name}: a gauge without a unit, and not known as a count"
        if metric.type not in ("counter", "gauge", "histogram", "info"):
            yield f"{name}: of type {metric.type}"
        for sample in metric.samples:
            if metric.type == "counter" and not sample.name.endswith(("_total", "_created")):
                yield f"{sample.name}: a counter without _total"
            if {"le", "quantile", "job", "instance"} & sample.labels.keys() and metric.type != "histogram":
                yield f"{name}: a label that is reserved"
