"""Every way in which ``mutations`` changes a schedule.

Operators know views, splits, messages, spans, bands, tuples and numbers, whatever op, port or buffer holds them, so
that a new op needs no line here. Left alone are labels and names, which are for people.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from random import Random
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import msgspec

from sim.schedule.ir.masks import CAUSAL, FULL, Band, Span
from sim.schedule.ir.ops import (
    STREAMS,
    Accumulate,
    AdamW,
    Copy,
    Fold,
    Gemm,
    HostAdamW,
    JoinedGemm,
    Merge,
    Message,
    Op,
    Pack,
    ReduceScatter,
    SquareSum,
    StateSum,
    Zero,
)
from sim.schedule.ir.program import Program, Schedule
from sim.schedule.ir.views import Split, View

LEFT_ALONE = {"label", "name"}
SUMMING = (Accumulate, AdamW, Fold, Gemm, HostAdamW, JoinedGemm, Merge, Pack, ReduceScatter, SquareSum, StateSum)
"""Ops that sum up what they read, or hand it on to a sum."""

Path = tuple[str | int, ...]
Item = Any
"""An op, a port or a buffer."""
Items = tuple[Item, ...]


class Scene(NamedTuple):
    """Where a change happens."""

    draw: Random
    schedule: Schedule
    program: Program


Operator = Callable[[Random, Schedule], Schedule | None]
"""Returns a mutant, None where it finds nothing to change."""
OfProgram = Callable[[Scene], Program | None]
OfItems = Callable[[Scene, Items, int], Iterable[Item] | None]
"""Given all items of a program and the number of the one to change: all that shall stand there."""
OfValue = Callable[[Scene, Item, Any], Any]
"""Given an item and a value in it: another value, None where there is none."""


# What is inside an op


def values_in(part: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Yield every value inside an op, a port or a buffer; views, spans and bands whole."""
    inner: Iterable[tuple[str | int, Any]] = ()
    if isinstance(part, msgspec.Struct) and not isinstance(part, View):
        inner = [(name, getattr(part, name)) for name in part.__struct_fields__ if name not in LEFT_ALONE]
    elif isinstance(part, tuple) and not isinstance(part, Span | Band):
        inner = enumerate(part)
    for key, value in inner:
        yield (*path, key), value
        yield from values_in(value, (*path, key))


def put(part: Any, path: Path, new: Any) -> Any:
    """Return a copy with another value at a path."""
    if not path:
        return new
    key, *rest = path
    if isinstance(part, msgspec.Struct):
        return msgspec.structs.replace(part, **{key: put(getattr(part, key), tuple(rest), new)})
    items = [put(item, tuple(rest), new) if at == key else item for at, item in enumerate(part)]
    return type(part)(*items) if hasattr(part, "_fields") else tuple(items)


def found_in(part: Any, kind: type | Callable[[Path, Any], bool]) -> list[tuple[Path, Any]]:
    """Return the values of a type, or those that a predicate wants, with their paths."""
    if isinstance(kind, type):
        return [(path, value) for path, value in values_in(part) if type(value) is kind]
    return [(path, value) for path, value in values_in(part) if kind(path, value)]


def views_of(program: Program) -> list[View]:
    """Return the views that a program's ops and ports use, each once, in their order."""
    ports = [port.view for port in (*program.inputs, *program.outputs)]
    return list(dict.fromkeys([*ports, *(view for op in program.ops for view in (*op.reads, *op.writes))]))


def made(kind: type, like: Op, **fields: Any) -> Any:
    """Return a kernel of another kind in the place of an op."""
    return kind(part=like.part, label=like.label, **fields)


def whole(view: View) -> Split:
    """Return a view as one part."""
    return Split(view, 0, 1)


# Operators from changes


