"""Compiles a C source of this folder at first use into the user's cache, and loads it by ctypes.

The file's name is a hash of the source, the compiler's flags and the platform, so no version is ever mistaken for
another. It is written beside its place and moved there whole, so processes that start together do not disturb each
other; it is loaded only if nobody but the user can have written it. Where the cache cannot be written, it is compiled
for this process alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from importlib import resources
from pathlib import Path

from sim.base.cache import is_own, own_folder

FLAGS = ("-std=c11", "-O2", "-ffp-contract=off", "-fPIC", "-shared")
"""Contraction would round a * b + c once where Python rounds twice."""
_OWN = 0o700
_LONGEST_COMPILE_S = 120

Accept = Callable[[ctypes.CDLL], None]
"""What a library that was just compiled has to pass: raises UnavailableError if it does not."""


class UnavailableError(Exception):
    """There is no compiled library; says why."""


@cache
def load(name: str, accept: Accept | None = None, *more: str) -> ctypes.CDLL:
    """Return ``name.c`` of this folder, compiled with ``more`` flags; raises UnavailableError, on every call, where
    that cannot be had.
    """
    found = _found(name, accept, *more)
    if isinstance(found, str):
        raise UnavailableError(found)
    return found


@cache
def _found(name: str, accept: Accept | None, *more: str) -> ctypes.CDLL | str:
    """Return the library, or why there is none."""
    source = resources.files("sim.native").joinpath(f"{name}.c").read_bytes()
    about = b"\0".join([source, *map(str.encode, (*FLAGS, *more, sys.platform, platform.machine()))])
    kept = f"{name}-{hashlib.sha256(about).hexdigest()[:16]}.so"
    folder = own_folder("native")
    if folder is not None and is_own(folder / kept):
        with contextlib.suppress(OSError):  # a damaged file is made anew
            return ctypes.CDLL(str(folder / kept))
    try:
        with tempfile.TemporaryDirectory(prefix=".compiling-", dir=folder) as scratch:
            made = Path(scratch) / kept
            _compile(source, made, more)
            library = ctypes.CDLL(str(made))
            if accept is not None:
                accept(library)
            if folder is not None:
                made.replace(folder / kept)
            return library
    except (UnavailableError, OSError) as error:
        return str(error)


def _compile(source: bytes, target: Path, more: tuple[str, ...]) -> None:
    """Compile a source into a shared library of mode 0700; raises UnavailableError with what the compiler said."""
    compiler = shutil.which(os.environ.get("CC") or "cc")
    if compiler is None:
        raise UnavailableError("no C compiler (cc, or what CC names)")
    path = target.with_suffix(".c")
    path.write_bytes(source)
    try:
        said = subprocess.run(
            [compiler, *FLAGS, *more, "-o", str(target), str(path), "-lm"],
            capture_output=True, text=True, errors="replace", check=False, timeout=_LONGEST_COMPILE_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired as error:
        raise UnavailableError(f"{compiler} took more than {_LONGEST_COMPILE_S} s") from error
    if said.returncode or not target.exists():
        lines = said.stderr.strip().splitlines()
        raise UnavailableError(f"{compiler} failed: {lines[0] if lines else said.returncode}")
    target.chmod(_OWN)
