"""What a running cluster has to do for each setting that changes."""

import re
from pathlib import Path

import pytest

from coatcheck.cluster.config.config_change import EFFECTS, ConfigChange, Effect, compare_configs
from coatcheck.cluster.config.serve_config import ServeConfig

BEFORE = {"model": "org/model", "groups": 2, "tp": 2}


def change(**settings: object) -> ConfigChange:
    """From BEFORE to BEFORE with these settings."""
    return compare_configs(ServeConfig.build(BEFORE), ServeConfig.build({**BEFORE, **settings}))


def test_every_setting_has_an_effect() -> None:
    """A new setting of `serve` must say what its change needs."""
    assert EFFECTS.keys() == ServeConfig.model_fields.keys()


def test_the_page_on_operations_names_each_setting_that_a_running_cluster_can_change() -> None:
    """In the table of changed settings, one row for each effect; the last row is for all others."""
    page = (Path(__file__).parents[3] / "docs" / "operations.md").read_text()
    table = page.partition("\n## Changing settings\n")[2].partition("\n\n| change |")[2].partition("\n\n")[0]
    cells = [row.split("|")[1] for row in table.splitlines()]
    rows = [set(re.findall("`([a-z-]+)`", cell)) for cell in cells if "everything else" not in cell]
    can_change = (Effect.LIVE, Effect.SCALE, Effect.GROUPS, Effect.ROUTERS, Effect.BOTH)
    expected = [{name.replace("_", "-") for name in EFFECTS if EFFECTS[name] is effect} for effect in can_change]
    assert [row for row in rows if row] == expected


def test_equal_settings_need_nothing() -> None:
    """Nor does the address of Ray, which has many spellings."""
    assert change() == change(ray_address="127.0.0.1:6379", ray_start_timeout=5) == ConfigChange()


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"groups": 3}, ConfigChange(scale=True)),
        ({"max_groups": 4, "queue_target": 1.0}, ConfigChange(live=("max-groups", "queue-target"))),
        ({"kv_memory": "4GiB"}, ConfigChange(groups=("kv-memory",))),
        ({"max_queued": 5}, ConfigChange(routers=("max-queued",))),
        ({"log_format": "json"}, ConfigChange(groups=("log-format",), routers=("log-format",))),
    ],
)
def test_what_it_takes(settings: dict[str, object], expected: ConfigChange) -> None:
    """Scaling, the supervisor alone, groups, routers, or both start again."""
    assert change(**settings) == expected


def test_what_is_impossible_is_refused_as_a_whole() -> None:
    """With the old value, the new one, and what to do; other changes beside it are not begun."""
    refused = change(block_size=32, served_model_name="m", max_queued=5)
    assert refused == ConfigChange(refusal=refused.refusal)
    assert "served-model-name from its default to m, block-size from 16 to 32" in refused.refusal
    assert "set the old value again, or start another cluster" in refused.refusal
