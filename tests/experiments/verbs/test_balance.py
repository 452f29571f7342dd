"""Balance on the command line: planners, ranks and hops of a batch."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from experiments.verbs.cli import main
from tests.experiments.verbs.typed import fails, run


@pytest.mark.sweep
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


@pytest.mark.sweep
def test_with_stages_every_packing_is_played(capsys: pytest.CaptureFixture[str]) -> None:
    """As ``simulate --pack`` plays it."""
    typed = ("--pp-degree", "2", "--gpus", "2", "--seq", "4K", "--seed", "3")
    small = ("--set", "model.num_layers=2")
    asked = ("balance", *typed, "--micro-batches", "3", "--pack", "concatenated,wlb-llm", *small)
    printed = run(capsys, *asked)
    assert re.search(
        r"^(Wlb-llm|Concatenated) trains fastest, .* of the step; .* times as fast: ", printed, re.MULTILINE
    )
    found = json.loads(run(capsys, *asked, "--json"))
    assert [(row["packer"], row["planner"]) for row in found["rows"]] == [
        ("concatenated", "all-gather"), ("wlb-llm", "all-gather"),
    ]  # fmt: skip
    step = ("--schedule", "allgather", "--accumulate", "3", "--documents", "wlb-llm", "--jitter", "0", *small)
    played = json.loads(run(capsys, "simulate", *typed, *step, "--pack", "wlb-llm", "--json"))
    assert played["uneven"] == pytest.approx(found["rows"][1]["uneven"], abs=0.01)
    said = fails(capsys, "balance", "--micro-batches", "3")
    assert "--micro-batches and --pack are of pipelines: set --pp-degree" in said
    assert "leave out --seeds" in fails(capsys, *asked, "--seeds", "2")
