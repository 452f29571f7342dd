"""What ranks did, read from Chrome traces: of the torch profiler (Kineto) and of Longstep's own players.

The format is that of Kineto's output (pytorch/kineto, libkineto/README.md) and of the trace event format of Chrome:
complete events ("ph": "X") with times in microseconds; categories ``kernel``, ``gpu_memcpy``, ``gpu_memset``,
``cpu_op``, ``cuda_runtime``; annotations ``ProfilerStep#N``. Files of a CPU have been read, none of a real GPU yet.
"""

from __future__ import annotations

import re
import statistics
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from sim.base.errors import InputError
from sim.base.presets import read_bytes
from sim.diagnose.kernel_names import WorkKind, kind_of_name, kind_of_op

Source = Literal["GPU kernels", "CPU operators", "Longstep"]
_MOST_BYTES = 2**30
"""Of a trace once it is decompressed: it is held whole."""
_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_HOST = ("cpu_op", "cuda_runtime", "cuda_driver")
_STEP = re.compile(r"ProfilerStep#\d+$")
_IN_NAME = re.compile(r"rank[-_]?(\d+)", re.IGNORECASE)


class Span(NamedTuple):
    """Something that took a while, in seconds on the clock of its trace."""

    name: str
    kind: WorkKind
    begin_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end_s - self.begin_s


class TracedRank(NamedTuple):
    """What one rank did in some steps."""

    rank: int
    source: Source
    bounds_s: tuple[float, ...]
    """Begin of each step, and end of the last."""
    work: list[Span]
    """Kernels, transfers and copies of these steps, in the order of their begin."""
    host: Sequence[Span] = ()
    """What the host's threads did; of GPU kernels only."""

    @property
    def steps(self) -> int:
        """The number of steps."""
        return len(self.bounds_s) - 1

    @property
    def steps_s(self) -> list[float]:
        """Seconds of every step."""
        return [end - begin for begin, end in pairwise(self.bounds_s)]

    @property
    def step_s(self) -> float:
        """Median seconds of a step."""
        return statistics.median(self.steps_s)

    def of_steps(self) -> list[list[Span]]:
        """Return the work of each step: what begins in it."""
        found: list[list[Span]] = [[] for _ in self.steps_s]
        for span in self.work:
            found[bisect_right(self.bounds_s, span.begin_s, hi=self.steps) - 1].append(span)
        return found


class _Event(msgspec.Struct):
    """One event of a Chrome trace; what it says beside this is skipped."""

    ph: str = ""
    cat: str = ""
    name: str = ""
    pid: Any = None
    tid: Any = None
    ts: float | str | None = None
    dur: float | str | None = None
    args: Any = None

    def span(self, kind: WorkKind) -> Span:
        """Return when it was; raises ValueError or TypeError for what is no time."""
        begin, length = float(self.ts), float(self.dur or 0)  # type: ignore[arg-type]
        if not (abs(begin) < float("inf") and 0 <= length < float("inf")):
            raise ValueError(f"ts {self.ts}, dur {self.dur}")
        return Span(self.name, kind, begin / 1e6, (begin + length) / 1e6)


class _File(msgspec.Struct):
    """A Chrome trace."""

    traceEvents: list[_Event]  # noqa: N815 - as it stands in the file
    distributedInfo: dict[str, Any] = {}  # noqa: N815
    otherData: Any = None  # noqa: N815


def read_traces(paths: Sequence[str | Path]) -> list[TracedRank]:
    """Return what ranks did, by the numbers of ranks: of files that hold one rank each, or several.

    Raises InputError for what is no such trace, or where two files are of one rank.
    """
    found: dict[int, TracedRank] = {}
    for number, path in enumerate(paths):
        for one in _read(str(path), number):
            if one.rank in found:
                raise InputError(
                    f"`trace` {str(path)!r}: rank {one.rank} was read before; give a file for each rank, named rank0, "
                    f"rank1, … where the files do not say whose they are"
                )
            found[one.rank] = one
    sources = {one.source for one in found.values()}
    if len(sources) > 1:
        raise InputError(f"`trace`: files hold {' and '.join(sorted(sources))}; give those of one run")
    return [found[rank] for rank in sorted(found)]


def _read(path: str, number: int) -> list[TracedRank]:
    file = _decoded(path)
    own = file.otherData.get("traces") if isinstance(file.otherData, dict) else None
    events = [event for event in file.traceEvents if event.ph == "X" and event.ts is not None]
    try:
        found = _of_longstep(events) if own else _of_torch(file, events, path, number)
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"`trace` {path!r}: an event has no time or name ({error}); expected what export_chrome_trace of the torch "
            f"profiler or `longstep run --trace` wrote"
        ) from error
    if not found:
        raise InputError(
            f"`trace` {path!r}: it has no kernel, operator or op of a rank; profile with ProfilerActivity.CUDA (or "
            f"CPU) and give what export_chrome_trace wrote"
        )
    return found


def _decoded(path: str) -> _File:
    """Return a file's content, which may be compressed by gzip."""
    data = read_bytes("trace", path, "`trace`")
    wrong = ""
    if data[:2] == b"\x1f\x8b":
        unpacked = zlib.decompressobj(wbits=31)
        try:
            data = unpacked.decompress(data, _MOST_BYTES)
            if unpacked.unconsumed_tail:
                wrong = f"it has more than {_MOST_BYTES} bytes: profile fewer steps"
            elif not unpacked.eof:
                wrong = "it is cut off"
        except zlib.error as error:
            wrong = str(error)
    if not wrong:
        try:
            return msgspec.json.decode(data, type=_File)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            wrong = str(error)
    raise InputError(
        f"`trace` {path!r} is no Chrome trace ({wrong}); expected JSON with traceEvents, or that in gzip, as "
        f"export_chrome_trace of the torch profiler writes it"
    )


