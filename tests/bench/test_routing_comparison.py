"""The comparison of routing rules: tuning, figures of earlier code, tables, and runs that are continued."""

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from coatcheck.bench import routing
from coatcheck.bench.routing_simulation import comparison
from coatcheck.bench.routing_simulation.cells import CELLS, Cell
from coatcheck.bench.routing_simulation.comparison import (
    OURS,
    QUEUED,
    RULES,
    TUNABLE,
    TUNED,
    Measured,
    fingerprint,
    measure,
)
from coatcheck.bench.routing_simulation.comparison_tables import OTHERS, compare, summary, worst
from coatcheck.bench.routing_simulation.rules import rules
from coatcheck.bench.routing_simulation.simulation import SimulationResult, run
from coatcheck.bench.routing_simulation.workload import Part
from coatcheck.bench.setup.public_traces import AZURE
from coatcheck.router.groups import group_load
from coatcheck.router.routing import routing_cost
from tests.bench.sessions import sessions


@pytest.mark.parametrize("name", TUNABLE)
def test_a_rule_is_tuned_on_the_training_part_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a rule's weights the one with the least TTFT p90 on the training part is measured, behind our queue."""
    cell, parts = Cell("sessions", 120, 0.9), {Part.TRAINING: sessions(12, 8), Part.MEASURED: sessions(12, 8, seed=1)}
    monkeypatch.setattr(comparison, "load_part", lambda workload, part, traces: parts[part])
    tuned = measure(cell, name + TUNED, Part.MEASURED, Path())
    rule = TUNABLE[name]
    by_weight = {
        weight: run(cell, partial(rule.make, weight), parts[Part.TRAINING], queued=True).ttft_p90
        for weight in rule.weights
    }
    assert tuned.weight is not None and by_weight[tuned.weight] == min(by_weight.values())
    assert tuned.result == run(cell, partial(rule.make, tuned.weight), parts[Part.MEASURED], queued=True)
    published = measure(cell, name, Part.MEASURED, Path())
    assert published.weight is None and published.result == run(cell, rules()[name], parts[Part.MEASURED])


