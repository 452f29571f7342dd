"""One grammar: a list of an option is a row each, and what people call cp, tp and accumulation says one thing."""

from __future__ import annotations

import json
import re

import pytest

from experiments.verbs.cli import main, parse
from longstep import Setup
from sim.base.errors import InputError
from sim.compare.axes import MOST_TYPED, rows_of, values_of
from tests.experiments.verbs.typed import fails, run, simulate

TINY = ("--model", "tiny", "--cluster", "hgx-h100", "--scope", "attention", "--seeds", "1")


@pytest.mark.sweep
def test_lists_are_rows_of_simulate_and_one_that_cannot_be_played_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("simulate", *TINY, "--seq", "16K,8K", "--gpus", "2,3", "--schedule", "ring,ulysses")
    printed = run(capsys, *asked)
    assert re.match(r"Ring is fastest at 8K on 2 GPUs \(.* for attention|Ulysses is fastest at ", printed)
    assert "at 16K on 2 GPUs (" in printed.splitlines()[0]
    assert "; nothing can be played at 16K on 3 GPUs, at 8K on 3 GPUs" in printed.splitlines()[0]
    found = json.loads(run(capsys, *asked, "--json"))
    assert found["answer"] == printed.splitlines()[0]
    rows = [(row["gpus"], row["seq"], row["schedule"], row["degrees"], bool(row["error"])) for row in found["rows"]]
    assert rows == [
        (2, 16384, "ring", "R 2", False), (2, 16384, "ulysses", "U 2", False),
        (2, 8192, "ring", "R 2", False), (2, 8192, "ulysses", "U 2", False),
        (3, 16384, "ring", None, True), (3, 16384, "ulysses", None, True),
        (3, 8192, "ring", None, True), (3, 8192, "ulysses", None, True),
    ]  # fmt: skip
    alone = simulate(capsys, *TINY, "--seq", "8K", "--gpus", "2", "--schedule", "ulysses")
    assert found["rows"][3]["step_time_s"] == alone["step_time_s"]


@pytest.mark.sweep
def test_lists_are_rows_of_sweep_and_axes_of_winners(capsys: pytest.CaptureFixture[str]) -> None:
    lists = (*TINY, "--seq", "8K..16K*2", "--schedule", "ring,zigzag", "--gpus", "2", "--jobs", "1")
    found = json.loads(run(capsys, "sweep", *lists, "--step-only", "--json"))
    assert [(row["seq"], row["schedule"], row["degrees"]) for row in found["rows"]] == [
        (8192, "ring", "R 2"), (8192, "zigzag", "R 2"), (16384, "ring", "R 2"), (16384, "zigzag", "R 2"),
    ]  # fmt: skip
    assert re.search(r"is fastest at (8|16)K \(", found["answer"])
    both = json.loads(run(capsys, "sweep", *lists, "--step-only", "--vary", "batch=1,2", "--json"))["rows"]
    assert len(both) == 8
    places = json.loads(run(capsys, "winners", *lists, "--json"))["rows"]
    assert [(row["seq"], row["degrees"]) for row in places] == [(8192, "R 2"), (16384, "R 2")]
    same = json.loads(run(capsys, "winners", *TINY, *lists[10:], "--across", "seq=8K,16K", "--json"))
    assert same["rows"] == places


def test_winners_say_why_one_cannot_be_played(capsys: pytest.CaptureFixture[str]) -> None:
    three = ("winners", *TINY, "--gpus", "2", "--schedule", "ring,zigzag,single", "--seq", "8K,16K", "--jobs", "1")
    printed = run(capsys, *three)
    assert printed.count("- single: --gpus 2 is not the one rank that this schedule takes") == 1
    assert re.search(r"│ (ring|zigzag) R 2", printed)


