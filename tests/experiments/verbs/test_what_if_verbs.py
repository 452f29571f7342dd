"""What-ifs on the command line: elasticities beside the figures, and rooflines."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from experiments.verbs.cli import main
from sim.plan.search.search import Search
from tests.experiments.verbs.test_cli import H100, fails, run

pq = pytest.importorskip("pyarrow.parquet")  # which a machine that only runs GPU tests has not


def test_roofline_prints_balances_and_kernels_and_writes_a_page(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "roofline.html"
    printed = run(capsys, "roofline", "--seq", "8K", "--page", str(page))
    assert re.search(r"hgx-h100 +│ 989.4 TFLOP/s │ 3.35 TB/s +│ 295", printed)
    assert re.search(r"8K +│ attention_forward standard .*│ memory", printed)
    found = json.loads(run(capsys, "roofline", "--seq", "8K", "--cluster", "dgx-a100", "--json"))
    assert round(next(row for row in found["balance"] if row["cluster"] == "dgx-a100")["flops_per_byte"]) == 153
    assert {row["seq"] for row in found["kernels"]} == {8192}
    html = page.read_text()
    assert html.count("<tr data-row=") == len(found["kernels"]), "one mark and one row for each kernel"
    assert html.count('class="shape"') >= len(found["kernels"])
    assert "295 FLOPs a byte by datasheet" in html
    assert printed.splitlines()[1].startswith("H100-SXM-80GB does 295 FLOPs in the time of one byte of its memory; ")
    assert found["answer"].startswith("A100-SXM-80GB does 153 FLOPs in the time of one byte")
    assert "beyond the measured range" not in printed
    assert "beyond the measured range: " in run(capsys, "roofline", "--seq", "128K", "--evidence")
    assert "--seq 8K,,1M" in fails(capsys, "roofline", "--seq", "8K,,1M")


def test_sensitivity_is_printed_beside_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    printed = run(capsys, "simulate", *H100, "--sensitivity")
    assert "doubling saves" in printed
    assert re.search(r"compute +│ -0\.\d{3}", printed)
    rows = json.loads(run(capsys, "simulate", *H100, "--sensitivity", "--json"))
    assert rows[0].keys() == {"figure", "elasticity", "bound_changes_nearby"}
    assert [row["figure"] for row in rows if row["elasticity"] < -0.5] == ["compute"]
    for several in (("--schedule", "ring,zigzag"), ("--vary", "cluster.nvlink.bytes_per_s=*1,*2")):
        assert "--sensitivity is of one step" in fails(capsys, "simulate", *H100, "--sensitivity", *several)


def test_memory_is_told_in_a_sentence_and_by_terms(capsys: pytest.CaptureFixture[str]) -> None:
    """The terms, what lies beside them and what is left are all of the memory, or more than all by what is missing."""
    step = ("simulate", "--model", "tiny", "--cluster", "hgx-h100", "--gpus", "2", "--layers", "1", "--seq", "4K")
    printed = run(capsys, *step, "--memory")
    assert re.search(r"^[\d.]+ MiB is allocated, most of it for .* of 80 GiB is left$", printed, re.MULTILINE)
    found = json.loads(run(capsys, *step, "--memory", "--json"))
    assert found["answer"] in printed
    assert sum(row["share"] for row in found["rows"]) == pytest.approx(1)
    sizes = [row["bytes"] for row in found["rows"] if row["is"] == "allocated"]
    assert sizes == sorted(sizes, reverse=True)
    tight = json.loads(run(capsys, *step, "--memory", "--json", "--set", "cluster.hbm.capacity_bytes=4e9"))
    *shares, missing = (row["share"] for row in tight["rows"])
    assert sum(shares) == pytest.approx(1 + (missing if "is missing" in tight["answer"] else -missing))
    assert "set --scope step" in fails(capsys, *step, "--scope", "layer", "--memory")
    assert "--memory is of one step" in fails(capsys, *step, "--memory", "--vary", "cluster.nvlink.bytes_per_s=*1,*2")


def test_what_ifs_of_one_figure_begin_with_what_it_changes(capsys: pytest.CaptureFixture[str]) -> None:
    vary = ("simulate", *H100, "--processes", "1", "--vary")
    slow = run(capsys, *vary, "cluster.gpu[0].speed=1,0.5").splitlines()
    assert re.match(r"With gpu\[0\]\.speed=0\.5 a step takes .* more than with gpu\[0\]\.speed=1 \(", slow[0]), slow[0]
    found = json.loads(run(capsys, *vary, "cluster.gpu[0].speed=1,0.5", "--json"))
    assert found["answer"] == slow[0]
    assert found["rests_on"]
    assert [row["cluster.gpu[0].speed"] for row in found["rows"]] == ["1", "0.5"]
    same = run(capsys, *vary, "cluster.nic.bytes_per_s=*1,*2").splitlines()
    assert "as long as with nic.bytes_per_s=*1" in same[0], "one node has no traffic over NICs"


@pytest.mark.slow
def test_the_price_of_memory_is_printed_for_training_steps(capsys: pytest.CaptureFixture[str]) -> None:
    """Keeping more than inputs of layers takes 22.2 GB and more (``tests/plan/test_memory_price.py``)."""
    step = (
        "simulate", "--model", "tiny", "--cluster", "hgx-h100", "--gpus", "2", "--layers", "3", "--schedule", "zigzag",
        "--seq", "256K",
    )  # fmt: skip
    step = (*step, "--set", "cluster.hbm.capacity_bytes=22000000000", "--set", "schedule.loss=whole", "--sensitivity")
    printed = " ".join(run(capsys, *step).split())
    assert re.search(r"GPU memory of 20\.49 GiB: elasticity -\d", printed)
    assert "host memory of 931.3 GiB: elasticity 0, it does not bind the fastest way that fits" in printed
    rows = {row["figure"]: row for row in json.loads(run(capsys, *step, "--json"))}
    assert rows["GPU memory"]["elasticity"] < 0 == rows["host memory"]["elasticity"]
    assert rows["GPU memory"]["more_step_time_s"] < rows["GPU memory"]["step_time_s"]


def test_balance_prints_planners_ranks_and_hops_and_writes_a_page(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Of one's own documents and layout: the file's order, and contiguous parts of it."""
    lengths, order, page = tmp_path / "lengths.jsonl", tmp_path / "order.txt", tmp_path / "balance.html"
    lengths.write_text('{"n": 3072}\n{"n": 1024}\n')
    order.write_text(" ".join(map(str, range(4096))))
    batch = ("--documents", str(lengths), "--column", "n", "--gpus", "2", "--planners", "zigzag,groups")
    printed = run(capsys, "balance", *batch, "--layout", str(order), "--page", str(page))
    assert "2 documents of 1K to 3K tokens, 4K in all" in printed
    assert printed.index("\n│ own layout ") < printed.index("\n│ zigzag ") < printed.index("\n│ lower bound")
    assert re.search(r"^Own layout attends this batch fastest, in .* times as long$", printed, re.MULTILINE)
    assert "own layout, by rank" in printed
    assert "own layout, by hop" in printed
    found = json.loads(run(capsys, "balance", *batch, "--json"))
    assert found["documents"] == [3072, 1024]
    assert re.match(r"Groups attends this batch fastest|Zigzag attends this batch fastest", found["answer"])
    assert len(found["rests_on"]) == 3
    assert [row["planner"] for row in found["planners"]] == ["zigzag", "groups", "lower bound"]
    assert sum(row["pairs"] for row in found["of"]["zigzag"]["ranks"]) == 3072 * 3073 // 2 + 1024 * 1025 // 2
    html = page.read_text()
    assert html.count("<tr data-row=") == 4
    assert html.count('class="shape"') >= 3 * 2, "a bar for each rank of every planner"
    order.write_text("0 1 1")
    assert "`order` has 3 positions, the batch 4096 tokens" in fails(capsys, "balance", *batch, "--layout", str(order))
    order.write_text("zero")
    assert "expected positions from 0" in fails(capsys, "balance", *batch, "--layout", str(order))
    assert "--layout" in fails(capsys, "balance", *batch, "--layout", str(tmp_path / "none.txt"))
    assert "unknown ending" in fails(capsys, "balance", "--documents", "lengths.csv")
    assert "did you mean 'zigzag'" in fails(capsys, "balance", "--planners", "zigzg")


