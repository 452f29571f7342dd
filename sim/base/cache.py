"""The user's cache: folders of what can be made anew, which nobody but the user can have written."""

from __future__ import annotations

import os
import stat
from pathlib import Path

_OWN = 0o700
_OTHERS = 0o077


def own_folder(name: str) -> Path | None:
    """Return the folder of that name in the cache; None if it is another user's, or cannot be written."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "longstep" / name
        folder.mkdir(parents=True, exist_ok=True, mode=_OWN)
    except (OSError, RuntimeError):  # read-only, or no home
        return None
    return folder if is_own(folder) and os.access(folder, os.W_OK) else None


def is_own(path: Path) -> bool:
    """Return whether something is there that nobody but the user can have written."""
    try:
        status = path.stat()
    except OSError:
        return False
    return status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & _OTHERS
