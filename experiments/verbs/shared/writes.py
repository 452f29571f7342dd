"""What verbs that write files share."""

from __future__ import annotations

import dataclasses

from sim.base.files import Kind, Output


@dataclasses.dataclass(frozen=True, kw_only=True)
class Writes:
    """Base of verbs that write files."""

    force: bool = False
    """Overwrite files also where Longstep did not write them, or they are read-only."""

    def output(self, path: str | None, kind: Kind) -> Output | None:
        """Return the file that an option names, if it names one."""
        return None if path is None else kind.at(path, force=self.force)
