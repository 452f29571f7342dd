"""What a lab of slow links says of predictions, and what it takes to say it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from calibrate.lab import cores_by_rate, cores_taken, goodput, require_calibrated
from calibrate.measure.links import LinkTimes
from experiments.evidence.headlines import headlines
from experiments.evidence.kept import Kept
from experiments.evidence.links.lab import MBIT, LabCell, LabRecord, LabResult, Repeat, kept_labs, lab_cells, read_lab
from experiments.evidence.links.lab_verdict import TARGETS, costs, crossovers, lab_lines, lab_order, placements, verdict
from experiments.pages.chapter import lab_section
from experiments.pages.lab_page import figure, page
from experiments.verbs.cli import main
from runtime.lab.lab import why_not
from sim.base.errors import InputError
from sim.base.units import percent
from sim.words.profile import Point, Profile, load_profile, save_profile

ROOT = Path(__file__).parents[3]
A100 = str(ROOT / "sim" / "profiles" / "a100-sxm.json")
QUIET = ((1.0, 2.0), (1.04, 1.97))
LOUD = ((1.0, 2.0), (1.0, 2.2))


def result(schedule: str, mbit: float, predicted_s: float, measured_s: list[float], **other: Any) -> LabResult:
    """Return a result whose repeats are all quiet, but for times below 0, which are those of void ones."""
    repeats = [
        Repeat(step_s=abs(one), before_s=(QUIET if one > 0 else LOUD)[0], after_s=(QUIET if one > 0 else LOUD)[1])
        for one in measured_s
    ]
    where = {"network": "flat", "seq": "1K", "placement": "", "share": 0.5} | other
    share = where.pop("share")
    cell = LabCell(bytes_per_s=mbit * MBIT, schedule=schedule, **where)
    return LabResult(cell=cell, predicted_s=predicted_s, share=share, repeats=repeats)


def record(
    results: list[LabResult], left_out: list[str] | None = None, begun: str = "2026-11-23T12:00:00+00:00"
) -> LabRecord:
    return LabRecord(
        profile=load_profile("a100-sxm"), title="layer of tiny, 4 ranks", begun=begun,
        command="longstep lab", software={}, ranks=4, goodput=0.98, results=results, left_out=left_out or [],
    )  # fmt: skip


def test_a_repeat_between_checks_that_differ_is_void() -> None:
    """The kernel may be 4 % slower, the transfer not 10 %. Times that count are those of the others."""
    one = result("ring", 50, 1.1, [1.0, 1.2, -7.0])
    assert [repeat.void for repeat in one.repeats] == [False, False, True]
    assert one.valid == [1.0, 1.2]
    assert one.times.median_s == pytest.approx(1.1)
    assert one.times.error == pytest.approx(0.0)


def test_the_order_of_schedules_counts_where_their_steps_are_apart() -> None:
    """At 50 Mbit/s ulysses is faster, as predicted; at 200 repeats overlap; at 1000 it is predicted faster and is not.
    A void repeat says nothing.
    """
    results = [
        result("ring", 50, 2.0, [2.0, 2.2]), result("ulysses", 50, 1.0, [1.0, 1.1, -9.0]),
        result("ring", 200, 1.0, [1.0, 1.2]), result("ulysses", 200, 0.9, [1.1, 0.8]),
        result("ring", 1000, 0.3, [0.2]), result("ulysses", 1000, 0.2, [0.3]), result("zigzag", 1000, 0.1, [-0.1]),
    ]  # fmt: skip
    assert lab_order(results) == (1, 2)


def test_the_evidence_has_a_row_of_a_quiet_lab_and_a_section_of_any(tmp_path: Path) -> None:
    quiet = record([result("ring", 50, 1.1, [1.0]), result("ulysses", 50, 0.9, [1.0])])
    loud = record([result("ring", 50, 1.1, [-1.0])])
    (row,) = headlines([], [], labs=[loud, quiet])
    assert row.row[:3] == ["executed: layer of tiny, 4 ranks, links of set rates, A100-SXM-80GB", "2", "10.0 %"]
    assert row.met == "missed"
    text = "\n".join(lab_section(Kept(tmp_path / "lab.json", loud), tmp_path))
    assert "nothing is claimed" in text
    assert "| ring | 50 % | 1.1 s | 1 s | (+10.0 %) | 1 of 1 |" in text
    (tmp_path / "lab.svg").write_text(figure(quiet))
    assert "![Predicted against executed times](lab.svg)" in lab_section(Kept(tmp_path / "lab.json", quiet), tmp_path)


@pytest.mark.parametrize(
    ("spoiled", "said"),
    [
        (lambda text: text[: len(text) // 2], "truncated.*restore the file"),
        (lambda text: text.replace('"ranks":4', '"ranks":"four"'), "ranks"),
        (lambda text: text.replace('"ranks":4,', ""), "ranks"),
        (lambda text: text.replace('"ranks":4', '"ranks":4,"speed":1'), "speed"),
    ],
    ids=["truncated", "wrong value", "field missing", "field of another version"],
)
def test_a_damaged_record_is_not_left_out_of_the_evidence(
    tmp_path: Path, spoiled: Callable[[str], str], said: str
) -> None:
    whole = msgspec.json.encode(record([result("ring", 50, 1.1, [1.0])])).decode()
    (tmp_path / "other.json").write_text('{"results": []}')
    (tmp_path / "lab.json").write_text(whole)
    assert [kept.path.name for kept in kept_labs(str(tmp_path))] == ["lab.json"]
    (tmp_path / "lab.json").write_text(spoiled(whole))
    with pytest.raises(InputError, match=f"lab.json.*{said}"):
        kept_labs(str(tmp_path))


def test_the_front_page_says_what_kept_labs_do() -> None:
    records = [kept.record for kept in kept_labs(str(ROOT / "experiments/results"))]
    page = (ROOT / "README.md").read_text()
    assert f"(`longstep lab`, layers on {records[0].ranks} ranks)" in page
    assert f"the target {100 * TARGETS[0]:g} %" in page
    for row in headlines([], [], labs=records):
        assert f"{100 * row.mean:.1f} % ({row.cases} layers, worst {percent(row.worst)})" in page
        assert row.met == "met", "the sentence says one target for all of them"
    for found in (verdict(record.results) for record in records):
        assert found.met or f"missed ({100 * found.mean:.1f} % over {found.cells} layers)" in page


def test_labs_of_a_machine_are_one_row_whose_orders_are_of_each(tmp_path: Path) -> None:
    """Two records of the same cells: their steps are rivals within each, and not of one another."""
    one = record([result("ring", 50, 1.0, [1.0]), result("ulysses", 50, 2.0, [2.0])])
    other = record([result("ring", 50, 1.1, [1.0], fault="slow-nic"), result("ulysses", 50, 2.0, [2.0])])
    (row,) = headlines([], [], labs=[one, other])
    assert (row.cases, row.right, row.pairs) == (4, 1, 1)
    assert row.mean == pytest.approx(0.025)
    assert (
        "### layer of tiny, 4 ranks, flat, slow-nic: 2 cells"
        in lab_section(Kept(tmp_path / "x.json", other), tmp_path)[0]
    )


def test_of_a_repeated_sweep_the_latest_counts_and_only_that() -> None:
    """Other cells of the same machine stay in its row, and a later sweep that claims nothing takes no one's place."""
    first = record([result("ring", 50, 1.4, [1.0])], begun="2026-11-23T12:00:00+00:00")
    again = record([result("ring", 50, 1.1, [1.0])], begun="2026-11-23T18:00:00+00:00")
    other = record([result("ring", 200, 1.2, [1.0])], begun="2026-11-23T11:00:00+00:00")
    loud = record([result("ring", 50, 9.0, [-1.0])], begun="2026-11-23T19:00:00+00:00")
    (row,) = headlines([], [], labs=[again, loud, first, other])
    assert (row.cases, row.worst) == (2, pytest.approx(0.2))
    assert row.mean == pytest.approx(0.15)


