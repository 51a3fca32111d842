"""merged(): the streams of several prompts as one, each event with its prompt's place.

A few events may wait for the reader, no more: a slow one holds its streams up, as a single stream's would.
"""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from ...proto.coatcheck_pb2 import GenerateEvent

Source = AsyncGenerator[GenerateEvent, None]
_WAITING = 16


async def begin(sources: Sequence[Source]) -> list[GenerateEvent]:
    """Takes and returns each stream's first event, which says that it was admitted; when one is not, raises its error
    and closes the others."""
    tasks: list[asyncio.Future[GenerateEvent]] = []
    try:
        for source in sources:
            tasks.append(asyncio.ensure_future(anext(source)))
            await asyncio.sleep(0)  # a thousand prompts that begin in one round would block the event loop
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for source in sources:
            await source.aclose()
        raise


async def merged(sources: Sequence[Source]) -> AsyncGenerator[tuple[int, GenerateEvent], None]:
    """Ends when all have ended, and with the first that fails; closing it closes all."""
    if len(sources) == 1:
        async with aclosing(sources[0]) as events:
            async for event in events:
                yield 0, event
        return
    queue: asyncio.Queue[tuple[int, GenerateEvent] | BaseException | None] = asyncio.Queue(_WAITING)
    tasks: list[asyncio.Task[None]] = []
    try:
        for place, source in enumerate(sources):
            tasks.append(asyncio.create_task(_pump(place, source, queue)))
            await asyncio.sleep(0)  # as above
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
    place: int, source: Source, queue: "asyncio.Queue[tuple[int, GenerateEvent] | BaseException | None]"
) -> None:
    try:
        async with aclosing(source) as events:
            async for event in events:
                await queue.put((place, event))
    except Exception as error:
        await queue.put(error)
    else:
        await queue.put(None)
