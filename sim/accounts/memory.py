"""Memory of a schedule: a function of the program only, walked in the order in which the host issues it.

That is the order in which a caching allocator sees it: a buffer is taken when an op that first touches it is issued,
and freed when the last op that uses it has been issued; if that op runs on another stream, at the first later
kernel that is ordered behind it, or op of that stream where no kernel ever is. What arrives only to be passed on, as
keys that a rank of a causal ring does not attend to, is freed at the next op of that stream if that comes first: no
kernel has to wait for it. Inputs and outputs belong to the caller and stay.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import chain
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np

from sim.accounts.trace import Counter, Trace
from sim.base.kept import kept
from sim.schedule.derive.dependencies import Dependencies
from sim.schedule.derive.workspace import adopted, repeated_bytes, repeats, workspace_bytes
from sim.schedule.ir.columns import rows
from sim.schedule.ir.forms import Form
from sim.schedule.ir.fragments import Fragment
from sim.schedule.ir.ops import (
    COMPUTE,
    FETCH,
    OFFLOAD,
    STREAMS,
    Accumulate,
    Attend,
    AttendBackward,
    AttentionKernel,
    Hold,
    JoinedGemm,
    Kernel,
    LinearKernel,
    Pack,
    TiledKernel,
    TokenKernel,
)
from sim.schedule.ir.program import Program, alone
from sim.schedule.ir.views import Buffer, Category
from sim.schedule.proof.check import Checked

Integers: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]
Booleans: TypeAlias = np.ndarray[Any, np.dtype[np.bool_]]


Term = Literal[
    "parameters", "gradients", "optimiser", "saved activations", "attention", "communication", "temporaries", "other"
]
"""What a training step's memory goes to. Saved activations are those that the forward pass leaves to the backward pass
or to the host; attention has q, k, v, what is made of them and its kernels' workspace; communication has what is sent,
received and laid out for that; temporaries are other activations, gradients of activations and workspace; other are
token ids, labels and losses."""
TERMS: tuple[Term, ...] = get_args(Term)
_OF_CATEGORY: dict[Category, Term] = {
    "parameter": "parameters",
    "gradient": "gradients",
    "optimiser": "optimiser",
    "communication": "communication",
    "repartition": "communication",
}
"""Of all others it matters where and when they are used."""


class Lifetime(NamedTuple):
    """When a buffer lives, by the numbers of ops: allocated before ``first``, freed before ``end``."""

    first: int
    end: int
    unseen: frozenset[str] = frozenset()
    """Streams that may still use it then, since no kernel is ordered behind them yet: an allocator has to be told."""


class MemoryWalk(NamedTuple):
    """Bytes of HBM in use on one rank."""

    in_use: list[int]
    """While each op runs, its workspace included."""
    peak_bytes: int
    buffer_peak_bytes: int
    """The peak without any workspace: what the runtime counts of its tensors."""
    by_category: dict[Category, int]
    """At the peak; the workspace of attention kernels counts as attention, that of others as other."""
    host_peak_bytes: int
    """Most that buffers take of the host's memory."""
    by_term: dict[Term, int]
    """At the peak, too."""
    update_peak_bytes: int
    """Most that is in use behind the last kernel of tokens and the packing of its gradients, while a step sums, clips,
    updates and gathers: what a log has of software that resets the peak behind the passes, as nanotron does in its
    first steps (0.4 logging.py, log_memory, called in trainer.py, training_step)."""


def lifetimes(program: Program, dependencies: Dependencies) -> list[Lifetime]:
    """Return the lifetime of every buffer. The runtime allocates and frees by the same list."""
    first, end, unseen = _spans(_of_program(program), dependencies)
    spans = enumerate(zip(first.tolist(), end.tolist(), strict=True))
    return [Lifetime(*span, frozenset(unseen.get(buffer, ()))) for buffer, span in spans]