def test_a_verdict_is_of_cells_in_which_communication_shows() -> None:
    """Errors of 10, -5 and 20 %; that of a cell that mostly computes does not count, nor one without a valid repeat."""
    results = [
        result("ring", 50, 1.1, [1.0]), result("ulysses", 50, 0.95, [1.0]), result("zigzag", 50, 1.2, [1.0]),
        result("ring", 1000, 9.0, [1.0], share=0.2), result("ring", 200, 9.0, [-1.0]),
    ]  # fmt: skip
    found = verdict(results)
    assert (found.cells, found.void, found.repeats) == (3, 1, 5)
    assert found.mean == pytest.approx(0.35 / 3)
    assert found.most == found.worst == pytest.approx(0.2)
    assert found.quiet
    assert not found.met, "the mean is above 8 %"
    assert verdict([result("ring", 50, 1.07, [1.0])]).met
    assert not verdict(
        [result("ring", 50, 1.31, [1.0]), *(result("ring", rate, 1.0, [1.0]) for rate in range(1, 30))]
    ).met


def test_with_more_than_a_third_void_nothing_is_claimed() -> None:
    lines = lab_lines(record([result("ring", 50, 1.0, [1.0, -1.0]), result("ulysses", 50, 1.0, [1.0])]))
    assert any("1 of 3 repeats void" in line for line in lines)
    assert any("of which communication is a third or more" in line for line in lines)
    lines = lab_lines(record([result("ring", 50, 1.0, [1.0, -1.0]), result("ulysses", 50, 1.0, [-1.0])]))
    assert lines[-1] == "the machine was not quiet: more than a third are void, so nothing is claimed"
    assert not any("communication is" in line for line in lines)


