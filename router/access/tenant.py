"""Tenant: the owner of a request, with its role, priority, share and limits."""

import math
from dataclasses import dataclass
from typing import Final, Literal

from coatcheck.proto.errors import InvalidConfig, PermissionDenied

# What a method requires: to generate, to see the state of the cluster, to change how the cluster runs.
Scope = Literal["generate", "observe", "manage"]
SCOPES: Final[dict[str, frozenset[Scope]]] = {
    "user": frozenset({"generate"}),
    "monitor": frozenset({"observe"}),
    "admin": frozenset({"generate", "observe", "manage"}),
}
_LOWEST_PRIORITY: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Tenant:
    """Requests share cached prefixes only if their salts are equal. The lowest `priority` goes first. `weight`: the
    tenant's share of the groups relative to other tenants. None in the other fields: no limit."""

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

    def require_scope(self, scope: Scope) -> None:
        """Raises PermissionDenied if the tenant's role does not have `scope`."""
        if scope not in SCOPES[self.role]:
            roles = " or ".join(role for role, scopes in SCOPES.items() if scope in scopes)
            raise PermissionDenied(f"the key of {self.name!r} has the role {self.role}; this needs the role {roles}")

    def combine_salt(self, cache_salt: str) -> str:
        """The salt of a request with `cache_salt`. Equal results mean the same tenant salt and the same cache_salt: the
        length before the tenant's salt shows where it ends."""
        return f"{len(self.salt)}:{self.salt}{cache_salt}" if self.salt else cache_salt

    def effective_priority(self, priority: int) -> int:
        """The priority of a request that asks for `priority`. Clients with a key can only lower their tenant's."""
        return min(self.priority + max(priority, 0), _LOWEST_PRIORITY) if self is not ANONYMOUS else priority


def _require(tenant: Tenant, holds: bool, name: str, allowed: str) -> None:
    if not holds:
        raise InvalidConfig(f"tenant {tenant.name!r}: {name} is {getattr(tenant, name)!r}; it must be {allowed}")


# The tenant of every request where no keys are required; it may do everything.
ANONYMOUS: Final = Tenant("anonymous", role="admin")
