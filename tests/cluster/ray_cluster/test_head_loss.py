"""The Ray head is killed and started again, with its state in Redis: requests are not affected."""

import threading
from pathlib import Path

import pytest

from coatcheck.bench.setup.ray_nodes import RayNodes
from coatcheck.bench.setup.redis_server import redis_server
from coatcheck.proto.errors import CoatcheckError
from tests.cluster.running_server import until
from tests.cluster.serving import Serving, kill
from tests.programs.find import need_program

pytestmark = [pytest.mark.ray, pytest.mark.full]


class Asking:
    """Sends short requests one after another, in a thread, while the context is open."""

    def __init__(self, serving: Serving) -> None:
        self.answers = 0
        self.faults: list[str] = []
        self._serving = serving
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._ask)

    def __enter__(self) -> "Asking":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _ask(self) -> None:
        while not self._stopping.is_set():
            try:
                answer = self._serving.generate("def main", max_tokens=30, ignore_eos=True)
                assert answer.usage.completion_tokens == 30
                self.answers += 1
            except (AssertionError, CoatcheckError) as error:
                self.faults.append(str(error))


def test_with_redis_the_head_may_be_lost(tmp_path: Path, tiny_model: Path) -> None:
    """While the head is gone requests are served as before; it comes back, the same command finds the cluster with its
    ranks as they were, and a rank that dies is started again."""
    need_program("redis-server")
    with redis_server(tmp_path) as address, RayNodes(tmp_path, environment={"RAY_REDIS_ADDRESS": address}) as nodes:
        nodes.add(1, {"front": 1})
        until(lambda: nodes.count() == 2, "the node has joined")
        flags = ["--grpc-port", "0", "--http-port", "none", "--kv-memory", "4MiB", "--router-resource", "front"]
        command = [str(tiny_model), *flags, "--ray-address", nodes.address]
        with Serving(*command, environment=nodes.environment) as serving:
            serving.wait_ready()
            rank = serving.group("group-0")["ranks"][0]["pid"]
            with Asking(serving) as asking:
                nodes.head.kill()
                so_far = asking.answers
                until(lambda: asking.answers > so_far + 1 or bool(asking.faults), "there are answers without a head")
                nodes.start_head()
                with Serving(*command, environment=nodes.environment) as again:
                    again.wait_ready()
                    assert again.address == serving.address
            assert not asking.faults
            assert serving.group("group-0")["ranks"][0]["pid"] == rank
            kill(rank)
            until(lambda: serving.group("group-0").get("restarts") == 1, "the group is started again")
