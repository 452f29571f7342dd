"""Planning on the command line: the best that fits, the other way round, and within a budget."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest

from sim.plan.search.search import Search
from tests.experiments.verbs.typed import fails, run


@pytest.mark.sweep
def test_plan_prints_the_best_that_fits_and_why_others_lose(capsys: pytest.CaptureFixture[str]) -> None:
    """With what a billion tokens cost; where nothing fits what is missing least."""
    small = ("plan", "--model", "tiny", "--gpus", "2", "--seq", "4K", "--global-batch", "1", "--schedule", "ulysses")
    small = (*small, "--layers", "2")
    small = (
        *small,
        "--ulysses-degree",
        "2",
        "--vary",
        "mlp=whole",
        "--vary",
        "activations=hbm",
        "--vary",
        "optimiser=gpu",
    )
    printed = run(capsys, *small, "--price", "2.5", "--most", "1")
    assert "ulysses (U 2)" in printed
    assert re.search(r"\nUlysses \(U 2\) trains fastest, with checkpoint none, .*: .* m?s a step \(", printed)
    assert re.search(r", [\d.]+ for a billion tokens; fits with [\d.]+ GiB left\n", printed)
    assert printed.index("\n└") < printed.index("\nkernels: ") < printed.index("\nsteps bound by ")
    once = (*small, "--most", "1", "--vary", "checkpoint=full", "--vary", "loss=whole")
    assert "why it loses" not in printed
    everything = run(capsys, *once, "--evidence")
    assert all(told in everything for told in ("why it loses", "the fastest", "doubling one figure of the machine"))
    found = json.loads(run(capsys, *once, "--json"))
    assert next(iter(found)) == "answer"
    assert found["answer"] in everything
    assert len(found["rests_on"]) == 3
    assert found["evidence"]["profile"] == "h100-sxm"
    assert found["best"][0]["options"].startswith("checkpoint full")
    assert found["slack"] == 0
    tight = ("--set", "cluster.hbm.capacity_bytes=1e9", "--vary", "checkpoint=full")
    assert "\nNothing fits: ulysses (U 2) with " in run(capsys, *small, *tight)
    assert "no schedule has it" in fails(capsys, *small, "--vary", "chunkk=1")
    assert "--vary loss: expected OPTION=VALUE" in fails(capsys, *small, "--vary", "loss")
    assert "--stack, --dp-degree" in fails(capsys, *small, "--stack", "fsdp")


LONG = (
    "plan", "--model", "tiny", "--gpus", "2", "--seq", "128K", "--schedule", "ulysses", "--layers", "1",
    "--vary", "checkpoint=full", "--vary", "mlp=whole", "--vary", "activations=hbm", "--vary", "optimiser=gpu",
)  # fmt: skip


@pytest.mark.sweep
def test_plan_says_which_global_batch_it_assumed(capsys: pytest.CaptureFixture[str]) -> None:
    """In its first line."""
    printed = run(capsys, *LONG)
    assert printed.startswith("assumed: --cluster hgx-h100 --global-batch 4\n")
    assert "4 sequences (512K tokens) a step: 2 configurations" in printed
    assert "--global-batch 1M is in tokens" in fails(capsys, *LONG, "--longest", "--global-batch", "1M")


@pytest.mark.slow
def test_plan_keeps_the_global_batch_that_is_typed(capsys: pytest.CaptureFixture[str]) -> None:
    """Replicas of ``any`` number train as many sequences as they are."""
    printed = run(capsys, *LONG, "--global-batch", "256K")
    assert printed.startswith("assumed: --cluster hgx-h100\n")
    assert "2 sequences (256K tokens) a step: 2 configurations" in printed
    rows = json.loads(run(capsys, *LONG, "--global-batch", "any", "--json"))["best"]
    assert {row["schedule"]: row["sequences"] for row in rows} == {"ulysses (U 2)": 1, "ulysses (2 replicas)": 2}
    assert "for 2 sequences" in run(capsys, *LONG, "--global-batch", "any")


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


@pytest.mark.sweep
@pytest.mark.slow
def test_plan_takes_several_degrees_and_any_of_shares(capsys: pytest.CaptureFixture[str]) -> None:
    """Where others are one value; of stages as of shares of weights."""
    small = (*PLANNED[:-2], "--seq", "64K", "--vary", "checkpoint=full", "--vary", "mlp=whole", "--global-batch", "2")
    small = (*small, "--vary", "activations=hbm", "--vary", "optimiser=gpu", "--most", "1", "--json")
    small = (*small, "--vary", "pipeline_schedule=1f1b")
    staged = "PP 2, pipeline_schedule 1f1b"
    for typed, degrees in (
        (("--tp-degree", "any", "--pp-degree", "2"), {staged}),
        (("--tp-degree", "1,2", "--pp-degree", "1,2"), {"U 2", "2 replicas", "TP 2", staged}),
    ):
        lost = json.loads(run(capsys, *small, *typed))["lost"]
        assert {row["degrees"] for row in lost} == degrees
    assert "--tp-degree 3 does not divide num_heads" in fails(capsys, *small, "--tp-degree", "1,3")
    assert "--gpus 1,2: expected one value" in fails(capsys, *small, "--gpus", "1,2")
