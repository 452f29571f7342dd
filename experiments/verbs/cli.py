"""The command ``longstep`` and its verbs.

Errors go to stderr in one line, with exit code 2. The verbs that execute import torch (``runtime``, ``calibrate``) when
they are run: simulating works without. Of the processes that torchrun starts, rank 0 runs the command. The others work
for it where the verb executes over them (``_OVER_WORKERS``); else they end at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import functools
import importlib
import io
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Union

import tyro
from rich.logging import RichHandler

from experiments.evidence.machine import NEEDS_TORCH
from experiments.verbs.shared.terminal import Printer, Ticker, printable
from sim.base.errors import InputError, LongstepError, RankError, none_of
from sim.base.garbage import collect_rarely

if TYPE_CHECKING:
    from runtime.processes.torchrun import Workers


class _Verb(NamedTuple):
    """Where a verb is: it is imported when it is typed, or when all of them are described."""

    module: str
    options: str
    """Its class."""
    function: str

    def parses_to(self) -> Any:
        """Return the class of its options."""
        return getattr(importlib.import_module(f"experiments.verbs.{self.module}"), self.options)

    def run(self, *arguments: object) -> None:
        """Do what it is for."""
        getattr(importlib.import_module(f"experiments.verbs.{self.module}"), self.function)(*arguments)


_VERBS = {
    "list": _Verb("show", "List", "list_names"),
    "show": _Verb("show", "Show", "show"),
    "simulate": _Verb("simulate", "Simulate", "simulate"),
    "explain": _Verb("explain", "Explain", "explain"),
    "doctor": _Verb("doctor", "Doctor", "doctor"),
    "sweep": _Verb("sweep", "Sweep", "sweep"),
    "crossover": _Verb("crossover", "Crossover", "crossover"),
    "winners": _Verb("winners", "Winners", "winners"),
    "study": _Verb("study", "Study", "study"),
    "fit": _Verb("fit", "Fit", "fit"),
    "ladder": _Verb("fit", "Ladder", "ladder"),
    "plan": _Verb("plan", "Plan", "plan"),
    "balance": _Verb("balance", "Balance", "balance"),
    "roofline": _Verb("roofline", "Roofline", "roofline"),
    "run": _Verb("run", "Run", "run"),
    "compare": _Verb("compare", "Compare", "compare"),
    "validate": _Verb("validate", "Validate", "validate"),
    "evaluate": _Verb("evaluate", "Evaluate", "evaluate"),
    "lab": _Verb("lab", "Lab", "lab"),
    "serve": _Verb("serve", "Serve", "serve"),
    "report": _Verb("report", "Report", "report"),
    "import": _Verb("import_file", "Import", "import_file"),
    "machine": _Verb("machine", "MachineFile", "machine_file"),
    "calibrate": _Verb("calibrate", "Calibrate", "calibrate"),
    "recheck": _Verb("recheck", "Recheck", "recheck"),
    "count": _Verb("count", "Count", "count"),
}
_ABOUT = "Predict, execute and compare schedules of long-context training. longstep --version says which one this is."
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""What writing to a disk fails with that takes no more."""
_WIDTH = 140
"""Columns of tables that go to a file or a pipe."""
_TORCHRUN = (
    "TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"
)  # fmt: skip
"""What every process that torchrun starts has in its environment."""
_OVER_WORKERS = ("run", "compare", "validate")
"""Verbs that execute over the processes that torchrun has started."""


def main(arguments: list[str] | None = None) -> None:
    """Run one command; exits with 0, with 2 after a mistake of the user's, with 1 after a failed run."""
    started = all(name in os.environ for name in _TORCHRUN)
    guarded(functools.partial(_as_started if started else command, arguments))


def _as_started(arguments: list[str] | None) -> None:
    """Run one command in a process that torchrun has started, of which only rank 0's prints."""
    verb = next(iter(sys.argv[1:] if arguments is None else arguments), "")
    if verb in _OVER_WORKERS:
        from runtime.processes.torchrun import under_torchrun

        under_torchrun(functools.partial(command, arguments))
    elif os.environ["RANK"] == "0":
        if verb in {"calibrate", "recheck", "lab"}:
            raise InputError(f"{verb} runs without torchrun: it starts the processes that it needs, on this host")
        command(arguments)


def command(arguments: list[str] | None, workers: Workers | None = None) -> None:
    """Parse and run one command; what it executes, it executes on the workers that torchrun has started, if it has."""
    console = open_console()
    if (sys.argv[1:] if arguments is None else arguments) == ["--version"]:
        console.print(f"longstep {_version()}")
        return
    verb, options = parse(arguments)
    with Ticker(verb):
        _VERBS[verb].run(options, console, *([workers] if verb in _OVER_WORKERS else []))


