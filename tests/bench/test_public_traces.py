"""The public traces: the error of a benchmark when one is missing."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from coatcheck.bench import kv, routing
from coatcheck.bench.setup.public_traces import AZURE, CONVERSATION, ORIGINS, SYNTHETIC


@pytest.mark.parametrize(
    ("bench", "there", "lacks"),
    [
        (routing.main, [], CONVERSATION),
        (partial(routing.main, only="azure"), [CONVERSATION, SYNTHETIC], AZURE),
        (partial(kv.main, "hits"), [CONVERSATION], SYNTHETIC),
        (partial(kv.main, "lengths"), [CONVERSATION], AZURE),
    ],
    ids=["routing", "routing of azure", "hits", "lengths"],
)
def test_a_trace_that_is_not_there_is_named_with_its_origin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], bench: Callable[..., None], there: list[str], lacks: str
) -> None:
    """One line before anything runs names the file, its repository and path there, and the flag for another folder."""
    for name in there:
        (tmp_path / name).touch()
    with pytest.raises(SystemExit) as ended:
        bench(traces=tmp_path)
    printed = capsys.readouterr()
    assert ended.value.code == 2 and not printed.out
    assert printed.err.startswith(f"error: {tmp_path / lacks} is not there: ") and printed.err.count("\n") == 1
    assert all(said in printed.err for said in (*ORIGINS[lacks], "gzip", "--traces"))
