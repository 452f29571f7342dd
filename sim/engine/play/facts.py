"""What ops are to an engine: of a fragment once, whoever calls it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias, assert_never

import numpy as np
from numpy.typing import NDArray

from sim.base.kept import kept
from sim.schedule.derive.kernels import KernelUse, use_of
from sim.schedule.derive.matching import Key
from sim.schedule.ir import ops
from sim.schedule.ir.exchanges import Exchanges
from sim.schedule.ir.forms import Form
from sim.schedule.ir.fragments import Fragment
from sim.schedule.ir.program import Program, alone
from sim.schedule.ir.views import Split, part_of

KERNEL, HOST_SYNC, EXCHANGE, COLLECTIVE, HOST_COPY, HOST_KERNEL = range(6)
"""Kinds of ops, as in player.c."""

INT = np.int32
Array: TypeAlias = NDArray[Any]

SIDE = np.dtype(
    [*((name, INT) for name in ("op", "communicator", "receives", "peer")), ("nbytes", np.int64), ("by_copies", INT)]
)
EXCHANGE_ROW = np.dtype([("op", INT), ("communicator", INT), ("peers", INT), ("nbytes", np.int64)])
COLLECTIVE_ROW = np.dtype([("op", INT), ("communicator", INT), ("kind", INT), ("nbytes", np.int64)])


class Distinct:
    """Things by the order in which they were first seen."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self.found: list[Any] = []

    def number(self, key: Hashable, thing: object) -> int:
        """Return the number of what has this key; the first one stands for all."""
        number = self._numbers.setdefault(key, len(self.found))
        if number == len(self.found):
            self.found.append(thing)
        return number


class Facts(NamedTuple):
    """What a fragment's ops are to an engine, whoever calls it."""

    kind: Array
    streams: list[str]
    """In the order of their first op."""
    stream: Array
    issues: list[tuple[Hashable, tuple[ops.Op, KernelUse | None]]]
    issue: Array
    uses: list[KernelUse]
    use: Array
    copies: list[tuple[tuple[object, ...], ops.HostCopy | ops.HostAdamW]]
    copy: Array
    sides: Array
    """Of messages, a row for all that an Exchange sends to one peer, or takes from it."""
    exchanges: Array
    """A row per Exchange."""
    collectives: Array
    """A row per collective."""
    communicators: list[str]
    kinds: list[ops.Collective]
    """An op of each kind of collective."""


class _OfForm(NamedTuple):
    """What ops of a form are to an engine."""

    kind: int
    use: KernelUse | None
    issue: Hashable
    sent: list[int]
    """Bytes of the messages of an Exchange."""
    taken: list[int]
    part: int
    """Of a collective the bytes of its largest part, 0 of others."""


@kept
def _of_form(form: Form) -> _OfForm:
    op, program, use = form.op, alone(form), use_of(form)
    sent, taken = (op.sends, op.recvs) if isinstance(op, ops.Exchange) else ((), ())
    return _OfForm(
        kind_of(op),
        use,
        issue_key(op, use),
        [program.nbytes(view) for _, view in sent],
        [program.nbytes(view) for _, view in taken],
        largest_part(op, program) if isinstance(op, ops.Collective) else 0,
    )


@kept
def facts_of(fragment: Fragment) -> Facts:
    """Return what the ops of a fragment are, as long as it lives."""
    (forms, which, _), program = fragment.formed, Program.of_fragment(fragment, rank=0)
    streams, issues, uses, copies = Distinct(), Distinct(), Distinct(), Distinct()
    communicators, kinds = Distinct(), Distinct()
    rows: list[tuple[int, ...]] = []
    over: list[int] = []
    of_forms = list(map(_of_form, forms))
    for of_form, at in zip(of_forms, np.unique(which, return_index=True)[1].tolist(), strict=True):
        op, copied = fragment.ops[at], -1
        issued = issues.number(of_form.issue, (of_form.issue, (op, of_form.use)))
        if isinstance(op, ops.HostCopy):
            places = (program.buffers[view.buffer].place for view in (op.source, op.target))
            what = (op.stream, op.source.shape, program.dtype(op.source), *places)
            copied = copies.number(what, (what, op))
        elif isinstance(op, ops.HostAdamW):
            of_host = (type(op), op.weights.shape, program.dtype(op.weights), op.cast and program.dtype(op.cast))
            copied = copies.number(of_host, (of_host, op))
        used = -1 if of_form.use is None else uses.number(of_form.use, of_form.use)
        rows.append((of_form.kind, streams.number(op.stream, op.stream), issued, used, copied))
        communicates = isinstance(op, ops.Communication)
        over.append(communicators.number(op.communicator, op.communicator) if communicates else -1)
    collectives: list[tuple[int, ...]] = []
    for index in fragment.collectives:
        op, number = fragment.ops[index], which[index]
        assert isinstance(op, ops.Collective)
        collectives.append((index, over[number], kinds.number(type(op), op), of_forms[number].part))
    sides, exchanges = _exchanged(fragment, of_forms, over)
    kind, stream, issue, use, copy = np.array(rows, INT).reshape(-1, 5)[which].T
    return Facts(
        kind, streams.found, stream, issues.found, issue, uses.found, use, copies.found, copy,
        sides, exchanges, np.array(collectives, COLLECTIVE_ROW),
        communicators.found, kinds.found,
    )  # fmt: skip