class _Columns(NamedTuple):
    """What matters of ops and of buffers, of a fragment or of a program. Bytes are exact: see ``_bytes``."""

    streams: tuple[str, ...]
    stream: Integers
    """(ops,): which of them each is on."""
    workspace: Integers
    repeated: Integers
    """(ops,): what each holds more where its kernel repeats shared keys."""
    attends: Booleans
    nbytes: Integers
    """(buffers,)"""
    on_gpu: Booleans
    category: Integers
    """(buffers,): places among ``CATEGORIES``."""
    term: Integers
    """(buffers,): places among ``TERMS``, of those that are not saved."""
    forward: Booleans
    """(ops,): which are of the forward pass."""
    moves: Booleans
    """(ops,): which copy to the host's memory or back."""
    holds: Booleans
    """(ops,): which do nothing with what they touch."""
    of_passes: Booleans
    """(ops,): which are kernels of tokens, or pack and add up their gradients."""
    counts: Integers
    """(ops,): how many buffers each touches, some more than once."""
    touched: Integers
    """Which: of all ops, one after the other."""
    written: Booleans
    """Which of these touches write."""
    adopted: Integers
    """Buffers that results of ops become: of all ops, one after the other."""
    adopted_counts: Integers
    """(ops,): how many of each op."""
    inputs: Integers
    outputs: Integers

    def is_on(self, which: Callable[[str], bool]) -> Booleans:
        """Return (ops,): which are on one of some streams."""
        return np.array(list(map(which, self.streams)), bool)[self.stream]


_NONE = np.zeros(0, bool)
"""Leaves what it is joined with its dtype."""
_MOST = 2**62
"""Bytes that numpy's integers surely add up to."""
CATEGORIES: tuple[Category, ...] = get_args(Category)
_OF_OPS = (
    "stream", "counts", "workspace", "repeated", "attends", "forward", "moves", "holds", "of_passes", "adopted_counts"
)  # fmt: skip
_ROWS = (
    _OF_OPS,
    ("nbytes", "on_gpu", "category", "term"),
    ("touched", "written"),
    ("adopted",),
    ("inputs",),
    ("outputs",),
)
"""Columns of as many rows."""
_OF_BUFFERS = {"touched", "adopted", "inputs", "outputs"}
"""Those of numbers of buffers."""


class _OfForm(NamedTuple):
    """What matters of an op of a form, as in ``_Columns``."""

    stream: str
    workspace: int
    repeated: int
    attends: bool
    forward: bool
    moves: bool
    holds: bool
    of_passes: bool
    adopted: list[int]
    """The places, among its views, of buffers that its results become."""


@kept
def _of_form(form: Form) -> _OfForm:
    op, program = form.op, alone(form)
    return _OfForm(
        op.stream,
        workspace_bytes(op, program) if isinstance(op, Kernel) else 0,
        repeated_bytes(op, program),
        isinstance(op, Attend | AttendBackward),
        op.part == "forward",
        op.stream in {OFFLOAD, FETCH},
        isinstance(op, Hold),
        isinstance(op, AttentionKernel | LinearKernel | TokenKernel | JoinedGemm | TiledKernel | Pack | Accumulate),
        [form.places[number] for number in adopted(op, program)],
    )


@kept
def _of_fragment(fragment: Fragment) -> _Columns:
    """Return the columns of a fragment. What it is given is in those of the call whose own buffers that are."""
    forms, which, buffers = formed = fragment.formed
    of_forms, own = list(map(_of_form, forms)), fragment.own
    streams = tuple(dict.fromkeys([of_forms[form].stream for form in which.tolist()]))
    adopts = [of_forms[form].adopted for form in which.tolist()]
    starts = zip(formed.starts.tolist(), adopts, strict=True)

    def each(column: list[Any], dtype: type = bool) -> Any:
        return np.array(column, dtype)[which]

    return _Columns(
        streams,
        each([streams.index(of.stream) for of in of_forms], np.int64),
        _bytes([of.workspace for of in of_forms])[which],
        _bytes([of.repeated for of in of_forms])[which],
        each([of.attends for of in of_forms]),
        _bytes([buffer.nbytes for buffer in own]),
        np.array([buffer.place == "hbm" for buffer in own], bool),
        np.array([CATEGORIES.index(buffer.category) for buffer in own], np.int64),
        np.array(list(map(_term, own)), np.int64),
        each([of.forward for of in of_forms]),
        each([of.moves for of in of_forms]),
        each([of.holds for of in of_forms]),
        each([of.of_passes for of in of_forms]),
        *_touched(fragment),
        np.array([buffers[start + place] for start, places in starts for place in places], np.int64),
        np.array(list(map(len, adopts)), np.int64),
        *(np.array([port.view.buffer for port in ports], np.int64) for ports in (fragment.inputs, fragment.outputs)),
    )


