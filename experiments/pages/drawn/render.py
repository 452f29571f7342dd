"""Fills the templates of pages and figures. What they show is escaped; what they lack is an error."""

from __future__ import annotations

import functools
from typing import Any

import jinja2

from experiments.pages.drawn.plots import HUES, THEMES
from experiments.pages.drawn.texts import TEXT_ROW
from sim.base.files import Kind, marked
from sim.base.units import percent, seconds

PAGE_FILE = Kind("an HTML page", marked('<meta name="generator" content="longstep">'))
FIGURE_FILE = Kind("an SVG figure", marked("<!-- generator: longstep -->"))


def render(template: str, **values: Any) -> str:
    """Return a template of ``experiments/pages/templates``, filled."""
    return _environment().get_template(template).render(**values)


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("experiments.pages"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"seconds": seconds, "percent": percent}
    environment.globals |= {"hues": list(HUES.values()), "themes": THEMES, "text_row": TEXT_ROW}
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    return environment