def _exchanged(fragment: Fragment, of_forms: Sequence[_OfForm], over: Sequence[int]) -> tuple[Array, Array]:
    """Return the rows of messages and those of Exchanges; ``over`` are communicators by the numbers of forms."""
    exchanges, which = fragment.exchanges, fragment.formed.which
    sides: list[list[tuple[int, ...]]] = []
    rows: list[list[tuple[int, ...]]] = []
    for at in exchanges.first:
        op, number = fragment.ops[at], which[at]
        assert isinstance(op, ops.Exchange)
        met, largest = _met(op, of_forms[number])
        sides.append([(over[number], *side, op.by_copies is True) for side in met])
        rows.append([(over[number], *largest)])
    return _rows(exchanges, sides, SIDE), _rows(exchanges, rows, EXCHANGE_ROW)


def _rows(exchanges: Exchanges, of_kinds: Sequence[Sequence[tuple[int, ...]]], dtype: np.dtype[Any]) -> Array:
    """Return rows that are said by kind, once for each Exchange, behind the number of its op."""
    names = dtype.names or ()
    at, columns = exchanges.each(of_kinds, len(names) - 1)
    found = np.empty(len(at), dtype)
    for name, column in zip(names, (at, *columns.T), strict=True):
        found[name] = column
    return found


def _met(op: ops.Exchange, of_form: _OfForm) -> tuple[list[tuple[int, int, int]], tuple[int, int]]:
    """Return of each peer whether an Exchange receives from it, and how many bytes, and of all the largest message."""
    out, into = _by_peer(op.sends, of_form.sent), _by_peer(op.recvs, of_form.taken)
    sides = [*((0, *sent) for sent in out.items()), *((1, *taken) for taken in into.items())]
    return sides, largest_message(op, (*of_form.sent, *of_form.taken))


def _by_peer(messages: Iterable[ops.Message], sizes: Iterable[int]) -> dict[int, int]:
    """Return how many bytes go to each peer, or come from it."""
    nbytes: dict[int, int] = {}
    for (peer, _), size in zip(messages, sizes, strict=True):
        nbytes[peer] = nbytes.get(peer, 0) + size
    return nbytes


def kind_of(op: ops.Op) -> int:
    """Return the kind of an op in the arrays."""
    if isinstance(op, ops.Kernel):
        return KERNEL
    if isinstance(op, ops.Exchange):
        return EXCHANGE
    if isinstance(op, ops.Collective):
        return COLLECTIVE
    if isinstance(op, ops.HostCopy):
        return HOST_COPY
    if isinstance(op, ops.HostAdamW):
        return HOST_KERNEL
    if isinstance(op, ops.HostSync):
        return HOST_SYNC
    assert_never(op)


def issue_key(op: ops.Op, use: KernelUse | None) -> Hashable:
    """Return what the cost of issuing an op depends on."""
    if use:
        own = use.kernel, use.into_slice, use.loop
        in_place = use.packs[0], use.variant == "eager"  # which of what software runs stands for it
        return *own, *in_place, op.part, op.meta.family
    if isinstance(op, ops.Exchange):
        return type(op), op.num_messages, op.by_copies
    if isinstance(op, ops.HostSync):
        return type(op), op.calls
    if isinstance(op, ops.Collective):
        return type(op), op.communicator
    return type(op), op.stream if isinstance(op, ops.HostCopy) else ""


def largest_message(op: ops.Exchange, nbytes: Iterable[int]) -> tuple[int, int]:
    """Return how many peers an Exchange has, in the direction with more, and the bytes of its largest message, of those
    of all; no peers where no kernel moves anything.

    What it sends to one and takes from another is on the same channels.
    """
    if op.by_copies:
        return 0, 0
    peers = max(len({peer for peer, _ in messages}) for messages in (op.sends, op.recvs))
    return peers, max(nbytes, default=0)


def part_bytes(programs: Sequence[Program], members: tuple[Key, ...]) -> int:
    """Return the bytes of one part of a collective (of AllReduce the whole). Where parts differ it is the largest, at
    whose pace a ring goes; of direct sends that is an upper bound.
    """
    largest = 0
    for rank, index in members:
        op = programs[rank].ops[index]
        assert isinstance(op, ops.Collective)
        largest = max(largest, largest_part(op, programs[rank]))
    return largest


def largest_part(op: ops.Collective, program: Program) -> int:
    """Return the bytes of the largest part that one member gives."""
    if not op.given:
        return 0
    alike = not any(isinstance(side, Split) and side.sizes for side in (op.given, op.taken))
    count = 1 if alike or not isinstance(op.given, Split) else op.given.parts
    return max(program.nbytes(part_of(op.given, member)) for member in range(count))
