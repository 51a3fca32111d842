"""`coatcheck plan`: how much of a model's KV cache fits, from config.json alone."""

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from coatcheck.cluster.config.settings import with_flags
from coatcheck.cluster.planner.plan_settings import PlanSettings
from coatcheck.cluster.planner.sizing import Sizing


@with_flags(PlanSettings)
def plan(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, bytes and seconds.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Write a picture to this file.")] = None,
    **flags: Any,
) -> None:
    """Show how much of MODEL's KV cache fits, from its config.json alone.

    Every token of a sequence stores a key and a value in each layer:
    2 × layers × KV heads × head_dim elements. They stay until the sequence
    ends. Besides the weights, this limits how many sequences run at once. The
    figures come from the layout that a running group uses and reports.

    More sequences fit with a smaller --kv-dtype (fp8 and int8 take half, int4
    a quarter, plus two fp16 scales per token and head), with a larger --tp
    (each rank holds its share of the KV heads, but at least one), or with a
    shorter --context. A decode step reads the weights and the KV of every
    sequence once. These bytes divided by --bandwidth are the lower bound of
    its time.

    Examples:

    coatcheck plan meta-llama/Llama-3.1-8B --context 32768 --kv-dtype fp8

    coatcheck plan config.json --tp 8 --gpu-memory 141GB --bandwidth 4.8TB/s

    coatcheck plan my-model --lengths trace.csv.gz --plot plan.png
    """
    sizing = Sizing.of(PlanSettings.build(flags))
    if plot is not None:
        from coatcheck.cluster.planner.plan_plot import plot_sizing

        plot_sizing(sizing, plot)
    if as_json:
        print(json.dumps(sizing.to_json()))
    else:
        from rich.console import Console

        from coatcheck.cluster.planner.plan_table import plan_tables

        Console(highlight=False).print(plan_tables(sizing))
    if plot is not None:
        print(f"wrote {plot}", file=sys.stderr)
