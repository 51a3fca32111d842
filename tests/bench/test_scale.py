"""The scale benchmark: its quick form runs every measurement and writes the figures of each."""

import json
from pathlib import Path

from coatcheck.bench import scale


def test_the_quick_form_measures_everything(tmp_path: Path) -> None:
    """Every place of the prefix at every length, events and load reports, for two numbers of groups."""
    scale.main(quick=True, name="now", json_path=tmp_path / "scale.json")
    written = json.loads((tmp_path / "scale.json").read_text())
    assert set(written) == {"now, 2 groups", "now, 16 groups"}
    for figures in written.values():
        places = ("nowhere", "one group", "all groups", "host memory", "in flight")
        decisions = {f"{place}, {length}" for place in places for length in scale.PROMPTS}
        assert decisions | {"events", "load reports"} <= set(figures)
        assert figures["events"]["blocks"] == 4096
        assert all(0 < figures[name]["p50_us"] <= figures[name]["p99_us"] for name in decisions)
