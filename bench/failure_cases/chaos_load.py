"""Streams for bench/chaos.py: every kind of sampling, each compared with the answer of an undisturbed run.

A load keeps a fixed number of streams running through Coatcheck's client and retries nothing.
"""

import asyncio
import itertools
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from coatcheck.cluster.client.async_client import AsyncClient
from coatcheck.cluster.client.results import GenerationResult
from coatcheck.proto.errors import CoatcheckError
from coatcheck.proto.stubs import coatcheck_pb2 as pb

LOGPROB_TOLERANCE = 1e-4
LONG_PROMPT = 1500  # tokens: three steps of prefill
_KINDS: list[dict[str, object]] = [
    {"temperature": 0.0},
    {"temperature": 0.8, "top_p": 0.95},
    {"temperature": 1.0, "n": 3},
    {"temperature": 0.0, "repetition_penalty": 1.2, "frequency_penalty": 0.3},
    {"temperature": 0.9, "presence_penalty": 0.5, "n": 2, "top_k": 40},
]


def cases(vocabulary: int, tokens: int) -> list[pb.GenerateRequest]:
    """One request of each kind of sampling with a short and with a long prompt, all with seeds."""
    made = []
    for number, (kind, length) in enumerate(itertools.product(_KINDS, (40, LONG_PROMPT))):
        ids = [3 + (position * position * 7 + number * 31 + position) % (vocabulary - 3) for position in range(length)]
        sampling = pb.SamplingParams(max_tokens=tokens, ignore_eos=True, logprobs=2, seed=1000 + number, **kind)  # type: ignore[arg-type]
        made.append(pb.GenerateRequest(token_ids=pb.TokenIds(ids=ids), sampling=sampling))
    return made


def with_stop(request: pb.GenerateRequest, answer: GenerationResult) -> pb.GenerateRequest | None:
    """The same request with a stop string that first occurs in the last third of its answer; None if there is none."""
    text = answer.choices[0].text
    for at in range(len(text) * 2 // 3, len(text) - 3):
        stop = text[at : at + 3]
        if text.find(stop) == at and "\ufffd" not in stop:
            again = pb.GenerateRequest()
            again.CopyFrom(request)
            again.sampling.stop.append(stop)
            return again
    return None


@dataclass(slots=True, eq=False)
class Running:
    """A stream under way. `group`: the group that serves it; `events`: the number of events so far."""

    case: int
    answer: GenerationResult
    group: str = ""
    task: "asyncio.Task[object] | None" = field(default_factory=asyncio.current_task)
    events: int = 0
    last_event_at: float = field(default_factory=time.monotonic)
    ended: bool = False

    @property
    def in_prefill(self) -> bool:
        """Whether the stream has started and has no token yet."""
        return bool(self.group) and self.events == 1 and not self.ended


class ChaosLoad:
    """`counts`: started, ended, failed, changed, refused (before their first event), moved. `address`: one router, or
    several."""

    def __init__(self, address: str | Sequence[str], requests: list[pb.GenerateRequest]) -> None:
        self.requests = requests
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self.running: set[Running] = set()
        self.stalls: list[tuple[float, float]] = []  # (when it ended, seconds without an event) of over half a second
        self.expected: list[GenerationResult] = []
        self._client = AsyncClient(address)
        self._salts = itertools.count()
        self._next = itertools.count()
        self._stopping = False

    async def learn(self) -> None:
        """Run every case undisturbed, one after another, and add cases with stop strings from their answers."""
        self.expected = [await self._generate(request) for request in self.requests]
        stopped = [with_stop(*pair) for pair in list(zip(self.requests, self.expected, strict=True))[:4]]
        for request in stopped:
            if request is not None:
                self.requests.append(request)
                self.expected.append(await self._generate(request))

    async def keep_streams(self, count: int) -> None:
        """Keep `count` streams running until `stop` is called."""
        await asyncio.gather(*(self._keep_one() for _ in range(count)))

    def stop(self) -> None:
        """Start no further stream."""
        self._stopping = True

    async def run(self, case: int, salt: str = "") -> None:
        """Run one stream, count it and compare its answer. Without `salt`, long prompts and every second stream get a
        new one, so that none of their prefixes are cached."""
        number = next(self._salts)
        request = self.request(case, salt or (f"salt {number}" if number % 2 or self.is_long(case) else ""))
        running = Running(case, GenerationResult(time.monotonic()))
        self.running.add(running)
        try:
            async for event in self._client.stream_events(request):
                self._record_event(running, event)
        except CoatcheckError as error:
            if not running.events:
                self.counts["refused"] += 1
                await asyncio.sleep(0.2)
                return
            self.counts["failed"] += 1
            self.faults.append(f"case {case}: {type(error).__name__}: {error}")
            return
        finally:
            running.ended = True
            self.running.discard(running)
        self.counts["ended"] += 1
        self.counts["moved"] += running.answer.moves > 0
        if change := difference(self.expected[case], running.answer):
            self.counts["changed"] += 1
            self.faults.append(f"case {case}: {change}")

    def request(self, case: int, salt: str) -> pb.GenerateRequest:
        """The request of a case with a salt."""
        request = pb.GenerateRequest()
        request.CopyFrom(self.requests[case])
        request.cache_salt = salt
        return request

    def is_long(self, case: int) -> bool:
        """Whether the prefill of a case takes several steps."""
        return len(self.requests[case].token_ids.ids) >= LONG_PROMPT

    async def close(self) -> None:
        await self._client.close()

    async def _keep_one(self) -> None:
        while not self._stopping:
            await self.run(next(self._next) % len(self.requests))

    def _record_event(self, running: Running, event: pb.GenerateEvent) -> None:
        now = time.monotonic()
        running.events += 1
        if event.HasField("started"):
            self.counts["started"] += 1
            running.group = event.started.group
        if now - running.last_event_at > 0.5 and running.events > 1:
            self.stalls.append((now, now - running.last_event_at))
        running.last_event_at = now
        running.answer.add(event, now)

    async def _generate(self, request: pb.GenerateRequest) -> GenerationResult:
        answer = GenerationResult(time.monotonic())
        async for event in self._client.stream_events(request):
            answer.add(event, time.monotonic())
        return answer


def difference(one: GenerationResult, other: GenerationResult) -> str:
    """The first difference of two answers; "" if text, token ids, finish reasons and log-probabilities are equal."""
    if len(one.choices) != len(other.choices):
        return f"{len(other.choices)} choices, not {len(one.choices)}"
    for index, (expected, got) in enumerate(zip(one.choices, other.choices, strict=True)):
        for name in ("token_ids", "text", "finish_reason", "stopped_by"):
            if getattr(expected, name) != getattr(got, name):
                return f"choice {index}: {name} is {getattr(got, name)!r}, not {getattr(expected, name)!r}"
        if len(expected.logprobs) != len(got.logprobs):
            return f"choice {index}: {len(got.logprobs)} log-probabilities, not {len(expected.logprobs)}"
        for position, (a, b) in enumerate(zip(expected.logprobs, got.logprobs, strict=True)):
            pairs = [(a.logprob, b.logprob), *zip(a.top.values(), b.top.values(), strict=True)]
            worst = max(abs(x - y) for x, y in pairs)
            if a.token_id != b.token_id or worst > LOGPROB_TOLERANCE:
                return f"choice {index}: log-probabilities at {position} differ by {worst:.2g}"
    return ""
