"""Views in nests of tuples, lists and dicts, as functions of builders take and return them."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

from sim.schedule.ir.views import View

Nest = TypeVar("Nest")


def flatten(nest: object, views: list[View], form: list[Hashable]) -> None:
    """Append the views of a nest, and what else tells it from others: types, lengths, keys, and what is no view."""
    if isinstance(nest, View):
        views.append(nest)
        form.append(View)
    elif isinstance(nest, dict):
        form.append((dict, *nest))
        for part in nest.values():
            flatten(part, views, form)
    elif isinstance(nest, tuple | list):
        form.append((type(nest), len(nest)))
        for part in nest:
            flatten(part, views, form)
    else:
        form.append(nest)


def mapped(nest: Nest, change: Callable[[View], View]) -> Nest:
    """Return a nest with a change made to each view."""
    return _mapped(nest, change)  # type: ignore[return-value]


def _mapped(nest: object, change: Callable[[View], View]) -> object:
    if isinstance(nest, View):
        return change(nest)
    if isinstance(nest, dict):
        return {key: _mapped(part, change) for key, part in nest.items()}
    if isinstance(nest, tuple):
        make = getattr(nest, "_make", tuple)  # of named tuples
        return make([_mapped(part, change) for part in nest])
    return [_mapped(part, change) for part in nest] if isinstance(nest, list) else nest
