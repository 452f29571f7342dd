"""Pages on a phone: at 390 pixels every text of a drawing can be read, and nothing sticks out of the page."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

import pytest

import longstep
from experiments.evidence.papers.cases import read_cases
from experiments.evidence.papers.published import CasePrediction, Evidence
from experiments.evidence.results import Result
from experiments.pages import (
    balance_page,
    comparison_page,
    evidence_page,
    lab_page,
    ladder_page,
    roofline_page,
    sweep_page,
)
from experiments.pages.drawn.figures import figure
from experiments.pages.drawn.pictures import Picture
from experiments.pages.report.report_page import page as report
from experiments.pages.study_page import Line, Spread, lengths, lines, shares, spreads, winners
from experiments.pages.study_page import page as study
from sim.base.units import length
from tests.experiments.evidence.case_files import OWN
from tests.experiments.pages.reading import Read
from tests.experiments.pages.test_comparison_page import make_comparison
from tests.experiments.pages.test_ladder_page import ROWS
from tests.experiments.pages.test_report_page import sweep_rows, without_library
from tests.experiments.pages.test_sweep_page import make_sweep
from tests.experiments.verbs.test_lab import record, result
from topology.cluster import load_cluster

RESULTS = Path(__file__).parents[3] / "experiments" / "results"
PHONE, MARGIN, LEAST = 390, 10, 12
"""Pixels across a phone, beside what its page shows, and of a text that can be read."""
CHARACTER = 0.53
"""Width of a character over its size, a mean: less than plots reckon with, as the browser's font may be narrow."""
ON_H100 = longstep.Setup(model="llama3-8b", cluster="hgx-h100", gpus=8)
SEQS = [2**power for power in range(13, 24)]

_LINES = [
    Line(f"hgx-h100 with 400 GB/s, the schedule number {n}", [(tokens, n + tokens / 2**20, "so") for tokens in SEQS])
    for n in range(6)
]
_CELLS = {
    (length(tokens), f"{rate} GB/s"): (("ulysses", "zigzag")[n % 2], "so")
    for n, tokens in enumerate(SEQS)
    for rate in (25, 50)
}
_SPREADS = [
    Spread(f"{n} ranks of hgx-h100", name, (1.0, 2.0, 90.0), "so") for n in (32, 64) for name in ("ring", "zigzag")
]
_SHARES = {"compute": 0.5, "memory bandwidth": 0.3, "the rate of NVLink, of all": 0.2}
_LENGTHS = [(f"{n} techniques, and activation offload", n * 2**20, "so") for n in range(1, 12)]
PICTURES = {
    "lines": lines(
        _LINES, about="", x_label="tokens of a sequence, all of them of one document, on eight GPUs",
        y_label="times as fast as with electrical links", x_name=lambda tokens: length(int(tokens)),
    ),
    "shares": shares([(length(tokens), _SHARES) for tokens in SEQS], about="", x_label="share of the step"),
    "winners": winners(_CELLS, about="", x_label="tokens of a sequence", y_label=""),
    "spreads": spreads(_SPREADS, about="", x_label="times the lower bound"),
    "lengths": lengths(_LENGTHS, about="", x_label="tokens"),
}  # fmt: skip


def of_balance(_: Path) -> str:
    return balance_page.page("documents", longstep.balance(ON_H100, [65536, 1024], ["zigzag"], play=False))


def of_cases(folder: Path) -> str:
    (folder / "cases.toml").write_text(OWN.format(more=""))
    file, cases = read_cases(str(folder / "cases.toml"))
    return evidence_page.page(
        [Evidence(file, [CasePrediction(case, 0.011, 0.008, 0.02, "compute", 8) for case in cases])]
    )


def of_roofline(_: Path) -> str:
    (balance,) = longstep.machine_balance(["hgx-h100"])
    return roofline_page.page("kernels", balance, longstep.roofline(ON_H100, [8192, 2**17]))


def of_study(picture: Picture, _: Path) -> str:
    return study("name", "which?", "This one.", "So. This one.", picture, [{"seq": 1}])


PAGES: dict[str, Callable[[Path], str]] = {
    "balance": of_balance,
    "cases": of_cases,
    "comparison": lambda _: comparison_page.page("a title", *make_comparison()),
    "lab": lambda _: lab_page.page(record([result("ring", 50, 1.1, [1.0]), result("ulysses", 50, 0.9, [1.0])])),
    "ladder": lambda _: ladder_page.page("techniques", ROWS, load_cluster("hgx-h100")),
    "report": lambda _: without_library(report("a report", [Result("rows", "rows", sweep_rows())])),
    "roofline": of_roofline,
    "sweep": lambda _: sweep_page.page(make_sweep(("ring",))),
    **{name: partial(of_study, picture) for name, picture in PICTURES.items()},
}


class Text(NamedTuple):
    """A text of a drawing, in its pixels."""

    said: str
    size: float
    left: float
    top: float
    right: float
    bottom: float


