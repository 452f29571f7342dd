"""Case files: what is read, and what is refused."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from experiments.evidence.papers.cases import FOLDER, case_fields, read_cases, setup_of, written_cases
from experiments.evidence.papers.published import predicted
from sim.base.errors import InputError
from sim.base.presets import preset_names
from sim.plan.extended import extended
from sim.setup.names import DATASHEET
from sim.setup.setup import Setup
from sim.software.attention import attending
from sim.software.software import load_software
from sim.words.profile import load_profile
from tests.experiments.evidence.case_files import OWN, one_case
from tests.helpers import slow_but

LEFT_OUT = '[[alike]]\nof = { }\nleft_out = ["merge"]\n'


@pytest.mark.sweep
@pytest.mark.parametrize("name", slow_but({"fpdt_h100"}, preset_names(FOLDER)))
def test_every_case_that_ships_can_be_simulated(name: str) -> None:
    file, cases = read_cases(name)
    assert file.source
    assert file.quality
    for case in cases:
        if not case.extend:
            case.played.resolved().built()
        found = case.setup.resolved().profile
        known = None if file.profile == DATASHEET else load_profile(file.profile)
        if known is None or found is None:
            assert found == known
            continue
        named = {
            name: getattr(found, name)
            for name in (
                *("rates", "runs", "software", "host_optimiser", "eager", "check_s", "attention", "allocator"),
                *("one_queue", "persistent"),
            )
        }
        kernel = found.attention and found.attention.kernel
        of_it = attending(known, kernel, case.setup.resolved().spec.gpu.chip) if kernel else known
        assert found == msgspec.structs.replace(of_it, **named)


@pytest.mark.parametrize("name", preset_names(FOLDER))
def test_every_set_of_times_that_ships_is_of_one_software(name: str) -> None:
    """Its bias is of that; nanotron's two forms of sharding are of one code, and ops alone are of no software."""
    cases = [case for case in written_cases(name)[1] if case.alone is None]
    assert all(case.setup.software is not None for case in cases)
    said = {load_software(case.setup.software).said.partition(",")[0] for case in cases if case.setup.software}
    assert len(said) == (1 if cases else 0), said


def test_a_case_that_names_no_model_and_no_cluster_is_of_what_executes() -> None:
    """Whatever questions are about: files were written before these had defaults of their own."""
    found = setup_of({"scope": "attention", "seq": "1K"}, DATASHEET)
    assert (found.model, found.cluster, found.assumed) == ("tiny", "host", {})
    asked = Setup("ring", seq="1K", profile=DATASHEET)
    said = case_fields(asked)
    assert (said["model"], said["cluster"]) == ("llama3-8b", "hgx-h100")
    assert setup_of(said, DATASHEET) == asked


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (", gpu = 8", "did you mean 'gpus'"),
        (', set = "a=b"', "set is a list"),
        (', seq_ = "1K"', "did you mean 'seq'"),
        (", window = true", "expected int or str or None"),
    ],
)
def test_what_is_wrong_in_a_case(tmp_path: Path, more: str, message: str) -> None:
    path = tmp_path / "ours.toml"
    path.write_text(OWN.format(more=more))
    with pytest.raises(InputError, match=message):
        read_cases(str(path))


