"""merged(): the streams of several prompts as one, each event with its prompt's place.

A few events may wait for the reader, no more: a slow one holds its streams up, as a single stream's would.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from coatcheck.proto.stubs.coatcheck_pb2 import GenerateEvent

Source = AsyncGenerator[GenerateEvent, None]
Event = tuple[int, GenerateEvent]  # (the prompt's place, its event)
_WAITING = 16


async def begin(sources: Sequence[Source], admitted: asyncio.Semaphore) -> AsyncGenerator[Event, None]:
    """Returns merged(sources) once every request is admitted and one stream has begun; others may wait for seats until
    the first ones end. `admitted` is released for each request that passes its checks. If a stream fails before that,
    closes all and raises its error, which can still become the HTTP status."""
    failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
    events = merged(sources, failed)
    started = asyncio.gather(anext(events), _acquire(admitted, len(sources)))
    try:
        await asyncio.wait({started, failed}, return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            raise failed.result()
        first, _ = started.result()
    except BaseException:
        started.cancel()
        await asyncio.gather(started, return_exceptions=True)
        await events.aclose()
        for source in sources:
            await source.aclose()
        raise
    return _chain(first, events)


async def merged(
    sources: Sequence[Source], failed: "asyncio.Future[BaseException] | None" = None
) -> AsyncGenerator[Event, None]:
    """Ends when all have ended, and with the first that fails; closing it closes all. `failed` gets the first error of
    several streams at once, even while nobody reads."""
    if len(sources) == 1:
        async with aclosing(sources[0]) as events:
            async for event in events:
                yield 0, event
        return
    queue: asyncio.Queue[Event | BaseException | None] = asyncio.Queue(_WAITING)
    tasks: list[asyncio.Task[None]] = []
    try:
        for place, source in enumerate(sources):
            tasks.append(asyncio.create_task(_pump(place, source, queue, failed)))
            await asyncio.sleep(0)  # a thousand prompts that begin in one round would block the event loop
        left = len(tasks)
        while left:
            item = await queue.get()
            if isinstance(item, BaseException):
                raise item
            if item is None:
                left -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _chain(first: Event, events: AsyncGenerator[Event, None]) -> AsyncGenerator[Event, None]:
    async with aclosing(events):
        yield first
        async for event in events:
            yield event


async def _acquire(semaphore: asyncio.Semaphore, times: int) -> None:
    for _ in range(times):
        await semaphore.acquire()


async def _pump(
    place: int,
    source: Source,
    queue: "asyncio.Queue[Event | BaseException | None]",
    failed: "asyncio.Future[BaseException] | None",
) -> None:
    try:
        async with aclosing(source) as events:
            async for event in events:
                await queue.put((place, event))
    except Exception as error:
        if failed is not None and not failed.done():
            failed.set_result(error)
        await queue.put(error)
    else:
        await queue.put(None)
