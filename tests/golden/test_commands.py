"""Every command of the READMEs, copied as it is written: it can be parsed, it finds what it reads, and it runs."""

from __future__ import annotations

import re
import shlex
from itertools import pairwise
from pathlib import Path

import pytest

from experiments.verbs.cli import _VERBS, parse
from sim.setup.names import MODEL, MODEL_HERE
from tests.golden.commands import COPIED, EXECUTE, NOT_RUN, REFUSED, kept, run_page, shown, why_not_run
from tests.golden.pages import PAGES, ROOT, Command, commands_of, names_of

WRITES = ("--out", "--page", "--trace", "--html", "--figure", "--cases-out", "--markdown")
"""Options whose file a command makes."""
REAL = re.compile(r"llama|qwen|mistral|gemma", re.IGNORECASE)


def named(page: Path) -> str:
    return str(page.relative_to(ROOT))


def copied(page: Path) -> list[Command]:
    """Return the commands of a page that run Longstep."""
    return [one for one in commands_of(page) if one.text.startswith("longstep ")]


@pytest.mark.sweep
@pytest.mark.parametrize("page", PAGES, ids=named)
def test_commands_are_understood(page: Path) -> None:
    """The verb and all of its options exist, also where the command is not run."""
    assert names_of(page) <= {*_VERBS}
    for command in dict.fromkeys(one.text for one in commands_of(page)):
        of_longstep = re.fullmatch(r"(?:torchrun .* )?longstep (.*)", command)
        if of_longstep:
            parse(shlex.split(of_longstep[1]))


@pytest.mark.parametrize("page", COPIED, ids=named)
def test_commands_find_what_they_read(page: Path) -> None:
    """It ships with the repository, or a command before makes it."""
    made: set[str] = set()
    for command in commands_of(page):
        words = shlex.split(command.text)
        for before, word in pairwise(words):
            if before in {*WRITES, ">"}:
                made.add(word)
            elif re.fullmatch(r"[\w./-]+\.(?:txt|jsonl?|toml|csv|parquet|ya?ml|py)", word):
                assert word in made or (ROOT / word).exists(), f"{command.text}: where does {word} come from?"


@pytest.mark.parametrize("page", COPIED, ids=named)
def test_commands_can_be_copied(page: Path) -> None:
    """Nothing in them stands for something that the reader has to know."""
    for command in copied(page):
        assert not re.search(r"\b(?:FILE|NAME|HOST|DIR|FOLDER)\b|<|…", command.text), command.text


@pytest.mark.sweep
@pytest.mark.parametrize("page", COPIED, ids=named)
def test_no_toy_is_played_where_the_text_speaks_of_a_model(page: Path) -> None:
    for command in copied(page):
        verb, options = parse(shlex.split(command.text)[1:])
        model = getattr(getattr(options, "selection", options), "model", None)
        if model is None or "--model" in command.text or "--from" in command.text:
            continue
        assert model == (MODEL_HERE if verb in EXECUTE else MODEL), command.text
        about = command.said_with.replace(command.text, "")
        assert model != MODEL_HERE or not REAL.search(about), f"{command.text}: what it plays is tiny"


def test_what_is_not_run_stands_in_a_page() -> None:
    written = [one for page in COPIED for one in commands_of(page)]
    assert {why for one in written if (why := why_not_run(one))} == {*NOT_RUN.values()}
    assert {one.text for one in written} >= REFUSED
    for begins in NOT_RUN:
        assert any(one.text.startswith(begins) for one in written), begins


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("page", COPIED, ids=named)
def test_commands_run_in_a_clone_and_print_what_they_printed(page: Path, tmp_path: Path) -> None:
    wrong: list[str] = []
    known = kept(page)
    for ran in run_page(page, tmp_path):
        if ran.command.text in REFUSED:
            said = " ".join(ran.complaint.removeprefix("longstep: ").split())
            if ran.code != 2 or said not in " ".join(page.read_text().split()):
                wrong.append(f"{ran.command.text}: it is not refused as the page says, but: {said}")
        elif ran.code:
            wrong.append(f"{ran.command.text}: {ran.complaint}")
        elif ran.is_kept and known.pop(ran.command.text, "") != shown(ran):
            wrong.append(f"{shown(ran)}is not what it printed: see tests/README.md")
    assert not wrong, "\n".join(wrong)
    assert not known, "commands that the page has no longer"
