"""EngineRequest: what a group is asked to answer, in token ids, after every default is filled in.

It does not know text, who asked, or which router sent it.
"""

from dataclasses import dataclass, field

from coatcheck.proto.retention import Retention
from coatcheck.proto.sampling import SamplingParams


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One prompt with `sampling.n` choices.

    `resume[choice]` holds output tokens that another group has already delivered: they count as output
    (limits, penalties, positions) but are not sent again.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    resume: dict[int, tuple[int, ...]] = field(default_factory=dict)
    cache_salt: str = ""
    priority: int = 0  # the lowest goes first
    uncached_tokens: int | None = None  # of the prompt, as its router foresees; None: all
    retention: Retention | None = None
    seconds_left: float | None = None  # it begins by then or never; None: whenever it can
    tenant: str = ""  # "": each salt is one

    @property
    def owner(self) -> str:
        """Whose share of the cache its blocks count towards."""
        return self.tenant or self.cache_salt
