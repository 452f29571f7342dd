"""Answers a question in parts: the step and its figures at once, then what takes more simulations and what it rests on.

The numbers are those of ``longstep.predict``, to the digit. Two things are left out that cost most of its time and
change none of them: the proof of schedules that ship, which tests prove, and the hash of the schedule.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NoReturn

import msgspec

from sim.base.garbage import garbage_collection_off
from sim.engine.play.fold import fold
from sim.engine.play.simulate import simulate
from sim.engine.results.report import Report, report
from sim.engine.results.sensitivity import bound
from sim.schedule.methods.one_device import on_one_device
from sim.schedule.proof.check import Checked
from sim.setup.configuration import Configuration
from sim.setup.prediction import Prediction

_KEPT_OPS = 60_000
"""Ops of all schedules that are kept, to be played again on another machine; the latest is, however large."""


class Player:
    """Plays configurations; keeps the schedules of the last ones, as far as they are small."""

    def __init__(self) -> None:
        self._kept: OrderedDict[int, tuple[Configuration, Checked, int]] = OrderedDict()
        self._number = 0

    @garbage_collection_off()
    def prediction(self, found: Configuration) -> Prediction:
        """Return the prediction of a configuration; raises InputError where it cannot be built, and TooLargeError as
        ``Configuration.built`` does.
        """
        checked = self._checked(found)
        simulation = simulate(checked, found.cluster, found.profile, found.jitter, engine=found.engine)
        return Prediction(simulation, found.schedule, found.title, _not_again)

    def has(self, found: Configuration) -> bool:
        """Return whether the schedule of a configuration is kept."""
        return any(found.has_schedule_of(other) for other, *_ in self._kept.values())

    @garbage_collection_off()
    def steady_s(self, found: Configuration) -> float:
        """Return the seconds of a step without noise: one play, and of alike ranks one, where noise takes several of
        all. Raises as ``prediction`` does.
        """
        played = simulate(self._checked(found), found.cluster, found.profile, engine=found.engine)
        return played.trace.step_time_s

    def forget(self) -> None:
        """Keep nothing but the latest schedule."""
        while len(self._kept) > 1:
            self._kept.popitem(last=False)

    def _checked(self, found: Configuration) -> Checked:
        for number, (other, checked, _) in self._kept.items():
            if found.has_schedule_of(other):
                self._kept.move_to_end(number)
                return checked
        schedule = found.built(share=1.0)
        checked = Checked(schedule)
        if found.one_device:
            checked = Checked(on_one_device(checked))
        played = fold(checked, found.cluster, members=not found.jitter.share).checked
        ops = sum(program.num_ops for program in played.schedule.programs)
        self._number += 1
        self._kept[self._number] = (found, checked, ops)
        while len(self._kept) > 1 and sum(count for *_, count in self._kept.values()) > _KEPT_OPS:
            self._kept.popitem(last=False)
        return checked


def first_figures(prediction: Prediction) -> Report:
    """Return all figures but the interval and what bounds the step, which take further plays; the prediction says what
    it says by them.
    """
    found = report(prediction.simulation, with_bound=False, with_hash=False)
    vars(prediction)["figures"] = found
    return found


def all_figures(prediction: Prediction, first: Report) -> Report:
    """Return all figures, by which the prediction then says what it says."""
    bounded = bound(prediction.simulation)
    found = msgspec.structs.replace(first, bound_by=bounded.by, saves=bounded.saves)
    vars(prediction)["figures"] = found
    return msgspec.structs.replace(found, interval_s=prediction.interval)


def _not_again(**changes: object) -> NoReturn:
    raise AssertionError(f"a question is played as it is asked, not with {changes}")
