"""by_name: frozen values that cross between processes are pickled by the names of their fields.

During an upgrade the two may run different versions. What the sender does not know has its default here, and what the
receiver does not know is dropped; so a field that is added later needs a default. Python itself would go by position.
"""

from collections.abc import Mapping
from dataclasses import MISSING, Field, fields
from typing import Any, TypeVar

_T = TypeVar("_T")


def by_name(cls: type[_T]) -> type[_T]:
    """Decorates a dataclass with slots, above `@dataclass`."""

    def get_state(self: Any) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in fields(self)}

    def set_state(self: Any, state: Mapping[str, Any]) -> None:
        for field in fields(self):
            value = state[field.name] if field.name in state else _default(cls, field)
            object.__setattr__(self, field.name, value)

    cls.__getstate__ = get_state  # type: ignore[method-assign]
    cls.__setstate__ = set_state  # type: ignore[attr-defined]
    return cls


def _default(cls: type, field: "Field[Any]") -> Any:
    if field.default is not MISSING:
        return field.default
    if field.default_factory is not MISSING:
        return field.default_factory()
    raise TypeError(f"a {cls.__name__} of another version has no {field.name}")