@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("measured_s = 0.01", "measured_s = 0", "no measured_s above 0"),
        ("measured_s = 0.01", "measured_s = nan", "no measured_s above 0"),
        ("measured_s = 0.01", "measured_s = 1e308", "no measured_s above 0, and of at most 1e[+]09 seconds"),
        ("measured_s = 0.01", "measured_s = true", "no measured_s above 0"),
        ('"zigzag"', '"zagzig"', "group 'two schedules', measured_s 0.005: unknown schedule"),
        ('scope = "attention"\n', "", "has no scope: set scope to attention, layer or step"),
        ('"64K"', '"8001"', "the nearest are 8000 or 8008"),
        ("target", "goal", "unknown key 'goal'.*allowed are name, cases, target, blind, set"),
        ('"a800-ultraattn"', '"none.json"', "case file .*ours.toml', profile = 'none.json': .* cannot be read"),
        ("cases = [", "cases = []\nothers = [", "unknown key 'others'"),
        ("[[group]]", "[[alike]]\nof = { gpu = 8 }\n[[group]]", "unknown key 'gpu'.*did you mean 'gpus'"),
        ("[[group]]", '[[alike]]\nof = { }\nleft_out = ["mrge"]\n[[group]]', "unknown kernel 'mrge'.*alike.left_out"),
        ('profile = "a800-ultraattn"', f'profile = "{DATASHEET}"\n{LEFT_OUT}', "left_out merge takes whole steps"),
    ],
)
def test_what_is_wrong_in_a_case_file(tmp_path: Path, right: str, wrong: str, message: str) -> None:
    path = tmp_path / "ours.toml"
    path.write_text(OWN.format(more="").replace(right, wrong))
    with pytest.raises(InputError, match=message):
        read_cases(str(path))


def test_what_cases_have_in_common_that_are_alike(tmp_path: Path) -> None:
    """Zigzag's code sends k and v in one buffer, and merges nothing: no time for that, on the GPU or on its host."""
    path = tmp_path / "ours.toml"
    sent = 'of = { schedule = "zigzag", pass = "forward" }\nset = ["schedule.messages=packed-separate"]'
    path.write_text(OWN.format(more="").replace("[[group]]", f'[[alike]]\n{sent}\nleft_out = ["merge"]\n\n[[group]]'))
    ring, zigzag = read_cases(str(path))[1]
    assert (ring.options, ring.left_out) == ("", ())
    assert (zigzag.options, zigzag.left_out) == ("messages=packed-separate", ("merge",))
    assert zigzag.rivals == ring.rivals
    left_out, all_of_it = zigzag.played.predicted().trace, zigzag.setup.predicted().trace
    merges = [[row.end_s - row.begin_s for row in trace.rows if row.kind == "Merge"] for trace in (left_out, all_of_it)]
    assert len(merges[0]) == len(merges[1]) == 8 * 7
    whole = [place for place, seconds in enumerate(merges[0]) if seconds < 1e-5]
    assert len(whole) == 28, "others are of half of the rows, which are copied back"
    assert all(merges[1][place] > 1e-4 for place in whole)
    assert left_out.step_time_s < all_of_it.step_time_s - 7 * 1e-4


FEW = """
title = "x"
source = "x"
quality = "x"
profile = "h100-sxm"

[select]
model = "llama3-8b"
cluster = "hgx-h100"
scope = "step"
schedule = "single"
gpus = 2
pp_degree = 2
seq = "4K"
batch = 9
set = ["model.num_layers=4", "schedule.micro_batches=9"]

[[group]]
name = "nine micro-batches"
few_micro_batches = true
cases = [{ measured_s = 1.0 }]
"""


@pytest.mark.sweep
@pytest.mark.usefixtures("in_this_process")
def test_few_micro_batches_say_what_many_take(tmp_path: Path) -> None:
    """Of two steps that have fewer, both without jitter."""
    path = tmp_path / "ours.toml"
    path.write_text(FEW)
    (case,) = read_cases(str(path))[1]
    assert [setup.batch for setup in case.told_by.setups] == [3, 4]
    (told,) = predicted([case])
    assert told.predicted_s == pytest.approx(case.setup.replace(jitter=0.0).predicted().step_time_s, rel=1e-9)
    assert told.low_s < told.predicted_s < told.high_s
    assert [setup.batch for setup in case._replace(few_micro_batches=False).told_by.setups] == [9]
    path.write_text(FEW.replace('scope = "step"', 'scope = "layer"').replace(', "schedule.micro_batches=9"', ""))
    with pytest.raises(InputError, match="few_micro_batches takes whole steps, without host_fit"):
        read_cases(str(path))


