"""The files of a page: all that a browser loads, rendered once, from this machine alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from importlib import resources
from typing import NamedTuple

from experiments.pages.drawn.plots import HUES
from experiments.pages.drawn.render import render
from experiments.pages.drawn.timeline import family_colours
from experiments.pages.report.report_page import plotly_js
from experiments.serve.choices import choices


class File(NamedTuple):
    """A file that is served."""

    kind: str
    content: Callable[[], str]


@cache
def _page() -> str:
    return render("serve.html.j2", title="Longstep", choices=choices())


@cache
def _style() -> str:
    return render("serve.css.j2")


@cache
def _look() -> str:
    """Return what all pages share, as a module: what hovering says, tables, timelines and charts."""
    palette = {tone: [hue[number] for hue in HUES.values()] for number, tone in enumerate(("light", "dark"))}
    return render("serve.look.js.j2", family_hues=family_colours(), palette=palette)


def _own(name: str) -> Callable[[], str]:
    return lambda: resources.files("experiments").joinpath("serve", "static", name).read_text()


JS = "text/javascript"
FILES: Mapping[str, File] = {
    "": File("text/html", _page),
    "page.css": File("text/css", _style),
    "look.js": File(JS, _look),
    "plotly.js": File(JS, cache(plotly_js)),
    **{
        name: File(JS, _own(name))
        for name in ("page.js", "form.js", "answer.js", "map.js", "ask.js", "state.js", "pins.js", "files.js")
    },
}
"""By name, below the token."""
