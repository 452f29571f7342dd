"""The screen of an explanation: lines of text that are read at 80 columns, without colour, and through pipes."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from sim.base.units import FEW, length, number, seconds, size
from sim.explain.weighed import MOST, Weighed
from topology.reserved import PARTS

if TYPE_CHECKING:
    from sim.explain.explain import Explanation

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