EXTENDED = FEW.replace("few_micro_batches = true", "extend = true").replace("num_layers=4", "num_layers=16")


@pytest.mark.sweep
@pytest.mark.usefixtures("in_this_process")
def test_extended_steps_are_told_by_few_layers_and_micro_batches(tmp_path: Path) -> None:
    """As ``extended`` tells them, with an interval from sets of steps; a step that is refused says so by its case."""
    path = tmp_path / "ours.toml"
    path.write_text(EXTENDED)
    (case,) = read_cases(str(path))[1]
    told, found = next(predicted([case])), extended(case.setup)
    assert found.played == "told by 10 and 12 of 16 layers, and 3 and 4 of 9 micro-batches"
    assert told.predicted_s == found.step_time_s
    assert told.low_s < told.predicted_s < told.high_s
    path.write_text(EXTENDED.replace('scope = "step"', 'scope = "layer"').replace(', "schedule.micro_batches=9"', ""))
    with pytest.raises(InputError, match="extend takes whole steps, without host_fit"):
        read_cases(str(path))
    path.write_text(EXTENDED.replace("seq =", "tp_degree = 3\nseq ="))
    with pytest.raises(InputError, match="group 'nine micro-batches', measured_s 1: .*tp_degree"):
        read_cases(str(path))


def test_a_case_file_without_cases_and_one_that_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "ours.toml"
    path.write_text('title = "x"\nsource = "x"\nquality = "x"\nprofile = "a800-ultraattn"\ngroup = []')
    with pytest.raises(InputError, match="a group holds no case"):
        read_cases(str(path))
    with pytest.raises(InputError, match="unknown case file 'ultra'"):
        read_cases("ultra")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ('measure = "Atend"', "measured_s 1: unknown kind of op 'Atend' .did you mean 'Attend'.*queries, keys, nbytes"),
        ('measure = "AllToAll"', "unknown kind of op 'AllToAll'.*allowed are .*Exchange"),
        ('measure = "Exchange", one_device = true', "unknown kind of op 'Exchange'.*allowed are .*Copy"),
        ('measure = "HostSync", schedule = "upipe"', "unknown kind of op 'HostSync'"),
        ("measure = true", "measure is True: expected a text"),
        ('measure = "Merge", nbytes = 64', "unknown measure of an op alone 'Merge'.*allowed are Attend, "),
        ("nbytes = 64", "unknown measure of an op alone ''"),
        ('measure = "Attend", nbytes = 64', "Attend alone takes queries and keys, not {'nbytes': 64}"),
        ('measure = "Attend", queries = 64', "Attend alone takes queries and keys, not {'queries': 64}"),
        ('measure = "Attend", queries = 0, keys = 1', "Attend: queries is 0: expected a whole number >= 1"),
        ('measure = "Attend", queries = "8K", keys = 1', "Attend: queries is '8K': expected a whole number"),
        ('measure = "Exchange", nbytes = 64, scope = "step"', "an op alone is no part of it; set scope to attention"),
        ('measure = "Exchange", nbytes = 64, seq = "1K"', "unknown key of an op alone 'seq'.*allowed are model, "),
        ('measure = "Exchange", nbytes = 63', "nbytes 63: Exchange in bf16 on 8 GPUs takes multiples of 2"),
        ('measure = "AllToAll", nbytes = 24', "nbytes 24: AllToAll in bf16 on 8 GPUs takes multiples of 16"),
        ('measure = "AllReduce", nbytes = 64, gpus = 1', "AllReduce takes 2 GPUs or more"),
        ('measure = "AllReduce", nbytes = 64, set = ["schedule.layout=zigzag"]', "no option layout"),
    ],
)
def test_what_is_wrong_in_the_case_of_an_op(tmp_path: Path, fields: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        one_case(tmp_path, f"{fields}, measured_s = 1")
