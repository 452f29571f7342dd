"""Lengths of documents from a user's file: plain text, JSONL or Parquet."""

from __future__ import annotations

import io
from pathlib import PurePath

import msgspec

from sim.batches.batch import require_lengths
from sim.errors import InputError, none_of
from sim.presets import read_bytes


def read_lengths(path: str, column: str = "length") -> tuple[int, ...]:
    """Return the lengths in a file, in its order.

    ``.txt``: whole numbers between blanks, commas or line breaks. ``.jsonl``: one object a line, of which ``column``
    counts. ``.parquet``: that column; needs pyarrow. Raises InputError for another ending, for what is no whole number
    of 1 or more, and without pyarrow.
    """
    suffix = PurePath(path).suffix
    if suffix not in _READERS:
        raise InputError(f"lengths file {path!r}: {none_of('ending', suffix, _READERS)}; set it with `documents`")
    found = _READERS[suffix](read_bytes("lengths file", path, "`documents`"), path, column)
    require_lengths(found, f"lengths file {path!r}")
    return found


def _text(data: bytes, path: str, column: str) -> tuple[int, ...]:
    del column  # plain text has none
    found = []
    for number, line in enumerate(data.decode(errors="replace").splitlines(), start=1):
        for word in line.replace(",", " ").split():
            try:
                found.append(int(word))
            except ValueError:
                raise _no_length(path, f"line {number}", word) from None
    return tuple(found)


def _json_lines(data: bytes, path: str, column: str) -> tuple[int, ...]:
    found = []
    for number, line in enumerate(data.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            value = msgspec.json.decode(line)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise InputError(f"lengths file {path!r}, line {number}: {error}; expected a JSON object a line") from None
        if not isinstance(value, dict) or column not in value:
            raise InputError(
                f"lengths file {path!r}, line {number}: expected an object with the key {column!r}; name another with "
                f"`column`"
            )
        found.append(_length(value[column], path, f"line {number}"))
    return tuple(found)


def _parquet(data: bytes, path: str, column: str) -> tuple[int, ...]:
    try:
        import pyarrow  # noqa: PLC0415 - an optional extra
        import pyarrow.parquet  # noqa: PLC0415
    except ImportError:
        raise InputError(
            f"lengths file {path!r}: Parquet needs pyarrow; pip install 'longstep[parquet]', or give .txt or .jsonl"
        ) from None
    try:
        opened = pyarrow.parquet.ParquetFile(io.BytesIO(data))
        if column not in opened.schema_arrow.names:
            wrong = none_of("column", column, opened.schema_arrow.names)
            raise InputError(f"lengths file {path!r}: {wrong}; set it with `column`")
        values = opened.read(columns=[column]).column(column).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise InputError(f"lengths file {path!r} is no Parquet file: {error}; set it with `documents`") from None
    return tuple(_length(value, path, f"row {row}") for row, value in enumerate(values))


def _length(value: object, path: str, place: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _no_length(path, place, value)
    return value


def _no_length(path: str, place: str, value: object) -> InputError:
    return InputError(f"lengths file {path!r}, {place}: {value!r} is no length: expected a whole number of 1 or more")


_READERS = {".txt": _text, ".jsonl": _json_lines, ".parquet": _parquet}
