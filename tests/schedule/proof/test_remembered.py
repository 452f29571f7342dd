"""What is proved is remembered by all that a proof depends on, and nothing else is believed."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

import sim
from sim.base.cache import is_own
from sim.base.errors import ScheduleError
from sim.schedule.ir.ops import Attend
from sim.schedule.ir.program import Schedule
from sim.schedule.methods.catalog import SCHEDULES
from sim.schedule.proof import remembered
from sim.schedule.proof.check import Checked, check
from sim.schedule.proof.remembered import check_once, key_of
from sim.words.workload import Workload
from tests.helpers import make_model
from tests.schedule.proof.mutations import mutate, operators

USERS = remembered._path
"""Of the user's cache, and not of the session that runs the tests."""


def written(ranks: int = 2) -> Schedule:
    """Return a small ring, written anew."""
    model = make_model(heads=2, kv_heads=2, head_dim=4)
    workload = Workload(model=model, seq=16, scope="attention", layers=1, passes="forward", dtype="fp32", batch=1)
    entry = SCHEDULES["ring"]
    return entry.schedule(workload, entry.mesh(ranks, model), entry.options)


def wrong() -> Schedule:
    """Return the ring, of which a rank attends nothing."""
    right = written()
    program = right.program(0)
    ops = [op for op in program.ops if not isinstance(op, Attend)]
    return Schedule(right.header, [program.replace(ops=ops), right.program(1)].__getitem__)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let proofs be remembered where they are by default, in a cache of the test's own."""
    monkeypatch.setattr(remembered, "_path", USERS)
    monkeypatch.setenv("LONGSTEP_PROOFS", "on")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "longstep" / "proofs" / "proved"


@pytest.fixture
def proofs(monkeypatch: pytest.MonkeyPatch) -> list[Schedule]:
    """Return what has been proved, as it is being proved."""
    found: list[Schedule] = []

    def proving(schedule: Schedule) -> Checked:
        found.append(schedule)
        return check(schedule)

    monkeypatch.setattr(remembered, "check", proving)
    return found


def test_a_schedule_that_is_asked_for_again_is_not_proved_again(file: Path, proofs: list[Schedule]) -> None:
    first, second = check_once(written()), check_once(written())
    assert len(proofs) == 1
    assert second.schedule.programs == first.schedule.programs
    assert list(second.matching.transfers) == list(first.matching.transfers)
    assert (second.matching.groups, second.kernels) == (first.matching.groups, first.kernels)
    assert file.read_text().split() == [key_of(written())]


def test_another_schedule_is_proved(file: Path, proofs: list[Schedule]) -> None:
    check_once(written(2))
    check_once(written(4))
    assert len(proofs) == 2


def test_what_is_refused_is_not_remembered(file: Path, proofs: list[Schedule]) -> None:
    check_once(written())
    before = file.read_bytes()
    for _ in range(2):
        with pytest.raises(ScheduleError):
            check_once(wrong())
    assert len(proofs) == 3
    assert file.read_bytes() == before


def test_other_code_proves_again(file: Path, proofs: list[Schedule], monkeypatch: pytest.MonkeyPatch) -> None:
    check_once(written())
    monkeypatch.setattr(remembered, "_code", lambda: b"of another version")
    check_once(written())
    assert len(proofs) == 2


def test_code_is_known_by_all_that_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def digest() -> bytes:
        return remembered._code.__wrapped__()

    file = tmp_path / "schedule" / "proof" / "rules.py"
    file.parent.mkdir(parents=True)
    file.write_text("MOST = 1")
    monkeypatch.setattr(sim, "__file__", str(tmp_path / "__init__.py"))
    first = digest()
    assert digest() == first
    file.write_text("MOST = 2")
    second = digest()
    file.rename(file.with_name("others.py"))
    assert len({first, second, digest()}) == 3


@pytest.mark.sweep
def test_a_mutant_has_a_key_of_its_own() -> None:
    compared = 0
    for number, name in enumerate(operators("layers")):
        _, original, changed = mutate(name, number, seed=5)
        with contextlib.suppress(ScheduleError):  # its mesh has other ranks than the builder
            assert key_of(changed) != key_of(original.schedule), name
            compared += 1
    assert compared > 60


def test_who_stands_for_others_is_part_of_the_key() -> None:
    right = written()
    programs = right.programs.__getitem__
    alike, unlike = (Schedule(right.header, programs, kind=kind) for kind in (lambda _: "the same", int))
    claims = right.header.claims and msgspec.structs.replace(right.header.claims, attention_flops=10**30)
    claiming = Schedule(msgspec.structs.replace(right.header, claims=claims), programs, kind=int)
    assert len({key_of(one) for one in (alike, unlike, claiming)}) == 3


@pytest.mark.parametrize(
    "spoil",
    [
        lambda file: file.write_bytes(b""),
        lambda file: file.write_bytes(file.read_bytes()[:-2]),
        lambda file: file.write_bytes(file.read_bytes()[3:]),
        lambda file: file.write_bytes(b"\xff\x00" * 99),
        lambda file: file.write_text("\n" + "0" * 64 + "\n"),
        lambda file: file.chmod(0o666),
        lambda file: file.parent.chmod(0o777),
        lambda file: file.unlink(),
    ],
    ids=["empty", "cut off", "without its beginning", "noise", "another's", "open", "in an open folder", "gone"],
)
def test_a_spoilt_file_is_not_believed(spoil: Callable[[Path], None], file: Path, proofs: list[Schedule]) -> None:
    check_once(written())
    spoil(file)
    check_once(written())
    assert len(proofs) == 2


def test_a_file_that_others_can_write_is_made_anew(file: Path, proofs: list[Schedule]) -> None:
    check_once(written())
    file.chmod(0o666)
    check_once(written())
    check_once(written())
    assert len(proofs) == 2
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_torn_line_spoils_no_other(file: Path, proofs: list[Schedule]) -> None:
    check_once(written())
    file.write_bytes(b"\n0123456789")
    check_once(written())
    check_once(written())
    assert len(proofs) == 2


def test_several_may_remember_at_once(file: Path) -> None:
    """Also the first keys of a file, which none of them finds there yet."""
    file.parent.mkdir(parents=True)
    keys = [f"{number:064d}" for number in range(40)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for number in range(40):
            other = file.with_name(f"{number}")
            with ThreadPoolExecutor(8) as pool:
                list(pool.map(lambda key, other=other: remembered._add(other, f"\n{key}\n".encode()), keys))  # type: ignore[misc]
            assert sorted(other.read_text().split()) == keys
    finally:
        sys.setswitchinterval(interval)


def test_the_oldest_are_dropped(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered, "_MOST", 3)
    file.parent.mkdir(parents=True)
    for number in range(7):
        remembered._add(file, f"\n{number:064d}\n".encode())
    assert [int(line) for line in file.read_text().split()] == [4, 5, 6]
    assert is_own(file)


def test_nothing_is_remembered_where_that_is_off(
    file: Path, proofs: list[Schedule], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LONGSTEP_PROOFS", "off")
    check_once(written())
    check_once(written())
    assert len(proofs) == 2
    assert not file.exists()


def test_a_cache_that_cannot_be_written_is_none(
    tmp_path: Path, file: Path, proofs: list[Schedule], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "taken").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "taken"))
    check_once(written())
    assert len(proofs) == 1
