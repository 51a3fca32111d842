"""The host tier of a real cluster: two groups of two ranks, with pools that hold little more than one prompt each."""

import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families

from coatcheck.bench.setup.max_wait import MAX_WAIT_SECONDS
from coatcheck.proto.stubs import coatcheck_pb2 as pb
from coatcheck.proto.stubs.coatcheck_pb2_grpc import AdminStub, GenerationStub
from coatcheck.workers.core.group_config import GroupConfig
from tests.cluster.local_cluster import LocalCluster
from tests.cluster.running_server import until
from tests.cluster.serving import kill

HOST_BYTES = 11_271 * 3072  # large enough for a mapping of its own, whose size finds it in the process's memory
PROMPT = [(i * 37 + 11) % 590 + 5 for i in range(200)]


@pytest.fixture(scope="module")
def serving(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    """Pools of 42 blocks of 16 tokens, and host memory for thousands of blocks."""
    groups = [
        GroupConfig(
            name, str(tiny_model), "tiny", tp=2, device="cpu", threads=1, dtype="float32", log_format="json",
            kv_memory=128 << 10, host_kv_memory=HOST_BYTES,
            eviction="lru",  # with "cost" a prompt that is repeated outlives any flood
        )
        for name in ("group-0", "group-1")
    ]  # fmt: skip
    with LocalCluster(groups, tmp_path_factory.mktemp("logs")) as cluster:
        yield cluster


def ask(
    serving: LocalCluster, prompt: list[int], max_tokens: int = 6, name: str = "", salt: str = ""
) -> tuple[list[int], Any]:
    """(greedy tokens, the Final event)."""
    sampling = pb.SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
    with grpc.insecure_channel(serving.address) as channel:
        stub: Any = GenerationStub(channel)  # type: ignore[no-untyped-call]  # protoc writes no types
        ids = pb.TokenIds(ids=prompt)
        request = pb.GenerateRequest(token_ids=ids, sampling=sampling, request_id=name, cache_salt=salt)
        answer = stub.Generate(request, timeout=MAX_WAIT_SECONDS)
    return list(answer.choices[0].token_ids), answer.final


@contextmanager
def all_work_for(serving: LocalCluster, group: str) -> Iterator[None]:
    """Drains the other group meanwhile, because the router would send new prompts to the group whose cached blocks are
    worth less."""
    other = {"group-0": "group-1", "group-1": "group-0"}[group]
    with grpc.insecure_channel(serving.address) as channel:
        admin: Any = AdminStub(channel)  # type: ignore[no-untyped-call]  # protoc writes no types
        admin.Drain(pb.DrainRequest(group=other, timeout_seconds=MAX_WAIT_SECONDS), timeout=2 * MAX_WAIT_SECONDS)
        try:
            yield
        finally:
            admin.Drain(pb.DrainRequest(group=other, undo=True), timeout=MAX_WAIT_SECONDS)


def flood(serving: LocalCluster, start: int) -> None:
    """Send prompts that nobody repeats, until the pool holds nothing else."""
    for i in range(4):
        ask(serving, [(start + 8 * i + 3 * j * (i + 1)) % 590 + 5 for j in range(200)], 1)


def test_a_prefix_comes_back_from_the_host(serving: LocalCluster) -> None:
    """A prompt that others have evicted from the pool gets the same answer, from host memory, and `status` counts
    it."""
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


def flip_bits(pid: int, bytes_per_block: int) -> int:
    """Flip one bit in each block of a process's host memory that is not all zeros. Returns the number of blocks."""
    flipped = 0
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
        start = host_memory(pid, memory)
        # The allocator's own bytes come first, less than half a block.
        for at in range(start + bytes_per_block // 2, start + HOST_BYTES, bytes_per_block):
            memory.seek(at)
            if byte := memory.read(1)[0]:
                memory.seek(at)
                flipped += memory.write(bytes([byte ^ 4]))
    return flipped


def host_memory(pid: int, memory: FileIO) -> int:
    """The address of a process's host memory. It begins with a page whose second word is the size that the allocator
    has mapped."""
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        ends, *about = line.split()
        start, end = (int(end, 16) for end in ends.split("-"))
        if len(about) > 4 or not about[0].startswith("rw") or end - start < HOST_BYTES:  # a file's, or too small
            continue
        memory.seek(start)
        held = memory.read(end - start)
        for page in range(0, len(held), 4096):
            if HOST_BYTES <= int.from_bytes(held[page + 8 : page + 16], "little") < HOST_BYTES + (1 << 14):
                return start + page
    raise AssertionError("there is no such memory")


def logged(serving: LocalCluster, group: str, request_id: str) -> dict[str, Any]:
    """What rank 0 of a group has logged at the end of a request."""
    lines = serving.read_log(group, 0).splitlines()
    ends = [json.loads(line) for line in lines if request_id in line and "submission ended" in line]
    found: dict[str, Any] = ends[-1]
    return found


def test_bits_that_flip_in_a_live_groups_host_memory(serving: LocalCluster) -> None:
    """Blocks with a wrong checksum are a miss: counted, logged with that reason, and computed again. The answer stays
    right."""
    first, final = ask(serving, PROMPT)
    with all_work_for(serving, final.group):
        flood(serving, 77)
        before = serving.group(final.group)
        follower = int(before["ranks"][1]["pid"])
        assert flip_bits(follower, before["bytes_per_block"]) > 12
        again, final = ask(serving, PROMPT, name="flipped")
        third, after = ask(serving, PROMPT)
        counted = before["prefix_misses"]["corrupt"] + 1
        until(lambda: serving.group(final.group)["prefix_misses"]["corrupt"] == counted, "the group reports it")
        now = serving.group(final.group)
    assert again == third == first
    assert final.usage.cached_host_tokens == 0 and after.usage.cached_device_tokens == 192
    assert now["integrity_failures"] > before["integrity_failures"]
    said = logged(serving, final.group, "flipped")
    assert (said["prefix_miss"], said["prefix_miss_block"], said["cached_host_tokens"]) == ("corrupt", 0, 0)


def test_the_log_says_why_a_prefix_missed(serving: LocalCluster) -> None:
    """The group's log tells apart a new prompt, a prompt of which only the beginning is known, and a prompt that is
    cached under another salt."""
    prompt = [(i * 53 + 7) % 590 + 5 for i in range(200)]
    _, final = ask(serving, prompt, 1, "a-new-one")
    with all_work_for(serving, final.group):
        ask(serving, [*prompt[:64], *[598] * 100], 1, "its-beginning")
        ask(serving, prompt, 1, "another-salt", "somebody")
    said = [logged(serving, final.group, name) for name in ("a-new-one", "its-beginning", "another-salt")]
    found = [(one["prefix_miss"], one["prefix_miss_block"]) for one in said]
    assert found == [("never_seen", 0), ("never_seen", 4), ("other_salt", 0)]


def _found(serving: LocalCluster) -> dict[tuple[str, ...], float]:
    """What /metrics says of the first group, by name and labels."""
    with urlopen(f"{serving.url}/metrics", timeout=MAX_WAIT_SECONDS) as answer:
        page = answer.read().decode()
    families = text_string_to_metric_families(page)
    return {
        (
            sample.name.removeprefix("coatcheck_group_"),
            *(v for k, v in sorted(sample.labels.items()) if k != "group"),
        ): sample.value
        for family in families
        for sample in family.samples
        if sample.labels.get("group") == "group-0"
    }


def _said(group: dict[str, Any]) -> dict[tuple[str, ...], float]:
    """The same values from the group's status."""
    free = group["blocks_total"] - group["blocks_used"] - group["blocks_cached"]
    said: dict[tuple[str, ...], float] = {
        ("blocks", "device", "used"): group["blocks_used"],
        ("blocks", "device", "cached"): group["blocks_cached"],
        ("blocks", "device", "free"): free,
        ("blocks", "host", "cached"): group["host_blocks_used"],
        ("blocks", "host", "free"): group["host_blocks_total"] - group["host_blocks_used"],
        ("cached_tokens_total", "device"): group["cached_device_tokens"],
        ("cached_tokens_total", "host"): group["cached_host_tokens"],
        ("moved_bytes_total", "host"): group["demotions"] * group["bytes_per_block"] * 2,
        ("moved_bytes_total", "device"): group["restores"] * group["bytes_per_block"] * 2,
        ("demoted_blocks_total",): group["demotions"],
        ("restored_blocks_total",): group["restores"],
        ("integrity_failures_total",): group["integrity_failures"],
        ("preemptions_total",): group["preemptions"],
    }
    said |= {("evicted_blocks_total", reason, "device"): n for reason, n in group["device_evictions"].items()}
    said |= {("evicted_blocks_total", reason, "host"): n for reason, n in group["host_evicted"].items()}
    said |= {("prefix_misses_total", reason): n for reason, n in group["prefix_misses"].items()}
    return said


def test_metrics_say_what_status_says(serving: LocalCluster) -> None:
    """/metrics and Status agree on occupancy, hits by tier, evictions by reason, copies, their bytes, failures and
    misses. The numbers add up."""
    group: dict[str, Any] = {}

    def agree() -> bool:
        group.update(serving.group("group-0"))
        said = _said(group)
        found = _found(serving)
        return {key: found[key] for key in said} == said

    until(agree, "the page and the status are of the same report")
    assert group["demotions"] <= sum(group["device_evictions"].values())


def _in_flight(serving: LocalCluster) -> float:
    """The number of requests that the router has received and not answered."""
    with urlopen(f"{serving.url}/metrics", timeout=MAX_WAIT_SECONDS) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    samples = [sample for family in families for sample in family.samples]
    return sum(sample.value for sample in samples if sample.name == "coatcheck_active_requests")


def test_a_rank_killed_while_blocks_come_back(serving: LocalCluster) -> None:
    """A group is killed amid a restore: the other group gives the right answer."""
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
        until(lambda: _in_flight(serving) == 1, "the prompt is with its group")
        assert not answers, "answered without one of its ranks"
    kill(follower)
    asking.join(MAX_WAIT_SECONDS)
    assert answers[0][0] == first
    assert answers[0][1].group != final.group and answers[0][1].moves == 1
