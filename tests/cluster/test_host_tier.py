"""The host tier through the real server: two groups of two ranks, pools that hold hardly one prompt each."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from coatcheck.proto import coatcheck_pb2 as pb
from coatcheck.proto.coatcheck_pb2_grpc import AdminStub, GenerationStub
from tests.cluster.serving import Serving, kill, until

pytestmark = pytest.mark.ray

PROMPT = [(i * 37 + 11) % 590 + 5 for i in range(200)]


@pytest.fixture(scope="module")
def serving(tiny_model: Path) -> Iterator[Serving]:
    """Pools of 21 blocks of 16 tokens, and host memory for a few hundred."""
    size = ["--groups", "2", "--tp", "2", "--kv-memory", "128KiB", "--host-kv-memory", "2MiB"]
    size += ["--eviction", "lru"]  # by worth, a prompt that is asked again and again outlives any flood
    with Serving(str(tiny_model), "--grpc-port", "0", "--dtype", "float32", *size) as serving:
        serving.wait_ready()
        yield serving


def ask(serving: Serving, prompt: list[int], max_tokens: int = 6) -> tuple[list[int], Any]:
    """Greedy tokens, and the final word."""
    sampling = pb.SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    with grpc.insecure_channel(serving.address) as channel:
        stub: Any = GenerationStub(channel)  # type: ignore[no-untyped-call]  # protoc writes no types
        answer = stub.Generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=prompt), sampling=sampling), timeout=60)
    return list(answer.choices[0].token_ids), answer.final


@contextmanager
def all_work_for(serving: Serving, group: str) -> Iterator[None]:
    """The other group drains meanwhile: else the router spares the group whose blocks are worth something."""
    other = {"group-0": "group-1", "group-1": "group-0"}[group]
    with grpc.insecure_channel(serving.address) as channel:
        admin: Any = AdminStub(channel)  # type: ignore[no-untyped-call]  # protoc writes no types
        admin.Drain(pb.DrainRequest(group=other, timeout_seconds=30), timeout=60)
        try:
            yield
        finally:
            admin.Drain(pb.DrainRequest(group=other, undo=True), timeout=60)


def flood(serving: Serving, start: int) -> None:
    """Prompts that nobody repeats, until the pool holds nothing else."""
    for i in range(4):
        ask(serving, [(start + 8 * i + 3 * j * (i + 1)) % 590 + 5 for j in range(200)], 1)


def test_a_prefix_comes_back_from_the_host(serving: Serving) -> None:
    """A prompt that others have driven out of the pool is answered as before, from host memory, and status says so."""
    first, final = ask(serving, PROMPT)
    with all_work_for(serving, final.group):
        flood(serving, 0)
        again, final = ask(serving, PROMPT)
    assert again == first
    found = final.usage
    assert found.cached_host_tokens > 0 and found.cached_device_tokens + found.cached_host_tokens == 192
    back = found.cached_host_tokens // 16
    until(lambda: serving.group(final.group)["restores"] >= back, "the group reports it")
    group = serving.group(final.group)
    assert group["host_blocks_total"] > 100 and 0 < group["host_blocks_used"] <= group["host_blocks_total"]
    assert group["demotions"] >= group["restores"] and group["integrity_failures"] == 0
    assert group["restore_bytes_per_second"] > 0 and group["restore_tokens_per_second"] > 0


def test_a_rank_killed_while_blocks_come_back(serving: Serving) -> None:
    """Killed in the middle of a restore, a group takes nothing with it: the other answers, and rightly."""
    first, final = ask(serving, PROMPT)
    answers: list[tuple[list[int], Any]] = []
    asking = threading.Thread(target=lambda: answers.append(ask(serving, PROMPT)))
    with all_work_for(serving, final.group):
        flood(serving, 300)
        again, final = ask(serving, PROMPT, 1)
        assert again == first[:1] and final.usage.cached_host_tokens
        flood(serving, 150)
        follower = int(serving.group(final.group)["ranks"][1]["pid"])
        os.kill(follower, signal.SIGSTOP)  # now rank 0 can begin the restore, and not end it
        asking.start()
        time.sleep(0.5)  # long enough for rank 0 to begin; if it has not, the answer is still to be right
        assert not answers, "answered without one of its ranks"
    kill(follower)
    asking.join(60)
    assert answers[0][0] == first
    assert answers[0][1].group != final.group and answers[0][1].moves == 1
