"""Files that Longstep writes: each whole or not at all, and none over what somebody else has written."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, NamedTuple

import msgspec

from sim.base.errors import InputError

_HEAD_BYTES = 4096
"""Within which a mark stands."""


class Kind(NamedTuple):
    """What a file holds."""

    name: str
    """With its article: a Chrome trace."""
    is_ours: Callable[[BinaryIO], bool]
    """Whether an open file, which is not empty, is one that Longstep wrote."""

    def at(self, path: str | Path, *, force: bool = False) -> Output:
        """Return a place for such a file; where ``force``, it may replace what Longstep did not write."""
        return Output(str(path), self, force)


class Output(NamedTuple):
    """A file to be written."""

    path: str
    kind: Kind
    force: bool

    def require(self) -> None:
        """Raise InputError if the file cannot be written, or must not be: it is another's, read-only, or no file."""
        if not self.path:
            raise InputError(f"'': expected a name for {self.kind.name.partition(' ')[2]}")
        with _explained(self.path):
            wrong = self._wrong(Path(os.path.realpath(self.path)), _found(self.path))
        if wrong:
            raise InputError(f"{self.path!r} cannot be written: {wrong}")

    def write(self, data: bytes) -> None:
        """Write all of it, if it still may; raises InputError if not."""
        self.require()
        write_whole(Path(self.path), data)

    def _wrong(self, target: Path, found: os.stat_result | None) -> str:
        """Return why a file must not be written, and what to do about it; empty if it may."""
        if found and not stat.S_ISREG(found.st_mode):
            return f"it is {_what(found.st_mode)}; choose another file"
        if not target.parent.is_dir():
            return f"there is no folder {str(target.parent)!r}; choose another file"
        if not os.access(target.parent, os.W_OK | os.X_OK):
            return f"you may not write to {str(target.parent)!r}; choose another file"
        if not found or self.force:
            return ""
        if not found.st_mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH):
            return "it is read-only; choose another file, or overwrite it with `force`"
        if found.st_size and not self._is_ours():
            return f"it is not {self.kind.name} that Longstep wrote; choose another file, or overwrite it with `force`"
        return ""

    def _is_ours(self) -> bool:
        with Path(self.path).open("rb") as file:
            return self.kind.is_ours(file)


def require_outputs(outputs: Sequence[Output | None]) -> None:
    """Raise InputError, before any work is done, if one of some files cannot be written, or two of them are one."""
    taken: dict[str, str] = {}
    for output in outputs:
        if output:
            output.require()
            real = os.path.realpath(output.path)
            if real in taken:
                raise InputError(
                    f"{output.path!r} cannot be written: it is to hold {taken[real]} and {output.kind.name}; give each "
                    f"a file of its own"
                )
            taken[real] = output.kind.name


def marked(*marks: str) -> Callable[[BinaryIO], bool]:
    """Return what recognises files with one of some marks near their beginning."""

    def is_ours(file: BinaryIO) -> bool:
        head = file.read(_HEAD_BYTES)
        return any(mark.encode() in head for mark in marks)

    return is_ours


def decoded_by(decode: Callable[[bytes], object]) -> Callable[[BinaryIO], bool]:
    """Return what recognises files that can be decoded."""

    def is_ours(file: BinaryIO) -> bool:
        try:
            decode(file.read())
        except (msgspec.DecodeError, ValueError, RecursionError):
            return False
        return True

    return is_ours


def make_folder(folder: Path) -> None:
    """Make a folder that files can be written into; raises InputError if that cannot be."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"folder {str(folder)!r} cannot be made ({error.strerror}); set XDG_DATA_HOME") from error


def write_whole(path: Path, data: bytes) -> None:
    """Write a file in one step, so that an interruption leaves nothing half-written; raises InputError if it cannot.

    A symbolic link stays one: what it points to is written. A file keeps its mode.
    """
    with _explained(str(path)):
        found = _found(path)
        if found and not stat.S_ISREG(found.st_mode):
            raise InputError(f"{str(path)!r} cannot be written: it is {_what(found.st_mode)}; choose another file")
        target = Path(os.path.realpath(path))
        draft = target.with_name(f".longstep-{secrets.token_hex(8)}")
        try:
            with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666), "wb") as file:
                file.write(data)
                if found:
                    os.fchmod(file.fileno(), stat.S_IMODE(found.st_mode))
            draft.replace(target)
        finally:
            draft.unlink(missing_ok=True)


@contextlib.contextmanager
def _explained(path: str) -> Iterator[None]:
    """Turn what the operating system says of a path into one line."""
    if "\0" in path:
        raise InputError(f"{path!r} cannot be written: a name holds no NUL byte; choose another file")
    try:
        yield
    except OSError as error:
        raise InputError(f"{path!r} cannot be written ({error.strerror}); choose another file") from error


def _found(path: str | Path) -> os.stat_result | None:
    """Return what there is at a path, behind symbolic links."""
    try:
        return Path(path).stat()
    except FileNotFoundError:
        return None


def _what(mode: int) -> str:
    """Return what something is that is no regular file."""
    kinds = {stat.S_ISDIR: "a folder", stat.S_ISFIFO: "a pipe", stat.S_ISSOCK: "a socket"}
    return next((name for is_kind, name in kinds.items() if is_kind(mode)), "a device")
