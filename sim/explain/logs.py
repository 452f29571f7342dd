"""What frameworks print of a run, as figures that were measured: ``26s/it, 71GiB``, or a file of a log.

To read another line, add a row to a table: a figure's name as it stands before the number, or the unit behind it.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple, TypeAlias

from sim.base.errors import InputError
from sim.base.presets import read_bytes

Figure: TypeAlias = Literal[
    "step_time_s", "steps_per_s", "tokens_per_s", "tokens_per_s_per_gpu", "samples_per_s", "memory_bytes", "mfu"
]
"""What a line may say; ``steps_per_s`` is read as ``step_time_s``."""

_FIRST = 3
"""Steps of a log that are left out: they compile, warm up and allocate."""
_MOST_LINES = 2000
"""Of a file the last ones are read."""
_MOST_LINE = 1024
"""Characters of a line: what is longer is no line of figures."""
_NUMBER = r"(?<![\d.-])(?<!\d,)(?P<value>\d+(?:,\d{3})*(?:\.\d*)?(?:e[+-]?\d{1,2})?)"
_LARGEST = 1e18
"""No figure of a run is as large."""
_SCALES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_TIMES = {"": 1.0, "s": 1.0, "sec": 1.0, "secs": 1.0, "second": 1.0, "seconds": 1.0, "ms": 1e-3, "us": 1e-6,
          "min": 60.0}  # fmt: skip
_SIZES = {f"{prefix}{unit}": base**power for power, prefix in enumerate("kmgt", 1)
          for unit, base in (("ib", 1024.0), ("b", 1000.0))}  # fmt: skip
_TIME = r"(?P<unit>ms|us|s|secs?|seconds?|min)"
_SIZE = r"(?P<unit>[kmgt]i?b)"
_TOKENS, _SECOND = r"(?:tokens?|tok|tks?)", r"s(?:ec(?:ond)?)?"
_COUNT = rf"{_NUMBER}(?P<scale>[km]?)\b"
_IS = r"['\"]?\s*(?:[:=]|\bis\b)?\s*['\"]?"
"""What stands between a name and its number: quotation marks of a dictionary of Python, a colon, or nothing."""


class _Line(NamedTuple):
    """How a figure is printed."""

    figure: Figure
    pattern: str
    """Without regard to case."""
    unit: float = 1.0
    """Of its numbers, where none stands with them."""


_LINES = (
    # Megatron-LM, nanotron; sizes of Megatron-LM are of 1024 x 1024 bytes
    _Line("step_time_s", rf"elapsed[ _]time[ _]per[ _]iteration[ _]\(?ms\)?{_IS}{_NUMBER}(?P<scale>[km]?)\b", 1e-3),
    _Line("step_time_s", rf"elapsed[ _]time[ _]per[ _]iteration(?:[ _]\(?s\)?)?{_IS}{_NUMBER}\s*(?P<unit>m?s)?\b"),
    _Line("memory_bytes", rf"memory \(MB\)[^\n]*?\bmax allocated{_IS}{_NUMBER}", 2.0**20),
    _Line("memory_bytes", rf"memory \(MB\)[^\n]*?\ballocated{_IS}{_NUMBER}", 2.0**20),
    _Line("memory_bytes", rf"cuda_max_memory_(?:reserved|allocated){_IS}{_NUMBER}(?P<scale>[kmgt]?)(?:i?b)?\b"),
    # axolotl and ms-swift name the unit before the number; of several the allocated peak stands first
    _Line("memory_bytes", rf"memory/max_(?:mem_)?(?:active|alloc\w*)\s*\(gib\){_IS}{_NUMBER}", 2.0**30),
    _Line("memory_bytes", rf"\bmem\w*\s*\(gib\){_IS}{_NUMBER}", 2.0**30),
    _Line("step_time_s", rf"train_speed\(s/it\w*\){_IS}{_NUMBER}"),
    _Line("steps_per_s", rf"train_speed\(it\w*/s\){_IS}{_NUMBER}"),
    # rates: of each GPU before those of the job, whose names are shorter
    _Line("tokens_per_s_per_gpu", rf"{_TOKENS}(?:/train)?(?:_per_|/){_SECOND}(?:_per_|/)(?:gpu|device){_IS}{_COUNT}"),
    _Line("tokens_per_s_per_gpu", rf"\bt[pg]s{_IS}{_COUNT}"),
    _Line("tokens_per_s_per_gpu", rf"{_COUNT}\s*(?:{_TOKENS}/{_SECOND}/(?:gpu|device)|tgs)\b"),
    _Line("tokens_per_s", rf"{_TOKENS}(?:_per_|/){_SECOND}{_IS}{_COUNT}"),
    _Line("tokens_per_s", rf"{_COUNT}\s*{_TOKENS}/{_SECOND}\b"),
    _Line("samples_per_s", rf"samples?(?:_per_|/){_SECOND}{_IS}{_NUMBER}"),
    _Line("samples_per_s", rf"\b(?:RunningAvg|Curr)?SamplesPerSec{_IS}{_NUMBER}"),
    _Line("samples_per_s", rf"{_NUMBER}\s*(?:samples?|seqs?|sequences)/{_SECOND}\b"),
    _Line("steps_per_s", rf"steps?_per_second{_IS}{_NUMBER}"),
    _Line("steps_per_s", rf"{_NUMBER}\s*(?:it(?:er)?s?|iterations?|steps?)/s(?:ec)?\b"),
    _Line("step_time_s", rf"{_NUMBER}\s*{_TIME}\s*/\s*(?:it(?:er)?|iteration|step)\b"),
    _Line("step_time_s", r"(?:step|iter|iteration)[ _]?(?:time|duration)(?:[ _]\(?(?P<before>ms|s)\)?)?"
                         rf"{_IS}{_NUMBER}\s*{_TIME}?\b"),
    _Line("step_time_s", rf"(?:time|s|sec|seconds)(?:_per_|/| per )(?:step|iter|iteration|it){_IS}{_NUMBER}\s*{_TIME}?"
                         r"\b"),
    _Line("mfu", rf"\bmfu(?:\s*\(%\))?{_IS}{_NUMBER}\s*(?P<unit>%?)"),
    _Line("mfu", rf"{_NUMBER}\s*(?P<unit>%)\s*mfu\b"),
    # of DeepSpeed's line, whose GB are GiB, the peak, and not what is allocated now
    _Line("memory_bytes", rf"\bMaxMemAllocated{_IS}{_NUMBER}\s*GB", 2.0**30),
    _Line("memory_bytes", rf"\bMemAllocated{_IS}{_NUMBER}\s*GB", 2.0**30),
    _Line("memory_bytes", rf"(?:(?:peak|max|gpu)[ _])*mem(?:ory)?\w*{_IS}{_NUMBER}\s*{_SIZE}(?:\s*\([\d.]+\s*%\))?"),
    _Line("memory_bytes", rf"{_NUMBER}\s*{_SIZE}(?:\s*\([\d.]+\s*%\)|\s*/\s*[\d.]+\s*[kmgt]i?b)?(?![\w/])"),
    _Line("step_time_s", rf"(?<![\w.<:]){_NUMBER}\s*{_TIME}(?![\w/:])"),
)  # fmt: skip
"""In this order: what one has read the next ones do not see. The last, a time alone, is read only where it is typed."""
_COMPILED = tuple((line, re.compile(line.pattern, re.IGNORECASE)) for line in _LINES)
_HARMLESS = re.compile(
    r"step|iter|epoch|loss|\blr\b|learning|grad|norm|zeros|scale|flop|\bflos|batch|sample|token|runtime|alloc|reserved|rank"
    r"|\binfo\b|\broot\b|train|\d:\d\d|\d-\d\d-\d\d|\d/\d|\d%|^[\W\d_]*$",
    re.IGNORECASE,
)
"""What parts of lines have that say anything else of steps: losses, counts, bars, when and by whom it is said."""
_COLOURS = re.compile(r"\x1b\[[0-9;]{0,20}m")


class Logged(NamedTuple):
    """What a log says: the median of its steps, and its largest memory. Times in seconds, sizes in bytes."""

    figures: dict[Figure, float]
    said: tuple[str, ...]
    """What each of them was read from, the last one of a file."""
    unknown: tuple[str, ...]
    """What was typed and is not understood."""
    steps: int
    """That count: of a file those behind the first few."""


def read_log(text: str) -> Logged:
    """Return what a log says, typed as a text, or the path of a file; raises InputError where nothing of it is
    understood.

    >>> read_log("26s/it, 71GiB, 5 apples")[:3]
    ({'step_time_s': 26.0, 'memory_bytes': 76235669504.0}, ('26s/it', '71GiB'), ('5 apples',))
    """
    path = _path_of(text)
    if path is None:
        lines, left = [_COLOURS.sub("", line) for line in text.splitlines()], list[str]()
    else:
        data = read_bytes("log", path, "`log`").decode(errors="replace")
        lines = [line for line in re.split(r"[\r\n]+", _COLOURS.sub("", data)) if len(line) <= _MOST_LINE]
        left = []
    samples: dict[Figure, list[tuple[float, str]]] = {}
    for line in lines[-_MOST_LINES:]:
        found, rest = _figures(line[:_MOST_LINE], typed=path is None)
        for figure, one in found.items():
            samples.setdefault(figure, []).append(one)
        left += [part.strip() for part in re.split(r"[,;|]", rest) if not _HARMLESS.search(part)]
    if not samples:
        shown = f"file {path!r}" if path else repr(text if len(text) <= 80 else f"{text[:80]}…")
        raise InputError(
            f"`log` {shown}: nothing of it is understood; expected such as 26s/it, 2.3it/s, step time: 26.1, 71GiB, "
            f"tps: 4321, mfu: 38%, or a file with lines of torchtitan, Megatron-LM, Hugging Face, DeepSpeed or nanotron"
        )
    kept = {figure: some[_FIRST:] if len(some) >= 2 * _FIRST else some for figure, some in samples.items()}
    return Logged(
        {figure: _of_all(figure, [value for value, _ in some]) for figure, some in kept.items()},
        tuple([some[-1][1] for some in kept.values()]),
        tuple(left) if path is None else (),
        max(map(len, kept.values())),
    )


def _path_of(text: str) -> str | None:
    """Return the path of a file where the text is one; a name that is not there but looks like one is one, too."""
    try:
        is_there = bool(text) and Path(text).exists()
    except (OSError, ValueError):  # longer than any name, or with what is no character
        is_there = False
    return text if is_there or re.fullmatch(r"[\w./~-]+\.(?:log|txt|out|err|jsonl?)", text) else None


def _figures(line: str, *, typed: bool) -> tuple[dict[Figure, tuple[float, str]], str]:
    """Return each figure of a line with what it was read from, and what is left of the line."""
    found: dict[Figure, tuple[float, str]] = {}
    for of, pattern in _COMPILED if typed else _COMPILED[:-1]:  # times alone in a file are of all kinds
        figure: Figure = "step_time_s" if of.figure == "steps_per_s" else of.figure
        while match := pattern.search(line):
            value = _value(of, match)
            line = f"{line[: match.start()]}|{line[match.end() :]}"
            if 0 < value < _LARGEST and figure not in found:
                found[figure] = (1 / value if of.figure == "steps_per_s" else value, match[0].strip(" '\""))
    return found, line


def _value(of: _Line, match: re.Match[str]) -> float:
    """Return a number in seconds, bytes, as a share, or a second."""
    groups = match.groupdict()
    unit, value = (groups.get("unit") or groups.get("before") or "").lower(), float(match["value"].replace(",", ""))
    if of.figure == "mfu":
        return value / 100 if unit == "%" or "%" in match[0] or value > 2 else value
    units = _SIZES if of.figure == "memory_bytes" else _TIMES
    return value * _SCALES[(groups.get("scale") or "").lower()] * (units.get(unit, 1.0) if unit else of.unit)


def _of_all(figure: Figure, values: Sequence[float]) -> float:
    return max(values) if figure == "memory_bytes" else statistics.median(values)