def _bytes(sizes: list[int]) -> Integers:
    """Return sizes as an array; of Python's integers where they are too many for numpy's."""
    return np.array(sizes, np.int64 if sum(sizes) < _MOST else object)


def _term(buffer: Buffer) -> int:
    """Return the number of the term that a buffer counts as where no pass leaves it to the next."""
    of_attention = buffer.category == "attention" or "h" in buffer.dims
    return TERMS.index(_OF_CATEGORY.get(buffer.category) or ("attention" if of_attention else "temporaries"))


def _touched(fragment: Fragment) -> tuple[Integers, Integers, Booleans]:
    """Return how many buffers each op touches, which, and whether it writes them."""
    try:
        columns = fragment.columns  # from which dependencies were derived
        counts, accesses = np.diff(columns.access_ends, prepend=0), columns.accesses
        return counts.astype(np.int64), accesses["buffer"].astype(np.int64), accesses["writes"].astype(bool)
    except OverflowError:
        touched = [[view.buffer for view in (*op.reads, *op.writes)] for op in fragment.ops]
        written = [[False] * len(op.reads) + [True] * len(op.writes) for op in fragment.ops]
        of_all, whether = (list(chain.from_iterable(one)) for one in (touched, written))
        return np.array(list(map(len, touched)), np.int64), np.array(of_all, np.int64), np.array(whether, bool)


def _of_program(program: Program) -> _Columns:
    """Return the columns of a program: those of its calls, one after the other, with the numbers of their buffers."""
    fragments, which = program.parts
    parts = list(map(_of_fragment, fragments))
    streams = tuple(dict.fromkeys(chain.from_iterable(part.streams for part in parts)))
    places = [np.array([streams.index(name) for name in part.streams], np.int64) for part in parts]
    parts = [part._replace(stream=place[part.stream]) for part, place in zip(parts, places, strict=True)]
    numbers, sizes = program.numbers
    first = np.cumsum(sizes) - sizes
    found: dict[str, Any] = {}
    for names in _ROWS:
        at, of_calls = rows([len(getattr(part, names[0])) for part in parts], which)
        for name in names:
            found[name] = np.concatenate([_NONE, *(getattr(part, name) for part in parts)])[at]
        if names[0] in _OF_BUFFERS:
            found[names[0]] = numbers[found[names[0]] + np.repeat(first, of_calls)]
    return _Columns(streams, **found)


class _Spans(NamedTuple):
    """Lifetimes as columns: (buffers,), and the streams of those that have any unseen."""

    first: Integers
    end: Integers
    unseen: dict[int, set[str]]


def _spans(columns: _Columns, dependencies: Dependencies) -> _Spans:
    count, buffers = len(columns.stream), columns.touched
    ops = np.repeat(np.arange(count), columns.counts)
    safe, seen, following = _safe(columns, dependencies)
    first, end = np.full(len(columns.nbytes), count), np.zeros(len(columns.nbytes), np.int64)
    np.minimum.at(first, buffers, ops)
    early = _passed_on(columns, ops)[buffers]
    np.maximum.at(end, buffers, np.where(early, np.minimum(safe, following)[ops], safe[ops]))
    told = ~seen[ops] | (safe[ops] > end[buffers])
    unseen: dict[int, set[str]] = {}
    for buffer, op in zip(buffers[told].tolist(), ops[told].tolist(), strict=True):
        unseen.setdefault(buffer, set()).add(columns.streams[columns.stream[op]])
    first[columns.inputs] = 0
    end[columns.inputs] = end[columns.outputs] = count
    return _Spans(first, end, unseen)


def _passed_on(columns: _Columns, ops: Integers) -> Booleans:
    """Return (buffers,): which of them communication fills last, and only communication uses from then on. ``ops`` are
    those of all touches.
    """
    sends = columns.is_on(lambda name: name not in STREAMS)[ops]
    filled, used = (np.full(len(columns.nbytes), -1) for _ in range(2))
    for last, which in ((filled, sends & columns.written), (used, ~sends)):
        np.maximum.at(last, columns.touched[which], ops[which])
    return filled > used