def test_balance_of_other_masks(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    page = tmp_path / "balance.html"
    batch = ("--documents", "3072,1024", "--gpus", "2", "--planners", "zigzag,wlb-llm", "--mask", "lambda:64:256")
    printed = run(capsys, "balance", *batch, "--page", str(page))
    assert "4K in all, mask lambda:64:256" in printed
    assert re.search(r"zigzag +│ [0-9.]+ .s", printed)
    assert "mask lambda:64:256" in page.read_text()
    found = json.loads(run(capsys, "balance", *batch, "--json"))
    assert found["mask"] == "lambda:64:256"
    assert "one band each" in found["planners"][1]["error"]
    assert "allowed are causal, full, window:TOKENS" in fails(capsys, "balance", "--mask", "lamda:64:256")


@pytest.mark.slow
def test_balance_draws_the_same_batch_from_a_seed(capsys: pytest.CaptureFixture[str]) -> None:
    drawn = ("balance", "--documents", "magi", "--seq", "16K", "--planners", "zigzag", "--json")
    first, again, other = (json.loads(run(capsys, *drawn, "--seed", seed))["documents"] for seed in ("1", "1", "2"))
    assert first == again != other
    assert sum(first) == 16384
    main([*drawn, "--seeds", "3"])
    several = json.loads(capsys.readouterr().out)
    assert several["answer"].startswith("Zigzag attends 3 batches fastest, in ")
    rows = several["rows"]
    assert [(row["seed"], row["planner"]) for row in rows[::2]] == [(seed, "zigzag") for seed in range(3)]
    main([*drawn[:-1], "--seeds", "3"])
    printed = capsys.readouterr().out
    assert "3 batches of 16K tokens of magi" in printed
    assert re.search(r"zigzag +│ .* \(.* to .*\)", printed)
    assert "--layout and --page are of one batch" in fails(capsys, *drawn, "--seeds", "3", "--page", "page.html")
    assert "a file is one batch" in fails(capsys, "balance", "--documents", "lengths.txt", "--seeds", "3")
    assert "1 or more" in fails(capsys, *drawn, "--seeds", "0")


SWEEP = (
    "sweep", "--model", "llama3-8b", "--cluster", "hgx-h100", "--layers", "1", "--scope", "layer", "--step-only",
    "--jobs", "1",
)  # fmt: skip


def test_a_sweep_is_written_and_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    parquet, csv = tmp_path / "rows.parquet", tmp_path / "rows.csv"
    vary = ("--vary", "seq=32K,64K", "--vary", "gpus=2,3")
    printed = run(capsys, *SWEEP, *vary, "--out", str(parquet))
    assert re.search(r"│ 32K +│ 2 +│ R 2 +│ [\d.]+ ms", printed)
    assert printed.startswith("Ring takes ")
    assert "of 4 rows 0 do not fit, 2 cannot be played" in printed
    run(capsys, *SWEEP, *vary, "--out", str(csv))
    found = json.loads(run(capsys, *SWEEP, *vary, "--json"))
    rows = found["rows"]
    assert found["answer"] == printed.splitlines()[0]
    assert found["rests_on"][0].startswith("kernels: ")
    table = pq.read_table(parquet)
    assert table.to_pylist() == rows
    assert b"longstep sweep" in table.schema.metadata
    assert csv.read_text().splitlines()[1].split(",") == list(rows[0])
    assert not list(tmp_path.glob("*.journal"))
    run(capsys, *SWEEP, *vary, "--out", str(parquet))


def test_a_table_whose_rows_all_failed_is_an_error(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Whose file is written all the same."""
    csv = tmp_path / "rows.csv"
    several = ("--schedule", "ulysses", "--gpus", "3,5", "--out", str(csv))
    with pytest.raises(SystemExit) as stop:
        main([*SWEEP, *several])
    captured = capsys.readouterr()
    assert stop.value.code == 2
    assert "none of 2 rows can be played; the first: Ulysses degree 3 does not divide" in captured.err
    assert f"all reasons are in {str(csv)!r}" in captured.err
    assert csv.read_text().count("does not divide num_heads") == 2
    assert "unknown prefix 'typo'" in fails(capsys, "fit", "--set", "typo=1")
    assert "unknown schedule 'fsdp'" in fails(capsys, "fit", "--schedule", "fsdp")
    assert "unknown stack 'zigzag'" in fails(capsys, "fit", "--stack", "zigzag")
    no_map = ("winners", "--schedule", "ulysses,fpdt", "--gpus", "3", "--across", "seq=32K", "--jobs", "1")
    assert "none of 2 rows can be played; the first: Ulysses degree 3" in fails(capsys, *no_map)


def test_what_a_sweep_refuses(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    mine = tmp_path / "mine.csv"
    mine.write_text("a,b\n")
    one = ("--vary", "seq=32K")
    assert "it is not a table of a sweep that Longstep wrote" in fails(capsys, *SWEEP, *one, "--out", str(mine))
    assert "ends in .parquet or .csv" in fails(capsys, *SWEEP, *one, "--out", str(tmp_path / "rows.txt"))
    assert "--vary seq: expected KEY=VALUES" in fails(capsys, *SWEEP, "--vary", "seq")
    assert "`vary` is empty" in fails(capsys, *SWEEP).replace("--vary", "`vary`")
    assert "--jobs 0" in fails(capsys, *SWEEP, *one, "--jobs", "0")


@pytest.mark.sweep
def test_crossovers_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    alone = ("--model", "llama3-8b", "--cluster", "hgx-h100", "--scope", "attention", "--pass", "forward")
    alone = (*alone, "--gpus", "4", "--seeds", "1", "--schedule", "ring,upipe")
    printed = run(capsys, "crossover", *alone, "--along", "seq=8K..64K")
    assert re.search(r"8K +│ \d+K +│ ring +│ \d+K to \d+K", printed)
    assert re.search(r"64K +│ upipe +│", printed)
    found = json.loads(run(capsys, "crossover", *alone, "--along", "seq=8K..64K", "--json"))
    assert (found["along"], found["a"], found["b"]) == ("seq", "ring", "upipe")
    assert re.fullmatch(r"Ring is faster than upipe up to \d+K.*, upipe from there to 64K", found["answer"])
    assert found["answer"] in printed
    at = next(point for point in found["points"] if point["value"] == found["crossings"][0]["value"])
    assert at["a_s"] > at["b_s"]
    assert "--along : expected KEY=LOW..HIGH" in fails(capsys, "crossover", *alone)
    assert "name two with --schedule" in fails(capsys, "crossover", *alone[:-1], "ring", "--along", "seq=8K..32K")


@pytest.mark.sweep
def test_a_map_of_winners_is_printed_with_reasons(capsys: pytest.CaptureFixture[str]) -> None:
    layer = ("--model", "tiny", "--cluster", "hgx-h100", "--scope", "layer", "--seeds", "1", "--gpus", "2")
    both = ("--schedule", "ring,zigzag", "--across", "seq=8K,16K", "--down", "cluster.nvlink.bytes_per_s=*1,/2")
    printed = run(capsys, "winners", *layer, *both, "--jobs", "1")
    assert re.search(r"bytes_per_s +┃ 8K +┃ 16K", printed)
    assert "seq 16K: " in printed
    found = json.loads(run(capsys, "winners", *layer, *both, "--jobs", "1", "--json"))
    assert found["answer"] in printed
    assert len(found["rests_on"]) == 3
    assert "\nkernels: profile 'h100-sxm'" in printed
    rows = found["rows"]
    assert [row["seq"] for row in rows] == [8192, 16384] * 2
    assert all(row["ratio"] >= 1 for row in rows)
    assert "name two or more with --schedule" in fails(capsys, "winners", *layer, "--across", "seq=8K")
    assert "--across : expected KEY=VALUES" in fails(capsys, "winners", *layer, *both[:2])
    assert "name another key" in fails(capsys, "winners", *layer, *both[:4], "--down", "seq=8K")


@pytest.mark.sweep
def test_doctor_says_what_a_run_points_to_and_how_to_check(capsys: pytest.CaptureFixture[str]) -> None:
    """128K on 8 H100 with zigzag take 119 ms: 10 ms is less than attention alone, twice as much a full mask;
    what cannot be told apart is said.
    """
    run_of = ("doctor", *H100, "--schedule", "zigzag")
    printed = run(capsys, *run_of, "--step-time", "10ms")
    assert printed.startswith("Impossible: 10 ms a step is below 62.2 ms, the floor by FLOPs at the peak; ")
    assert "attention kernels alone 107 ms" in printed
    slow = run(capsys, *run_of, "--step-time", "0.22", "--memory", "2GiB")
    assert re.match(r"Too slow: 220 ms a step is 1\.8\d times the predicted 1\d\d ms \(.*; .* would explain it\n", slow)
    assert "cannot be told apart" in slow
    assert "- full-mask: " in slow
    assert "to check: print what attention is called with" in slow
    found = json.loads(run(capsys, *run_of, "--step-time", "220ms", "--json"))
    assert found["verdict"] == "too slow"
    assert found["answer"].startswith("Too slow: ")
    assert len(found["rests_on"]) == 3
    assert {"slow-rank", "full-mask"} <= {row["name"] for row in found["causes"] if row["consistent"]}
    same = run(capsys, *run_of, "--memory", "1.7GiB", "--also", "gpus=4,memory=1.7GiB")
    assert "did not move as it should" in same


@pytest.mark.sweep
def test_the_doctor_lays_a_trace_beside_the_simulated_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A trace of the same simulation differs nowhere; that of a full mask names the kind of kernels that is off."""
    run_of = (*H100, "--schedule", "zigzag", "--gpus", "2")
    for name, more in (("same", ()), ("full", ("--mask", "full"))):
        run(capsys, "simulate", *run_of, *more, "--trace", str(tmp_path / f"{name}.json"))
    same = run(capsys, "doctor", *run_of, "--trace", str(tmp_path / "same.json"))
    assert re.search(r"attention forward +│ ([\d.]+ m?s) +│ \1 +│", same)
    assert "Healthy: " in same
    assert " times as long" not in same
    full = run(capsys, "doctor", *run_of, "--trace", str(tmp_path / "full.json"))
    assert re.search(r"- attention backward: .* 1\.9\d times|- attention backward: .* 2 times", full)
    assert "- full-mask: " in full
    found = json.loads(run(capsys, "doctor", *run_of, "--trace", str(tmp_path / "full.json"), "--json"))
    assert [row["rank"] for row in found["traced"]["ranks"]] == [0, 1]


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ((), "nothing was measured: give --step-time, --tokens-per-s, --memory, --mfu or --trace"),
        (("--trace", "none.json"), "'none.json' cannot be read (No such file or directory); set it with --trace"),
        (("--step-time", "fast"), "--step-time fast: expected a time above 0 such as 41s or 350ms"),
        (("--step-time", "0"), "--step-time 0: expected a time"),
        (("--memory", "61 parsecs"), "--memory 61 parsecs: expected a size"),
        (("--mfu", "41", "--step-time", "1"), "--mfu 41: expected a share such as 0.41, or 41%"),
        (("--step-time", "1", "--rank-times", "1,,2"), "--rank-times : expected a time"),
        (("--tokens-per-s", "nan"), "--tokens-per-s nan: expected a number above 0"),
        (("--memory", "2GiB", "--also", "gpu=4"), "'gpu' (did you mean 'gpus'?)"),
        (("--memory", "2GiB", "--also", "gpus=four"), "--also gpus=four: gpus 'four': expected a whole number"),
    ],
)
def test_the_doctor_refuses_what_is_no_measurement(
    capsys: pytest.CaptureFixture[str], typed: tuple[str, ...], message: str
) -> None:
    assert message in fails(capsys, "doctor", *H100, *typed)


