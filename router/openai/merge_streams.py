"""merge_streams(): merges the event streams of several prompts into one stream.

At most _MAX_WAITING events wait for a slow reader; then all streams wait.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from coatcheck.proto.stubs.coatcheck_pb2 import GenerateEvent

Source = AsyncGenerator[GenerateEvent, None]
Event = tuple[int, GenerateEvent]  # (index of the prompt, its event)
_MAX_WAITING = 16


async def start_merged(sources: Sequence[Source], admitted: asyncio.Semaphore) -> AsyncGenerator[Event, None]:
    """Returns merge_streams(sources) once all requests are admitted and one stream has begun. The other streams may
    still wait for a group until the first ones end.

    `admitted` is released once for each request that passes its checks. If a stream fails before that, closes all of
    them and raises its error, which can still become the HTTP status.
    """
    failed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
    events = merge_streams(sources, failed)
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
    return _prepend(first, events)


async def merge_streams(
    sources: Sequence[Source], failed: "asyncio.Future[BaseException] | None" = None
) -> AsyncGenerator[Event, None]:
    """Yields (index of the prompt, event) until all sources have ended or one has failed. Closing the generator closes
    all sources. With several sources `failed` gets the first error at once, even while the events are not read."""
    if len(sources) == 1:
        async with aclosing(sources[0]) as events:
            async for event in events:
                yield 0, event
        return
    queue: asyncio.Queue[Event | BaseException | None] = asyncio.Queue(_MAX_WAITING)
    tasks: list[asyncio.Task[None]] = []
    try:
        for prompt_index, source in enumerate(sources):
            tasks.append(asyncio.create_task(_pump(prompt_index, source, queue, failed)))
            await asyncio.sleep(0)  # starting a thousand prompts at once would block the event loop
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


async def _pump(
    prompt_index: int,
    source: Source,
    queue: "asyncio.Queue[Event | BaseException | None]",
    failed: "asyncio.Future[BaseException] | None",
) -> None:
    """Puts the events of a source into the queue, then None or its error."""
    try:
        async with aclosing(source) as events:
            async for event in events:
                await queue.put((prompt_index, event))
    except Exception as error:
        if failed is not None and not failed.done():
            failed.set_result(error)
        await queue.put(error)
    else:
        await queue.put(None)


async def _acquire(semaphore: asyncio.Semaphore, times: int) -> None:
    for _ in range(times):
        await semaphore.acquire()


async def _prepend(first: Event, events: AsyncGenerator[Event, None]) -> AsyncGenerator[Event, None]:
    async with aclosing(events):
        yield first
        async for event in events:
            yield event
