"""Synthetic workloads for the routing benchmark: requests with shared prefixes, each made from a seed.

Every generator returns TraceEntry objects whose arrival times have a mean rate of about one request a second; the
simulation speeds them up to the load of a cell. Prefix blocks are numbered as in Mooncake's traces: equal numbers mean
equal tokens and an equal prefix before them.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, count
from typing import Final

from coatcheck.cluster.benchmark.request_trace import BLOCK_TOKENS, TraceEntry

REQUESTS: Final = 5_000


class _Prompts:
    """Hands out block numbers, so that prompts with a common prefix have common blocks."""

    def __init__(self) -> None:
        self._next = count()

    def blocks(self, tokens: int) -> tuple[int, ...]:
        """New blocks for a text of `tokens` tokens; a last block that is not full has no number."""
        return tuple(next(self._next) for _ in range(tokens // BLOCK_TOKENS))

    def extend(self, prefix: tuple[int, ...], tokens: int) -> tuple[int, ...]:
        """`prefix` and new blocks up to a length of `tokens` tokens."""
        return prefix + self.blocks(tokens - len(prefix) * BLOCK_TOKENS)


def _poisson(dice: random.Random, requests: int) -> Iterator[float]:
    at = 0.0
    for _ in range(requests):
        at += dice.expovariate(1.0)
        yield at


def _zipf(items: int) -> list[float]:
    """Cumulative weights of `items` items by Zipf's law."""
    return list(accumulate(1 / rank for rank in range(1, items + 1)))


def shared_prompt(
    seed: int, shared_tokens: int = 4096, answer: tuple[int, int] = (100, 300), requests: int = REQUESTS
) -> list[TraceEntry]:
    """One system prompt of `shared_tokens` tokens before 400 to 600 tokens of each request's own."""
    dice, prompts = random.Random(seed), _Prompts()
    shared = prompts.blocks(shared_tokens)
    entries = []
    for at in _poisson(dice, requests):
        length = shared_tokens + dice.randint(400, 600)
        entries.append(TraceEntry(at, length, dice.randint(*answer), prompts.extend(shared, length)))
    return entries


def tenants(seed: int, number: int = 100, requests: int = REQUESTS) -> list[TraceEntry]:
    """`number` tenants, some busier than others by Zipf's law, each with a system prompt of 1,000 to 8,000 tokens of
    its own before 200 to 1,000 tokens of the request."""
    dice, prompts = random.Random(seed), _Prompts()
    systems = [(length, prompts.blocks(length)) for length in (dice.randint(1000, 8000) for _ in range(number))]
    weights = _zipf(number)
    entries = []
    for at in _poisson(dice, requests):
        ((system_length, system),) = dice.choices(systems, cum_weights=weights)
        length = system_length + dice.randint(200, 1000)
        entries.append(TraceEntry(at, length, dice.randint(50, 400), prompts.extend(system, length)))
    return entries


def retrieval(seed: int, documents: int = 200, tokens: int = 4096, requests: int = REQUESTS) -> list[TraceEntry]:
    """Questions of 100 tokens about one of `documents` documents of `tokens` tokens, chosen by Zipf's law."""
    dice, prompts = random.Random(seed), _Prompts()
    texts = [prompts.blocks(tokens) for _ in range(documents)]
    weights = _zipf(documents)
    entries = []
    for at in _poisson(dice, requests):
        (text,) = dice.choices(texts, cum_weights=weights)
        entries.append(TraceEntry(at, tokens + 100, dice.randint(50, 250), text))
    return entries


