"""What READMEs hold: their fenced blocks, and every command that they show, in the order in which it stands."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PACKAGES = ("sim", "topology", "runtime", "calibrate", "experiments", "tests")
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(page for package in PACKAGES for page in (ROOT / package).rglob("*.md")),
]
_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
_SYNOPSIS = re.compile(r"\S  +\S| \[")
"""A line of a ``text`` block with alternatives in brackets, or with an explanation behind two spaces."""
_PROSE = re.compile(r"`((?:longstep|make|pip|python) [^`…]*)`")
_NAMED = re.compile(r"longstep [a-z]+")
"""A verb by its name alone, which is no command that anyone copies."""


class Block(NamedTuple):
    """A fenced block of a page."""

    page: Path
    language: str
    text: str
    follows: bool
    """Whether nothing stands between it and the block before it."""
    begin: int
    """Where it begins in the page."""

    @property
    def name(self) -> str:
        """Return where it stands, for the names of tests."""
        return f"{self.page.relative_to(ROOT)}-{self.text.splitlines()[0][:40]}"


class Command(NamedTuple):
    """A line that a reader copies into a shell."""

    text: str
    said_with: str
    """The paragraph, the row of a table or the block that it stands in."""
    output: str = ""
    """What the page shows that it prints."""


def blocks_of(page: Path) -> Iterator[Block]:
    """Yield the fenced blocks of a page, in order."""
    text, end = page.read_text(), 0
    for found in _FENCED.finditer(text):
        yield Block(page, found[1], found[2], not text[end : found.start()].strip(), found.start())
        end = found.end()


def commands_of(page: Path) -> list[Command]:
    """Return the commands of a page in their order: of its blocks, of its tables, and those in backquotes in its text.
    Verbs that are only named are left out, but for those that need no more.
    """
    text, found = page.read_text(), list[tuple[int, Command]]()
    for block in blocks_of(page):
        found += [(block.begin, one) for one in _of_block(block)]
    for begin, part in _prose(text):
        for one in _PROSE.finditer(part):
            command = " ".join(one[1].split())
            if not _NAMED.fullmatch(command):
                found.append((begin + one.start(), Command(command, part)))
    return [one for _, one in sorted(found, key=lambda placed: placed[0])]


def names_of(page: Path) -> set[str]:
    """Return the verbs that a page names without options."""
    return {one for _, part in _prose(page.read_text()) for one in re.findall(r"`longstep ([a-z]+)`", part)}


def _of_block(block: Block) -> Iterator[Command]:
    if block.language == "console":
        for command, output in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block.text, re.MULTILINE):
            yield Command(command, block.text, output)
    elif block.language in {"bash", "text"}:
        for line in block.text.splitlines():
            is_shell = block.language == "bash" or re.match(r"(?:longstep|torchrun) ", line)
            command = line.partition("  #")[0].strip()
            if is_shell and command and not _SYNOPSIS.search(command):
                yield Command(command, block.text)


def _prose(text: str) -> Iterator[tuple[int, str]]:
    """Yield the paragraphs of a page, and the rows of its tables, with where they begin."""
    blanked = _FENCED.sub(lambda block: re.sub(r"\S", " ", block[0]), text)
    for one in re.finditer(r"^\|.*$|(?:^(?!\|).*\S.*\n?)+", blanked, re.MULTILINE):
        yield one.start(), one[0]