@pytest.mark.sweep
def test_fit_has_a_row_for_each_place(capsys: pytest.CaptureFixture[str]) -> None:
    step = ("fit", "--model", "tiny", "--cluster", "hgx-h100", "--layers", "1", "--seeds", "1")
    asked = (*step, "--seq", "2K", "--schedule", "ring,ulysses", "--gpus", "2,3")
    rows = json.loads(run(capsys, *asked, "--json"))["rows"]
    assert [(row["gpus"], row["row"], row["degrees"]) for row in rows] == [
        (2, "ring", "R 2"), (2, "ulysses", "U 2"), (3, "ring", "R 3"), (3, "ulysses", ""),
    ]  # fmt: skip
    assert "Ulysses degree 3" in rows[-1]["error"]
    printed = run(capsys, *asked)
    assert re.search(r"The longest that fits is 2K, by ring on 3 GPUs in .* a step", printed)
    assert re.search(r"│ 3 +│ ulysses +│ - +│", printed)
    assert "- ulysses: Ulysses degree 3" in printed


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("typed", "message"),
    [
        (("--gpus", ","), "--gpus ,: expected values separated by commas, such as 8,16,64"),
        (("--gpus", "8,,16"), "--gpus 8,,16: expected values separated by commas"),
        (("--gpus", "8,eight"), "--gpus 'eight': expected a whole number"),
        (("--gpus", "8,0"), "--gpus 0: expected a whole number of 1 or more"),
        (("--gpus", "8,16,8"), "--gpus: 8 stands there twice"),
        (("--seq", "64K,65536"), "--seq: 65536 stands there twice"),
        (("--seq", "8K,1Q"), "8K or 1M"),
        (("--seq", "8K..1K*2"), "--seq 8K..1K*2: expected LOW..HIGH*FACTOR"),
        (("--nodes", "1..20000+1"), "--nodes has 20000 values: at most 1000"),
        (("--gpus", ",".join(map(str, range(10_000)))), "--gpus has 10000 values: at most 1000"),
        (("--gpus", "1..100+1", "--seq", "1K..100K+1K"), "100 of --gpus x 100 of --seq are 10000 rows"),
        (("--schedule", "ring,rign"), "unknown schedule 'rign' (did you mean 'ring'?)"),
        (("--stack", "fsdp,fsdb"), "unknown stack 'fsdb'"),
        (("--model", "tiny,tini"), "unknown model 'tini'"),
        (("--cluster", "hgx-h100,hgx-h1"), "unknown cluster 'hgx-h1'"),
        (("--schedule", "ring,ring"), "--schedule: ring stands there twice"),
        (("--tp-degree", "3", "--gpus", "8"), "--gpus 8 is not --tp-degree 3, or a multiple of 3: set --gpus 3"),
        (
            ("--cp", "4", "--tp-degree", "2", "--gpus", "6"),
            "--cp 4 x --tp-degree 2 does not divide 6 GPUs: set --gpus 8",
        ),
        (("--cp", "4", "--gpus", "6"), "--cp 4 does not divide 6 GPUs: set --gpus 4 or 8"),
        (("--cp", "4", "--gpus", "8", "--dp-degree", "1"), "--gpus 8 is not --cp 4 x --dp-degree 1: set --gpus 4"),
        (
            ("--cp", "4", "--pp-degree", "2", "--gpus", "12"),
            "--cp 4 x --pp-degree 2 does not divide 12 GPUs: set --gpus",
        ),
        (("--pp-degree", "3", "--gpus", "8"), "--gpus 8 is not --pp-degree 3, or a multiple of 3"),
        (("--pp-degree", "0"), "--pp-degree 0"),
        (("--pipeline", "1f1b", "--set", "schedule.pipeline_schedule=gpipe"), "--pipeline 1f1b, and --set schedule"),
        (("--cp", "4", "--ring-degree", "2"), "--cp 4 is not --ring-degree 2 of schedule 'ring'"),
        (("--cp", "2", "--schedule", "single"), "--cp 2: schedule 'single' splits no sequence"),
        (("--accumulate", "0"), "--accumulate 0: expected a whole number of 1 or more"),
        (
            ("--accumulate", "2", "--set", "schedule.micro_batches=2"),
            "--accumulate 2, and --set schedule.micro_batches=2: they say the same",
        ),
        (("--accumulate", "3", "--batch", "2", "--scope", "step"), "micro_batches"),
        (
            ("--gpus", "2,4", "--vary", "cluster.nvlink.bytes_per_s=*1,*2"),
            "--vary is of one step: leave it out, or all",
        ),
        (("--seq", "1K,2K", "--neighbours"), "--neighbours are of one step"),
    ],
)
def test_lists_that_are_wrong(capsys: pytest.CaptureFixture[str], typed: tuple[str, ...], message: str) -> None:
    told = fails(capsys, "simulate", *typed)
    assert message in told
    assert len(told) < 1000