def agents(seed: int, requests: int = REQUESTS) -> list[TraceEntry]:
    """Sessions of 10 to 40 calls below one tool description of 3,072 tokens: each call adds 200 to 2,000 tokens to the
    session's prompt and comes 5 to 60 s after the last."""
    dice, prompts = random.Random(seed), _Prompts()
    tools = prompts.blocks(3072)
    sessions = max(requests // 25, 1)
    spacing = requests / sessions  # keeps the mean rate at one request a second
    entries: list[TraceEntry] = []
    for place in range(sessions):
        at = place * spacing * dice.uniform(0.9, 1.1)
        chain, length = tools, 3072 + dice.randint(100, 1000)
        for _ in range(dice.randint(10, 40)):
            chain = prompts.extend(chain, length)
            answer = dice.randint(30, 300)
            entries.append(TraceEntry(at, length, answer, chain))
            at += dice.uniform(5, 60)
            length += answer + dice.randint(200, 2000)
    return _in_order(entries)


def chats(seed: int, requests: int = REQUESTS) -> list[TraceEntry]:
    """Conversations of 1 to 12 turns: each turn adds 50 to 500 tokens and an answer of 100 to 500, after a pause."""
    dice, prompts = random.Random(seed), _Prompts()
    system = prompts.blocks(512)
    conversations = max(requests * 2 // 13, 1)
    entries: list[TraceEntry] = []
    for _ in range(conversations):
        at = dice.uniform(0, requests)
        chain, length = system, 512 + dice.randint(50, 1500)
        for _ in range(dice.randint(1, 12)):
            chain = prompts.extend(chain, length)
            answer = dice.randint(100, 500)
            entries.append(TraceEntry(at, length, answer, chain))
            at += dice.uniform(20, 200)
            length += answer + dice.randint(50, 500)
    return _in_order(entries)


def flash_crowd(seed: int, requests: int = REQUESTS) -> list[TraceEntry]:
    """The requests of 50 tenants, and five crowds: 6% of all requests come within about 1.5% of the run, with one new
    prompt of 8,192 tokens."""
    crowd = requests * 6 // 100
    calm = tenants(seed, 50, requests - 5 * crowd)
    dice, prompts = random.Random(seed + 1), _Prompts()
    first = 1 + max(block for entry in calm for block in entry.blocks)
    entries = list(calm)
    span = calm[-1].at
    for place in range(5):
        text = tuple(first + block for block in prompts.blocks(8192))
        begin = span * (place + 0.5) / 5
        for _ in range(crowd):
            own = dice.randint(20, 200)
            at = begin + span / requests * crowd / 4 * dice.random()
            entries.append(TraceEntry(at, 8192 + own, dice.randint(50, 250), text))
    return _in_order(entries)


def long_and_short(seed: int, requests: int = REQUESTS) -> list[TraceEntry]:
    """Chats of 200 to 2,000 tokens, and one request in 50 with a prompt of 50,000 to 100,000 tokens; half of the long
    ones ask again about an earlier long text."""
    dice, prompts = random.Random(seed), _Prompts()
    texts: list[tuple[int, tuple[int, ...]]] = []
    entries = []
    for at in _poisson(dice, requests):
        if dice.random() < 0.02:
            if texts and dice.random() < 0.5:
                length, text = dice.choice(texts[-8:])
            else:
                length = dice.randint(50_000, 100_000)
                text = prompts.blocks(length)
                texts.append((length, text))
            length += dice.randint(20, 100)
            entries.append(TraceEntry(at, length, dice.randint(100, 500), prompts.extend(text, length)))
        else:
            length = dice.randint(200, 2000)
            entries.append(TraceEntry(at, length, dice.randint(50, 400), prompts.blocks(length)))
    return entries


def bursts(seed: int, requests: int = REQUESTS) -> list[TraceEntry]:
    """Batches of 10 to 100 requests that arrive together, each batch with a prompt of 2,048 tokens of its own."""
    dice, prompts = random.Random(seed), _Prompts()
    entries: list[TraceEntry] = []
    at = 0.0
    while len(entries) < requests:
        size = dice.randint(10, 100)
        at += dice.expovariate(1 / size)
        text = prompts.blocks(2048)
        for _ in range(size):
            length = 2048 + dice.randint(100, 1500)
            entries.append(TraceEntry(at, length, dice.randint(50, 300), prompts.extend(text, length)))
    return entries[:requests]


def _in_order(entries: Iterable[TraceEntry]) -> list[TraceEntry]:
    return sorted(entries, key=lambda entry: entry.at)


WORKLOADS: Final[dict[str, Callable[[int], Sequence[TraceEntry]]]] = {
    "shared prompt 0.5k": lambda seed: shared_prompt(seed, 512),
    "shared prompt 4k": lambda seed: shared_prompt(seed, 4096),
    "shared prompt 20k": lambda seed: shared_prompt(seed, 20_480),
    "shared prompt, long answers": lambda seed: shared_prompt(seed, 4096, (500, 1500)),
    "tenants": tenants,
    "retrieval": retrieval,
    "agents": agents,
    "chats": chats,
    "flash crowd": flash_crowd,
    "bursts": bursts,
    "long and short": long_and_short,
}