def test_schedules_change_order_where_their_lines_cross() -> None:
    """Ring over Ulysses is 2 at 50 Mbit/s and 1/2 at 200 as predicted, so 1 at 100; measured 4 and 1/4: at 100 too."""
    results = [
        result("ring", 50, 2.0, [4.0]), result("ulysses", 50, 1.0, [1.0]),
        result("ring", 200, 0.5, [0.25]), result("ulysses", 200, 1.0, [1.0]),
    ]  # fmt: skip
    (found,) = crossovers(results, "ring", "ulysses")
    assert found.predicted == pytest.approx(100 * MBIT)
    assert found.measured == pytest.approx(100 * MBIT)
    assert found.right
    apart = [*results[:2], result("ring", 200, 0.5, [0.9]), results[3]]
    (found,) = crossovers(apart, "ring", "ulysses")
    assert found.measured is not None
    assert found.measured > 150 * MBIT
    assert not found.right
    (never,) = crossovers([*results[:2], result("ring", 200, 2.0, [2.0]), results[3]], "ring", "ulysses")
    assert never.predicted is never.measured is None
    assert never.right


def test_placements_are_told_apart() -> None:
    inner, outer = (
        result("usp", 50, predicted, [measured], placement=name, network="thin")
        for name, predicted, measured in (("ulysses-inner", 1.0, 1.3), ("ring-inner", 1.5, 1.2))
    )
    (order,) = placements([inner, outer])
    assert (order.predicted, order.measured) == ("ulysses-inner", "ring-inner")
    assert "measured: wrong" in lab_lines(record([inner, outer]))[-1]
    alike = result("usp", 50, 1.005, [1.2], placement="ring-inner", network="thin")
    assert placements([inner, alike]) == []


def test_a_fault_costs_what_it_costs_beside_the_same_without() -> None:
    """Twice as long as predicted, 2.2 times as measured: within 15 %. Faulty cells are in no crossover."""
    results = [
        result("ring", 50, 1.0, [1.0]), result("ring", 50, 2.0, [2.2], fault="slow-nic"),
        result("ulysses", 50, 1.0, [1.0], fault="slow-nic"),
    ]  # fmt: skip
    (cost,) = costs(results)
    assert (cost.predicted, cost.measured, cost.right) == (2.0, 2.2, True)
    assert not costs([results[0], result("ring", 50, 2.0, [2.5], fault="slow-nic")])[0].right
    assert "flat at 50 Mbit/s, slow-nic of rank 1: 2 times as long" in lab_lines(record(results))[-1]
    assert crossovers(results, "ring", "ulysses") == []


def test_cells_of_schedules_with_two_degrees_are_of_both_placements() -> None:
    cells = lab_cells(["flat", "thin"], [50 * MBIT], ["ring", "usp"], ["1K", "2K"])
    assert len(cells) == 2 * 2 * 3
    assert {cell.method for cell in cells} == {"ring", "usp ulysses-inner", "usp ring-inner"}


def test_a_transfer_takes_of_the_cores_what_attention_loses_there() -> None:
    """Four ranks on two cores: 8 ms of 40 on each core are 0.4 cores in all, of eight sides; of 16 if attention ended
    before the transfer did, 1.0 cores. What would be negative is nothing: a byte that costs less at the higher rate
    costs only what any time costs.
    """
    times = {"median_s": 0.04, "mean_s": 0.04, "low_s": 0.04, "high_s": 0.04, "runs": 4}
    point = Point(kernel="exchange", dtype="fp32", shape=(4, 2**20), condition="busy", nbytes=2**20, **times)
    lost = [0.007, 0.009, 0.1, -0.001]
    assert cores_taken(LinkTimes(point, lost, [], [0.05]), 2.0) == pytest.approx(0.05)
    assert cores_taken(LinkTimes(point, lost, [], [0.016]), 2.0) == pytest.approx(0.125)
    assert cores_taken(LinkTimes(point, [-0.001], [], [0.05]), 2.0) == 0.0
    assert cores_by_rate(0.05, 0.01) == (0.05, 0.0)


