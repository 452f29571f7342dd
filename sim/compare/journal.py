"""The rows of a sweep that are finished, kept on disk until all are: whatever ends the process loses none of them."""

from __future__ import annotations

import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from sim.base.errors import InputError, JournalError

_MARK = "longstep sweep"
_VERSION = 2
"""Of what is written here; journals without one are of version 1."""
_BEGIN = b'{"mark":"%b"' % _MARK.encode()
_OTHER = "choose another file, or begin anew with `force`"
_SUM_BYTES = 8
"""Of the checksum that begins a line, in hexadecimal digits."""


class _Head(msgspec.Struct, frozen=True, kw_only=True):
    """The first line: what sweep it is of."""

    mark: str
    version: int = 1
    sweep: str = ""
    """What was asked for."""


class _Line(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Any other one, behind a checksum: a portion."""

    numbers: list[int]
    rows: list[dict[str, Any]]


class Journal:
    """An append-only file of JSON lines, each of which is on the disk before the next one is begun. What a crash has
    left of a last line is cut off.
    """

    def __init__(self, path: Path, sweep: str, *, force: bool = False) -> None:
        """Open it, or go on with what it holds; raises JournalError where it is damaged, of another sweep or version,
        or no journal at all, unless ``force``, which begins anew.
        """
        self.path = path
        self.rows: dict[int, dict[str, Any]] = {}
        """Finished ones, by their numbers."""
        kept = b"" if force else self._read(sweep)
        head = kept or msgspec.json.encode(_Head(mark=_MARK, version=_VERSION, sweep=sweep)) + b"\n"
        try:
            self._file = path.open("r+b" if kept else "wb")
            self._file.truncate(0 if not kept else len(kept))
            self._file.seek(0, os.SEEK_END)
            if not kept:
                self._append(head)
        except OSError as error:
            raise InputError(f"{str(path)!r} cannot be written ({error.strerror}); choose another file") from error

    def _read(self, sweep: str) -> bytes:
        """Read the rows of the whole lines of a journal and return these lines. Raises JournalError, and leaves the
        file as it is, where it is no journal that can be continued.
        """
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise InputError(f"{str(self.path)!r} cannot be read ({error.strerror}); choose another file") from error
        whole = data[: data.rfind(b"\n") + 1]
        if not whole:  # nothing was finished
            if data and not data.startswith(_BEGIN[: len(data)]):
                raise self._unusable("is no journal of a sweep", _OTHER)
            return b""
        first, *lines = whole[:-1].split(b"\n")
        head = self._head(first)
        for number, line in enumerate(lines, 2):
            found = _portion(line)
            if found is None:
                raise self._unusable(
                    f"is damaged: line {number} of {1 + len(lines)} is not what was written",
                    f"delete that line (sed -i {number}d FILE) and repeat the command, which keeps the rows of all "
                    f"others and predicts these again; or begin anew with `force`",
                )
            self.rows |= zip(found.numbers, found.rows, strict=True)
        if head.sweep != sweep:
            raise self._unusable(
                f"has {len(self.rows)} rows of another sweep that was not finished", f"repeat its command, {_OTHER}"
            )
        return whole

    def _head(self, first: bytes) -> _Head:
        """Return the first line; raises JournalError where it is none of this version."""
        try:
            head = msgspec.json.decode(first, type=_Head)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            head = _Head(mark="")
        if head.mark != _MARK:
            damaged = first.startswith(_BEGIN)
            what = "is damaged: its first line, which says what sweep it is of, is not what was written"
            raise self._unusable(what if damaged else "is no journal of a sweep", _OTHER)
        if head.version != _VERSION:
            raise self._unusable(
                f"is a journal of version {head.version}, and this Longstep writes version {_VERSION}",
                f"finish the sweep with the Longstep that began it, {_OTHER}",
            )
        return head

    def _unusable(self, why: str, remedy: str) -> JournalError:
        return JournalError(f"{str(self.path)!r} {why}; {remedy}")

    def add(self, numbers: Sequence[int], rows: list[dict[str, Any]]) -> None:
        """Keep a finished portion."""
        portion = msgspec.json.encode(_Line(numbers=list(numbers), rows=rows))
        self._append(_checksum(portion) + portion + b"\n")

    def _append(self, line: bytes) -> None:
        self._file.write(line)
        self._file.flush()
        os.fsync(self._file.fileno())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    def remove(self) -> None:
        """Take it away, once its rows are elsewhere."""
        self.path.unlink(missing_ok=True)


def _checksum(portion: bytes) -> bytes:
    return b"%08x" % zlib.crc32(portion)


def _portion(line: bytes) -> _Line | None:
    """Return the portion that a line holds; None where it is not as it was written."""
    portion = line[_SUM_BYTES:]
    return msgspec.json.decode(portion, type=_Line) if line[:_SUM_BYTES] == _checksum(portion) else None