def _safe(columns: _Columns, dependencies: Dependencies) -> tuple[Integers, Booleans, Integers]:
    """Return per op before which other its buffers may be given back, whether that is known to come behind it, and the
    next op of its stream.

    Behind a kernel any later op does. Behind another op the first kernel that is ordered behind it does; if there is
    none, as on a rank that passes keys on without attending to them, it is the next op of its stream or else the
    program's end.
    """
    count, numbers = len(columns.stream), {name: number for number, name in enumerate(dependencies.streams)}
    stream = np.array([numbers[name] for name in columns.streams], np.int64)[columns.stream]
    safe, seen, following = np.arange(1, count + 1), np.ones(count, bool), np.arange(1, count + 1)
    of_stream = {name: np.flatnonzero(stream == number) for name, number in numbers.items()}
    kernels = of_stream.pop(COMPUTE, stream[:0])
    for name, ops in of_stream.items():
        ended = dependencies.known_array[kernels, numbers[name]]  # grows, since kernels follow each other
        safe[ops] = np.append(kernels, count)[np.searchsorted(ended, ops)]
        seen[ops] = safe[ops] < count
        following[ops] = np.append(ops[1:], count)
        safe[ops] = np.where(seen[ops], safe[ops], following[ops])
    return safe, seen, following


class Held:
    """The memory of one rank: what is alive while each op runs."""

    def __init__(self, program: Program, dependencies: Dependencies, attention: str = "") -> None:
        self.columns = columns = _of_program(program)
        self.first, self.end, _ = _spans(columns, dependencies)
        sizes = (columns.nbytes, columns.workspace, columns.repeated)
        most = math.fsum((np.sum(sizes[0], dtype=float), *(of.max(initial=0) for of in sizes[1:])))
        self._exact = np.int64 if most < _MOST and object not in [of.dtype for of in sizes] else object
        self.nbytes, self.workspace, repeated = (of.astype(self._exact) for of in sizes)
        if repeats(attention):
            self.workspace += repeated
        into, makers = columns.adopted, np.repeat(np.arange(len(columns.stream)), columns.adopted_counts)
        before = self.first[into] < makers
        np.add.at(self.workspace, makers[before], self.nbytes[into[before]])
        self.on_gpu = columns.on_gpu
        self.alive = self.first < self.end

    def bytes_of(self, which: Booleans) -> Any:
        """Return the bytes of some buffers that are alive at each op."""
        change = np.zeros(len(self.workspace) + 1, self._exact)
        np.add.at(change, self.first[which], self.nbytes[which])
        np.subtract.at(change, self.end[which], self.nbytes[which])
        return np.cumsum(change[:-1])

    @property
    def terms(self) -> Integers:
        """(buffers,): numbers of terms. What both passes use is saved, as is what is copied to the host or back; what
        is there before the step or behind it, and is neither weight nor state, is other, as is what no op uses.
        """
        columns, ops = self.columns, np.repeat(np.arange(len(self.workspace)), self.columns.counts)
        forward, moves = columns.forward[ops], columns.moves[ops]
        in_forward, in_backward, moved, callers, used = (np.zeros(len(columns.nbytes), bool) for _ in range(5))
        in_forward[columns.touched[forward]] = in_backward[columns.touched[~forward]] = True
        moved[columns.touched[moves]] = callers[columns.inputs] = callers[columns.outputs] = True
        used[columns.touched[~columns.holds[ops]]] = True
        found = columns.term.copy()
        of_tokens = (found == TERMS.index("attention")) | (found == TERMS.index("temporaries"))
        found[of_tokens & ((in_forward & in_backward) | moved)] = TERMS.index("saved activations")
        found[of_tokens & (callers | ~used)] = TERMS.index("other")
        return found


