"""What an op is, whatever it is called and whichever buffers it uses: what depends on no more is found once a form."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import cache
from itertools import chain
from operator import attrgetter
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from sim.schedule.ir.declare import operands, rebound
from sim.schedule.ir.ops import Op
from sim.schedule.ir.views import Buffer, Slices, Split, View


class Form:
    """Ops of one form are of one kind, on boxes of buffers that are alike and of which the same ones are the same, and
    differ in nothing else but labels, peers, and the positions by which they turn tokens. Forms are equal where they
    are the same object.
    """

    def __init__(self, op: Op, views: Sequence[View], buffers: Sequence[Buffer]) -> None:
        numbers = [view.buffer for view in views]
        own = {number: place for place, number in enumerate(dict.fromkeys(numbers))}
        self.op = rebound(op, own)
        """The first op of this form that was seen, on ``buffers``."""
        self.buffers = [buffers[number] for number in own if 0 <= number < len(buffers)]
        """Those of the views of that op, each once; fewer where a view is of none."""
        self.places = [numbers.index(number) for number in own]
        """Of each buffer the place of its first view among all views."""
        self.reads, self.writes = ([_place(view, views) for view in some] for some in (op.reads, op.writes))
        """The places of what it reads and writes among its views."""
        self.boxes: list[Slices] = [view.slices for view in views]


class Formed(NamedTuple):
    """Ops as forms on some buffers."""

    forms: list[Form]
    """Each once, in the order of its first op."""
    which: NDArray[np.intp]
    """(ops,): the number of each op's form."""
    buffers: NDArray[np.intp]
    """The numbers of the buffers of the views of all ops, one op after the other."""

    @property
    def starts(self) -> NDArray[np.intp]:
        """(ops,): where the views of each op begin among those of all."""
        counts = np.array([len(form.boxes) for form in self.forms], np.intp)[self.which]
        found: NDArray[np.intp] = np.cumsum(counts) - counts
        return found


def formed(ops: Iterable[Op], buffers: Sequence[Buffer], inputs: Mapping[int, str]) -> Formed:
    """Return ops by their forms; ``inputs`` are tensors by buffer, which are like no buffer that is none."""
    like = like_of(chain(range(len(buffers)), inputs), buffers, inputs)
    found: list[Form] = []
    numbers: dict[Hashable, int] = {}
    which, of_views = list[int](), list[int]()
    for op in ops:
        views, key = _described(op, like)
        if key not in numbers:
            numbers[key] = len(found)
            found.append(_FORMS.get(key) or _FORMS.setdefault(key, Form(op, views, buffers)))
        which.append(numbers[key])
        of_views += [view.buffer for view in views]
    return Formed(found, np.array(which, np.intp), np.array(of_views, np.intp))


def like_of(numbers: Iterable[int], buffers: Sequence[Buffer], inputs: Mapping[int, str]) -> dict[int, Hashable]:
    """Return of buffers what those have in common that are like each other; None of what is no buffer."""
    count = len(buffers)
    like: dict[int, Hashable] = {number: buffers[number] if 0 <= number < count else None for number in numbers}
    like.update({number: (like[number], tensor) for number, tensor in inputs.items() if number in like})
    return like


def form_of(op: Op, like: Mapping[int, Hashable], buffers: Sequence[Buffer]) -> Form:
    """Return the form of an op on some buffers, which are ``like`` others."""
    views, key = _described(op, like)
    return _FORMS.get(key) or _FORMS.setdefault(key, Form(op, views, buffers))


def views_of(op: Op) -> list[View]:
    """Return the views of an op, in the order of its fields."""
    return _described(op, {})[0]


def _described(op: Op, like: Mapping[int, Hashable]) -> tuple[list[View], Hashable]:
    """Return the views of an op, and what all ops of its form have in common."""
    kind = type(op)
    values, others = _getters(kind)
    views: list[View] = []
    cuts: list[Hashable] = []
    for value in values(op):
        if type(value) is View:
            views.append(value)
            cuts.append(View)
        elif value is None:
            cuts.append(None)
        elif type(value) is Split:
            views.append(value.view)
            cuts.append((value.dim, value.parts, value.sizes))
        else:
            views += [one if type(one) is View else one.view for one in value]
            cuts.append(len(value))
    numbers = [view.buffer for view in views]
    shared = () if len(set(numbers)) == len(numbers) else tuple([numbers.index(number) for number in numbers])
    boxes = tuple([view.slices for view in views])
    return views, (kind, others(op), tuple(cuts), shared, boxes, tuple([like.get(number) for number in numbers]))


_FORMS: WeakValueDictionary[Hashable, Form] = WeakValueDictionary()
"""All that are in use."""


def _place(view: View, views: Sequence[View]) -> int:
    return next(place for place, other in enumerate(views) if other is view)


@cache
def _getters(kind: type[Op]) -> tuple[Callable[[Op], Sequence[Any]], Callable[[Op], Hashable]]:
    """Return what finds the operands of an op, and what finds its other fields but the label; of positions how many."""
    named = operands(kind)
    others = _all_of([name for name in kind.__struct_fields__ if name not in {*named, "label", "tokens"}])
    if "tokens" in kind.__struct_fields__:
        return _all_of(list(named)), lambda op: (others(op), sum([span.size for span in op.tokens]))
    return _all_of(list(named)), others


def _all_of(names: Sequence[str]) -> Callable[[Op], Any]:
    """Return what finds all of these fields."""
    if len(names) > 1:
        return attrgetter(*names)
    return lambda op: tuple([getattr(op, name) for name in names])
