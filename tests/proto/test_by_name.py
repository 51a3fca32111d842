"""Values that cross between processes of different versions."""

import pickle
from dataclasses import dataclass, field, make_dataclass
from typing import Any

import pytest

from coatcheck.cluster.config.serve_config import ServeConfig
from coatcheck.cluster.supervision.cluster_state import ClusterState, GroupState
from coatcheck.proto.by_name import by_name
from coatcheck.workers.core.rank_progress import RankProgress


@by_name
@dataclass(frozen=True, slots=True)
class Value:
    """Of this version."""

    name: str
    parts: tuple[int, ...] = ()
    more: dict[str, int] = field(default_factory=dict)


def sent_by_another(*names: tuple[str, Any]) -> Any:
    """What a `Value` of another version, with these fields, would put into its pickle."""
    other: Any = by_name(make_dataclass("Value", names, frozen=True, slots=True))
    return other(*(f"its {name}" for name, _ in names)).__getstate__()


def test_what_a_version_knows_comes_through() -> None:
    """Whole, and frozen as before."""
    value = Value("a", (1, 2), {"b": 3})
    assert pickle.loads(pickle.dumps(value)) == value
    state = ClusterState((GroupState("group-0", ranks=(RankProgress(),)),), ("a:1",))
    assert pickle.loads(pickle.dumps(state)) == state


def test_fields_are_known_by_name() -> None:
    """A field that the sender lacks has its default, one that is unknown here is dropped, wherever it stood."""
    received = object.__new__(Value)
    received.__setstate__(sent_by_another(("first", str), ("name", str)))  # type: ignore[attr-defined]
    assert received == Value("its name")
    with pytest.raises(TypeError, match="a Value of another version has no name"):
        object.__new__(Value).__setstate__(sent_by_another(("first", str)))  # type: ignore[attr-defined]


def test_the_settings_of_a_cluster_outlive_its_version() -> None:
    """A supervisor that is started again with what an older one was given knows every setting of its own."""
    config = ServeConfig(model="m", tp=2, deterministic=True)
    state = config.__getstate__()
    older = dict(state["__dict__"])
    del older["eviction"]
    received = object.__new__(ServeConfig)
    received.__setstate__({**state, "__dict__": {**older, "of_a_newer_one": 1}})
    assert received == config and received.eviction == "cost" and not hasattr(received, "of_a_newer_one")
