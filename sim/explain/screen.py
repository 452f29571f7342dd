"""What a configuration comes to, and its screen: lines of text that are read at 80 columns and through pipes."""

from __future__ import annotations

import dataclasses
import html
import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from sim.base.units import FEW, digits_within, length, number, seconds, seconds_between, size
from sim.engine.results.room import Limit
from sim.explain.logs import Logged
from sim.explain.weighed import MOST, Weighed, turns
from sim.setup.imports.facts import Row
from sim.setup.setup import Setup
from sim.setup.stacks import techniques_on
from topology.reserved import PARTS

WIDTH = 80
"""Columns."""
BAR = 22
"""Column at which bars begin."""
_LETTERS = {
    "parameters": "P", "gradients": "G", "optimiser": "O", "saved activations": "S", "attention": "A",
    "communication": "C", "temporaries": "T", "other": "X", "matrix products": "M", "other kernels": "K",
    "copies": "H", "exposed communication": "C", "waiting": "W",
}  # fmt: skip
"""What stands for each part in bars."""
_RESERVED, _MEASURED, _FREE = "+", "=", "."
_GIB = 2**30
_JOINED = "\xa0"
"""A space at which no line ends."""
_ROWS = 4
"""Keys that are left out, of which so many are shown."""
_CHANGE = 42
"""Columns of a change."""


class Memory(NamedTuple):
    """What a GPU's memory goes to, in bytes."""

    terms: dict[str, int]
    """Of the peak allocated of the rank that holds most."""
    tightest: Limit
    """The memory with least to spare: the GPU's, or its host's."""
    gpu: Limit
    fits: bool | None