def test_figures_of_other_code_are_known_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rule's fingerprint differs if the rule decides otherwise, and stays if only other rules do; it covers the
    requests too."""
    parts = {Part.TRAINING: sessions(3, 3), Part.MEASURED: sessions(3, 3, seed=1)}
    monkeypatch.setattr(comparison, "load_part", lambda workload, part, traces: parts[part])
    cell = Cell("sessions", 120, 0.9)

    def prints() -> dict[str, str]:
        comparison._behaviour.cache_clear()
        comparison._digest.cache_clear()
        return {
            rule: fingerprint(cell, rule, Part.MEASURED, Path())
            for rule in (OURS, "llm-d", "llm-d" + QUEUED, "llm-d" + TUNED)
        }

    before = prints()
    assert prints() == before and len(set(before.values())) == 4
    with monkeypatch.context() as patch:
        patch.setattr(routing_cost, "_TTFT_LIMIT", 200.0)
        assert {rule for rule, code in prints().items() if code != before[rule]} == {OURS}
    with monkeypatch.context() as patch:
        patch.setattr(group_load, "_QUEUED_SECONDS", 1.0)
        assert {rule for rule, code in prints().items() if code != before[rule]} == before.keys() - {"llm-d"}
    with monkeypatch.context() as patch:
        patch.setitem(parts, Part.TRAINING, sessions(3, 4))
        assert {rule for rule, code in prints().items() if code != before[rule]} == {"llm-d" + TUNED}
    comparison._behaviour.cache_clear()
    comparison._digest.cache_clear()


def _result(p90: float, p99: float, goodput: float, imbalance: float = 1.0) -> SimulationResult:
    return SimulationResult(0.5, imbalance, 0.1, p90, p99, goodput, 1.0)


def test_ours_is_compared_with_the_best_of_each_kind_by_each_figure() -> None:
    """The best by p90, p99 and goodput may be three rules. Rules with a weight are in the last table as tuned only, and
    a cell that is not run to its end is in no table. The worst cell comes first."""
    bad = dict.fromkeys(RULES, _result(9, 9, 0.1))
    fine = bad | {OURS: _result(1, 3, 0.9), "dynamo": _result(2, 9, 0.1), "sglang": _result(9, 4, 0.1)}
    fine |= {"random": _result(9, 9, 0.95), "llm-d" + QUEUED: _result(0.5, 9, 0.5), "llm-d" + TUNED: _result(0.8, 9, 1)}
    slow = bad | {OURS: _result(4, 4, 0.5, 1.3), "random": _result(1, 9, 0.5), "random" + QUEUED: _result(1, 9, 0.5)}
    cells = {CELLS[0].name: fine, CELLS[1].name: slow, CELLS[2].name: {OURS: _result(1, 1, 1)}}
    results = {cell: {rule: {Part.MEASURED: result} for rule, result in rules.items()} for cell, rules in cells.items()}
    tables = {title: compare(results, others) for title, others in OTHERS.items()}
    published, queued, tuned = (next(row for row in rows if row.cell == CELLS[0].name) for rows in tables.values())
    assert (published.p90_rule, published.p99_rule, published.goodput_rule) == ("dynamo", "sglang", "random")
    assert (published.p90_ratio, published.p99_ratio) == pytest.approx((0.5, 0.75))
    assert published.goodput_ratio == pytest.approx(0.9 / 0.95)
    assert published.reached == (True, True, False, True)
    assert queued.p90_rule == "llm-d" and queued.p90_ratio == pytest.approx(2.0)
    assert tuned.p90_rule == "llm-d, tuned" and tuned.p90_ratio == pytest.approx(1.25)
    rows = tables["rules as published"]
    assert len(rows) == 2 and [row.cell for row in worst(rows, 1)] == [CELLS[1].name]
    assert summary(rows).startswith(
        "of 2 cells: TTFT p90 at most 1.05 of the best other rule in 1, p99 in 2, goodput at least 0.98 of the best in "
        "1, work at most 1.15 of the mean, or groups that differ, in 1; all four in 0\n"
    )


def test_figures_are_means_over_the_parts_that_all_rules_have() -> None:
    """Times have geometric means, shares arithmetic ones; a part that one rule lacks does not count."""
    others = {rule: {part: _result(1, 1, 0.5) for part in (Part.MEASURED, Part.MEASURED_SECOND)} for rule in RULES}
    ours = {
        Part.MEASURED: _result(1, 2, 0.2),
        Part.MEASURED_SECOND: _result(4, 8, 0.8),
        Part.MEASURED_THIRD: _result(9, 9, 1),
    }
    (row,) = compare({CELLS[0].name: others | {OURS: ours}}, OTHERS["rules as published"])
    assert (row.p90_ratio, row.p99_ratio) == pytest.approx((2.0, 4.0))
    assert row.ours.goodput == pytest.approx(0.5) and row.goodput_ratio == pytest.approx(1.0)


def test_a_run_goes_on_where_it_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each figure is written as it comes. A resumed run keeps them, without a half line at the end, and runs only what
    is missing or comes from other code; the tables then have every rule."""
    cell, path = CELLS[0], tmp_path / "out.jsonl"
    ran: list[str] = []
    monkeypatch.setattr(routing, "CELLS", (cell,))
    monkeypatch.setattr(routing, "check_traces", lambda folder, names: None)
    monkeypatch.setattr(routing, "fingerprint", lambda cell, rule, part, traces: f"code of {rule}")

    def measured(tasks: list[routing.Task], processes: int) -> Iterator[Measured]:
        for task in tasks:
            if len(ran) == 3:
                raise KeyboardInterrupt
            ran.append(task.rule)
            yield Measured(task.cell.name, task.rule, task.part, _result(1, 2, 0.5), None, f"code of {task.rule}")

    monkeypatch.setattr(routing, "_measure", measured)
    with pytest.raises(KeyboardInterrupt):
        routing.main(json_path=path)
    assert ran == list(RULES[:3])
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0].replace("code of", "other code of"), *lines[1:], lines[1][:9]]))
    ran.clear()
    monkeypatch.setattr(routing, "_measure", lambda tasks, processes: measured_all(tasks, ran))
    routing.main(json_path=path, resume=True)
    assert ran == [RULES[0], *RULES[3:]]
    assert len(path.read_text().splitlines()) == len(RULES)
    ran.clear()
    routing.main(json_path=path, resume=True)
    assert not ran and capsys.readouterr().out.count("of 1 cells") == 2 * len(OTHERS)


def measured_all(tasks: list[routing.Task], ran: list[str]) -> Iterator[Measured]:
    for task in tasks:
        ran.append(task.rule)
        yield Measured(task.cell.name, task.rule, task.part, _result(1, 2, 0.5), None, f"code of {task.rule}")


@pytest.mark.parametrize(
    ("only", "content", "said"),
    [
        ("azur/", "", "no cell's name begins with 'azur/'; they are workload/blocks/load, conversation/3000/0.3 to "),
        ("azure", "", "old.jsonl is there already; continue it with --resume, or name another file"),
        ("azure", "{}\n", "line 1 of "),
    ],
)
def test_what_cannot_be_measured_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], only: str, content: str, said: str
) -> None:
    """A cell that does not exist, or a file that is not to be continued or is no figures: one line that says what to
    change."""
    (tmp_path / AZURE).touch()
    (tmp_path / "old.jsonl").write_text(content)
    with pytest.raises(SystemExit) as ended:
        routing.main(traces=tmp_path, only=only, json_path=tmp_path / "old.jsonl", resume=bool(content))
    printed = capsys.readouterr()
    assert ended.value.code == 2 and not printed.out
    assert printed.err.startswith("error: ") and said in printed.err and printed.err.count("\n") == 1
