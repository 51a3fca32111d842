"""StreamingClients: clients that stream without pause while a cluster changes, and check each answer."""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import grpc

from coatcheck.proto.stubs.coatcheck_pb2 import GenerateRequest, SamplingParams, StatusRequest
from coatcheck.proto.stubs.coatcheck_pb2_grpc import AdminStub, GenerationStub

STREAMS = 2


class StreamingClients:
    """Clients that know one address and retry nothing. Each sends the next request as soon as one is answered."""

    def __init__(self, address: str, pool: ThreadPoolExecutor) -> None:
        channel = grpc.insecure_channel(address)
        self._generation, self._admin = GenerationStub(channel), AdminStub(channel)
        self._pool = pool
        self._undisturbed = [self._ask(seed) for seed in range(STREAMS)]

    def ask_while(self, *running: "Future[Any]") -> "list[Future[int]]":
        """Send requests from every client until all of `running` are done. Each future returns its number of requests,
        at least one."""
        return [self._pool.submit(self._ask_while, seed, running) for seed in range(STREAMS)]

    def states(self) -> dict[str, str]:
        """The state of each group, as the router reports it."""
        return {group.name: group.state for group in self._admin.Status(StatusRequest()).groups}

    def _ask(self, seed: int) -> list[int]:
        sampling = SamplingParams(max_tokens=100, ignore_eos=True, seed=seed)
        events = self._generation.GenerateStream(GenerateRequest(text=f"prompt {seed}", sampling=sampling))
        return [token for event in events for token in event.delta.token_ids]

    def _ask_while(self, seed: int, running: "tuple[Future[Any], ...]") -> int:
        times = 0
        while not times or not all(one.done() for one in running):
            assert self._ask(seed) == self._undisturbed[seed]
            times += 1
        return times