PLANNED = (
    "plan", "--model", "tiny", "--gpus", "2", "--schedule", "ulysses", "--layers", "2", "--ulysses-degree", "2"
)  # fmt: skip


@pytest.mark.slow
def test_plan_answers_the_other_way_round(capsys: pytest.CaptureFixture[str]) -> None:
    """The longest context, the fewest GPUs, the cheapest cluster."""
    small = (*PLANNED, "--seq", "4K")
    for kept in ("checkpoint=full", "mlp=whole", "activations=hbm", "optimiser=gpu"):
        small = (*small, "--vary", kept)
    ended = "The longest context is at least 8K, 8192 tokens, with ulysses (U 2), "
    assert ended in run(capsys, *small, "--longest", "--until", "8K")
    printed = run(capsys, *small, "--longest", "--step-time", "1us")
    assert "Nothing is enough at 512: what may fit takes" in printed
    assert "what may fit takes" in printed
    found = json.loads(run(capsys, *small, "--fewest-gpus", "--tokens-per-s", "1000", "--json"))
    assert found["value"] == 2
    assert [row["reaches"] for row in found["tried"]] == [False, True]
    assert found["best"][0]["gpus"] == 2
    prices = ("--cheapest", "--price", "hgx-h100=100,dgx-a100=1/GPU-h")
    assert "2 x dgx-a100" in run(capsys, *small, *prices)
    lost = {row["degrees"]: row["why"] for row in json.loads(run(capsys, *small, *prices, "--json"))["lost"]}
    assert lost["U 2, 2 x dgx-a100"] == "the cheapest"
    assert "dearer" in lost["U 2, 2 x hgx-h100"]