@dataclasses.dataclass(frozen=True)
class Explanation:
    """What a configuration comes to. Times in seconds, sizes in bytes.

    >>> import pathlib, tempfile
    >>> from sim.explain.explain import explain
    >>> path = pathlib.Path(tempfile.mkdtemp()) / "run.json"
    >>> _ = path.write_text('{"zero_optimization": {"stage": 2}, "sequence_parallel_size": 2}')
    >>> found = explain(path, model="tiny", seq="8K", gpus=2, layers=2)
    >>> found.step_time_s < found.expected_s[1], [*found.to_dict()][0]
    (True, 'answer')
    """

    setup: Setup
    title: str
    """The files, and what they are of."""
    paths: tuple[str, ...]
    assumptions: tuple[str, ...]
    """What no key says and is taken, with the field that says otherwise."""
    defaults: tuple[Row, ...]
    """What the framework takes where a key is missing."""
    left_out: tuple[Row, ...]
    """Keys that matter and are not simulated."""
    step_time_s: float
    interval_s: tuple[float, float] | None
    """The 90 % interval."""
    expected_s: tuple[float, float]
    """What one healthy run in a hundred is outside of."""
    floor_s: float
    """FLOPs at the peak, or bytes on the links: no run is faster."""
    parts: dict[str, float]
    """What the step of the critical rank consists of."""
    memory: Memory
    expected_bytes: tuple[float, float]
    """What a run may report of the memory: by the allocator, or the driver."""
    longest: int | None
    """The longest context that fits, in tokens; None where documents say how long sequences are."""
    weighed: tuple[Weighed, ...]
    """Single changes, those that help most first."""
    record: str
    """How often such answers were right; at the rates of datasheets, that it is at these."""
    logged: Logged | None = None
    measured_s: float | None = None
    measured_bytes: float | None = None
    findings: tuple[str, ...] = ()
    """Where figures of the log contradict each other."""

    @property
    def helps(self) -> tuple[Weighed, ...]:
        """The changes that help most: keys of the framework first."""
        return tuple(sorted((one for one in self.weighed if one.helps), key=lambda one: one.change.by == "option"))

    @property
    def answer(self) -> str:
        """Time and memory in a sentence each, with what was measured."""
        return f"{self.of_time} {self.of_memory}"

    @property
    def of_time(self) -> str:
        """What the step takes, beside what it took."""
        digits = digits_within(*self.interval_s) if self.interval_s else FEW
        within = seconds_between(*self.interval_s) if self.interval_s else "at datasheet rates"
        said = f"Predicted {seconds(self.step_time_s, digits)} a step ({within})"
        if self.measured_s is None:
            return f"{said}."
        said += f"; measured {seconds(self.measured_s, FEW)}"
        low_s, high_s = self.expected_s
        if low_s <= self.measured_s <= high_s:
            return f"{said} is as expected."
        ratio = self.measured_s / self.step_time_s
        times = f"{said} is {number(ratio, 2)} times as long as predicted"
        parts = turns(self.setup)
        if parts > 1 and low_s <= parts * self.measured_s <= high_s:
            return f"{times}, and as expected of one of its {parts} micro-batches: see what the log counts as a step."
        if self.measured_s < self.floor_s:
            return f"{times}, and impossible: the GPUs at their peak take {seconds(self.floor_s, FEW)}."
        return f"{times}: {self._cause()}."

    @property
    def of_memory(self) -> str:
        """What a GPU holds, beside what it held."""
        gpu, tightest = self.memory.gpu, self.memory.tightest
        said = f"Predicted {size(gpu.held_bytes + gpu.reserved_bytes, FEW)} of {size(gpu.capacity_bytes)} of a GPU"
        free = f"{size(abs(tightest.free_bytes), FEW)} {'left' if tightest.free_bytes >= 0 else 'missing'}"
        of = "" if tightest.memory == gpu.memory else f" of the {tightest.memory}'s memory"
        does = {True: "fits", False: "does not fit", None: "at the limit"}[self.memory.fits]
        said += f" ({does}, {free}{of})"
        if self.measured_bytes is None:
            return f"{said}."
        said += f"; measured {size(self.measured_bytes, FEW)}"
        low, high = self.expected_bytes
        if low <= self.measured_bytes <= high:
            return f"{said} is as expected."
        apart = self.measured_bytes - (high if self.measured_bytes > high else low)
        more = f"{size(abs(apart), FEW)} {'more' if apart > 0 else 'less'} than expected"
        by_time = self.measured_s is not None and not self.expected_s[0] <= self.measured_s <= self.expected_s[1]
        return f"{said} is {more}{'' if by_time else f': {self._cause()}'}."

    def _cause(self) -> str:
        """Return which single change would explain what was measured, or who looks for more."""
        found = [one for one in self.weighed if self._explains(one)]
        if not found:
            files = " ".join(f"--from {path}" for path in self.paths)
            measured = "" if self.measured_s is None else f" --step-time {self.measured_s:.4g}s"
            measured += "" if self.measured_bytes is None else f" --memory {self.measured_bytes / 2**30:.4g}GiB"
            return f"no single change of it would take that; for other causes ask longstep doctor {files}{measured}"
        best = min(found, key=lambda one: abs(math.log((one.step_time_s or 1.0) / (self.measured_s or 1.0))))
        would = f"{seconds(best.step_time_s or 0.0, FEW)} and {size(self._held(best), FEW)}"
        return f"with {best.change.text} it would be {would}"

    def _held(self, one: Weighed) -> int:
        return one.peak_bytes + self.memory.gpu.reserved_bytes

    def _explains(self, one: Weighed) -> bool:
        """Return whether a change takes the time and the memory that were measured, as far as they were."""
        if one.step_time_s is None or one.tokens != 1:
            return False
        low, high = (end / self.step_time_s * one.step_time_s for end in self.expected_s)
        more = one.peak_bytes - self.memory.gpu.held_bytes
        least, most = (end + more for end in self.expected_bytes)
        return (self.measured_s is None or low <= self.measured_s <= high) and (
            self.measured_bytes is None or least <= self.measured_bytes <= most
        )

    @property
    def understood(self) -> list[str]:
        """What was understood, in two lines: what is trained on what, and how."""
        found = self.setup.resolved()
        work, mesh = found.workload, found.mesh
        batch, parts = mesh.dp * work.batch, turns(self.setup)
        batches = f"global batch of {batch} sequence{'s' if batch > 1 else ''} ({length(batch * work.real_seq)} tokens)"
        at_once = f"{parts} micro-batches of {work.batch // parts}" if parts > 1 else f"{work.batch} at once"
        replicas = f"{mesh.dp} replicas" if mesh.dp > 1 else "one replica"
        nodes = f", {found.spec.nodes} nodes" if found.spec.nodes > 1 else ""
        machine = f"{mesh.size} x {found.spec.gpu.name} ({found.spec.name}{nodes})"
        split = f"{found.schedule} over {mesh.sharing} GPUs" if mesh.sharing > 1 else "no context parallelism"
        if mesh.ulysses > 1 < mesh.ring:
            split += f" (heads {mesh.ulysses} x tokens {mesh.ring})"
        split += f", tensor parallelism over {mesh.tp}" if mesh.tp > 1 else ""
        split += f", in {mesh.pp} stages" if mesh.pp > 1 else ""
        return [
            f"{work.model.name}, {machine}, {length(work.real_seq)} tokens, {batches}, {at_once} on {replicas}",
            "; ".join([split, *techniques_on(dataclasses.asdict(found.options))]),
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data, as ``longstep explain --json`` prints it."""
        gpu = self.memory.gpu
        low_high = dict(zip(("low", "high"), self.interval_s or (None, None), strict=True))
        return {
            "answer": self.answer,
            "files": self.title,
            "understood": self.understood,
            "assumptions": list(self.assumptions),
            "defaults": [f"{row.key} = {row.value.strip('()')}" for row in self.defaults],
            "left_out": [f"{row.key} = {row.value}: {row.means}" for row in self.left_out],
            "step_time_s": self.step_time_s,
            "interval_s": low_high,
            "expected_s": list(self.expected_s),
            "floor_s": self.floor_s,
            "parts_s": self.parts,
            "terms_bytes": self.memory.terms,
            "reserved_bytes": gpu.reserved_bytes,
            "capacity_bytes": gpu.capacity_bytes,
            "free_bytes": self.memory.tightest.free_bytes,
            "fits": self.memory.fits,
            "expected_bytes": list(self.expected_bytes),
            "longest": self.longest,
            "measured": None if self.logged is None else {
                "step_time_s": self.measured_s, "memory_bytes": self.measured_bytes, "read": list(self.logged.said),
                "not_understood": list(self.logged.unknown), "findings": list(self.findings),
            },
            "changes": [
                {
                    "change": one.change.text, "by": one.change.by, "step_time_s": one.step_time_s,
                    "memory_bytes": self._held(one), "fits": one.fits, "longest": one.longest, "tokens": one.tokens,
                }
                for one in self.helps
            ],
            "record": self.record,
        }  # fmt: skip

    def __repr__(self) -> str:
        return "\n".join(self.lines())

    def _repr_html_(self) -> str:
        first, *others = (html.escape(line) for line in self.lines())
        return f"<p><b>{first}</b></p><pre>{chr(10).join(others)}</pre>"

    def lines(self, named: Callable[[str], str] = str) -> list[str]:
        """Return the screen as lines of at most 80 columns where words allow it; ``named`` writes fields as options."""
        return screen(self, named)


def screen(found: Explanation, named: Callable[[str], str]) -> list[str]:
    """Return an explanation as lines; ``named`` writes the fields in backquotes as options."""
    lines = [*_wrapped(found.of_time), *_wrapped(found.of_memory), ""]
    lines += _understood(found, named)
    lines += ["", *_memory(found), "", *_time(found), "", *_changes(found), ""]
    return [*lines, *_wrapped(found.record)]


def _wrapped(text: str, first: str = "", rest: str = "  ") -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )


def _listed(parts: Sequence[str], before: str = "") -> list[str]:
    """Return a list in lines that break between its parts."""
    lines = _wrapped(", ".join(part.replace(" ", _JOINED) for part in parts), f"  {before}")
    return [line.replace(_JOINED, " ") for line in lines]


def _understood(found: Explanation, named: Callable[[str], str]) -> list[str]:
    """Return what was understood, assumed, left to the framework, left out, and not understood."""
    lines = [line for text in found.understood for line in _wrapped(text)]
    for text in found.assumptions:
        lines += _wrapped(f"assumed: {named(text)}")
    if found.defaults:
        said = ", ".join(f"{row.key} = {row.value.strip('()')}" for row in found.defaults)
        lines += _wrapped(f"not in the file, so as the framework takes it: {said}")
    for row in found.left_out[:_ROWS]:
        lines += _wrapped(f"left out: {row.key} = {row.value}: {named(row.means)}")
    if len(found.left_out) > _ROWS:
        lines.append(f"left out: {len(found.left_out) - _ROWS} more; longstep import shows them")
    if found.logged and found.logged.unknown:
        lines += _wrapped(f"not understood of the log: {', '.join(found.logged.unknown)}")
    if found.logged and found.logged.steps > 1:
        lines.append(f"measured: the median of {found.logged.steps} steps of the log, and its largest memory")
    return lines + [line for finding in found.findings for line in _wrapped(f"measured: {finding}")]


def _memory(found: Explanation) -> list[str]:
    """Return the bar of the memory, up to what the GPU has, or holds or would."""
    gpu = found.memory.gpu
    sizes = {_LETTERS[name]: nbytes / _GIB for name, nbytes in _largest(found.memory.terms)}
    sizes[_RESERVED] = gpu.reserved_bytes / _GIB
    has, measured = gpu.capacity_bytes / _GIB, (found.measured_bytes or 0.0) / _GIB
    held = math.fsum(sizes.values())
    legend = [f"{_LETTERS[name]} {name} {number(nbytes / _GIB, FEW)}" for name, nbytes in _largest(found.memory.terms)]
    legend += [f"{_RESERVED} {', '.join(part.name for part in PARTS)} {number(sizes[_RESERVED], FEW)}"]
    most = max(has, held, measured)
    lines = [f"memory of a GPU, up to {size(gpu.capacity_bytes)} (|)"]
    lines.append(_row("predicted", f"{number(held, FEW)} GiB", sizes, most, has))
    if measured:
        lines.append(_row("measured", f"{number(measured, FEW)} GiB", {_MEASURED: measured}, most, has))
    return [*lines, *_listed(legend, "GiB: ")]


def _time(found: Explanation) -> list[str]:
    """Return the bar of the step."""
    parts = dict(_largest(found.parts, by_size=False))
    most = max(found.step_time_s, found.measured_s or 0.0)
    legend = [f"{_LETTERS[name]} {name} {seconds(s, FEW)}" for name, s in parts.items()]
    lines = ["time of a step"]
    taken = {_LETTERS[name]: s for name, s in parts.items()}
    lines.append(_row("predicted", seconds(found.step_time_s, FEW), taken, most))
    if found.measured_s is not None:
        lines.append(_row("measured", seconds(found.measured_s, FEW), {_MEASURED: found.measured_s}, most))
    return [*lines, *_listed(legend)]


def _largest(parts: Mapping[str, float], *, by_size: bool = True) -> list[tuple[str, float]]:
    """Return the parts that there are, the largest first where that is asked."""
    some = [(name, value) for name, value in parts.items() if value > 0]
    return sorted(some, key=lambda part: -part[1]) if by_size else some


def _row(name: str, value: str, parts: Mapping[str, float], most: float, limit: float | None = None) -> str:
    """Return a bar behind its name and value: each part as many letters as it has of ``most``."""
    columns = WIDTH - BAR - 1
    bar, reached = "", 0.0
    for letter, part in parts.items():
        reached += part
        bar += letter * (round(columns * reached / most) - len(bar))
    if limit is not None:
        at = round(columns * limit / most)
        bar = bar.ljust(at, _FREE)
        bar = f"{bar[:at]}|{bar[at:]}"
    return f"{f'  {name:<9} {value}':<{BAR - 1}} {bar}"


def _changes(found: Explanation) -> list[str]:
    """Return what helps most, beside what is: seconds, memory and the longest context."""
    if not found.helps:
        return ["no single change that is known saves 1 % of time or memory"]
    lines = [f"{'what helps most, each alone':<{_CHANGE}} {'step':>15} {'memory':>9}  longest"]
    gpu = found.memory.gpu
    lines.append(_line("as it is", seconds(found.step_time_s, FEW), gpu.held_bytes + gpu.reserved_bytes, found.longest))
    for one in found.helps:
        lines += _of_change(one, found)
    marks = {
        "nearest flag": "~ simulated as the nearest that there is",
        "option": "* an option of longstep: the framework has no key for it that is known",
    }
    lines += [f"  {text}" for by, text in marks.items() if any(one.change.by == by for one in found.helps)]
    if any(one.tokens != 1 for one in found.helps):
        lines.append("  ^ its step has other tokens: the time is for as many as now")
    return lines


def _of_change(one: Weighed, found: Explanation) -> list[str]:
    mark = {"flag": "", "nearest flag": " ~", "option": " *"}[one.change.by] + (" ^" if one.tokens != 1 else "")
    text, step = f"{one.change.text}{mark}", "does not fit"
    if one.step_time_s is not None:
        step = f"{seconds(one.step_time_s, FEW)} ({100 * (one.step_time_s / found.step_time_s - 1):+.0f} %)"
    held = one.peak_bytes + found.memory.gpu.reserved_bytes
    if len(text) > _CHANGE - 2:
        return [f"  {text}", _line("", step, held, one.longest)]
    return [_line(text, step, held, one.longest)]


def _line(text: str, step: str, nbytes: float, longest: int | None) -> str:
    context = "" if longest is None else "none" if longest == 0 else length(longest) + ("+" if longest >= MOST else "")
    return f"{f'  {text}':<{_CHANGE}} {step:>15} {size(nbytes, FEW):>9}  {context}".rstrip()
