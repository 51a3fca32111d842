"""What the load generator sends and when: seeded, exact in length, faithful to a trace."""

import gzip
import json
import time
from pathlib import Path

import numpy as np
import pytest

from coatcheck.cluster.benchmark.request_generator import BenchRequest, RequestGenerator
from coatcheck.cluster.benchmark.request_trace import TraceEntry, read_trace
from coatcheck.proto.errors import InvalidConfig
from coatcheck.proto.stubs import coatcheck_pb2 as pb


def ids(request: BenchRequest) -> list[int]:
    return list(pb.GenerateRequest.FromString(request.message).token_ids.ids)


def test_same_settings_same_bytes() -> None:
    """Two machines with the same settings send the same requests; another seed sends others."""
    one = RequestGenerator(vocab_size=100, seed=1).build_requests(5, rate=2.0)
    assert one == RequestGenerator(vocab_size=100, seed=1).build_requests(5, rate=2.0)
    assert one != RequestGenerator(vocab_size=100, seed=2).build_requests(5, rate=2.0)


def test_lengths_are_exact() -> None:
    """A prompt has input_len tokens of the vocabulary, and the answer is held to output_len."""
    for request in RequestGenerator(vocab_size=50, input_len=33, output_len=7).build_requests(20):
        assert len(ids(request)) == 33
        assert max(ids(request)) < 50
        sampling = pb.GenerateRequest.FromString(request.message).sampling
        assert (sampling.max_tokens, sampling.ignore_eos, sampling.temperature) == (7, True, 0.0)
        assert request.output_len == 7


def test_random_prompts_differ_and_fixed_ones_do_not() -> None:
    """Random prompts share nothing; fixed prompts are one prompt."""
    random = RequestGenerator(vocab_size=10**6, input_len=16).build_requests(10)
    assert len({tuple(ids(request)) for request in random}) == 10
    fixed = RequestGenerator(vocab_size=10**6, input_len=16, prompts="fixed").build_requests(10)
    assert len({tuple(ids(request)) for request in fixed}) == 1


def test_shared_prefixes_are_taken_in_turn() -> None:
    """Request i begins with prefix i modulo their number, and its suffix is its own."""
    requests = RequestGenerator(
        10**6, prompts="shared-prefix", num_prefixes=3, prefix_len=20, input_len=5
    ).build_requests(9)
    prompts = [ids(request) for request in requests]
    assert {len(prompt) for prompt in prompts} == {25}
    assert all((a[:20] == b[:20]) == (i % 3 == j % 3) for i, a in enumerate(prompts) for j, b in enumerate(prompts))
    assert len({tuple(prompt[20:]) for prompt in prompts}) == 9


def test_a_text_is_sent_as_it_is() -> None:
    """A text prompt goes out as text, for the server to tokenize."""
    (request,) = RequestGenerator(vocab_size=10, text="once upon a time").build_requests(1)
    assert pb.GenerateRequest.FromString(request.message).text == "once upon a time"


def test_poisson_arrivals() -> None:
    """Gaps between arrivals are exponential with the rate's mean, and the first request opens the run."""
    arrivals = np.array(
        [request.at for request in RequestGenerator(vocab_size=10, input_len=1).build_requests(4000, rate=8.0)]
    )
    gaps = np.diff(arrivals)
    assert arrivals[0] == 0.0
    assert gaps.mean() == pytest.approx(1 / 8, rel=0.06)
    assert gaps.std() == pytest.approx(1 / 8, rel=0.08)
    assert {request.at for request in RequestGenerator(vocab_size=10).build_requests(3)} == {0.0}


MOONCAKE = [
    {"timestamp": 4000, "input_length": 1100, "output_length": 5, "hash_ids": [0, 1, 2]},
    {"timestamp": 3000, "input_length": 1030, "output_length": 6, "hash_ids": [0, 1, 9]},
    {"timestamp": 7000, "input_length": 600, "output_length": 7, "hash_ids": [0, 4]},
]
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9151690,396,109\n"
)


def test_mooncake_trace(tmp_path: Path) -> None:
    """Times count from the first arrival, in seconds and in order; prompts share exactly the blocks the ids share."""
    path = tmp_path / "trace.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(map(json.dumps, MOONCAKE)).encode()))
    trace = read_trace(path)
    assert [(entry.at, entry.input_len, entry.output_len) for entry in trace] == [
        (0.0, 1030, 6),
        (1.0, 1100, 5),
        (4.0, 600, 7),
    ]
    first, second, third = (ids(request) for request in RequestGenerator(vocab_size=10**6).replay(trace))
    assert list(map(len, (first, second, third))) == [1030, 1100, 600]
    assert first[:1024] == second[:1024]
    assert first[1024:] != second[1024:1030]
    assert third[:512] == first[:512]
    assert third[512:] != first[512:600]


