"""Whether a step fits, without proving or playing it."""

from __future__ import annotations

from sim.engine.fold import fold
from sim.engine.room import Room, room_of
from sim.garbage import garbage_collection_off
from sim.memory import walks
from sim.schedule.derive.replicas import folds
from sim.schedule.methods.one_device import on_one_device
from sim.schedule.proof.check import Checked
from sim.setup.setup import Configuration

__all__ = ["Room", "room"]


@garbage_collection_off()
def room(found: Configuration) -> Room:
    """Return the memory of a configuration's step, as its prediction would. Raises InputError if it cannot be built."""
    schedule = found.built()
    checked = Checked(schedule, folds=folds(schedule))
    if found.one_device:
        checked = Checked(on_one_device(checked))
    folded = fold(checked, found.cluster)
    return room_of(schedule.header, walks(folded.checked), folded.cluster)
