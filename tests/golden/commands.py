"""Copy every command of a README into a fresh clone and run it there; ``python -m tests.golden.commands`` accepts what
they print now.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from tests.golden.pages import ROOT, Command, commands_of

COPIED = [ROOT / "README.md", ROOT / "experiments" / "README.md"]
"""Pages whose commands are run as they are written."""
PRINTED = Path(__file__).parent / "printed"
"""What they print, a file for each page."""

NOT_RUN = {
    "git clone ": "the reader says from where",
    "make setup": "installs from a registry",
    "pip install ": "installs from a registry",
    "source ": "tests run in an environment of their own",
    "make demo": "calibrates for minutes, on an idle machine",
    "make gpu": "needs a GPU",
    "make bench": "takes minutes",
    "make validate": "takes minutes, on an idle machine",
    "python -m experiments.recipes sizes": "takes minutes",
    "python -m experiments.recipes doctor": "takes 5 minutes, on an idle machine",
    "longstep lab --rates ": "needs root, and an idle machine for minutes",
    "longstep lab --network ": "needs root, and an idle machine for minutes",
    "longstep validate --seq ": "executes for minutes, on an idle machine",
    "make evidence": "takes minutes, and writes pages that are committed",
    "longstep evaluate all": "takes minutes",
    "longstep serve ": "answers until it is interrupted",
    "longstep study all ": "takes hours",
    "longstep study balancing ": "takes 28 minutes",
    "longstep fit --model llama3-8b --cluster hgx-h100": "goes over all stacks and lengths: takes minutes",
    "longstep ladder --model llama3.2-3b ": "takes minutes",
    "longstep plan --model llama3-8b --seq 512K --cheapest ": "takes minutes",
    "longstep plan --model llama3-8b --cluster hgx-h100 --gpus 8 --longest ": "takes minutes",
    "longstep plan --model llama3-8b --gpus 8 --documents ": "takes minutes",
    "longstep study claims": "takes two minutes",
    "longstep balance --documents wlb-llm --seq 128K --seeds 10 ": "takes minutes",
}
"""Commands that no test runs, by how they begin (one without a blank at its end: the whole of it), and why."""
REFUSED = {"longstep simulate --cluster hgx-h100 --schedule ring --gpus 4096 --seq 16M --scope attention"}
"""Commands of which a page shows what they are refused with."""
EXACT = {"list", "simulate", "fit", "winners", "crossover", "doctor", "sweep", "study", "import", "report", "ladder"}
"""Verbs that print the same each time. Plans say how many configurations were simulated, which depends on which worker
answers first; balance says how long planners took, and what executes measures.
"""
EXECUTE = ("run", "compare", "validate", "lab", "calibrate")
"""Verbs that play the smallest model on this machine where no other is named."""


class Ran(NamedTuple):
    """A command that was run."""

    command: Command
    code: int
    printed: str
    complaint: str

    @property
    def is_kept(self) -> bool:
        """Whether what it prints is kept."""
        return is_exact(self.command) and not self.code


def is_exact(command: Command) -> bool:
    """Return whether a command of Longstep prints the same each time."""
    program, *rest = shlex.split(command.text)
    return program == "longstep" and rest[0] in EXACT and "--execute" not in rest


def why_not_run(command: Command) -> str:
    """Return why no test runs a command; "" where one does."""
    for begins, why in NOT_RUN.items():
        if command.text == begins or (begins.endswith(" ") and command.text.startswith(begins)):
            return why
    return ""


def clone(folder: Path) -> Path:
    """Copy what git tracks, as it is in this checkout, into a new folder."""
    tracked = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, check=True)
    target = folder / "longstep"
    for name in filter(None, tracked.stdout.split("\0")):
        if (ROOT / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, target / name)
    return target


def run_page(page: Path, folder: Path, *, exact_only: bool = False) -> Iterator[Ran]:
    """Run the commands of a page in their order, each once, in one clone: all, or of those of Longstep only the ones
    that print the same each time.
    """
    there, programs = clone(folder), folder / "bin"
    programs.mkdir()
    for name, starts in (("longstep", "-m longstep"), ("python", "")):
        program = programs / name
        program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {starts} "$@"\n')
        program.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{programs}:{os.environ['PATH']}", "XDG_DATA_HOME": str(folder / "data"), "PYTHONPATH": str(there),
    }  # fmt: skip
    for command in {one.text: one for one in commands_of(page)}.values():
        left_out = exact_only and command.text.startswith("longstep ") and not is_exact(command)
        if not why_not_run(command) and not left_out:
            ran = subprocess.run(
                ["bash", "-c", command.text], cwd=there, env=environment, capture_output=True, text=True, check=False,
                stdin=subprocess.DEVNULL,
            )  # fmt: skip
            yield Ran(command, ran.returncode, ran.stdout, ran.stderr.strip())


def printed_file(page: Path) -> Path:
    """Return the file with what the commands of a page print."""
    return PRINTED / ("-".join(page.relative_to(ROOT).with_suffix("").parts) + ".txt")


def shown(ran: Ran) -> str:
    """Return a command with what it prints, as such a file has it."""
    lines = (line.rstrip() for line in ran.printed.splitlines())
    return "\n".join([f"$ {ran.command.text}", *lines]) + "\n\n"


def kept(page: Path) -> dict[str, str]:
    """Return what a page's commands are known to print, by command."""
    text = printed_file(page).read_text()
    return {one.splitlines()[0].removeprefix("$ "): one for one in re.findall(r"(?ms)^\$ .*?(?=^\$ |\Z)", text)}


def main() -> None:
    """Write what the commands of the pages print, or of those that are named."""
    pages = [Path(name).resolve() for name in sys.argv[1:]] or COPIED
    for page in pages:
        with tempfile.TemporaryDirectory() as folder:
            known = []
            for ran in run_page(page, Path(folder), exact_only=True):
                if ran.code and ran.command.text not in REFUSED:
                    sys.exit(f"{ran.command.text}: exit code {ran.code}: {ran.complaint}")
                known += [shown(ran)] if ran.is_kept else []
                sys.stderr.write(f"{ran.command.text}\n")
            printed_file(page).parent.mkdir(exist_ok=True)
            printed_file(page).write_text("".join(known))


if __name__ == "__main__":
    main()
