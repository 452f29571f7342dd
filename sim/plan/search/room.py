"""Whether a step fits, without proving or playing it."""

from __future__ import annotations

from sim.accounts.memory import walks
from sim.base.garbage import garbage_collection_off
from sim.engine.play.fold import Fold, fold
from sim.engine.results.room import Room, room_played
from sim.schedule.ir.program import Header
from sim.schedule.methods.one_device import on_one_device
from sim.schedule.proof.check import Checked
from sim.setup.configuration import Configuration

__all__ = ["Room", "held_behind_passes", "room"]


@garbage_collection_off()
def room(found: Configuration) -> Room:
    """Return the memory of a configuration's step, as its prediction would. Raises InputError if it cannot be built."""
    header, folded = _folded(found)
    return room_played(header, folded, found.allocator)


@garbage_collection_off()
def held_behind_passes(found: Configuration) -> int:
    """Return the most bytes that a GPU holds after the passes of a step, which software logs if it resets the peak
    there. Raises InputError as ``room`` does.
    """
    _, folded = _folded(found)
    return max(walked.update_peak_bytes for walked in walks(folded.checked))


def _folded(found: Configuration) -> tuple[Header, Fold]:
    schedule = found.built()
    checked = Checked(schedule)
    if found.one_device:
        checked = Checked(on_one_device(checked))
    return schedule.header, fold(checked, found.cluster)
