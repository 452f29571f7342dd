"""Every README: its Python runs, its commands print what it shows, its files and links are there.

A block of Python with a block of text behind it is run, and prints that text; one without is an example of this folder.
A ``console`` block shows commands behind ``$`` with what they print. Commands are in ``test_commands.py``.
"""

from __future__ import annotations

import dataclasses
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import get_args, get_origin, get_type_hints

import msgspec
import pytest
from _pytest.mark import ParameterSet

import longstep
from experiments.evidence.papers.cases import read_cases
from experiments.verbs.cli import main
from experiments.verbs.shared.selection import Selection
from sim.schedule.methods.catalog import SCHEDULES
from tests.golden.pages import PACKAGES, PAGES, ROOT, Block, blocks_of, commands_of
from topology.cluster import load_cluster
from topology.specs import ClusterSpec, LinkSpec

FOLDER = Path(__file__).parent
FILES = [path.relative_to(ROOT).as_posix() for package in PACKAGES for path in (ROOT / package).rglob("*.*")]
FRONT = ROOT / "README.md"
QUICK = ("list", "show", "simulate")
"""Verbs that are quick enough to be run for what they print by every test run."""


BLOCKS = [block for page in PAGES for block in blocks_of(page)]
PYTHON = [pair for pair in zip(BLOCKS, [*BLOCKS[1:], None], strict=True) if pair[0].language == "python"]


def _by_cost(block: Block, after: Block | None) -> ParameterSet:
    """Return a block with the mark of what it takes: where software is listed every preset is asked."""
    many = "software_names()" in block.text
    return pytest.param(block, after, id=block.name, marks=[pytest.mark.slow] if many else [])


@pytest.mark.gloo
@pytest.mark.parametrize(("block", "after"), [_by_cost(*pair) for pair in PYTHON])
def test_python_prints_what_stands_behind_it(
    block: Block,
    after: Block | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    if after is not None and after.language == "text" and after.follows and after.page == block.page:
        exec(block.text, {"__name__": "__main__"})
        assert capsys.readouterr().out == after.text
    else:
        assert block.text in {path.read_text() for path in FOLDER.glob("*.py")}, "no example of tests/golden is that"


SHOWN = [one for page in PAGES for one in commands_of(page) if one.output]


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("command", "output"),
    [
        pytest.param(one.text, one.output, marks=[] if one.text.split()[1] in QUICK else [pytest.mark.slow])
        for one in SHOWN
    ],
)
def test_commands_print_what_is_shown(
    command: str, output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    program, *rest = shlex.split(command)
    assert program == "longstep"
    main(rest)
    printed = capsys.readouterr().out
    assert [line.rstrip() for line in printed.splitlines()] == output.splitlines()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    """Links within the repository, and the files that a page names in backquotes, perhaps by the end of their path."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" not in target:
            assert (page.parent / target.partition("#")[0]).exists(), target
    for path in re.findall(r"`([\w./-]+\.py|[\w.-]+/[\w./-]+\.(?:toml|md|json))`", text):
        assert any(f"/{file}".endswith(f"/{path}") for file in FILES), path


def test_the_front_page_is_short_and_begins_with_an_answer() -> None:
    """A question, a command and what it prints before all else; what more there is to say is in a folder's README."""
    text = FRONT.read_text()
    assert len(text.splitlines()) <= 130
    assert len(text.split()) <= 1400
    title, question = text.partition("```")[0].split("\n\n")[:2]
    assert title.startswith("# ")
    assert question.endswith("?")
    first = next(blocks_of(FRONT))
    assert first.language == "console"
    assert next(iter(commands_of(FRONT))).output


def test_sentences_of_the_front_page_are_read_once() -> None:
    """Nobody keeps more than this many words in mind; a link, a number or an option counts as one."""
    prose = re.sub(r"^```.*?^```$|^[|#].*$", "", FRONT.read_text(), flags=re.DOTALL | re.MULTILINE)
    prose = re.sub(r"\]\([^)]*\)", "]", prose)
    for sentence in re.split(r"(?<=[.:?;])\s+|\n\n|\n- ", prose):
        assert len(sentence.split()) <= 30, sentence


def toml_of(page: str, key: str, folder: Path) -> str:
    """Return a file with the one TOML block of a page that says something of ``key``."""
    (text,) = (block.text for block in blocks_of(ROOT / page) if block.language == "toml" and key in block.text)
    path = folder / "example.toml"
    path.write_text(text)
    return str(path)


def test_the_cluster_file_is_one(tmp_path: Path) -> None:
    """It can be simulated on, with traffic to its other node and to host memory."""
    path = toml_of("topology/README.md", "[gpu]", tmp_path)
    spec = load_cluster(path)
    ranks = 2 * spec.gpus_per_node
    found = longstep.predict(
        cluster=path, gpus=ranks, seq="16K", scope="layer", layers=2, set={"schedule.activations": "host"}
    )
    assert {"nvlink", "pcie", "dram", "nic"} <= {resource.group for resource in found.cluster.resources}
    assert found.step_time_s > 0


def test_the_software_file_is_one(tmp_path: Path) -> None:
    path = toml_of("sim/software/README.md", "[kernels]", tmp_path)
    played = longstep.predict("single", model="tiny", cluster="hgx-h100", gpus=1, seq="4K", software=path)
    assert played.profile is not None
    assert played.profile.software == "our trainer"
    assert played.checked.schedule.header.options["zero_stage"] == 2


def test_the_case_file_is_one(tmp_path: Path) -> None:
    file, cases = read_cases(toml_of("experiments/README.md", "[[group]]", tmp_path))
    assert file.group[0].target == 0.1
    assert [case.setup.schedule for case in cases] == ["zigzag", "ulysses"]
    assert cases[0].rivals == cases[1].rivals


def keys_of(struct: type[msgspec.Struct], prefix: str = "") -> Iterator[str]:
    """Yield the dotted paths of all keys of a file; of a link its table, since all links have the same keys."""
    of_links = set(LinkSpec.__struct_fields__) if issubclass(struct, LinkSpec) and prefix else set()
    if of_links:
        yield f"[{prefix.rstrip('.')}]"
    for name, hint in get_type_hints(struct).items():
        inner = [one for one in (hint, *get_args(hint)) if isinstance(one, type) and issubclass(one, msgspec.Struct)]
        for one in inner:  # several where a table has kinds
            yield from keys_of(one, f"{prefix}{name}.N." if get_origin(hint) is dict else f"{prefix}{name}.")
        if inner:
            continue
        if name not in of_links:
            yield prefix + name


@pytest.mark.parametrize(
    ("page", "names"),
    [
        ("topology/README.md", [*keys_of(ClusterSpec), *keys_of(LinkSpec)]),
        ("sim/schedule/README.md", list(SCHEDULES)),
        (
            "sim/schedule/README.md",
            sorted({name for entry in SCHEDULES.values() for name in msgspec.to_builtins(entry.options or {})}),
        ),
        (
            "experiments/README.md",
            ["--" + {"passes": "pass"}.get(f.name, f.name).replace("_", "-") for f in dataclasses.fields(Selection)],
        ),
    ],
    ids=["keys of clusters", "schedules", "options of schedules", "options of the selection"],
)
def test_tables_are_complete(page: str, names: list[str]) -> None:
    text = (ROOT / page).read_text()
    assert names
    assert [name for name in names if f"`{name}`" not in text] == []
