"""Studies: each answers its question with what it finds, and the page of all says what they find now."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from experiments.studies.study import names, study
from experiments.verbs.cli import main

PAGE = Path(__file__).parents[2] / "experiments/studies/README.md"


@pytest.mark.slow
@pytest.mark.parametrize("name", names())
def test_the_page_says_what_a_study_finds(name: str) -> None:
    """Its conclusion word for word; a mark of its picture, or a bar, for every row."""
    wanted = study(name)
    found = wanted.find(1)
    assert f"## {wanted.question}\n\n`longstep study {name}`\n" in PAGE.read_text()
    assert found.conclusion in PAGE.read_text()
    assert (PAGE.parent / f"{name}.svg").read_text().startswith("<svg")
    assert {mark.row for mark in found.picture.plot.marks} == {*range(len(found.rows))}


def test_a_study_prints_its_conclusion_and_writes_its_page(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    html, svg = tmp_path / "study.html", tmp_path / "study.svg"
    main(["study", "causal-layouts", "--jobs", "1", "--json", "--page", str(html), "--figure", str(svg)])
    found = json.loads(capsys.readouterr().out)
    assert len(found["rows"]) == 24
    assert found["conclusion"] in html.read_text()
    assert len(re.findall(r'<g class="hue-\d" data-row', svg.read_text())) == 24


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (("hidng",), "(did you mean 'hiding'?)"),
        (("hiding", "--markdown", "page.md"), "--markdown is of all studies"),
        (("all", "--page", "page.html"), "are of one study"),
    ],
)
def test_what_is_no_study(capsys: pytest.CaptureFixture[str], typed: tuple[str, ...], message: str) -> None:
    with pytest.raises(SystemExit):
        main(["study", *typed])
    assert message in capsys.readouterr().err


def test_all_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    main(["study"])
    printed = capsys.readouterr().out
    assert all(name in printed and study(name).question in printed for name in names())
