"""A request whose tokens are known, and a stream that is read in pieces."""

from coatcheck.proto.stubs.coatcheck_pb2 import GenerateEvent, GenerateRequest, SamplingParams
from tests.router.fake_group import FakeGroup
from tests.router.router_under_test import RouterUnderTest, StartRouter


def ask(**sampling: object) -> GenerateRequest:
    """A request with a fixed seed, so its tokens are known."""
    return GenerateRequest(text="a fox", sampling=SamplingParams(**{"max_tokens": 20, "seed": 7, **sampling}))  # type: ignore[arg-type]


async def undisturbed(start_router: StartRouter, request: GenerateRequest) -> tuple[list[str], list[list[int]]]:
    """The texts and token ids of the choices, from a group that does not fail."""
    router = await start_router(FakeGroup())
    whole = await router.generation.Generate(request)
    return [choice.text for choice in whole.choices], [list(choice.token_ids) for choice in whole.choices]


class Stream:
    """A stream that is read in pieces, joined per choice."""

    def __init__(self, router: RouterUnderTest, request: GenerateRequest, n: int = 1) -> None:
        self.call = router.generation.GenerateStream(request)
        self.events: list[GenerateEvent] = []
        self.texts = [""] * n
        self.ids: list[list[int]] = [[] for _ in range(n)]

    async def read(self) -> GenerateEvent:
        """Reads the next event and adds it to `texts` and `ids`."""
        event: GenerateEvent = await self.call.read()
        self.events.append(event)
        if event.HasField("delta"):
            self.texts[event.delta.choice] += event.delta.text
            self.ids[event.delta.choice] += event.delta.token_ids
        return event

    async def finish(self) -> GenerateEvent:
        """Reads all remaining events; returns the Final."""
        while not (event := await self.read()).HasField("final"):
            pass
        return event
