"""GGUF files as models: they are converted to a checkpoint directory first, with a progress bar on stderr."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from coatcheck.cluster.config.serve_config import ServeConfig
from coatcheck.workers.gguf.model_path import find_gguf

if TYPE_CHECKING:
    from rich.console import Console

    from coatcheck.workers.gguf.converter import Progress


def with_converted_model(config: ServeConfig) -> ServeConfig:
    """The same settings; if `model` is a GGUF file, with the directory that it is converted to. The directory has the
    file's name, so the model has that name for clients. Converts unless that was done before. Other processes do not
    delete the directory as long as this process runs, or ever if the cluster outlives this process.

    Raises InvalidModel for a file that is broken or not served.
    """
    path = find_gguf(config.model)
    if path is None:
        return config
    # Imported late: other models need neither numpy nor the gguf package.
    from coatcheck.workers.gguf.conversion_cache import hold_directory

    directory = hold_directory(path, config.dtype, outlives=config.ray_address is not None)
    if not directory.is_dir():
        convert_with_progress(path, directory, config.dtype)
    return config.model_copy(update={"model": str(directory)})


def convert_with_progress(path: Path, directory: Path, dtype: str) -> None:
    """Convert the GGUF file `path` into `directory` and show on stderr how far that is. Raises InvalidModel."""
    from rich.console import Console

    from coatcheck.workers.gguf.conversion_cache import convert

    console = Console(stderr=True)
    console.print(f"converting {path.name} to {directory}", soft_wrap=True, markup=False, highlight=False)
    with _progress_bar(console) as progress:
        freed = convert(path, directory, dtype, progress)
    if freed:
        text = f"deleted earlier conversions of {path.name}, which freed {freed / 2**20:,.0f} MiB"
        console.print(text, soft_wrap=True, markup=False, highlight=False)


@contextmanager
def _progress_bar(console: "Console") -> Iterator["Progress"]:
    """A progress bar, which ends without a trace. Nothing is shown if the console is no terminal."""
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    with Progress(BarColumn(), DownloadColumn(), TimeRemainingColumn(), console=console, transient=True) as bars:
        task = bars.add_task("", total=None)
        yield lambda done, total: bars.update(task, completed=done, total=total)
