"""ProgressBars: a progress bar for each rank that loads weights. Shows nothing unless stderr is a terminal."""

from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

if TYPE_CHECKING:
    from coatcheck.cluster.ray_cluster.cluster_state import ClusterState


class ProgressBars:
    """A context manager. The bars disappear when it is left."""

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

    def update_bars(self, state: "ClusterState") -> None:
        for group in state.groups:
            for rank, progress in enumerate(group.ranks):
                task = self._tasks.get((group.name, rank))
                if task is None:
                    name = f"{group.name} rank {rank}"
                    task = self._tasks[group.name, rank] = self._progress.add_task(name, total=None, phase="")
                self._progress.update(
                    task, completed=progress.done_bytes, total=progress.total_bytes or None, phase=progress.phase.value
                )
