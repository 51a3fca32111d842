"""EngineRequest: a request to a group in token ids, with every default filled in."""

from dataclasses import dataclass, field

from coatcheck.proto.retention import Retention
from coatcheck.proto.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One prompt with `sampling.n` choices.

    `resume[choice]`: output tokens that another group has delivered. They count as output (limits, penalties,
    positions) and are not sent again.
    `priority`: the lowest number goes first.
    `uncached_tokens`: prompt tokens that the router expects to be computed; None for all.
    `seconds_left`: the request must start within this time or is refused; None for no deadline.
    `tenant`: "" if every `cache_salt` is a tenant.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    resume: dict[int, tuple[int, ...]] = field(default_factory=dict)
    cache_salt: str = ""
    priority: int = 0
    uncached_tokens: int | None = None
    retention: Retention | None = None
    seconds_left: float | None = None
    tenant: str = ""

    @property
    def owner(self) -> str:
        """The tenant whose share of the cache the request's blocks count towards."""
        return self.tenant or self.cache_salt
