"""Tenant: on whose behalf a request comes, and what it may do.

Values alone: who checks keys, keeps limits or shares the groups out fairly does so elsewhere.
"""

import math
from dataclasses import dataclass
from typing import Final, Literal

from coatcheck.proto.errors import InvalidConfig, PermissionDenied

# What a call needs of its caller: to be answered by the model, to see how the cluster is, to change how it runs.
Scope = Literal["generate", "observe", "manage"]
SCOPES: Final[dict[str, frozenset[Scope]]] = {
    "user": frozenset({"generate"}),
    "monitor": frozenset({"observe"}),
    "admin": frozenset({"generate", "observe", "manage"}),
}
_LOWEST_PRIORITY: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Tenant:
    """`salt` keeps its cached prefixes apart from others'; of two that wait, the lower `priority` goes first.

    `weight` is its share of the groups beside other tenants'. Limits that are None do not limit.
    """

    name: str
    salt: str = ""
    role: str = "user"
    priority: int = 0
    weight: float = 1.0
    max_streams: int | None = None
    max_prompt_tokens: int | None = None
    requests_per_minute: float | None = None
    tokens_per_minute: float | None = None

    def __post_init__(self) -> None:
        """Raises InvalidConfig, naming the setting, its value and what it may be."""
        _require(self, 0 < len(self.name) <= 64 and self.name.isprintable(), "name", "1 to 64 printable characters")
        _require(self, len(self.salt) <= 128, "salt", "at most 128 characters")
        _require(self, self.role in SCOPES, "role", f"one of {', '.join(SCOPES)}")
        _require(self, abs(self.priority) < 2**30, "priority", "between -2^30 and 2^30")
        _require(self, 0 < self.weight < math.inf, "weight", "above 0")
        for name in ("max_streams", "max_prompt_tokens"):
            value = getattr(self, name)
            _require(self, value is None or value >= 1, name, "at least 1")
        for name in ("requests_per_minute", "tokens_per_minute"):
            value = getattr(self, name)
            _require(self, value is None or 0 < value < math.inf, name, "above 0")

    def require(self, scope: Scope) -> None:
        """Raises PermissionDenied for what its role does not allow."""
        if scope not in SCOPES[self.role]:
            able = " or ".join(role for role, scopes in SCOPES.items() if scope in scopes)
            raise PermissionDenied(
                f"the key of {self.name!r} has the role {self.role}; this takes one with the role {able}"
            )

    def salted(self, cache_salt: str) -> str:
        """The client's salt within the tenant's: no salt of one tenant's clients is one of another's."""
        return f"{len(self.salt)}:{self.salt}{cache_salt}" if self.salt else cache_salt

    def ranked(self, priority: int) -> int:
        """A request's priority, of which clients may only give way: no key buys a place before other tenants."""
        return min(self.priority + max(priority, 0), _LOWEST_PRIORITY) if self is not ANYONE else priority


def _require(tenant: Tenant, holds: bool, name: str, allowed: str) -> None:
    if not holds:
        raise InvalidConfig(f"tenant {tenant.name!r}: {name} is {getattr(tenant, name)!r}; it must be {allowed}")


# Whoever comes where no keys are asked for: everything is theirs, as it is on one's own machine.
ANYONE: Final = Tenant("anyone", role="admin")
