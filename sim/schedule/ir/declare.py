"""How ops declare themselves: each operand says in its annotation whether it is read or written, and its dimensions.

From these declarations follow ``reads`` and ``writes``, the rule of shapes, what is updated in place, and the sides of
a collective. Letters name extents that have to agree within one op: b batch, q queries, k keys, s tokens, h query
heads, g key/value heads, d head dim, e width, f feed-forward width; of weights i fan in, o fan out; n numbers of any
meaning. A ``*`` folds all remaining dimensions into the next letter; ``...`` stands for any dimensions, the same
wherever it stands. Data types agree within one op too, but where it is said otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from operator import attrgetter
from typing import Any, Literal, NamedTuple, TypeVar, get_type_hints

import msgspec

from sim.schedule.ir.views import Data, Split, View

AnyOp = TypeVar("AnyOp", bound=Data)
Numbers = Literal["alike", "wide", "alike or wide", "any", "int64"]
"""The data type of a kernel's operand: that of its first one, what sums of such numbers are kept in, one of these two,
any that a workload has, or integers.
"""


class Operand(NamedTuple):
    """What an annotation says of the views in a field: a View, a Split, or the views of messages."""

    letters: str
    """Dimensions; empty where the op has a rule of its own."""
    is_read: bool
    is_written: bool
    read_if: str = ""
    """The flag by which an op also reads what it writes."""
    numbers: Numbers = "alike"
    contiguous: bool = False
    """Whether its views have to lie in memory in one piece."""

    def is_read_by(self, op: Data) -> bool:
        """Return whether an op reads it."""
        return self.is_read or bool(self.read_if and getattr(op, self.read_if))


def In(  # noqa: N802 - stands in annotations, as a type does
    letters: str = "", numbers: Numbers = "alike", *, contiguous: bool = False
) -> Operand:
    """Return the declaration of what an op reads."""
    return Operand(letters, is_read=True, is_written=False, numbers=numbers, contiguous=contiguous)


def Out(  # noqa: N802
    letters: str = "", numbers: Numbers = "alike", *, read_if: str = "", contiguous: bool = False
) -> Operand:
    """Return the declaration of what an op writes."""
    return Operand(letters, is_read=False, is_written=True, read_if=read_if, numbers=numbers, contiguous=contiguous)


def InOut(letters: str = "", numbers: Numbers = "alike") -> Operand:  # noqa: N802
    """Return the declaration of what an op updates in place."""
    return Operand(letters, is_read=True, is_written=True, numbers=numbers)


@cache
def operands(kind: type[Data]) -> dict[str, Operand]:
    """Return the operands that a class of ops declares, by field."""
    hints = get_type_hints(kind, include_extras=True)
    return {
        field: mark
        for field in kind.__struct_fields__
        for mark in getattr(hints[field], "__metadata__", ())
        if isinstance(mark, Operand)
    }


Views = Callable[[Any], tuple[View, ...]]


@cache
def readers(kind: type[Data]) -> Views:
    """Return what finds the views that an op of a class reads, in the order of its fields."""
    declared = operands(kind).items()
    return _collector(kind, [(name, mark.read_if) for name, mark in declared if mark.is_read or mark.read_if])


@cache
def writers(kind: type[Data]) -> Views:
    """Return what finds the views that an op of a class writes, in the order of its fields."""
    return _collector(kind, [(name, "") for name, mark in operands(kind).items() if mark.is_written])


def _collector(kind: type[Data], fields: list[tuple[str, str]]) -> Views:
    """Return what collects the views of fields, each but those under a flag that is not set."""
    hints = get_type_hints(kind)
    if all(hints[name] in {View, Split} and not flag for name, flag in fields):  # most, and players ask all the time
        paths = [name if hints[name] is View else f"{name}.view" for name, _ in fields]
        find: Any = attrgetter(*paths) if paths else lambda _: ()
        return find if len(paths) != 1 else lambda op: (find(op),)

    def collect(op: Any) -> tuple[View, ...]:
        views: list[View] = []
        for name, flag in fields:
            if not flag or getattr(op, flag):
                value = getattr(op, name)
                if type(value) is View:
                    views.append(value)
                else:
                    views += views_in(value)
        return tuple(views)

    return collect


def views_in(value: View | Split | Iterable[Any] | None) -> Iterator[View]:
    """Yield the views of a field: itself, of a Split the whole one, of messages or views each; none of None."""
    if isinstance(value, View):
        yield value
    elif isinstance(value, Split):
        yield value.view
    elif value is not None:
        for one in value:
            yield one if type(one) is View else one.view


def rebound(op: AnyOp, number: Mapping[int, int] | Sequence[int], **changes: Any) -> AnyOp:
    """Return an op on other buffers, ``number[old]``, and with other values of some fields."""
    for name in operands(type(op)):
        value = getattr(op, name)
        if type(value) is View:
            changes[name] = View(number[value.buffer], value.slices)
        elif type(value) is Split:
            view = View(number[value.view.buffer], value.view.slices)
            changes[name] = Split(view, value.dim, value.parts, value.sizes)
        elif value is not None:
            changes[name] = tuple([_rebound(one, number) for one in value])
    return msgspec.structs.replace(op, **changes)


def _rebound(one: Any, number: Mapping[int, int] | Sequence[int]) -> Any:
    """Return a view, or a message, on another buffer."""
    if type(one) is View:
        return View(number[one.buffer], one.slices)
    return type(one)(one.peer, View(number[one.view.buffer], one.view.slices))


def side(op: Data, *, written: bool) -> View | Split | None:
    """Return what a collective writes, or what it reads: its one such operand, or None."""
    fields = (name for name, mark in operands(type(op)).items() if (mark.is_written if written else mark.is_read))
    return next((getattr(op, name) for name in fields), None)
