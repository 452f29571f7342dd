"""Records that lie in a folder, each with what lies beside it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

from sim.base.errors import InputError
from sim.base.presets import decoded, read_bytes

Of = TypeVar("Of")


class Kept(NamedTuple, Generic[Of]):
    """A record, and where it lies."""

    path: Path
    record: Of

    @property
    def notes(self) -> str:
        """What ``notes.md`` in its folder says of it: what explains the errors and no command computes. Raises
        InputError where that is no text.
        """
        beside = self.path.with_name("notes.md")
        try:
            return beside.read_text().strip() if beside.is_file() else ""
        except UnicodeDecodeError as error:
            raise InputError(f"notes {str(beside)!r} are no text: write them anew, or take the file away") from error

    @property
    def figure(self) -> Path | None:
        """Its figure, if there is one in its folder: under the record's name, or parity.svg."""
        names = (f"{self.path.stem}.svg", "parity.svg")
        return next((found for name in names if (found := self.path.with_name(name)).is_file()), None)


def kept_in(folder: str, field: str, read: Callable[[str], Of]) -> list[Kept[Of]]:
    """Return all records of a kind that lie in a folder or below: JSON objects with a ``profile`` and that ``field``.

    Told by these alone, so that a record which is damaged, or of another version, is an error and not left out of the
    evidence. Raises InputError for such a one, and for a file that is no JSON.
    """
    found = []
    for file in sorted(Path(folder).rglob("*.json")):
        data = read_bytes("record", str(file), "`record`")
        content = decoded(data, f"record {str(file)!r}", "restore the file, or take it out of the folder")
        if isinstance(content, dict) and {"profile", field} <= content.keys():
            found.append(Kept(file, read(str(file))))
    return found
