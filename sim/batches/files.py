"""Lengths of documents as users have them: typed, or in a file of plain text, JSONL or Parquet."""

from __future__ import annotations

import codecs
import io
import re
from pathlib import PurePath

import msgspec

from sim.base.errors import InputError, none_of
from sim.base.presets import read_bytes
from sim.batches.batch import require_lengths

_WHOLE = re.compile("-?[0-9]{1,99}")
"""A whole number, of digits that every reader of lengths takes."""


def typed_lengths(text: str, column: str = "length") -> tuple[int, ...]:
    """Return lengths that are listed in a text, such as 5000,3000,192, or in the file that it names.

    Raises InputError as ``read_lengths`` does.

    >>> typed_lengths("5000, 192")
    (5000, 192)
    """
    ending = PurePath(text).suffix
    if ending in _READERS or ending[1:].isalpha():
        return read_lengths(text, column)
    found = _listed(text, "`documents`")
    require_lengths(found)
    return found


def read_lengths(path: str, column: str = "length") -> tuple[int, ...]:
    """Return the lengths in a file, in its order.

    ``.txt``: whole numbers between blanks, commas or line breaks. ``.jsonl``: one object a line, of which ``column``
    counts. ``.parquet``: that column; needs pyarrow. Raises InputError for another ending, for what is no whole number
    of 1 or more, and without pyarrow.
    """
    _require_ending(path)
    return lengths_in(path, read_bytes("lengths file", path, "`documents`"), column)


def lengths_in(path: str, data: bytes, column: str = "length") -> tuple[int, ...]:
    """Return the lengths that the content of a file holds; raises InputError as ``read_lengths`` does."""
    found = _READERS[_require_ending(path)](data.removeprefix(codecs.BOM_UTF8), path, column)
    require_lengths(found, f"lengths file {path!r}")
    return found


def _require_ending(path: str) -> str:
    suffix = PurePath(path).suffix
    if suffix not in _READERS:
        raise InputError(f"lengths file {path!r}: {none_of('ending', suffix, _READERS)}; set it with `documents`")
    return suffix


def _listed(text: str, place: str) -> tuple[int, ...]:
    words = text.replace(",", " ").split()
    for word in words:
        if not _WHOLE.fullmatch(word):
            raise _no_length(place, word)
    return tuple(map(int, words))


def _text(data: bytes, path: str, column: str) -> tuple[int, ...]:
    del column  # plain text has none
    lines = enumerate(data.decode(errors="replace").splitlines(), start=1)
    return tuple(size for number, line in lines for size in _listed(line, f"lengths file {path!r}, line {number}"))


def _json_lines(data: bytes, path: str, column: str) -> tuple[int, ...]:
    found = []
    for number, line in enumerate(data.splitlines(), start=1):
        if not line.strip():
            continue
        place = f"lengths file {path!r}, line {number}"
        try:
            value = msgspec.json.decode(line)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            raise InputError(f"{place}: {error}; expected a JSON object a line") from None
        if not isinstance(value, dict) or column not in value:
            raise InputError(f"{place}: expected an object with the key {column!r}; name another with `column`")
        found.append(_length(value[column], place))
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
    return tuple(_length(value, f"lengths file {path!r}, row {row}") for row, value in enumerate(values))


def _length(value: object, place: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise _no_length(place, value)
    return value


def _no_length(place: str, value: object) -> InputError:
    shown = repr(value)
    shown = shown if len(shown) < 64 else f"{shown[:60]} …"
    return InputError(f"{place}: {shown} is no length: expected a whole number of 1 or more")


_READERS = {".txt": _text, ".jsonl": _json_lines, ".parquet": _parquet}