def on_ranks(change: OfProgram) -> Operator:
    """Return the operator that changes one rank, two, or all of them by the same draws."""

    def operator(draw: Random, schedule: Schedule) -> Schedule | None:
        programs = schedule.programs
        ranks = draw.sample(range(len(programs)), min(draw.choice((1, 2, len(programs))), len(programs)))
        state = draw.random()
        for rank in ranks:
            programs[rank] = change(Scene(Random(state), schedule, programs[rank])) or programs[rank]
        return Schedule(schedule.header, programs.__getitem__)

    return operator


def among(change: OfItems, *lists: str) -> Operator:
    """Return the operator that changes one item of a program's ops, or of the lists that are named."""

    def of_program(scene: Scene) -> Program | None:
        sites = [(name, at) for name in lists or ("ops",) for at in range(len(getattr(scene.program, name)))]
        scene.draw.shuffle(sites)
        for name, at in sites:
            items = getattr(scene.program, name)
            new = change(scene, items, at)
            if new is not None and tuple(new) != items:
                return scene.program.replace(**{name: tuple(new)})
        return None

    return on_ranks(of_program)


def inside(kind: type | Callable[[Path, Any], bool], other: OfValue, *lists: str) -> Operator:
    """Return the operator that changes one value of a kind inside an item."""

    def change(scene: Scene, items: Items, at: int) -> Items | None:
        found = found_in(items[at], kind)
        if not found:
            return None
        path, value = scene.draw.choice(found)
        new = other(scene, items[at], value)
        return None if new is None else (*items[:at], put(items[at], path, new), *items[at + 1 :])

    return among(change, *lists)


def named(name: str) -> Callable[[Path, Any], bool]:
    """Return the predicate of a field."""
    return lambda path, _: path[-1] == name


def any_of(draw: Random, values: Iterable[Any], but: Any) -> Any:
    """Return one of some values that is not this one, None if there is none."""
    return draw.choice([value for value in values if value != but] or [None])


# Other values


def view_of_its_shape(scene: Scene, _: Item, view: View) -> View | None:
    return any_of(scene.draw, [other for other in views_of(scene.program) if other.shape == view.shape], view)


def any_view(scene: Scene, _: Item, view: View) -> View | None:
    return any_of(scene.draw, views_of(scene.program), view)


def stale_view(scene: Scene, items: Items, at: int) -> Items | None:
    """Return the ops with a view that another op of the kind has in the same place."""
    item = items[at]
    path, _ = scene.draw.choice(found_in(item, View) or [((), None)])
    others = [other for other in items if type(other) is type(item) and other is not item]
    if not path or not others:
        return None
    views = [view for other in others for where, view in found_in(other, View) if where == path]
    new = any_of(scene.draw, views, None)
    return None if new is None else (*items[:at], put(item, path, new), *items[at + 1 :])


def resliced(scene: Scene, view: View, moves: Callable[[int, int], list[tuple[int, int]]], *, within: bool) -> Any:
    """Return a view that begins and ends elsewhere along one dimension."""
    dim = scene.draw.randrange(len(view.slices))
    (start, stop), extent = view.slices[dim], scene.program.buffers[view.buffer].shape[dim]
    boxes = [(start + a, stop + b) for a, b in moves(stop - start, extent)]
    if within:
        boxes = [(a, b) for a, b in boxes if 0 <= a < b <= extent]
    box = any_of(scene.draw, boxes, (start, stop))
    return None if box is None else View(view.buffer, (*view.slices[:dim], box, *view.slices[dim + 1 :]))


def moved_view(scene: Scene, _: Item, view: View) -> View | None:
    return resliced(scene, view, lambda n, _: [(by, by) for by in (-n, -1, 1, n)], within=True)


