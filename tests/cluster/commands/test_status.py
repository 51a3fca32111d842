"""`coatcheck status` for people: a row for each group, and for each rank unless there are very many."""

import pytest

from coatcheck.cluster.commands.status import _print, describe_age
from coatcheck.proto.stubs.coatcheck_pb2 import Adapter, GetModelResponse, GroupStatus, RankStatus, StatusResponse


def printed(capsys: pytest.CaptureFixture[str], groups: int, *, unhealthy: int = 0) -> str:
    """What is printed for so many groups of eight ranks, of which some ranks of the last group are not healthy."""
    ranks = [RankStatus(rank=rank, node=f"node-{rank}", pid=rank, healthy=True) for rank in range(8)]
    answer = StatusResponse(
        router="router-0",
        state="serving",
        groups=[GroupStatus(name=f"group-{number}", state="serving", ranks=ranks) for number in range(groups)],
    )
    for rank in answer.groups[-1].ranks[:unhealthy]:
        rank.healthy = False
    _print(answer)
    return capsys.readouterr().out


def test_every_rank_has_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    """A cluster of 32 groups shows all of its ranks."""
    lines = printed(capsys, 32).splitlines()
    assert sum("/7" in line for line in lines) == 32 and not any("--json" in line for line in lines)


def test_of_very_many_ranks_only_the_unhealthy_have_rows(capsys: pytest.CaptureFixture[str]) -> None:
    """With more than 256 ranks the rows are those of groups and of ranks that are not healthy, and a line says so."""
    lines = printed(capsys, 40, unhealthy=2).splitlines()
    assert "320 ranks, 2 of them not healthy; `coatcheck status --json` lists all" in lines
    assert [line.split()[0] for line in lines if "/" in line and " no " in line] == ["group-39/0", "group-39/1"]
    assert sum(line.strip().startswith("group-") for line in lines) == 42


def test_a_line_names_the_kernels_in_use(capsys: pytest.CaptureFixture[str]) -> None:
    """Each kind of kernels that some group runs is named once."""
    kinds = ("native (avx2)", "native (amx)", "native (avx2)", "")
    _print(StatusResponse(groups=[GroupStatus(name=f"group-{i}", kernels=kind) for i, kind in enumerate(kinds)]))
    assert "kernels: native (amx), native (avx2)" in capsys.readouterr().out.splitlines()


def test_a_line_names_the_adapters(capsys: pytest.CaptureFixture[str]) -> None:
    """The LoRA adapters are named as clients name them; without adapters there is no such line."""
    model = GetModelResponse(name="m", adapters=[Adapter(name="sql"), Adapter(name="team/chat[v2]")])
    _print(StatusResponse(model=model))
    assert "LoRA adapters: sql, team/chat[v2]" in capsys.readouterr().out.splitlines()
    _print(StatusResponse())
    assert "LoRA" not in capsys.readouterr().out


def test_a_full_queue_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """The router's own queue with its longest wait, and how requests ended; nothing while there is neither."""
    answer = StatusResponse(queued_requests=12, queue_seconds=3.25)
    answer.outcomes.add(outcome="ok", count=3)
    answer.outcomes.add(outcome="queue_full", count=2)
    _print(answer)
    lines = capsys.readouterr().out.splitlines()
    assert "12 requests in the router's queue, for up to 3.2 s" in lines
    assert "requests of the last 5 min: 3 ok, 2 queue_full" in lines
    _print(StatusResponse())
    assert not any("request" in line for line in capsys.readouterr().out.splitlines())


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "-"), (0.5, "0 s"), (59.9, "59 s"), (60, "1 min"), (7300, "2 h"), (200_000, "2 d")]
)
def test_ages(seconds: float, text: str) -> None:
    """One unit, rounded down."""
    assert describe_age(seconds) == text


def test_weights_latents_and_the_busiest_expert_are_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """The weights of each rank, that every rank stores the latents, and how uneven the experts' load is."""
    rank = RankStatus(healthy=True, weight_bytes=5 << 20)
    groups = [GroupStatus(ranks=[rank], replicates_latents=True, expert_tokens=tokens) for tokens in ([1, 2], [2, 7])]
    _print(StatusResponse(groups=[*groups, GroupStatus()]))
    out = capsys.readouterr().out
    assert "5 MiB" in out and ", latents on every rank)" in out
    assert "experts: expert 1 of 2 is the busiest, with 1.50 times the mean of tokens" in out
    _print(StatusResponse(groups=[GroupStatus(ranks=[rank], divides_latents=True)]))
    assert ", latents divided over the ranks)" in capsys.readouterr().out