@pytest.mark.parametrize("verb", ["plan", "doctor", "ladder", "crossover", "show"])
def test_other_verbs_take_one_value(capsys: pytest.CaptureFixture[str], verb: str) -> None:
    also = ("--schedule", "ring,zigzag", "--along", "seq=1K..2K") if verb == "crossover" else ()
    told = fails(capsys, verb, *also, "--gpus", "2,4")
    assert "--gpus 2,4: expected one value; simulate, sweep, fit and winners take a list" in told


def test_what_a_sweep_varies_is_named_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--seq lists several, too" in fails(capsys, "sweep", "--seq", "1K,2K", "--vary", "seq=1K,2K")
    assert "unknown schedule 'zigzg'" in fails(capsys, "sweep", "--vary", "schedule=ring,zigzg")
    both = ("winners", "--schedule", "ring,zigzag", "--seq", "1K,2K", "--across", "seq=1K,2K")
    assert "seq is varied twice" in fails(capsys, *both)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"cp": 4}, "R 4"),
        ({"cp": 4, "gpus": 8}, "R 4 DP 2"),
        ({"cp": 4, "dp_degree": 3}, "R 4 DP 3"),
        ({"cp": 8, "nodes": 2}, "R 8 DP 2"),
        ({"cp": 8, "cluster": "16xH100"}, "R 8 DP 2"),
        ({"cp": 8, "schedule": "usp", "ulysses_degree": 2}, "U 2 R 4"),
        ({"cp": 1, "schedule": "single", "gpus": 4}, "DP 4"),
        ({"cp": 8, "schedule": "ulysses", "gpus": 16}, "U 8 DP 2"),
        ({"pp_degree": 2}, "R 4 PP 2"),
        ({"pp_degree": 16, "schedule": "single"}, "PP 16"),
        ({"pp_degree": 4, "schedule": "single", "gpus": 8, "dp_degree": 2}, "PP 4 DP 2"),
        ({"cp": 4, "pp_degree": 2, "gpus": 16}, "R 4 PP 2 DP 2"),
    ],
)
def test_cp_is_degrees_and_replicas(fields: dict[str, object], named: str) -> None:
    """GPUs are so many times the replicas: 16 of cp 8 are two, which the degrees also say."""
    assert Setup(**{"cluster": "hgx-h100", **fields}).resolved().mesh.named() == named  # type: ignore[arg-type]


@pytest.mark.sweep
def test_cp_and_accumulation_are_what_is_spelled_out(capsys: pytest.CaptureFixture[str]) -> None:
    step = ("--model", "tiny", "--cluster", "hgx-h100", "--layers", "1", "--seq", "2K", "--seeds", "1", "--gpus", "4")
    short = simulate(capsys, *step, "--cp", "2", "--accumulate", "2", "--tp", "1")
    long = ("--ring-degree", "2", "--dp-degree", "2", "--batch", "2", "--set", "schedule.micro_batches=2")
    assert short == simulate(capsys, *step, *long)
    found = json.loads(run(capsys, "simulate", *step, "--cp", "2,4", "--json"))
    assert [row["degrees"] for row in found["rows"]] == ["R 2 DP 2", "R 4"]
    assert "needs least GPU time for a token" in found["answer"]


