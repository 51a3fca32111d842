"""What a running cluster has to do for each setting that changes."""

import pytest

from coatcheck.cluster.config.config_change import EFFECTS, ConfigChange, compare_configs
from coatcheck.cluster.config.serve_config import ServeConfig

BEFORE = {"model": "org/model", "groups": 2, "tp": 2}


def change(**settings: object) -> ConfigChange:
    """From BEFORE to BEFORE with these settings."""
    return compare_configs(ServeConfig.build(BEFORE), ServeConfig.build({**BEFORE, **settings}))


def test_every_setting_has_an_effect() -> None:
    """A new setting of `serve` must say what its change needs."""
    assert EFFECTS.keys() == ServeConfig.model_fields.keys()


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
