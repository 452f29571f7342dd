"""Programs as JSON, call by call: a fragment is encoded once, and each of its calls fills in its own numbers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any, NamedTuple

import msgspec

from sim.base.kept import kept
from sim.schedule.ir.declare import rebound
from sim.schedule.ir.fragments import Call, Fragment
from sim.schedule.ir.stretches import Again, Stretch, Stretched, with_peers

_encode = msgspec.json.encode
_FEW = 2
"""Calls of a fragment for which a template is not worth its while."""


class Pieces:
    """The JSON of programs, one after the other. What a call has in common with one of the program before is not
    written again.
    """

    def __init__(self) -> None:
        self._before: dict[object, bytes] = {}

    def of(self, rank: int, calls: Sequence[Call]) -> Iterator[bytes]:
        """Yield the JSON of the program of a rank, which is that of all buffers, ops and ports of its calls, piece by
        piece.
        """
        often = Counter(id(call.fragment) for call in calls)
        before, self._before = self._before, {}

        def known(kind: str, call: Call, write: Callable[[Call], bytes]) -> bytes:
            fragment, given, first, layer = call
            key = (kind, id(fragment.ops if kind == "ops" else fragment.shared), given, first, layer)
            found = self._before[key] = before[key] if key in before else write(call)
            return found

        def ops(call: Call) -> bytes:
            return _ops(call) if often[id(call.fragment)] > _FEW else _items(call.ops)

        yield b'{"rank":%d,"buffers":[' % rank
        yield from _listed(known("buffers", call, _buffers) for call in calls)
        yield b'],"ops":['
        yield from _listed(known("ops", call, ops) for call in calls)
        yield from _ports(calls)
        yield b"]}"


def _ports(calls: Sequence[Call]) -> Iterator[bytes]:
    yield b'],"inputs":['
    yield from _listed(_items(call.ports(call.fragment.inputs)) for call in calls if call.fragment.inputs)
    yield b'],"outputs":['
    yield from _listed(_items(call.ports(call.fragment.outputs)) for call in calls if call.fragment.outputs)


def _listed(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Yield items of a list with commas between them."""
    separator = b""
    for part in parts:
        if part:
            yield separator
            yield part
            separator = b","


def _items(things: Iterable[object]) -> bytes:
    """Return the items of a list, without its brackets."""
    if isinstance(things, Stretched):
        return b",".join([_again(place) for place in things.places])
    return _encode(list(things))[1:-1]


def _again(place: Again) -> bytes:
    """Return the ops of a stretch that is written again."""
    stretch = place.bound.stretch
    if place.is_as_written:
        return _items(stretch.ops)
    return _of_stretch(stretch).of([*place.all_numbers, *place.bound.peers, _encode(place.label)[1:-1]])


def _buffers(call: Call) -> bytes:
    """Return the buffers of a call."""
    if call.fragment.buffer_layers:
        return _of_buffers(call.fragment).filled((), call.layer)
    return _items(call.buffers)


def _ops(call: Call) -> bytes:
    """Return the ops of a call."""
    return _of_ops(call.fragment).filled(call.numbers, call.layer)


class _Template(NamedTuple):
    """JSON with gaps for the numbers of buffers, and for layers."""

    form: bytes
    keys: tuple[int, ...]
    """Of each gap the number of its buffer in the fragment, or behind those its place among layers."""
    layers: tuple[int, ...]
    """Counted from the layer of the call."""

    def filled(self, numbers: Sequence[int], layer: int) -> bytes:
        """Return the JSON of a call of some layer whose buffers have these numbers."""
        return self.of([*numbers, *(layer + one for one in self.layers)])

    def of(self, values: Sequence[object]) -> bytes:
        """Return the JSON with these values in its gaps."""
        return self.form % (itemgetter(*self.keys)(values) if self.keys else ())


_GAP = re.compile(rb'"\\u0000(\d+)"| \\u0001(-?\d+)\\u0001|\\u0002')
"""The number of a buffer or of a peer, which is a string of its own, a layer behind a name, or the end of a label."""
_END = "\2"


@kept
def _of_buffers(fragment: Fragment) -> _Template:
    before, layers = len(fragment.given), fragment.buffer_layers
    buffers = [
        msgspec.structs.replace(buffer, name=_layered(buffer.name, layers.get(number)))
        for number, buffer in enumerate(fragment.own, before)
    ]
    return _template(buffers, 0)


@kept
def _of_ops(fragment: Fragment) -> _Template:
    gaps: Any = [f"\0{number}" for number in range(len(fragment.given) + len(fragment.own))]
    layers = fragment.op_layers
    ops = [rebound(op, gaps, label=_layered(op.label, layers.get(at))) for at, op in enumerate(fragment.ops)]
    return _template(ops, len(gaps))


@kept
def _of_stretch(stretch: Stretch) -> _Template:
    """Return the template of ops that are given buffers and peers, one after the other, and the end of labels."""
    count = stretch.num_given + len(stretch.buffers)
    gaps: Any = [f"\0{number}" for number in range(count)]

    def peer(number: int) -> Any:
        return f"\0{count + number}"

    ops = [
        with_peers(rebound(op, gaps, label=op.label if start is None else start + _END), peer)
        for op, start in zip(stretch.ops, stretch.starts, strict=True)
    ]
    return _template(ops, 0)


def _layered(name: str, layer: int | None) -> str:
    return name if layer is None else f"{name} \1{layer}\1"


def _template(things: Iterable[object], count: int) -> _Template:
    """Return the template of some JSON that names so many buffers."""
    layers: dict[int, int] = {}
    keys: list[int] = []

    def gap(found: re.Match[bytes]) -> bytes:
        number, layer = found.groups()
        if number is layer is None:
            keys.append(-1)
            return b"%b"
        if number is not None:
            keys.append(int(number))
            return b"%d"
        keys.append(count + layers.setdefault(int(layer), len(layers)))
        return b" %d"

    form = _GAP.sub(gap, _items(things).replace(b"%", b"%%"))
    return _Template(form, tuple(keys), tuple(layers))
