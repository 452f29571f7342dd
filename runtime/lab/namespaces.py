"""Network namespaces, as Linux calls them: leaving the present one for a new one, and entering one that there is.

They have no names. One lives as long as a process is in it or holds it open, so whatever happens to those that made it,
nothing stays behind.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

_CLONE_NEWNET = 0x40000000
OWN = Path("/proc/self/ns/net")
"""The namespace that the calling process is in."""


def leave() -> int:
    """Let the calling thread be in a new, empty namespace; return a descriptor that keeps it. Raises OSError."""
    _called("unshare", _CLONE_NEWNET)
    return os.open(OWN, os.O_RDONLY | os.O_CLOEXEC)


def enter(namespace: int | str) -> None:
    """Let the calling thread be in a namespace, by a descriptor or a path; threads that it starts are, too. Raises
    OSError.
    """
    if isinstance(namespace, int):
        _called("setns", namespace, _CLONE_NEWNET)
        return
    opened = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _called("setns", opened, _CLONE_NEWNET)
    finally:
        os.close(opened)


def _called(name: str, *arguments: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments):
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
