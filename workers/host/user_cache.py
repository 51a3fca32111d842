"""The cache of this user on this host: $XDG_CACHE_HOME/coatcheck, by default ~/.cache/coatcheck."""

import os
from pathlib import Path


def user_cache() -> Path | None:
    """The cache's folder, which may not exist. None for a user without a home."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "coatcheck" if os.path.isabs(base) else None


def write_whole(file: Path, text: str) -> None:
    """Write the file and its folders. Another process reads all of the text or the file before. Raises OSError."""
    file.parent.mkdir(parents=True, exist_ok=True)
    draft = file.with_suffix(f".{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(file)
    except OSError:  # the disk is full
        draft.unlink(missing_ok=True)
        raise
