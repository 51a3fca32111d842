"""What came of one case: it passed, failed, was refused by the GPU's path, or was skipped."""

import json
from dataclasses import asdict, dataclass
from typing import Literal


class Refused(Exception):
    """The GPU's path refuses a model that the CPU's path serves; the message is its reason."""


class Skipped(Exception):
    """The case cannot run here; the message is the reason."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """`case`: as in parts.py. `detail`: what was measured, why it was refused or skipped, or how it failed."""

    case: str
    result: Literal["passed", "failed", "refused", "skipped"]
    seconds: float
    detail: str = ""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Outcome":
        return cls(**json.loads(text))
