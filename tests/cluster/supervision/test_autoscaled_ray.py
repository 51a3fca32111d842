"""`--max-groups` with Ray's own autoscaler: a queue adds a node and a group on it, idleness removes both."""

import signal
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import grpc
import pytest

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.proto.stubs.coatcheck_pb2 import GenerateRequest, SamplingParams, StatusRequest
from coatcheck.proto.stubs.coatcheck_pb2_grpc import AdminStub, GenerationStub
from tests.cluster.autoscaled_ray import AutoscaledRay
from tests.cluster.running_server import until
from tests.cluster.serving import Serving

_CLIENTS = 12  # one is answered, four are ready behind it, the others wait in line


class Clients:
    """Clients that send the next request as soon as one is answered, and retry nothing. `answers` counts the answers of
    each group."""

    def __init__(self, address: str) -> None:
        channel = grpc.insecure_channel(address)
        self._generation, self._admin = GenerationStub(channel), AdminStub(channel)
        self._lock = threading.Lock()
        self.stopped = threading.Event()
        self.answers: Counter[str] = Counter()

    def ask_on(self, seed: int) -> None:
        """Send requests until `stopped` is set."""
        sampling = SamplingParams(max_tokens=200, ignore_eos=True, seed=seed)
        while not self.stopped.is_set():
            answer = self._generation.Generate(GenerateRequest(text=f"prompt {seed}", sampling=sampling))
            assert answer.final.usage.completion_tokens == 200
            with self._lock:
                self.answers[answer.final.group] += 1

    def states(self) -> dict[str, str]:
        """The state of each group, as the router reports it."""
        return {group.name: group.state for group in self._admin.Status(StatusRequest()).groups}

    def story(self, ray: AutoscaledRay) -> str:
        """Answers, groups, nodes and the supervisor's last log lines, for a failed assertion."""
        return f"{dict(self.answers)} {self.states()}, {ray.nodes()} nodes; supervisor:{ray.last_words('Supervisor')}"


@pytest.mark.ray
@pytest.mark.full  # a minute: ten seconds of queue, a node, a group, and all of it back
def test_a_queue_brings_a_node_and_idleness_takes_it_away(tiny_model: Path, tmp_path: Path) -> None:
    """One group on a head without room for a second; twelve clients queue. Ray adds a node, and a second group
    starts there and answers. With one client left, the second group and its node are removed. No request is refused
    or fails."""
    with AutoscaledRay(tmp_path, head_cpus=1, most=1) as ray, ThreadPoolExecutor(_CLIENTS) as pool:
        flags = "--groups 1 --max-groups 2 --queue-target 0.05 --scale-in-after 5 --max-num-seqs 1 --kv-memory 4MiB"
        where = f"--grpc-port 0 --http-port none --ray-address {ray.address}"
        with Serving(str(tiny_model), *f"{flags} {where}".split(), environment=ray.environment) as serving:
            serving.wait_ready()
            assert ray.nodes() == 1
            many, one = Clients(serving.address), Clients(serving.address)
            told = partial(many.story, ray)
            asking = [pool.submit(many.ask_on, seed) for seed in range(_CLIENTS)]
            try:
                until(
                    lambda: many.answers["group-1"] > 0 or asking[0].done(),
                    "another group answers",
                    else_tell=told,
                )
                assert ray.nodes() == 2 and many.states() == {"group-0": "serving", "group-1": "serving"}
            finally:
                many.stopped.set()
            for client in asking:
                client.result()
            last = pool.submit(one.ask_on, 0)
            try:
                until(lambda: set(one.states()) == {"group-0"} or last.done(), "the group is gone", else_tell=told)
                until(lambda: ray.nodes() == 1, "the node is gone", else_tell=told)
            finally:
                one.stopped.set()
            last.result()
            serving.process.send_signal(signal.SIGTERM)
            assert serving.process.wait(MAX_WAIT_SECONDS) == 0
