"""``longstep explain``: what a launch script comes to, beside a line of its log, and what would help."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Annotated, ClassVar

import tyro
from rich.console import Console
from rich.text import Text

from experiments.verbs.cli import with_flags
from experiments.verbs.shared.kinds import OptionalText
from experiments.verbs.shared.selection import FileSelection
from experiments.verbs.shared.terminal import print_json
from sim.base.errors import InputError
from sim.explain.explain import of_imported
from sim.explain.logs import read_log
from sim.explain.screen import BAR

_COLOURS = {
    "S": "cyan", "O": "magenta", "P": "green", "G": "yellow", "A": "blue", "C": "red", "T": "white", "X": "white",
    "M": "green", "K": "cyan", "H": "yellow", "W": "red",
}  # fmt: skip
"""Of the letters of bars, which say the same without."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Explain(FileSelection):
    """Explain a run by its configuration and a line of its log: whether its time and memory are as expected, what they
    consist of, and which single changes help most, as keys of its framework.
    """

    PATHS: ClassVar[str] = "the argument FILE"
    from_file: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(name="files")] = ()
    """FILEs, as of longstep import. Nothing in them is run."""
    log: OptionalText = None
    """What the run prints, such as "26s/it, 71GiB", "tps: 4,321 mfu: 38%" or a line of its log; or a FILE of it, whose
    median counts."""
    json: bool = False
    """Print one JSON object."""


def explain(command: Explain, console: Console) -> None:
    """Print the screen of a run."""
    if not command.from_file:
        raise InputError("explain needs a configuration: name one file or more, such as train.toml")
    logged = None if command.log is None else read_log(command.log)
    found = of_imported(command.imported(), logged, **command.typed())
    if command.json:
        print_json(found.to_dict(), console)
        return
    sentences = True
    for line in found.lines(with_flags):
        sentences = sentences and bool(line)
        console.print(Text(line, "bold") if sentences else Text.assemble(*_coloured(line)), no_wrap=True)


def _coloured(line: str) -> Iterator[str | tuple[str, str]]:
    """Yield the parts of a line, of bars each letter in its colour."""
    if not line.startswith(("  predicted ", "  measured ")):
        yield line
        return
    yield line[:BAR]
    yield from ((letter, _COLOURS.get(letter, "")) for letter in line[BAR:])