def texts(svg: ElementTree.Element, x: float = 0.0, y: float = 0.0) -> Iterator[Text]:
    """The texts of a drawing, those of drawings in it, too; as far as they are read from left to right."""
    sizes = {"head": 15.0}
    for part in svg:
        if part.tag.endswith("svg"):
            yield from texts(part, x + float(part.attrib["x"]), y + float(part.attrib["y"]))
        elif part.tag.endswith("}g") or part.tag == "g":
            yield from texts(part, x, y)
        elif part.tag.endswith("text") and part.text and "transform" not in part.attrib:
            size = sizes.get(part.attrib.get("class", ""), 12.0)
            wide = len(part.text) * CHARACTER * size
            share = {"start": 0.0, "middle": 0.5, "end": 1.0}[part.attrib.get("text-anchor", "start")]
            left, base = x + float(part.attrib["x"]) - share * wide, y + float(part.attrib["y"])
            yield Text(part.text, size, left, base - 0.75 * size, left + wide, base + 0.2 * size)


def shown_on_a_phone(text: str) -> list[ElementTree.Element]:
    """The drawings of a page that it does not hide from phones."""
    hidden = re.search(
        r"@media \(max-width: (\d+)px\) {\s*\.wide { display: none; }\s*\.narrow { display: block; }", text
    )
    if hidden and int(hidden[1]) >= PHONE:
        text = re.sub(r'<div class="wide">.*?</div>', "", text, flags=re.DOTALL)
    return [ElementTree.fromstring(one) for one in re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)]


def can_be_read(svg: ElementTree.Element, room: float, least: float) -> None:
    """Assert that texts of a drawing are large enough in so much room, within it, and not upon each other."""
    width, height = map(float, svg.attrib["viewBox"].split()[2:])
    scale = min(1.0, room / width)
    found = list(texts(svg))
    assert found
    for one in found:
        assert one.size * scale >= least, f"{one.said}: {one.size * scale:.1f} pixels"
        assert one.left >= -1 and one.right <= width + 1, f"{one.said} sticks out"  # noqa: PT018
        assert one.top >= -1 and one.bottom <= height + 1, f"{one.said} sticks out"  # noqa: PT018
    for one, other in combinations(found, 2):
        apart = one.right <= other.left or other.right <= one.left or one.bottom <= other.top or other.bottom <= one.top
        assert apart, f"{one.said} lies on {other.said}"


@pytest.mark.sweep
@pytest.mark.parametrize("name", PAGES)
def test_pages_fit_a_phone(name: str, tmp_path: Path) -> None:
    text = PAGES[name](tmp_path)
    for drawing in shown_on_a_phone(text):
        can_be_read(drawing, PHONE - 2 * MARGIN, LEAST)
    read, style = Read(text), "".join(re.findall(r"<style>(.*?)</style>", text, flags=re.DOTALL))
    assert ("meta", {"name": "viewport", "content": "width=device-width, initial-scale=1"}) in read.tags
    assert f"@media (max-width: 600px) {{ body {{ padding: 12px {MARGIN}px" in style
    for asked in ("prefers-color-scheme: dark", "prefers-reduced-motion: reduce", ":focus-visible { outline: 2px"):
        assert asked in style
    (box,) = re.findall(r"\.scroll {(.*?)}", style, flags=re.DOTALL)
    assert "overflow: auto" in box
    assert "border: 1px solid" in box
    (names,) = re.findall(r"\n *tr > :first-child {(.*?)}", style, flags=re.DOTALL)
    assert "overflow-wrap: break-word" in names, "anywhere would make them as narrow as a letter"
    boxes = re.findall(r'<div class="scroll" tabindex="0" role="group" aria-label="[^"]+">\s*<table', text)
    assert len(boxes) == text.count("<table") > 0
    fixed = [
        float(pixels) for pixels in re.findall(r"(?<![-\w])(?:min-)?width: ?(\d+)px", re.sub(r"@media[^{]*", "", style))
    ]
    assert max(fixed, default=0) < PHONE
    assert not re.search(r"font(-size)?:[^;]*?(?<![\d.])(\d|10|11)(\.\d+)?px", text), "text of the page, or of a canvas"
    after_title = text.partition("</h1>")[2].lstrip()
    assert after_title.startswith('<p class="answer">')


@pytest.mark.parametrize("name", PICTURES)
def test_figures_of_studies_fit_a_phone(name: str) -> None:
    text = figure("Which of all the schedules is the fastest, and from which length on?", [PICTURES[name].narrow])
    can_be_read(ElementTree.fromstring(text), PHONE, LEAST)


@pytest.mark.sweep
def test_figures_of_records_fit_a_phone() -> None:
    for text in (sweep_page.figure(make_sweep()), lab_page.figure(record([result("ring", 50, 1.1, [1.0])]))):
        can_be_read(ElementTree.fromstring(text), PHONE, LEAST)


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*/*.svg")), ids=lambda path: f"{path.parent.name}/{path.name}")
def test_kept_figures_of_records_fit_a_phone(path: Path) -> None:
    """After a change of the plots, validate or lab --record --figure writes them anew."""
    can_be_read(ElementTree.fromstring(path.read_text()), PHONE, LEAST)


def test_a_drawing_that_is_only_scaled_down_cannot_be_read() -> None:
    """A plot of 860 pixels has texts of 5 pixels on a phone."""
    text = of_study(PICTURES["lines"], Path())
    wide = re.findall(r'<div class="wide">\s*<svg.*?</svg>\s*(<svg.*?</svg>)', text, flags=re.DOTALL)
    with pytest.raises(AssertionError, match="8K: 5.2 pixels"):
        can_be_read(ElementTree.fromstring(wide[0]), PHONE - 2 * MARGIN, LEAST)
