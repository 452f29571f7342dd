"""Views in nests of tuples, lists and dicts, as functions of builders take and return them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import TypeVar

from sim.schedule.ir.views import View

Nest = TypeVar("Nest")


def flatten(nest: object, views: list[View], form: list[Hashable]) -> None:
    """Append the views of a nest, and what else tells it from others: types, lengths, keys, and what is no view."""
    kind = type(nest)
    if kind is View:
        views.append(nest)  # type: ignore[arg-type]  # its type was looked at
        form.append(View)
        return
    if isinstance(nest, dict):
        form.append((dict, *nest))
        parts: Iterable[object] = nest.values()
    elif isinstance(nest, tuple | list):
        form.append((kind, len(nest)))
        parts = nest
    else:
        form.append(nest)
        return
    for part in parts:
        if type(part) is View:  # most are: a call for each of them takes longer than all else here
            views.append(part)
            form.append(View)
        else:
            flatten(part, views, form)


def mapped(nest: Nest, change: Callable[[View], View]) -> Nest:
    """Return a nest with a change made to each view."""
    return _mapped(nest, change)  # type: ignore[return-value]


def _mapped(nest: object, change: Callable[[View], View]) -> object:
    if type(nest) is View:
        return change(nest)
    if isinstance(nest, dict):
        return {
            key: change(part) if type(part) is View else _mapped(part, change) for key, part in nest.items()
        }  # as in flatten
    if isinstance(nest, tuple):
        make = getattr(nest, "_make", tuple)  # of named tuples
        return make([change(part) if type(part) is View else _mapped(part, change) for part in nest])
    return [_mapped(part, change) for part in nest] if isinstance(nest, list) else nest