def test_a_record_comes_back_and_fills_a_page(tmp_path: Path) -> None:
    results = [result("ring", 50, 1.1, [1.0, 1.2]), result("ulysses", 50, 1.0, [0.9], network="chain")]
    kept = record(results, ["chain at 10000 Mbit/s: less"])
    (tmp_path / "lab.json").write_bytes(msgspec.json.encode(kept))
    assert read_lab(str(tmp_path / "lab.json")) == kept
    text = page(kept)
    assert "left out: chain at 10000 Mbit/s: less" in text
    assert text.count("<tr data-row") == 2
    (tmp_path / "none.json").write_bytes(msgspec.json.encode(record([])))
    with pytest.raises(InputError, match="holds no result; longstep lab --out writes one"):
        read_lab(str(tmp_path / "none.json"))


@pytest.mark.parametrize(("typed", "said"), [
    (("--rates", "fast"), "--rates fast: expected Mbit/s from 1 to 100000"),
    (("--rates", "0"), "--rates 0: expected Mbit/s from 1 to 100000"),
    (("--network", "flat,star"), "--network star: expected some of flat, thin, tree, chain, torus"),
    (("--network", "torus", "--gpus", "3"), "network torus of 3 ranks: expected at least 4, and an even number"),
    (("--fault", "fire"), "unknown value of --fault 'fire'"),
    (("--schedule", "rong"), "unknown schedule 'rong' (did you mean 'ring'?)"),
    (("--repeats", "0"), "--repeats 0: expected"),
    (("--gpus", "1"), "network flat of 1 ranks: expected at least 2; set --gpus"),
    (("--calibration", A100), "not the calibration of a lab of 4 ranks"),
    (("--record", "r.json", "--out", "o.json"), "--record shows what was measured"),
    (("--record", "nowhere.json"), "nowhere.json"),
])  # fmt: skip
def test_mistakes_are_told_before_anything_is_built(
    typed: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["lab", *typed])
    assert stop.value.code == 2
    err = capsys.readouterr().err
    assert err.startswith("longstep: ")
    assert said in err
    assert err.count("\n") == 1


@pytest.fixture
def calibrated(own_profiles: Path) -> Profile:
    """A profile of this machine with nominal kernels, which predicts no time right and takes none to make."""
    from topology.cluster import load_cluster
    from topology.host import host_facts

    spec = load_cluster("host")
    from sim.words.profile import Machine

    machine = Machine(gpu=spec.gpu.name, cores=host_facts().cores, software={"longstep": "0"})
    profile = Profile(
        name="host", created="2026-11-23T12:00:00+00:00", command="a test", complete=True, machine=machine,
        cluster=spec.figures(), points=(),
    )  # fmt: skip
    save_profile(profile, own_profiles / "host.json")
    return profile


@pytest.mark.gloo
@pytest.mark.slow
def test_a_lab_is_built_calibrated_and_compared(
    calibrated: Profile, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With two ranks, on the two networks that two ranks can make. No time is asserted, but that links limit."""
    if why := why_not():
        pytest.skip(why)
    out, kept = tmp_path / "record.json", tmp_path / "lab.json"
    options = ("--gpus", "2", "--network", "flat,chain", "--rates", "100,100000", "--schedule", "ring", "--seq", "512")
    played = ("--fault", "slow-nic,slow-rank", "--repeats", "1", "--scope", "attention")
    main(["lab", *options, *played, "--calibration", str(kept), "--out", str(out), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert len(found["left_out"]) >= 4, "100 Gbit/s, with a fault and without"
    assert all("at 100000 Mbit/s" in why and "does not yield that rate" in why for why in found["left_out"])
    record = read_lab(str(out))
    assert load_profile(str(kept)) == record.profile
    require_calibrated(record.profile, 2)
    assert 0 < goodput(record.profile) < 1.2
    assert {one.cell.network for one in record.results} == {"flat", "chain"}
    for one in record.results:
        """At least K and V of 256 tokens in fp32 pass each link; rank 1's may be at a quarter."""
        nbytes = 256 * 4 * 64 * 2 * 4
        assert one.repeats[0].step_s > nbytes / (one.cell.bytes_per_s * (0.25 if one.cell.fault == "slow-nic" else 1.0))
        assert math.isfinite(one.predicted_s)
    kernels = {point.kernel for point in record.profile.points}
    assert kernels == {"exchange", "all_to_all", "all_gather", "reduce_scatter", "all_reduce"}