def walk(program: Program, dependencies: Dependencies, attention: str = "") -> MemoryWalk:
    """Return the HBM in use while each op of one rank runs, and its peak by category and by term; ``attention`` names
    the kernel of the runtime that attends, by default one that holds what flash-attention does.
    """
    held = Held(program, dependencies, attention)
    columns, terms, nbytes = held.columns, held.terms.tolist(), held.nbytes.tolist()
    buffers = held.bytes_of(held.alive & held.on_gpu)
    in_use = buffers + held.workspace
    by_category: dict[Category, int] = {}
    by_term = dict.fromkeys(TERMS, 0)
    if len(in_use):
        at_peak = int(in_use.argmax())
        attends, own = bool(columns.attends[at_peak]), int(held.workspace[at_peak])
        by_category["attention" if attends else "other"] = own
        by_term["attention" if attends else "temporaries"] = own
        for buffer in np.flatnonzero(held.on_gpu & (held.first <= at_peak) & (at_peak < held.end)).tolist():
            category, term, size = CATEGORIES[columns.category[buffer]], TERMS[terms[buffer]], nbytes[buffer]
            by_category[category] = by_category.get(category, 0) + size
            by_term[term] += size
    peaks = [int(of.max(initial=0)) for of in (in_use, buffers, held.bytes_of(held.alive & ~held.on_gpu))]
    behind = np.flatnonzero(columns.of_passes).max(initial=-1) + 1
    update = int(in_use[behind:].max(initial=0))
    return MemoryWalk(in_use.tolist(), peaks[0], peaks[1], by_category, peaks[2], by_term, update)


def terms_in_use(program: Program, dependencies: Dependencies) -> dict[Term, list[int]]:
    """Return the bytes of each term while each op runs: together those that ``walk`` says are in use."""
    held = Held(program, dependencies)
    terms, attends = held.terms, held.columns.attends
    of_workspace: dict[Term, Booleans] = {"attention": attends, "temporaries": ~attends}
    found: dict[Term, list[int]] = {}
    for number, term in enumerate(TERMS):
        in_use = held.bytes_of(held.alive & held.on_gpu & (terms == number))
        if term in of_workspace:
            in_use = in_use + np.where(of_workspace[term], held.workspace, 0)
        found[term] = in_use.tolist()
    return found


@kept
def alike(checked: Checked) -> list[int]:
    """Return for every rank the first one whose program takes the same memory."""
    values: dict[object, int] = {}
    numbers: dict[Fragment, int] = {}
    first: dict[object, int] = {}
    found = []
    for rank, (program, dependencies) in enumerate(zip(checked.schedule.programs, checked.dependencies, strict=True)):
        for call in program.calls:
            if call.fragment not in numbers:
                numbers[call.fragment] = values.setdefault(_values(_of_fragment(call.fragment.shared)), len(values))
        calls = tuple([(numbers[call.fragment], call.given, call.first) for call in program.calls])
        found.append(first.setdefault((id(dependencies), calls), rank))  # who do the same share their dependencies
    return found


@kept
def walks(checked: Checked) -> list[MemoryWalk]:
    """Return the walk of every rank; it depends on the schedule only, and so is kept for all that is asked of it."""
    programs, dependencies, of = checked.schedule.programs, checked.dependencies, alike(checked)
    known = {rank: walk(programs[rank], dependencies[rank]) for rank in dict.fromkeys(of)}
    return [known[rank] for rank in of]


def walks_with(checked: Checked, attention: str) -> list[MemoryWalk]:
    """Return the walk of every rank where an attention kernel of the runtime runs."""
    if not repeats(attention):
        return walks(checked)
    pairs = zip(checked.schedule.programs, checked.dependencies, strict=True)
    return [walk(program, dependencies, attention) for program, dependencies in pairs]


def _values(columns: _Columns) -> tuple[object, ...]:
    """Return columns as what can be compared."""
    return tuple(
        [
            column if isinstance(column, tuple) else tuple(column) if column.dtype == object else column.tobytes()
            for column in columns
        ]
    )


def counters(checked: Checked, trace: Trace) -> list[Counter]:
    """Return the bytes in use over the time of a trace: the walk knows the order, the trace the seconds. Of a training
    step by term as well.
    """
    of_ranks = walks(checked)
    found = [Counter(row.rank, row.begin_s, {"bytes": of_ranks[row.rank].in_use[row.op]}) for row in trace.rows]
    if checked.schedule.header.workload.scope != "step":
        return found
    terms = [terms_in_use(p, d) for p, d in zip(checked.schedule.programs, checked.dependencies, strict=True)]
    by_term = [
        Counter(row.rank, row.begin_s, {term: of[row.op] for term, of in terms[row.rank].items()}, "memory by term")
        for row in trace.rows
    ]
    return found + by_term
