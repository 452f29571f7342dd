"""The op set is closed: a new kind is a type error in every reader that has to know it, and nowhere else."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from sim.schedule.ir.declare import operands
from sim.schedule.ir.ops import (
    KINDS,
    BiasedGemm,
    Collective,
    Copy,
    Exchange,
    Fold,
    Gemm,
    Hold,
    JoinedGemm,
    Pack,
    Unpack,
)

ROOT = Path(__file__).parents[3]

DUMMIES = '''

class Dropout(_Kernel, frozen=True, kw_only=True):
    """out = x, as a kernel of tokens."""

    meta = Meta("d", "dropout", "other", "dropout")
    x: Annotated[View, In("bse")]
    out: Annotated[View, Out("bse")]


class Broadcast(_Collective, frozen=True, kw_only=True):
    """recv = what the only member sends that has something to send."""

    meta = Meta("b", "broadcast", "transfer")
    name = "broadcast"
    send: Annotated[View | None, In()]
    recv: Annotated[View, Out()]


Collective: TypeAlias'''

READERS = {
    "Dropout": {"runtime/execution/ops/dense.py", "sim/schedule/derive/workspace.py"},
    "Broadcast": {"runtime/execution/groups.py", "sim/schedule/derive/matching.py"},
    "broadcast": {"sim/engine/traffic/collectives.py", "sim/engine/traffic/least.py"},
}
"""Who must complain of a new kernel, of a new collective, and of its name in profiles. What a kernel computes stands in
one more file that mypy cannot know, the equations of a block; everything else follows from the declarations.
"""


@pytest.mark.slow
@pytest.mark.gloo
def test_mypy_names_every_reader_of_a_new_op(tmp_path: Path) -> None:
    for package in ("sim", "topology", "runtime"):
        shutil.copytree(ROOT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__", "*.json"))
    ops = tmp_path / "sim/schedule/ir/ops.py"
    text = ops.read_text()
    for old, new in (
        ('"barrier"]', '"barrier", "broadcast"]'),
        ("\nCollective: TypeAlias", DUMMIES),
        ("AllReduce | Barrier\n", "AllReduce | Barrier | Broadcast\n"),
        ("TokenKernel: TypeAlias = Gemm |", "TokenKernel: TypeAlias = Dropout | Gemm |"),
        ("    Delta | Merge |", "    Dropout | Delta | Merge |"),
    ):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    ops.write_text(text)
    settings = tmp_path / "mypy.ini"
    settings.write_text(
        "[mypy]\npython_version = 3.11\nallow_untyped_calls = True\n"
        "[mypy-torch.*,networkx.*,numpy.*]\nfollow_imports = skip\nignore_missing_imports = True\n"
    )
    ended = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", settings, "-p", "sim", "-p", "topology", "-p", "runtime"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    found: dict[str, set[str]] = {name: set() for name in READERS}
    for error in ended.stdout.splitlines():
        name = re.search(r'to "assert_never" has incompatible type ".*\b(Dropout|[Bb]roadcast)\b.*"', error)
        if name:
            found[name[1]].add(error.partition(":")[0])
    assert found == READERS, ended.stdout


def test_every_op_declares_itself() -> None:
    codes = [kind.meta.code for kind in KINDS.values()]
    assert len(set(codes)) == len(codes)
    with_rules_of_their_own = {Copy, Fold, Gemm, BiasedGemm, JoinedGemm, Exchange, Hold, Pack, Unpack}
    for kind in KINDS.values():
        if kind not in with_rules_of_their_own and not issubclass(kind, Collective):
            assert all(mark.letters for mark in operands(kind).values()), kind