def test_plan_answers_one_question_with_what_it_needs(capsys: pytest.CaptureFixture[str]) -> None:
    small = (*PLANNED, "--seq", "4K")
    assert "--counts x: expected whole numbers" in fails(capsys, *small, "--fewest-gpus", "--counts", "2,x")
    assert "--counts 2: for --fewest-gpus" in fails(capsys, *small, "--counts", "2")
    assert "--cheapest needs the price" in fails(capsys, *small, "--cheapest")
    assert "ask one at a time" in fails(capsys, *small, "--cheapest", "--longest")
    assert "are for --longest" in fails(capsys, *small, "--step-time", "60s")
    assert "--step-time soon: expected a time" in fails(capsys, *small, "--longest", "--step-time", "soon")
    assert "--price free: expected prices" in fails(capsys, *small, "--cheapest", "--price", "a=free")
    assert "several clusters are for" in fails(capsys, *small, "--price", "a=1,b=2")


@pytest.mark.slow
def test_a_search_that_was_cut_says_so_once(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its answer holds, since a configuration is known with it, and is no more than a bound."""
    small = ("plan", "--model", "tiny", "--gpus", "2", "--seq", "4K", "--schedule", "ulysses", "--layers", "2")
    small = (*small, "--set", "cluster.hbm.capacity_bytes=4e9", "--jobs", "1", "--vary", "mlp=whole")
    searched = Search.run
    monkeypatch.setattr(Search, "run", cut(searched))
    longest = run(capsys, *small, "--longest", "--until", "1M")
    assert re.search(
        r"The longest context is at least \d+ tokens, with ulysses .* left; the search was cut short", longest
    )
    assert "tokens to 1 %" not in longest
    monkeypatch.setattr(Search, "run", cut(searched))
    fewest = run(capsys, *small, "--fewest-gpus", "--counts", "1,2")
    assert re.search(r"The fewest GPUs are 2 or fewer, with ulysses .* left; the search was cut short", fewest)
    for printed in (longest, fewest):
        assert printed.count("cut short") == printed.count("--limit SECONDS searches longer") == 1
        assert "1 simulated" in printed
        assert "nothing" not in printed


def cut(run_search: Callable[..., None]) -> Callable[..., None]:
    """Return a search that has time for whether two GPUs do, at the first length that is asked for, and for nothing
    else.
    """
    had: list[Search] = []

    def some(search: Search, jobs: int, *, until_one: bool = False) -> None:
        gpus = search.families[0].setup.gpus
        if until_one and gpus == 2 and not had:
            had.append(search)
            run_search(search, jobs, until_one=True)

    return some


@pytest.mark.slow
def test_plan_decides_every_tensor_within_a_budget(capsys: pytest.CaptureFixture[str]) -> None:
    small = (*PLANNED, "--seq", "64K")
    for kept in ("mlp=whole", "optimiser=gpu"):
        small = (*small, "--vary", kept)
    found = json.loads(run(capsys, *small, "--memory-budget", "70GiB", "--tensors", "x,out", "--most", "1", "--json"))
    assert found["best"][0]["options"].startswith("x keep, out keep")
    assert found["configurations"] == 2 * 3


def test_plan_refuses_what_is_no_budget(capsys: pytest.CaptureFixture[str]) -> None:
    small = (*PLANNED, "--seq", "64K")
    assert "--memory-budget lots: expected a size" in fails(capsys, *small, "--memory-budget", "lots")
    assert "at most what a GPU has" in fails(capsys, *small, "--memory-budget", "100GiB")
    assert "unknown tensor 'gates' (did you mean 'gate'?)" in fails(capsys, *small, "--tensors", "gates")
    assert "leave out --longest" in fails(capsys, *small, "--longest", "--tensors", "x")