def test_azure_trace(tmp_path: Path) -> None:
    """An Azure trace has times and lengths; its prompts share nothing."""
    path = tmp_path / "azure.csv"
    path.write_text(AZURE)
    trace = read_trace(path)
    assert [entry.input_len for entry in trace] == [374, 396]
    assert trace[1].at == pytest.approx(4.234579, abs=1e-5)
    one, other = RequestGenerator(vocab_size=10**6).replay(trace)
    assert (len(ids(one)), one.output_len, len(ids(other))) == (374, 44, 396)
    assert ids(one)[:10] != ids(other)[:10]


def test_the_times_of_an_azure_trace_are_utc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrivals are one second apart wherever the trace is read, also in the hour in which clocks there are set back."""
    path = tmp_path / "azure.csv"
    rows = ("2024-10-27 02:59:59,3,4", "2024-10-27 03:00:00,3,4", "2024-10-27 03:00:01.000000+00:00,3,4")
    path.write_text("\n".join(("TIMESTAMP,ContextTokens,GeneratedTokens", *rows)))
    monkeypatch.setenv("TZ", "Europe/Berlin")
    time.tzset()
    try:
        assert [entry.at for entry in read_trace(path)] == [0.0, 1.0, 2.0]
    finally:
        monkeypatch.undo()
        time.tzset()


def test_scales() -> None:
    """Times and lengths are multiplied; blocks shrink with their prompts, so that what was shared still is."""
    trace = [TraceEntry(0.0, 1024, 100, (0, 1)), TraceEntry(10.0, 1024, 3, (0, 2))]
    one, other = RequestGenerator(vocab_size=10**6).replay(trace, time_scale=0.5, length_scale=0.25)
    assert (other.at, len(ids(one)), one.output_len, other.output_len) == (5.0, 256, 25, 1)
    assert ids(one)[:128] == ids(other)[:128]
    assert ids(one)[128:] != ids(other)[128:]


def test_limit_reads_no_further(tmp_path: Path) -> None:
    """A limit takes the first requests of the file and does not look at the rest."""
    path = tmp_path / "trace.jsonl"
    path.write_text(json.dumps(MOONCAKE[0]) + "\nnonsense\n")
    assert len(read_trace(path, limit=1)) == 1


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("trace.jsonl", '{"timestamp": 1}\n', "line 1 of the trace is not a Mooncake request"),
        ("trace.jsonl", "[1]\n", "line 1 of the trace"),
        ("trace.csv", "TIMESTAMP,ContextTokens\n2023-11-16 18:15:46,3\n", "line 2 of the trace is not an Azure row"),
        ("trace.jsonl", '{"timestamp": 1, "input_length": Infinity, "output_length": 1}\n', "line 1 of the trace"),
        ("trace.jsonl", '{"timestamp": NaN, "input_length": 1, "output_length": 1}\n', "the time is nan; it must be"),
        ("trace.jsonl", '{"timestamp": 1, "input_length": 1, "output_length": 1e12}\n', "1000000000000 tokens; it"),
        ("trace.jsonl", '{"timestamp": 1, "input_length": -1, "output_length": 1}\n', "-1 tokens; it must be from 0"),
        (
            "trace.jsonl",
            '{"timestamp": 1, "input_length": 1, "output_length": 1, "hash_ids": [-1]}\n',
            "the block -1; ids are not negative",
        ),
        ("trace.jsonl", '{"a":' * 100_000, "line 1 of the trace"),
        ("trace.csv", f"TIMESTAMP\n{'x' * 200_000}\n", "line 2 of the trace is not an Azure row"),
        ("trace.csv", "", "holds no request"),
        ("trace.parquet", "x", "neither .jsonl"),
        ("trace.jsonl.gz", "not gzip", "cannot read the trace"),
    ],
)
def test_bad_traces(tmp_path: Path, name: str, text: str, message: str) -> None:
    """A file that is no trace is refused with the line and what a line must be."""
    (tmp_path / name).write_text(text)
    with pytest.raises(InvalidConfig, match=message):
        read_trace(tmp_path / name)


def test_missing_trace(tmp_path: Path) -> None:
    """A file that is not there is named."""
    with pytest.raises(InvalidConfig, match=r"none\.jsonl: No such file"):
        read_trace(tmp_path / "none.jsonl")
