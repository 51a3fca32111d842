"""The files of this repository that are its own, also where git is missing or the tree is not a clone."""

import os
from pathlib import Path

from pathspec import GitIgnoreSpec

ROOT = Path(__file__).parents[1]


def source_files() -> list[Path]:
    """Every file below the root that .gitignore does not name, relative to the root."""
    ignored = GitIgnoreSpec.from_lines([".git", *(ROOT / ".gitignore").read_text().splitlines()])
    found = []
    for folder, folders, files in os.walk(ROOT):
        here = Path(folder).relative_to(ROOT)
        folders[:] = [name for name in folders if not ignored.match_file(f"{here / name}/")]
        found += [here / name for name in files if not ignored.match_file(here / name)]
    return sorted(found)