def _of_longstep(events: Iterable[_Event]) -> list[TracedRank]:
    """Return the ranks of a trace that Longstep wrote: those executed, where there are both players'."""
    rows = [event.args for event in events if isinstance(event.args, dict) and "player" in event.args]
    executed = [row for row in rows if row["player"] == "executed"]
    return ranks_of_rows(executed or rows)


def ranks_of_rows(rows: Iterable[dict[str, Any]]) -> list[TracedRank]:
    """Return ranks of what a player did, by rows as ``sim.accounts.trace.Row`` has them."""
    of_rank: dict[int, list[Span]] = {}
    for row in rows:
        kind = kind_of_op(row["kind"])
        if kind:
            # a transfer kernel is on its stream from where it is posted: it waits there for its peers
            from_s = "posted_s" if row["sent_bytes"] else "begin_s"
            of_rank.setdefault(int(row["rank"]), []).append(
                Span(str(row["label"]), kind, float(row[from_s]), float(row["end_s"]))
            )
    end_s = max((span.end_s for spans in of_rank.values() for span in spans), default=0.0)
    return [
        TracedRank(rank, "Longstep", (0.0, end_s), sorted(spans, key=lambda span: span.begin_s))
        for rank, spans in sorted(of_rank.items())
        if end_s > 0
    ]


def _of_torch(file: _File, events: list[_Event], path: str, number: int) -> list[TracedRank]:
    """Return the ranks of a file of the torch profiler: one, or as many as there are GPUs in it."""
    said = file.distributedInfo.get("rank")
    named = _IN_NAME.search(Path(path).name)
    rank = said if isinstance(said, int) else int(named.group(1)) if named else number
    on_gpu = sorted((event for event in events if event.cat in _GPU), key=_device)
    if on_gpu:
        groups = [[*group] for _, group in groupby(on_gpu, _device)]
        host = [event.span("unknown") for event in events if event.cat in _HOST] if len(groups) == 1 else []
        found = []
        for at, group in enumerate(groups):
            device = _device(group[0])
            marks = [one for one in events if one.cat == "gpu_user_annotation" and _device(one) == device]
            work = [event.span(kind_of_name(event.name)) for event in group]
            of_steps = _steps(marks) or _steps(one for one in events if one.cat == "user_annotation")
            one = _within(at if len(groups) > 1 else rank, "GPU kernels", of_steps, work, host)
            found += [one] if one else []
        return found
    operators = [event for event in events if event.cat == "cpu_op"]
    of_steps = _steps(one for one in events if one.cat == "user_annotation")
    found_one = _within(rank, "CPU operators", of_steps, _outermost(operators), [])
    return [found_one] if found_one else []


def one_after_the_other(runs: Sequence[Sequence[TracedRank]]) -> list[TracedRank]:
    """Return the steps of several traces of the same ranks as those of one."""
    found = []
    for of_rank in zip(*runs, strict=True):
        bounds, work = [0.0], list[Span]()
        for one in of_rank:
            later = bounds[-1] - one.bounds_s[0]
            bounds += [bound + later for bound in one.bounds_s[1:]]
            work += [span._replace(begin_s=span.begin_s + later, end_s=span.end_s + later) for span in one.work]
        found.append(of_rank[0]._replace(bounds_s=tuple(bounds), work=work, host=()))
    return found


def _device(event: _Event) -> str:
    device = event.args.get("device", event.pid) if isinstance(event.args, dict) else event.pid
    return f"{device:0>9}"  # as text that sorts as numbers do


def _steps(marks: Iterable[_Event]) -> list[Span]:
    """Return the steps that are marked, in turn."""
    return sorted((one.span("unknown") for one in marks if _STEP.match(one.name)), key=lambda span: span.begin_s)


def _within(rank: int, source: Source, steps: list[Span], work: list[Span], host: list[Span]) -> TracedRank | None:
    """Return what a rank did within its steps; all of a file without steps is one."""
    if not work:
        return None
    begin_s = steps[0].begin_s if steps else min(span.begin_s for span in work)
    end_s = max(span.end_s for span in steps or work)
    inside = sorted((span for span in work if begin_s <= span.begin_s < end_s), key=lambda span: span.begin_s)
    if not inside or end_s <= begin_s:
        return None
    begins = [span.begin_s for span in steps] or [begin_s]
    return TracedRank(rank, source, (*begins, end_s), inside, host)


def _outermost(operators: Iterable[_Event]) -> list[Span]:
    """Return operators of a CPU, each with its time. The outermost one with a known name stands for those that it
    calls. Of the others only those that call nothing are kept, so that all unknown work is reported.
    """
    found: list[Span] = []
    spans = sorted(
        ((str(one.tid), one.span(kind_of_name(one.name))) for one in operators),
        key=lambda pair: (pair[0], pair[1].begin_s, -pair[1].end_s),
    )
    for _, of_thread in groupby(spans, lambda pair: pair[0]):
        known_until = float("-inf")
        caller: Span | None = None  # unknown, and perhaps without calls
        for _, span in of_thread:
            if span.begin_s < known_until:
                continue
            if caller and caller.end_s <= span.begin_s:
                found.append(caller)
            caller = None
            if span.kind == "unknown":
                caller = span
            else:
                found.append(span)
                known_until = span.end_s
        found += [caller] if caller else []
    return found
