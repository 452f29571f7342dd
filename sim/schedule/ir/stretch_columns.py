"""What ops that are written by stretches are, as arrays: found once for all places where a stretch is bound alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain

import numpy as np

from sim.schedule.ir.exchanges import Exchanges, Ints
from sim.schedule.ir.forms import Form, Formed
from sim.schedule.ir.stretches import Bound, Stretched
from sim.schedule.ir.views import Buffer


def formed_of(ops: Stretched, buffers: Sequence[Buffer], inputs: Mapping[int, str]) -> Formed:
    """Return ops by their forms, as ``forms.formed`` does."""
    kinds, starts = _kinds(buffers, inputs), _starts(ops)
    counts = np.array([len(bound.stretch.views) for bound in ops.bounds], np.int64)[ops.which]
    begins = np.cumsum(counts) - counts
    which, of_views = np.empty(len(ops), np.intp), np.empty(int(counts.sum()), np.intp)
    numbers: dict[Form, int] = {}
    first: list[int] = []
    for bound, places in ops.by_bound:
        firsts, stretch = ops.firsts[places], bound.stretch
        of_views[begins[places][:, None] + np.arange(len(stretch.views))] = _bound(bound, firsts)
        used = firsts[:, None] + stretch.used_own
        inside = (used >= 0) & (used < len(buffers))
        for some in _alike(kinds[np.where(inside, used, -1)]):
            own = places[some]
            forms = stretch.forms(ops.place(own[0]), buffers, inputs)
            for at, form in enumerate(forms, int(starts[own[0]])):
                if numbers.setdefault(form, len(first)) == len(first):
                    first.append(at)
                first[numbers[form]] = min(first[numbers[form]], at)
            which[starts[own][:, None] + np.arange(len(forms))] = [numbers[form] for form in forms]
    order = np.argsort(first)
    found, place = list(numbers), np.empty(len(first), np.intp)
    place[order] = np.arange(len(first))
    return Formed([found[number] for number in order.tolist()], place[which], of_views)


def exchanges_of(ops: Stretched, formed: Formed) -> Exchanges:
    """Return the Exchanges among ops that have these forms, as ``exchanges.exchanges_of`` does."""
    starts, kinds = _starts(ops), dict[tuple[int, ...], list[Ints]]()
    for bound, places in ops.by_bound:
        for place, peers in zip(bound.stretch.exchanges, bound.exchanged, strict=True):
            at = starts[places] + place
            forms = formed.which[at]
            for form in np.unique(forms).tolist():
                kinds.setdefault((form, *peers), []).append(at[forms == form])
    each = sorted([np.sort(np.concatenate(found)) for found in kinds.values()], key=lambda found: int(found[0]))
    together = np.concatenate([np.zeros(0, np.int64), *each])
    order = np.argsort(together)
    which = np.repeat(np.arange(len(each)), [len(found) for found in each])
    return Exchanges(together[order], which[order], [int(found[0]) for found in each])


def peers_of(ops: Stretched) -> tuple[int, ...]:
    """Return the ranks that messages come from and go to, one after the other."""
    of_bounds = [[peer for some in bound.exchanged for peer in some] for bound in ops.bounds]
    return tuple(chain.from_iterable([of_bounds[which] for which in ops.which.tolist()]))


def _starts(ops: Stretched) -> Ints:
    """Return of each place the number of its first op."""
    return np.concatenate([[0], ops.ends[:-1]])


def _bound(bound: Bound, firsts: Ints) -> Ints:
    """Return (places, views): the numbers of the buffers of all views, where own ones begin with these."""
    stretch, given = bound.stretch, np.array(bound.given, np.int64)
    one = stretch.views - len(given)
    one[stretch.are_given] = given[stretch.views[stretch.are_given]]
    return firsts[:, None] * ~stretch.are_given + one


def _kinds(buffers: Sequence[Buffer], inputs: Mapping[int, str]) -> Ints:
    """Return numbers that are the same for buffers that are the same object, and none for inputs; behind them one for
    what is no buffer.
    """
    found = np.fromiter([*map(id, buffers), 0], np.int64, len(buffers) + 1)
    some = [number for number in inputs if 0 <= number < len(buffers)]
    found[some] = -1 - np.arange(len(some))
    return found


def _alike(rows: Ints) -> Iterator[Ints]:
    """Yield which rows are equal, for each that there is."""
    if (rows == rows[0]).all():
        yield np.arange(len(rows))
        return
    _, which = np.unique(rows, axis=0, return_inverse=True)
    for number in range(which.max() + 1):
        yield np.flatnonzero(which.reshape(-1) == number)