def stretched_view(scene: Scene, _: Item, view: View) -> View | None:
    return resliced(
        scene, view, lambda n, _: [(0, n), (0, -1), (1, 0), (-n, 0), (0, -n // 2), (n // 2, 0)], within=True
    )


def view_outside(scene: Scene, _: Item, view: View) -> View | None:
    return resliced(scene, view, lambda _, m: [(m, m), (-m, -m), (0, 1), (-1, 0), (m, 0)], within=False)


def swapped_views(scene: Scene, items: Items, at: int) -> Items | None:
    """Return the ops with two views of one traded."""
    found = found_in(items[at], View)
    if len(found) < 2:
        return None
    (path, view), (other_path, other) = scene.draw.sample(found, 2)
    return (*items[:at], put(put(items[at], path, other), other_path, view), *items[at + 1 :])


def narrowed(letters: str) -> OfItems:
    """Return the change of an op to one that works on a half only: of all its views of one extent along a dimension of
    these letters.
    """

    def change(scene: Scene, items: Items, at: int) -> Items | None:
        buffers, op = scene.program.buffers, items[at]
        letter, half = scene.draw.choice(letters), scene.draw.randrange(2)
        found = [
            (path, view, buffers[view.buffer].dims.index(letter))
            for path, view in found_in(op, View)
            if letter in buffers[view.buffer].dims
        ]
        extent = any_of(scene.draw, [view.shape[dim] for _, view, dim in found], 1)
        if extent is None:
            return None
        cut = slice(0, extent // 2) if half == 0 else slice(extent // 2, extent)
        for path, view, dim in found:
            if view.shape[dim] == extent:
                op = put(op, path, view[(*[slice(None)] * dim, cut)])
        return (*items[:at], op, *items[at + 1 :])

    return change


def other_number(scene: Scene, _: Item, number: int) -> int:
    return scene.draw.choice([number + 1, number - 1, 0, number + 2])


def other_literal(scene: Scene, item: Item, value: str) -> str | None:
    literals = [get_args(hint) for hint in get_type_hints(type(item)).values() if get_origin(hint) is Literal]
    return any_of(scene.draw, next((values for values in literals if value in values), ()), value)


def other_stream(scene: Scene, _: Item, stream: str) -> str:
    return any_of(scene.draw, [*STREAMS, *communicators(scene), "no such stream"], stream)


def communicators(scene: Scene) -> list[str]:
    return [communicator.name for communicator in scene.schedule.header.communicators]


def other_band(scene: Scene, _: Item, band: Band) -> Band:
    shifted = [Band(band.left, None if band.right is None else band.right + by) for by in (-1, 1)]
    shifted += [Band(None if band.left is None else band.left + by, band.right) for by in (-1, 1)]
    seen = [value for op in scene.program.ops for _, value in found_in(op, Band)]
    return any_of(scene.draw, [FULL, CAUSAL, Band(left=0), Band(right=-1), *shifted, *seen], band)


def other_span(scene: Scene, _: Item, span: Span) -> Span:
    by = scene.draw.choice([-span.size, -1, 1, span.size]) * span.step
    step = scene.draw.choice([1, 2, 3])
    moved = Span(span.start + by, span.stop + by, span.step)
    return scene.draw.choice([moved, Span(span.start, span.start + span.size * step, step)])


def same_field(scene: Scene, item: Item, value: Any) -> Any:
    """Return what the same field of another item holds."""
    name = next(name for name in item.__struct_fields__ if getattr(item, name) == value)
    items = (*scene.program.ops, *scene.program.inputs, *scene.program.outputs, *scene.program.buffers)
    return any_of(scene.draw, [getattr(other, name) for other in items if type(other) is type(item)], value)


def is_list(_: Path, value: Any) -> bool:
    return type(value) is tuple and bool(value)


def list_changed(how: str) -> OfValue:
    """Return the change of a tuple: messages, spans of tokens, the order of a copy, streams that the host waits for."""

    def change(scene: Scene, _: Item, values: tuple[Any, ...]) -> tuple[Any, ...]:
        at, other = scene.draw.randrange(len(values)), scene.draw.randrange(len(values))
        new = list(values)
        if how == "dropped":
            del new[at]
        elif how == "doubled":
            new.insert(other, values[at])
        else:
            new[at], new[other] = new[other], new[at]
        return tuple(new)

    return change


# Ops as a whole


def dropped(_: Scene, items: Items, at: int) -> Items:
    return items[:at] + items[at + 1 :]


def doubled(_: Scene, items: Items, at: int) -> Items:
    return items[: at + 1] + items[at:]


def repeated_later(scene: Scene, items: Items, at: int) -> Items:
    later = scene.draw.randrange(at, len(items)) + 1
    return (*items[:later], items[at], *items[later:])


def moved(scene: Scene, items: Items, at: int) -> Items:
    rest, to = dropped(scene, items, at), scene.draw.randrange(len(items))
    return (*rest[:to], items[at], *rest[to:])


def swapped_neighbours(_: Scene, items: Items, at: int) -> Items:
    return (*items[:at], *reversed(items[at : at + 2]), *items[at + 2 :])


def swapped(scene: Scene, items: Items, at: int) -> Items:
    new, other = list(items), scene.draw.randrange(len(items))
    new[at], new[other] = new[other], new[at]
    return tuple(new)


def label_dropped(_: Scene, items: Items, at: int) -> Items:
    return tuple(item for item in items if item.label != items[at].label)


def cut_off(_: Scene, items: Items, at: int) -> Items:
    return items[:at]


def another_of_its_kind(scene: Scene, items: Items, at: int) -> Items | None:
    """Return the ops with one replaced by another of its kind: the same work twice, other work not at all."""
    new = any_of(scene.draw, [item for item in items if type(item) is type(items[at])], items[at])
    return None if new is None else (*items[:at], new, *items[at + 1 :])


def of_another_layer(scene: Scene, items: Items, at: int) -> Items | None:
    """Return the ops with a view that an op of the same label, but for its numbers, has in the same place: of another
    layer, chunk or hop, or where all of the label is the same of another micro-batch.
    """
    item, (path, view) = items[at], scene.draw.choice(found_in(items[at], View) or [((), None)])
    name = _without_numbers(item.label)
    others = [other for other in items if type(other) is type(item) and _without_numbers(other.label) == name]
    found = [other for one in others for where, other in found_in(one, View) if where == path]
    new = any_of(scene.draw, [other for other in found if other.shape == view.shape], view)
    return None if new is None else (*items[:at], put(item, path, new), *items[at + 1 :])


def _without_numbers(label: str) -> str:
    return "".join(letter for letter in label if not letter.isdigit())


def before_its_sum(scene: Scene, items: Items, at: int) -> Items | None:
    """Return the ops with one that runs before the last op that adds to what it reads."""
    read = {view.buffer for view in items[at].reads}
    writers = [number for number in range(at) if read & {view.buffer for view in items[number].writes}]
    if not writers:
        return None
    to = writers[-1]
    return (*items[:to], items[at], *items[to:at], *items[at + 1 :])


def of_another_rank(scene: Scene, items: Items, at: int) -> Items | None:
    """Return the ops with one as another rank has it in the same place."""
    others = [program.ops[at] for program in scene.schedule.programs if at < len(program.ops)]
    fits = [op for op in others if all(view.buffer < len(scene.program.buffers) for view in (*op.reads, *op.writes))]
    new = any_of(scene.draw, fits, items[at])
    return None if new is None else (*items[:at], new, *items[at + 1 :])


def overwrites(_: Scene, items: Items, at: int) -> Items | None:
    """Return the ops with an update (a merge, a sum) that overwrites what it should have added to."""
    op = items[at]
    updated = [view for view in op.writes if view in op.reads]
    added = [[view for view in op.reads if view not in updated and view.shape == into.shape] for into in updated]
    if not updated or not all(added):
        return None
    copies = [
        made(Copy, op, source=whole(sources[0]), target=whole(into))
        for sources, into in zip(added, updated, strict=True)
    ]
    return (*items[:at], *copies, *items[at + 1 :])


def adds(_: Scene, items: Items, at: int) -> Items | None:
    """Return the ops with one that adds what it should have written anew, or merged."""
    op = items[at]
    pairs = [(a, b) for a in op.reads for b in op.writes if a.shape == b.shape and a != b]
    if not pairs or isinstance(op, Accumulate):
        return None
    return (*items[:at], *(made(Accumulate, op, source=a, into=b) for a, b in pairs), *items[at + 1 :])


def inserted(make: Callable[[Scene, Op, View, View], Op]) -> OfItems:
    """Return the change that inserts an op of two views of one shape, one of which the op behind it uses."""

    def change(scene: Scene, items: Items, at: int) -> Items | None:
        views = (*items[at].reads, *items[at].writes)
        if not views:
            return None
        view = scene.draw.choice(views)
        other = view_of_its_shape(scene, items[at], view)
        return None if other is None else (*items[:at], make(scene, items[at], view, other), *items[at:])

    return change


def detour(fill: Callable[[Scene, View, View], list[dict[str, Any]]], *kinds: type[Op]) -> OfProgram:
    """Return the change that lets an op, of some kinds if any are named, read an operand from a new buffer; ``fill``
    gives the copies to that, which may go by further new ones.
    """

    def change(scene: Scene) -> Program | None:
        program, buffers = scene.program, scene.program.buffers
        sites = [at for at, op in enumerate(program.ops) if not kinds or isinstance(op, kinds)]
        if not sites:
            return None
        at = scene.draw.choice(sites)
        op = program.ops[at]
        found = [(path, view) for path, view in found_in(op, View) if view in op.reads and view not in op.writes]
        if not found:
            return None
        path, view = scene.draw.choice(found)
        new = View(len(buffers), tuple((0, extent) for extent in view.shape))
        copies = [made(Copy, op, **fields) for fields in fill(scene, view, new)]
        between = {one.buffer: one for copy in copies for one in copy.writes if one.buffer > new.buffer}
        made_anew = [
            msgspec.structs.replace(buffers[view.buffer], shape=one.shape, place="hbm", category="other")
            for one in (new, *between.values())
        ]
        ops = (*program.ops[:at], *copies, put(op, path, new), *program.ops[at + 1 :])
        return program.replace(ops=ops, buffers=(*buffers, *made_anew))

    return change


def reordered(scene: Scene, view: View, new: View) -> list[dict[str, Any]]:
    """Return a copy of two parts along a dimension, in one order or another."""
    dim = scene.draw.randrange(min(3, len(view.slices)))
    parts = 2 if view.shape[dim] % 2 == 0 else 1
    order = tuple(scene.draw.choices(range(parts), k=parts))
    return [{"source": Split(view, dim, parts), "target": Split(new, dim, parts), "order": order}]


def halved(scene: Scene, view: View, new: View) -> list[dict[str, Any]]:
    """Return a copy of one half, twice."""
    dim = any_of(scene.draw, [dim for dim in range(min(3, len(view.slices))) if view.shape[dim] % 2 == 0], None)
    if dim is None:
        return [{"source": whole(view), "target": whole(new)}]
    half = scene.draw.randrange(2)
    return [{"source": Split(view, dim, 2), "target": Split(new, dim, 2), "order": (half, half)}]


def turned(scene: Scene, view: View, new: View) -> list[dict[str, Any]]:
    """Return copies of a view by way of a buffer where its parts lie along another dimension, their sizes spelled out
    or not; and from there in their order or another one.
    """
    dims = range(min(3, len(view.slices)))
    along, across = scene.draw.choice([(a, b) for a in dims for b in dims if a != b] or [(0, 0)])
    parts = 1 if along == across else scene.draw.choice([n for n in (1, 2, 3, 4) if view.shape[along] % n == 0])
    shape = list(view.shape)
    shape[along], shape[across] = shape[along] // parts, shape[across] * parts
    between = View(new.buffer + 1, tuple((0, extent) for extent in shape))

    def split(of: View, dim: int) -> Split:
        return Split(of, dim, parts, scene.draw.choice(((), (of.shape[dim] // parts,) * parts)))

    order = tuple(scene.draw.choice((range(parts), scene.draw.sample(range(parts), parts))))
    return [
        {"source": split(view, along), "target": split(between, across)},
        {"source": split(between, across), "target": split(new, along), "order": order},
    ]


def mixed(scene: Scene, view: View, new: View) -> list[dict[str, Any]]:
    """Return copies of one half each of two views."""
    other = view_of_its_shape(scene, None, view) or view
    dim = scene.draw.randrange(min(3, len(view.slices)))
    middle = view.shape[dim] // 2
    halves = [(*[slice(None)] * dim, half) for half in (slice(0, middle), slice(middle, None))]
    sources = zip((view, other), halves if middle else halves[1:], strict=False)
    return [{"source": whole(source[half]), "target": whole(new[half])} for source, half in sources]


def turned_around(_: Scene, items: Items, at: int) -> Items | None:
    """Return the ops with one whose messages go where they came from."""
    messages = found_in(items[at], Message)
    peers = sorted({message.peer for _, message in messages})
    if len(peers) < 2:
        return None
    op = items[at]
    for path, message in messages:
        op = put(op, path, message._replace(peer=peers[(peers.index(message.peer) + 1) % len(peers)]))
    return (*items[:at], op, *items[at + 1 :])


def two_buffers_become_one(scene: Scene) -> Program | None:
    """Return the program with a buffer that takes another one's place from some op on, or everywhere."""
    buffers, ports = scene.program.buffers, (*scene.program.inputs, *scene.program.outputs)
    old = scene.draw.randrange(len(buffers))
    alike = [
        number
        for number, buffer in enumerate(buffers)
        if (buffer.shape, buffer.dims, buffer.place) == (buffers[old].shape, buffers[old].dims, buffers[old].place)
        and number not in {port.view.buffer for port in ports}
    ]
    new = any_of(scene.draw, alike, old)
    if new is None:
        return None
    number = [new if at == old else at for at in range(len(buffers))]
    begin = scene.draw.choice([0, scene.draw.randrange(len(scene.program.ops))])
    ops = [op if at < begin else renumber(op, number) for at, op in enumerate(scene.program.ops)]
    outputs = [renumber(port, number) for port in scene.program.outputs]
    return scene.program.replace(ops=tuple(ops), outputs=tuple(outputs))


def renumber(item: Item, number: list[int]) -> Item:
    """Return an op or a port with other numbers for its buffers."""
    for path, view in found_in(item, View):
        item = put(item, path, View(number[view.buffer], view.slices))
    return item


# Schedules as a whole


def ranks_swapped(draw: Random, schedule: Schedule) -> Schedule | None:
    """Return the schedule with two ranks that do each other's work."""
    programs = schedule.programs
    if len(programs) < 2:
        return None
    a, b = draw.sample(range(len(programs)), 2)
    programs[a], programs[b] = (
        programs[b].replace(rank=a),
        programs[a].replace(rank=b),
    )
    return Schedule(schedule.header, programs.__getitem__)


def groups_changed(draw: Random, schedule: Schedule) -> Schedule | None:
    """Return the schedule with two members of a communicator's groups in each other's place."""
    header = schedule.header
    if not header.communicators:
        return None
    at = draw.randrange(len(header.communicators))
    groups = [list(group) for group in header.communicators[at].groups]
    places = [(group, place) for group, members in enumerate(groups) for place in range(len(members))]
    if len(places) < 2:
        return None
    (g, i), (h, j) = draw.sample(places, 2)
    groups[g][i], groups[h][j] = groups[h][j], groups[g][i]
    new = msgspec.structs.replace(header.communicators[at], groups=tuple(map(tuple, groups)))
    return Schedule(put(header, ("communicators", at), new), schedule.program)


def claims_changed(draw: Random, schedule: Schedule) -> Schedule | None:
    """Return the schedule with another claim of what it costs."""
    numbers = [path for path, value in values_in(schedule.header.claims) if isinstance(value, int)]
    path = ("claims", *draw.choice(numbers))
    return Schedule(put(schedule.header, path, draw.randrange(10**6)), schedule.program)


PORTS = ("inputs", "outputs")

OPERATORS: dict[str, Operator] = {
    "view: another of its shape": inside(View, view_of_its_shape),
    "view: any other": inside(View, any_view),
    "view: stale, of another op of the kind": among(stale_view),
    "view: moved": inside(View, moved_view),
    "view: stretched": inside(View, stretched_view),
    "view: outside of its buffer": inside(View, view_outside),
    "views: two of an op swapped": among(swapped_views),
    "views: half of an op's work": among(narrowed("bsh")),
    "buffer: two become one": on_ranks(two_buffers_become_one),
    "number: peer, dimension, parts, order": inside(int, other_number),
    "number: epsilon, theta": inside(
        float, lambda scene, _, number: number * scene.draw.choice((0.5, 0.999, 1 + 1e-12, 1.001, 2.0))
    ),
    "flag: turned over": inside(bool, lambda _scene, _item, value: not value),
    "literal: form, kernel, pass": inside(str, other_literal),
    "stream: another": inside(
        lambda path, value: isinstance(value, str) and path[0] in {"stream", "streams"}, other_stream
    ),
    "communicator: another": inside(
        named("communicator"), lambda scene, _, name: any_of(scene.draw, communicators(scene), name)
    ),
    "band: another": inside(Band, other_band),
    "span: moved or stretched": inside(Span, other_span),
    "list: one dropped": inside(is_list, list_changed("dropped")),
    "list: one doubled": inside(is_list, list_changed("doubled")),
    "list: two swapped": inside(is_list, list_changed("swapped")),
    "messages: turned around": among(turned_around),
    "op: dropped": among(dropped),
    "op: doubled": among(doubled),
    "op: repeated later": among(repeated_later),
    "op: moved": among(moved),
    "ops: neighbours swapped": among(swapped_neighbours),
    "ops: any two swapped": among(swapped),
    "ops: all of a label dropped": among(label_dropped),
    "ops: all from one on dropped": among(cut_off),
    "op: another of its kind": among(another_of_its_kind),
    "op: of another rank": among(of_another_rank),
    "op: overwrites, no merge or sum": among(overwrites),
    "op: adds, no write or merge": among(adds),
    "inserted: zero": among(inserted(lambda _, op, view, __: made(Zero, op, into=view))),
    "inserted: copy": among(
        inserted(lambda _, op, view, other: made(Copy, op, source=whole(other), target=whole(view)))
    ),
    "inserted: sum": among(inserted(lambda _, op, view, other: made(Accumulate, op, source=other, into=view))),
    "detour: parts in another order": on_ranks(detour(reordered)),
    "detour: half of another": on_ranks(detour(mixed)),
    "detour: parts along another dimension": on_ranks(detour(turned)),
    "addend: one half of it twice": on_ranks(detour(halved, *SUMMING)),
    "addend: mixed with another": on_ranks(detour(mixed, *SUMMING)),
    "op: operand of another layer, chunk or micro-batch": among(of_another_layer),
    "op: before the sum that it reads": among(before_its_sum),
    "port: dropped": among(dropped, *PORTS),
    "port: doubled": among(doubled, *PORTS),
    "port: another view of its shape": inside(View, view_of_its_shape, *PORTS),
    "port: view stretched": inside(View, stretched_view, *PORTS),
    "port: another tensor": inside(named("tensor"), same_field, *PORTS),
    "port: another's tokens": inside(named("tokens"), same_field, *PORTS),
    "port: tokens or heads moved": inside(Span, other_span, *PORTS),
    "port: layer": inside(int, other_number, *PORTS),
    "port: spans dropped": inside(is_list, list_changed("dropped"), *PORTS),
    "buffer: place, category, data type": inside(str, other_literal, "buffers"),
    "buffer: data type": inside(named("dtype"), other_literal, "buffers"),
    "buffer: dimensions": inside(named("dims"), same_field, "buffers"),
    "buffer: shape": inside(named("shape"), same_field, "buffers"),
    "ranks: two swapped": ranks_swapped,
    "communicator: members swapped": groups_changed,
    "claims: another number": claims_changed,
}
