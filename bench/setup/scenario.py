"""The server scenarios, and the targets against other engines."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Scenario:
    """`clients` in a closed loop. One of `prefixes` shared prefixes comes before the `input_len` tokens (0: none)."""

    clients: int
    requests: int
    input_len: int
    output_len: int
    prefixes: int = 0
    prefix_len: int = 0

    @property
    def title(self) -> str:
        shared = f"{self.prefixes} × {self.prefix_len:,} shared + " if self.prefixes else ""
        return f"{self.clients} × {shared}{self.input_len}/{self.output_len}"


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one server in one scenario."""

    ttft_ms: float
    tpot_ms: float
    tokens_per_second: float


@dataclass(frozen=True, slots=True)
class Target:
    """One promise: our `figure` is at least `ratio` times the peer's, or at most if less is better."""

    scenario: Scenario
    figure: str
    ratio: float

    @property
    def less_is_better(self) -> bool:
        return self.figure == "ttft_ms"

    def reached(self, ours: Figures, peer: Figures) -> tuple[float, bool]:
        """(ratio of our figure to the peer's, whether it meets the target). TPOT is compared as a speed."""
        mine, other = getattr(ours, self.figure), getattr(peer, self.figure)
        ratio = other / mine if self.figure == "tpot_ms" else mine / other
        return ratio, ratio <= self.ratio if self.less_is_better else ratio >= self.ratio


ALONE = Scenario(1, 8, 512, 64)
EIGHT = Scenario(8, 24, 512, 64)
MANY = Scenario(32, 64, 512, 64)
SHORT = Scenario(16, 48, 16, 256)
SHARED = Scenario(8, 32, 64, 32, prefixes=4, prefix_len=1024)

SCENARIOS = (ALONE, EIGHT, MANY, SHORT, SHARED)

# By the peer's name. TPOT is a ratio of speeds.
TARGETS = {
    "vllm": (
        Target(ALONE, "tpot_ms", 2.0),
        Target(ALONE, "ttft_ms", 0.5),
        Target(EIGHT, "tokens_per_second", 2.0),
        Target(MANY, "tokens_per_second", 2.0),
        Target(SHORT, "tokens_per_second", 2.0),
        Target(SHARED, "tokens_per_second", 2.0),
    ),
    "llama.cpp": (
        Target(ALONE, "tpot_ms", 1.0),
        Target(EIGHT, "tokens_per_second", 1.5),
        Target(MANY, "tokens_per_second", 1.5),
    ),
    "openvino": (
        Target(ALONE, "tpot_ms", 1.25),
        Target(ALONE, "ttft_ms", 0.9),
        Target(EIGHT, "tokens_per_second", 1.2),
        Target(MANY, "tokens_per_second", 1.2),
        Target(SHORT, "tokens_per_second", 1.2),
    ),
}
