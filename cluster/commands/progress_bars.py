"""ProgressBars: each rank's start as a line on a terminal, and as nothing where there is none."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from coatcheck.cluster.supervision.cluster_state import ClusterState


class ProgressBars:
    """A context manager; `show` may be called as often as one likes."""

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(binary_units=True),
            TextColumn("{task.fields[phase]}"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._tasks: dict[tuple[str, int], TaskID] = {}

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def show(self, state: ClusterState) -> None:
        """Brings every line up to date."""
        for group in state.groups:
            for rank, said in enumerate(group.ranks):
                task = self._tasks.get((group.name, rank))
                if task is None:
                    name = f"{group.name} rank {rank}"
                    task = self._tasks[group.name, rank] = self._progress.add_task(name, total=None, phase="")
                self._progress.update(
                    task, completed=said.done_bytes, total=said.total_bytes or None, phase=said.phase.value
                )
