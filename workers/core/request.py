"""EngineRequest: a request to a group in token ids, with every default filled in."""

from dataclasses import dataclass, field
from enum import Enum

from coatcheck.proto.retention import Retention
from coatcheck.proto.sampling import SamplingParams


class Pooling(Enum):
    """How the hidden states of a prompt become its embedding. The values equal those of the public contract."""

    NONE = 0
    LAST = 1
    MEAN = 2


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One prompt with `sampling.n` choices.

    `resume[choice]`: output tokens that another group has delivered. They count as output (limits, penalties,
    positions) and are not sent again.
    `priority`: the lowest number is scheduled first.
    `uncached_tokens`: prompt tokens that the router expects to be computed; None for all.
    `seconds_left`: a request that has not started within this time is refused; None for no deadline.
    `tenant`: the owner of the request's blocks; "" if each `cache_salt` is a tenant of its own.
    `adapter`: the name of the LoRA adapter that all tokens are computed with; "" for none.
    `pooling`: unless NONE, the first output of choice 0 has the prompt's embedding.
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
    pooling: Pooling = Pooling.NONE
    adapter: str = ""

    @property
    def owner(self) -> str:
        """The tenant whose share of the cache the request's blocks count towards."""
        return self.tenant or self.cache_salt
