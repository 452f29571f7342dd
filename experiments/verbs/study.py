"""``longstep study``: questions of the field, each with the sweep that answers it, a picture and a conclusion."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from experiments.pages.drawn.figures import figure
from experiments.pages.drawn.render import FIGURE_FILE, PAGE_FILE
from experiments.pages.study_page import CHAPTER_FILE, chapter, page, said, section, with_claims, with_section
from experiments.studies import claims
from experiments.studies import study as studies
from experiments.verbs.shared.kinds import OptionalInt, OptionalText
from experiments.verbs.shared.terminal import Ticker, print_json
from experiments.verbs.shared.writes import Writes
from sim.base.errors import InputError, none_of
from sim.base.files import Output, require_outputs
from sim.base.presets import read_bytes

_WORDS = ("list", "claims", "all")
"""What may stand in place of a name."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study(Writes):
    """Answer a question of the field by simulating it: list says which there are, all runs them, claims holds what
    papers claim against them.
    """

    name: Annotated[str, tyro.conf.Positional] = "list"
    """NAME of a study, list, claims, or all."""
    page: OptionalText = None
    """Write an HTML page to this file."""
    figure: OptionalText = None
    """Write the picture to this SVG file."""
    markdown: OptionalText = None
    """Write questions, pictures and conclusions of all to this file, and the pictures beside it; of one study: its
    section of such a file, and its picture."""
    jobs: OptionalInt = None
    """Processes; by default as many as there are cores."""
    seeds: OptionalInt = None
    """Batches of each kind, of one study that draws them; by default as many as its page has."""
    json: bool = False
    """Print JSON: the answer in a sentence, the conclusion, and the rows."""


def study(command: Study, console: Console) -> None:
    """Run a study, or list all."""
    if command.name == "list":
        for name in studies.names():
            console.print(f"{name:18} {studies.study(name).question}", markup=False, highlight=False)
        return
    if command.name == "all":
        _write_all(command, console)
        return
    if command.name == "claims":
        _hold_claims(command, console)
        return
    if command.name not in studies.names():
        raise InputError(none_of("study", command.name, [*studies.names(), *_WORDS]))
    wanted = studies.study(command.name)
    html, svg = command.output(command.page, PAGE_FILE), command.output(command.figure, FIGURE_FILE)
    out, picture = command.output(command.markdown, CHAPTER_FILE), _beside(command, wanted.name)
    require_outputs([html, svg, out, picture])
    before = _page_with(command) if out else ""
    with Ticker.hushed(), Console(stderr=True).status(f"playing the sweep of {wanted.name}"):
        found = wanted.found(command.jobs, command.seeds)
    answer = wanted.answer(found.conclusion)
    if out and picture:
        _draw(picture, wanted, found)
        out.write(with_section(before, wanted.name, _told(wanted, found)).encode())
    if html:
        html.write(page(wanted.name, wanted.question, answer, found.conclusion, found.picture, found.rows).encode())
    if svg:
        _draw(svg, wanted, found)
    if command.json:
        said_first = {"answer": answer, "question": wanted.question, "conclusion": found.conclusion}
        print_json({**said_first, "rows": list(found.rows)}, console)
        return
    console.print(answer, markup=False)
    table = Table(*found.rows[0], title=wanted.question, title_justify="left")
    for row in found.rows:
        table.add_row(*(said(key, value) for key, value in row.items()))
    console.print(table)
    console.print(found.conclusion, markup=False)


def _told(wanted: studies.Study, found: studies.Finding) -> str:
    """Return the section of a study."""
    return section(wanted.name, wanted.question, found.picture.wide.plot.about, found.conclusion)


def _draw(picture: Output, wanted: studies.Study, found: studies.Finding) -> None:
    picture.write(figure(wanted.question, [found.picture.narrow]).encode())


def _beside(command: Study, name: str) -> Output | None:
    """Return the file of a study's picture, beside the page of studies if one is written."""
    return command.output(command.markdown and str(Path(command.markdown).parent / f"{name}.svg"), FIGURE_FILE)


def _page_with(command: Study) -> str:
    """Return the page of studies as it is; raises InputError where a section of it cannot be replaced by itself."""
    assert command.markdown
    if command.name in claims.needed():
        raise InputError(
            f"`markdown`: claims on the page rest on {command.name}; longstep study claims --markdown writes both anew"
        )
    text = _page(command)
    with_section(text, command.name, "")
    return text


def _page(command: Study) -> str:
    assert command.markdown
    return read_bytes("page", command.markdown, "`markdown`").decode()


def _hold_claims(command: Study, console: Console) -> None:
    """Run the studies that claims of papers are held against, and print each claim with its verdict; on a page of
    studies, write their sections and the claims anew.
    """
    if command.page or command.figure or command.seeds:
        raise InputError("`page`, `figure` and `seeds` are of studies; claims take `json` and `markdown`")
    names, out = claims.needed(), command.output(command.markdown, CHAPTER_FILE)
    pictures = {name: _beside(command, name) for name in names}
    require_outputs([out, *pictures.values()])
    text, figures = _page(command) if out else "", {}
    for name in names:
        wanted = studies.study(name)
        found = wanted.find(command.jobs)
        figures[name] = found.figures
        if picture := pictures[name]:
            _draw(picture, wanted, found)
            text = with_section(text, name, _told(wanted, found))
    held = claims.judged(figures)
    if out:
        out.write(with_claims(text, claims.markdown(held)).encode())
    if command.json:
        print_json([one.figures() for one in held], console)
        return
    table = Table(*claims.HEADS, title="What papers claim of interconnects", title_justify="left")
    for one in held:
        table.add_row(*one.cells())
    console.print(table)


def _write_all(command: Study, console: Console) -> None:
    """Run all studies, print their conclusions, and write them with their pictures."""
    if command.page or command.figure or command.json or command.seeds:
        raise InputError("`page`, `figure`, `seeds` and `json` are of one study; all of them take `markdown`")
    out, names = command.output(command.markdown, CHAPTER_FILE), studies.names()
    pictures = {name: _beside(command, name) for name in names}
    require_outputs([out, *pictures.values()])
    told, figures = [], {}
    for name in names:
        wanted = studies.study(name)
        with Ticker.hushed(), Console(stderr=True).status(f"playing the sweep of {name}"):
            found = wanted.find(command.jobs)
        console.print(f"{wanted.question}\n  {found.conclusion}", markup=False, highlight=False)
        told.append(_told(wanted, found))
        figures[name] = found.figures
        if picture := pictures.get(name):
            _draw(picture, wanted, found)
    if out:
        out.write(chapter(told, claims.markdown(claims.judged(figures))).encode())