def guarded(action: Callable[[], None]) -> None:
    """Do what a program is for; turn what can go wrong into one line on stderr and an exit code."""
    collect_rarely()
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[RichHandler(show_path=False)])
    sys.stdout, sys.stderr = (stream or io.StringIO() for stream in (sys.stdout, sys.stderr))  # None where closed
    try:
        _to_the_end(action)
    except LongstepError as error:
        _complain(with_flags(str(error)))
        sys.exit(1 if isinstance(error, RankError) else 2)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        _complain(NEEDS_TORCH)
        sys.exit(2)
    except KeyboardInterrupt:
        _complain("interrupted")
        sys.exit(130)
    except MemoryError:
        _complain("this machine has too little memory for it: choose fewer GPUs, layers or chunks")
        sys.exit(1)
    except BrokenPipeError:  # the reader of a pipe has seen enough
        _print_no_more()
        sys.exit(0)
    except OSError as error:
        if error.errno not in _FULL:
            raise
        _print_no_more()
        _complain(f"what there is to print cannot be written ({error.strerror})")
        sys.exit(1)


def _to_the_end(action: Callable[[], None]) -> None:
    """Do it, and write what it has printed while errors can still be told."""
    try:
        action()
    finally:
        sys.stdout.flush()


def _print_no_more() -> None:
    """Let what is still to be printed go nowhere: at the exit of the process writing it would fail once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def open_console() -> Printer:
    """Return the console that results are printed on."""
    return Printer(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else _WIDTH)


def _version() -> str:
    from importlib import metadata  # which takes a while to import

    try:
        return metadata.version("longstep")
    except metadata.PackageNotFoundError:
        return "of a folder, not installed"


def parse(arguments: list[str] | None) -> tuple[str, Any]:
    """Return the verb that was typed, and its options; what tyro says about a mistake is put into one line."""
    typed = sys.argv[1:] if arguments is None else arguments
    verb = typed[0] if typed else ""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            if verb in _VERBS:
                return verb, _parsed(_VERBS[verb].parses_to(), f"longstep {verb}", typed[1:], None)
            every = [Annotated[one.parses_to(), tyro.conf.subcommand(name)] for name, one in _VERBS.items()]
            found = _parsed(Union[tuple(every)], "longstep", typed, _ABOUT)  # noqa: UP007 - of as many as there are
            return next(name for name, one in _VERBS.items() if one.parses_to() is type(found)), found
    except SystemExit as stop:
        if stop.code:
            _complain(_mistake(_one_line(said.getvalue()), typed))
        raise


def _parsed(options: Any, prog: str, typed: list[str], about: str | None) -> Any:
    return tyro.cli(options, prog=prog, description=about, args=typed, config=(tyro.conf.FlagCreatePairsOff,))


def _mistake(said: str, typed: list[str]) -> str:
    """Return in words of this project what tyro says of what was typed."""
    verb = next((word for word in typed if not word.startswith("-")), "")
    if verb not in _VERBS:
        told = none_of("command", verb, _VERBS) if verb else f"expected a command: {', '.join(_VERBS)}"
        return f"{told}; longstep --help describes them"
    helped = f"longstep {verb} --help describes them"
    if match := re.search(r"Unrecognized (?:or misplaced )?options: ([^\s,]+)", said):
        if not match[1].startswith("-"):
            return f"unexpected {match[1]!r}: options of longstep {verb} begin with --; {helped}"
        known = _flags()
        flags = [*(known[name] for name in _fields(_VERBS[verb].parses_to()) if known[name].startswith("-")), "--help"]
        return f"{none_of('option', match[1].partition('=')[0], flags)}; {helped}"
    if match := re.search(r"Missing value for argument '([^']*)'", said):
        return f"{match[1]}: its value is missing; {helped}"
    kind = re.search(r"Argument helptext: (--\S+) .*?(INT|FLOAT)", said)
    value = re.search(r"(?:base 10|to float): ('.*?')", said)
    if kind and value:
        return f"{kind[1]} {value[1]}: expected a {'whole ' * (kind[2] == 'INT')}number"
    return said


def _complain(message: str) -> None:
    line = printable(message).replace("\n", "\\n")
    sys.stderr.write(f"longstep: {line}\n")


def with_flags(message: str) -> str:
    """Return a message of the library, whose fields stand in backquotes, with the flags of the command line."""
    return re.sub(r"`([a-z_]+)`", lambda match: _flags().get(match[1], match[0]), message)


def _fields(owner: type) -> Iterator[str]:
    """Yield the names of all options of a command."""
    for field in dataclasses.fields(owner):
        if isinstance(field.default_factory, type):
            yield from _fields(field.default_factory)
        else:
            yield field.name


@functools.cache
def _flags() -> dict[str, str]:
    """Return the flag of every field that an error may name."""
    fields = (name for verb, one in _VERBS.items() if verb != "list" for name in _fields(one.parses_to()))
    others = {"passes": "--pass", "from_file": "--from", "kind": "longstep list", "cases": "longstep evaluate"}
    return {name: f"--{name.replace('_', '-')}" for name in fields} | others


def _one_line(box: str) -> str:
    """Return the text inside the box that tyro draws around an error."""
    lines = (re.sub(r"[╭╮╰╯│─]+|-{4,}", " ", line).strip() for line in box.splitlines())
    return re.sub(r"\s+", " ", " ".join(line for line in lines if line))
