"""merge_streams(): several streams as one, when one fails, and when the reader stops."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from coatcheck.proto.errors import Overloaded
from coatcheck.proto.stubs.coatcheck_pb2 import Delta, GenerateEvent
from coatcheck.router.openai.merge_streams import merge_streams, start_merged


class Source:
    """A stream of `count` deltas that then ends, fails or waits for ever. `closed`: the generator was closed."""

    def __init__(self, count: int, end: str = "ends") -> None:
        self.sent = 0
        self.closed = False
        self._count = count
        self._end = end

    async def events(self) -> AsyncGenerator[GenerateEvent, None]:
        try:
            for number in range(self._count):
                self.sent += 1
                yield GenerateEvent(delta=Delta(choice=number))
            if self._end == "fails":
                raise Overloaded("full")
            if self._end == "waits":
                await asyncio.Event().wait()
        finally:
            self.closed = True


async def test_every_event_comes_once_in_its_streams_order() -> None:
    """Each event is yielded once, and the events of one prompt keep their order."""
    sources = [Source(count) for count in (3, 0, 40)]
    got: dict[int, list[int]] = {0: [], 1: [], 2: []}
    async for prompt_index, event in merge_streams([source.events() for source in sources]):
        got[prompt_index].append(event.delta.choice)
    assert got == {0: [0, 1, 2], 1: [], 2: [*range(40)]}
    assert all(source.closed for source in sources)


async def test_one_failure_closes_all() -> None:
    """The first error is raised, and every stream is closed."""
    sources = [Source(1, "waits"), Source(2, "fails")]
    with pytest.raises(Overloaded):
        async for _ in merge_streams([source.events() for source in sources]):
            pass
    assert all(source.closed for source in sources)


async def test_a_reader_that_leaves_closes_all() -> None:
    """Closing the merged stream closes every stream."""
    sources = [Source(1, "waits"), Source(1, "waits")]
    events = merge_streams([source.events() for source in sources])
    await anext(events)
    await events.aclose()
    assert all(source.closed for source in sources)


async def test_a_slow_reader_holds_its_streams_up() -> None:
    """While nobody reads, only a few events are made ahead."""
    sources = [Source(10_000), Source(10_000)]
    events = merge_streams([source.events() for source in sources])
    await anext(events)
    for _ in range(200):
        await asyncio.sleep(0)
    assert sum(source.sent for source in sources) < 40
    await events.aclose()


async def test_what_is_not_admitted_closes_the_others() -> None:
    """start_merged() raises the error of a stream that is not admitted, even if others have sent events, and closes all
    streams."""
    sources = [Source(100, "waits"), Source(100, "waits"), Source(0, "fails")]
    streams = [source.events() for source in sources]
    with pytest.raises(Overloaded):
        await start_merged(streams, asyncio.Semaphore(2))
    assert all(source.closed for source in sources)


async def test_the_first_that_begins_is_enough() -> None:
    """start_merged() returns although an admitted prompt still waits for its first event, and no event is lost."""
    sources = [Source(0, "waits"), Source(3)]
    events = await start_merged([source.events() for source in sources], asyncio.Semaphore(2))
    assert [(await anext(events))[1].delta.choice for _ in range(3)] == [0, 1, 2]
    await events.aclose()
    assert all(source.closed for source in sources)


@pytest.mark.parametrize("prompts", [1, 2])
async def test_a_reader_that_leaves_before_all_are_admitted_closes_all(prompts: int) -> None:
    """Cancelling start_merged() closes every stream."""
    sources = [Source(1, "waits") for _ in range(prompts)]
    waiting = asyncio.create_task(start_merged([source.events() for source in sources], asyncio.Semaphore(0)))
    for _ in range(100):
        await asyncio.sleep(0)
    assert all(source.sent for source in sources)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert all(source.closed for source in sources)
