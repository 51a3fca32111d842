"""`coatcheck explain`: its table, its JSON and its errors."""

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from coatcheck.proto.stubs import coatcheck_pb2 as pb
from coatcheck.proto.stubs.coatcheck_pb2_grpc import AdminServicer, add_AdminServicer_to_server
from tests.cluster.command_line import run_here

TOLD = pb.Explanation(
    group="group-1",
    why="group-1: 0.250 s (queue 0.000 + prefill 0.250)",
    prompt_tokens=7,
    costs=[
        pb.GroupCost(group="group-1", total_seconds=0.25, prefill_seconds=0.25, device_tokens=4),
        pb.GroupCost(group="group-0", total_seconds=1.5, queue_seconds=1.5, host_tokens=16),
    ],
)


class Explaining(AdminServicer):
    """A router that answers with TOLD, or refuses."""

    def __init__(self) -> None:
        self.asked: list[pb.GenerateRequest] = []
        self.address = ""

    def Explain(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> pb.Explanation:
        self.asked.append(request)
        if not request.text and not request.token_ids.ids:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "the prompt is empty; give at least one token")
        return TOLD


@pytest.fixture
def router() -> Iterator[Explaining]:
    """A router that listens."""
    service = Explaining()
    server = grpc.server(ThreadPoolExecutor(1))
    add_AdminServicer_to_server(service, server)
    service.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield service
    server.stop(None).wait()


def run(*arguments: str) -> tuple[int, str]:
    """(exit code, output) of `coatcheck explain`."""
    done = run_here("explain", *arguments)
    return done.code, done.out + done.err


def test_people_get_a_row_per_group(router: Explaining) -> None:
    """The reason, then a row for each group with its cost terms, cheapest first, without terms that are zero
    everywhere. The prompt is sent as given."""
    status, printed = run("hello", "--address", router.address, "--cache-salt", "mine", "--max-tokens", "9")
    assert status == 0 and printed.startswith("group-1: 0.250 s")
    assert printed.index("group-1 ", 9) < printed.index("group-0 ")
    assert "1.500" in printed and "16" in printed
    columns = re.search(r"^ ?group  (.*)$", printed, re.MULTILINE)
    assert columns is not None and columns[1].split() == ["cost", "queue", "prefill", "cached", "in", "host"]
    (asked,) = router.asked
    assert (asked.text, asked.cache_salt, asked.sampling.max_tokens) == ("hello", "mine", 9)


def test_scripts_get_every_field(router: Explaining) -> None:
    """--json prints one object with every field, also zeros."""
    status, printed = run("1,2,3", "--token-ids", "--json", "--address", router.address)
    told = json.loads(printed)
    assert status == 0 and list(router.asked[0].token_ids.ids) == [1, 2, 3]
    assert told["group"] == "group-1" and told["costs"][0]["queue_seconds"] == 0.0


def test_a_refusal_is_one_line(router: Explaining) -> None:
    """A bad request ends with the router's message in one line."""
    status, printed = run("", "--address", router.address)
    assert (status, printed) == (2, "error: the prompt is empty; give at least one token\n")


def test_nobody_there_is_one_line() -> None:
    """If no router listens, the error names the address."""
    status, printed = run("hello", "--address", "127.0.0.1:1")
    refusal = "error: no server answers at 127.0.0.1:1; is `coatcheck serve` running there?\n"
    assert (status, printed) == (1, refusal)


def test_a_refused_group_has_its_reason_in_a_column(router: Explaining, monkeypatch: pytest.MonkeyPatch) -> None:
    """The column is there only if some group is refused."""
    assert "refused" not in run("hello", "--address", router.address)[1]
    refused = pb.GroupCost(group="group-2", total_seconds=0.1, refused="full: it has none")
    monkeypatch.setitem(globals(), "TOLD", pb.Explanation(group="group-1", costs=[*TOLD.costs, refused]))
    status, printed = run("hello", "--address", router.address)
    assert status == 0
    assert re.search(r"refused", printed) and re.search(r"group-2 \(no room\).*full: it has none", printed)