def test_cp_and_accumulation_come_before_what_a_file_says(capsys: pytest.CaptureFixture[str]) -> None:
    file = "tests/setup/imports/torchtitan-llama3-8b.toml"
    _, plain = parse(["simulate", "--from", file, "--gpus", "16"])
    before = plain.selection.setup().resolved().mesh
    _, command = parse(["simulate", "--from", file, "--gpus", "16", "--cp", "2", "--accumulate", "4"])
    setup = command.selection.setup()
    mesh = setup.resolved().mesh
    assert (mesh.size // mesh.dp, mesh.dp) == (2, 8)
    assert (mesh.size // mesh.dp) != before.size // before.dp
    assert "schedule.micro_batches=4" in setup.set
    assert setup.batch % 4 == 0
    refused = fails(capsys, "simulate", "--from", file, "--cp", "4", "--ring-degree", "2")
    assert "--cp 4 is not --ring-degree 2" in refused


@pytest.mark.sweep
def test_documents_need_not_divide(capsys: pytest.CaptureFixture[str]) -> None:
    """5000 + 3001 + 193 = 8194 tokens: 2 are missing on 4 ranks, 6 on 8 halves; execution refuses them."""
    packed = (*TINY, "--documents", "5000,3001,193", "--gpus", "4")
    printed = run(capsys, "simulate", *packed, "--schedule", "ulysses")
    assert printed.startswith("padded: 2 tokens behind the documents, which no other token sees\n")
    both = run(capsys, "simulate", *packed, "--schedule", "ulysses,zigzag")
    assert "padded: 2 tokens behind the documents for ulysses, " in both
    assert "padded: 6 tokens behind the documents for zigzag, " in both
    swept = ("sweep", *packed, "--schedule", "ulysses,zigzag", "--step-only", "--jobs", "1")
    assert run(capsys, *swept).startswith("padded: 2 to 6 tokens behind the sequence, which no other token sees\n")
    spelled = simulate(capsys, *packed, "--schedule", "ulysses", "--pad")
    assert simulate(capsys, *packed, "--schedule", "ulysses") == spelled
    assert "8194 is no multiple of 4" in fails(capsys, "show", *packed[2:])
    assert "padded" not in run(capsys, "simulate", *TINY, "--documents", "5000,3192", "--gpus", "4")


def test_what_lists_are() -> None:
    assert rows_of({}) == [{}]
    assert rows_of({"gpus": ["2", "4"], "seq": ["1K"]}) == [{"gpus": "2", "seq": "1K"}, {"gpus": "4", "seq": "1K"}]
    assert len(values_of("gpus", f"1..{MOST_TYPED}+1")) == MOST_TYPED
    with pytest.raises(InputError, match="`gpus` has 1001 values"):
        values_of("gpus", f"1..{MOST_TYPED + 1}+1")
    assert values_of("model", "../models/a.toml, tiny") == ["../models/a.toml", "tiny"]


@pytest.mark.sweep
def test_a_planner_of_documents_is_a_row(capsys: pytest.CaptureFixture[str]) -> None:
    packed = (*TINY, "--documents", "1024,1024", "--gpus", "2", "--schedule", "ring,groups")
    found = json.loads(run(capsys, "simulate", *packed, "--json"))["rows"]
    swept = json.loads(run(capsys, "sweep", *packed, "--step-only", "--jobs", "1", "--json"))["rows"]
    assert [row["schedule"] for row in found] == [row["schedule"] for row in swept] == ["ring", "groups"]
    assert [row["step_time_s"] for row in found] == [row["step_time_s"] for row in swept]
    without = (*TINY, "--gpus", "2", "--schedule", "ring,groups", "--json")
    rows = json.loads(run(capsys, "simulate", *without))["rows"]
    assert "plans documents: set `documents`" in rows[1]["error"]
    main(["simulate", *without[:-1]])
    assert "set --documents" in capsys.readouterr().out
