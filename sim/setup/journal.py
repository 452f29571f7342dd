"""The rows of a sweep that are finished, kept on disk until all are: whatever ends the process loses none of them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import msgspec

from sim.errors import InputError

_MARK = "longstep sweep"


class _Head(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The first line: what sweep it is of."""

    mark: str
    sweep: str
    """What was asked for."""


class _Line(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Any other one: a portion."""

    numbers: list[int]
    rows: list[dict[str, Any]]


class Journal:
    """An append-only file of JSON lines, each of which is on the disk before the next one is begun. What a crash has
    left of a last line is cut off.
    """

    def __init__(self, path: Path, sweep: str, *, force: bool = False) -> None:
        """Open it, or go on with what it holds; raises InputError where it is of another sweep, or no journal at all,
        unless ``force``, which begins anew.
        """
        self.path = path
        self.rows: dict[int, dict[str, Any]] = {}
        """Finished ones, by their numbers."""
        kept = b"" if force else self._read(sweep)
        head = kept or msgspec.json.encode(_Head(mark=_MARK, sweep=sweep)) + b"\n"
        try:
            self._file = path.open("r+b" if kept else "wb")
            self._file.truncate(0 if not kept else len(kept))
            self._file.seek(0, os.SEEK_END)
            if not kept:
                self._append(head)
        except OSError as error:
            raise InputError(f"{str(path)!r} cannot be written ({error.strerror}); choose another file") from error

    def _read(self, sweep: str) -> bytes:
        """Return the whole lines of what is there, having kept their rows."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return b""
        except OSError as error:
            raise InputError(f"{str(self.path)!r} cannot be read ({error.strerror}); choose another file") from error
        whole = data[: data.rfind(b"\n") + 1]
        if not whole:  # nothing was finished
            if data and not data.startswith(b'{"mark":"' + _MARK.encode()[: max(0, len(data) - 9)]):
                raise self._foreign()
            return b""
        first, *lines = whole.splitlines()
        try:
            head = msgspec.json.decode(first, type=_Head)
            for line in lines:
                found = msgspec.json.decode(line, type=_Line)
                self.rows |= zip(found.numbers, found.rows, strict=True)
        except msgspec.DecodeError:
            raise self._foreign() from None
        if head.sweep != sweep:
            raise InputError(
                f"{str(self.path)!r} has {len(self.rows)} rows of another sweep that was not "
                f"finished: repeat its command, choose another file, or begin anew with `force`"
            )
        return whole

    def _foreign(self) -> InputError:
        return InputError(
            f"{str(self.path)!r} is no journal of a sweep; choose another file, or overwrite it with `force`"
        )

    def add(self, numbers: Sequence[int], rows: list[dict[str, Any]]) -> None:
        """Keep a finished portion."""
        self._append(msgspec.json.encode(_Line(numbers=list(numbers), rows=rows)) + b"\n")

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
