"""Sentences that answer: of plans, questions the other way round, crossings, batches and runs, made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from sim.diagnose.answer import Cause, Diagnosis
from sim.plan.answer import Answer, Plan
from sim.setup.answers.answer import as_html, who_wins
from sim.setup.answers.rows import of_balance, of_crossings, of_ladder
from sim.setup.answers.table import Table

GIB = 2**30
ROW: dict[str, Any] = {
    "schedule": "usp (U 4, R 2)", "options": "checkpoint full, mlp tiled", "step_time_s": 70.61, "low_s": 61.2,
    "high_s": 86.4, "tokens_per_s_per_gpu": 929.3, "tie": False, "fits": True, "free_bytes": 29.64 * GIB,
    "unusual": "",
}  # fmt: skip


def plan(*rows: dict[str, Any], **more: Any) -> Plan:
    told = {"slack": 0.0, "simulated": 3, "configurations": 9, "shortage": ""} | more
    return Plan(Table([{**ROW, **row} for row in rows]), Table([]), **told)


def test_a_plan_says_what_is_fastest_and_what_is_tied() -> None:
    other = {"tie": True, "options": "checkpoint none, mlp tiled"}
    assert plan({}, other, {**other, "schedule": "ring (R 8)"}).answer == (
        "Usp (U 4, R 2) trains fastest, with checkpoint full, mlp tiled: 70.6 s a step (61 to 86 s), 929 tokens/s/GPU; "
        "fits with 29.6 GiB left; the same with checkpoint none and ring (R 8) are tied"
    )
    cheap = plan({"cost_per_billion_tokens": 747.23, "fits": None, "low_s": None, "high_s": None}, by_cost=True)
    assert cheap.answer == (
        "Usp (U 4, R 2) trains cheapest, with checkpoint full, mlp tiled: 70.6 s a step (interval not known), "
        "929 tokens/s/GPU, 747 for a billion tokens; at the limit: 29.6 GiB left"
    )


def test_a_plan_that_was_cut_short_says_how_much_better_others_may_be() -> None:
    assert plan({}, slack=0.0534).answer.endswith("left; the search was cut short: others may be up to 5.3 % faster")
    assert plan({}, slack=1.0, interrupted=True).answer.endswith(
        "the search was interrupted: how good others are is not known"
    )
    strange = plan({"unusual": "it pins 9 of 10 GiB of a socket's memory"}).answer
    assert strange.endswith("left; no one would run this, it pins 9 of 10 GiB of a socket's memory")


def test_where_nothing_fits_it_says_what_is_missing_and_what_would_do() -> None:
    none = plan(shortage="ring (R 8) with mlp tiled needs 3 GiB more of GPU memory", remedies=["16 GPUs: ring (R 16)"])
    assert none.answer == (
        "Nothing fits: ring (R 8) with mlp tiled needs 3 GiB more of GPU memory; enough would be 16 GPUs: ring (R 16)"
    )
    assert plan(shortage="nothing is known yet", slack=1.0).answer.startswith("Nothing was found so far that fits: ")


@pytest.mark.parametrize(
    ("value", "reaches", "what", "said"),
    [
        (2**20, [True, False], "seq", "The longest context is 1M, 1048576 tokens to 1 %, with usp (U 4, R 2), "),
        (24960, [True], "seq", "The longest context is at least 24960 tokens, with usp"),
        (8, [False, True], "gpus", "The fewest GPUs are 8, with usp"),
        (8, [None, True], "gpus", "The fewest GPUs are 8 or fewer, with usp"),
        (None, [False, False], "gpus", "Nothing is enough on up to 9 GPUs: why not"),
        (None, [None], "seq", "Nothing was found so far at 8; the search was cut short"),
    ],
)
def test_a_question_the_other_way_round(value: int | None, reaches: list[bool | None], what: str, said: str) -> None:
    tried = Table([{what: 8 + number, "reaches": one, "why": "why not"} for number, one in enumerate(reaches)])
    found = Answer(value, None if value is None else plan({}), tried)
    assert found.answer.startswith(said)
    assert ("search was cut short" in found.answer) == (None in reaches)
    assert repr(found).startswith(found.answer)


def test_crossings_say_who_wins_where() -> None:
    names = {"a": "ring", "b": "ulysses"}
    points = [{"value": 1e9, "a_s": 1.0, "b_s": 2.0}, {"value": 4e9, "a_s": None, "b_s": 2.0},
              {"value": 9e9, "a_s": None, "b_s": None}]  # fmt: skip
    rows = [
        {"value": 2e9, "low": None, "high": None, "below": "a"},
        {"value": 5e9, "low": 5e9, "high": 5.0001e9, "below": "b"},
        {"value": None, "low": None, "high": None, "below": ""},
    ]
    assert of_crossings("cluster.nic.bytes_per_s", (1e9, 9e9), names, rows, points) == (
        "Ring is faster than ulysses up to cluster.nic.bytes_per_s 2e+09 (how near is not known), ulysses alone can be "
        "played and fits from there up to 5e+09, neither can be played and fits from there to 9e+09"
    )


def test_a_ladder_says_which_technique_saves_and_costs_most() -> None:
    sizes, times = (395, 300, 44), (1.0, 1.5, 4.5)
    rows = [
        {"techniques": name, "longest": 2**20, "seq": 2**16, "step_time_s": taken, "peak_hbm_bytes": held * GIB}
        for name, held, taken in zip(("none", "+ FSDP", "+ checkpointing"), sizes, times, strict=True)
    ]
    assert of_ladder([*rows, {**rows[0], "techniques": "all - FSDP"}]) == (
        "With both techniques contexts up to 1M fit, without them up to 1M; at 64K a GPU holds 44 GiB instead of "
        "395 GiB, and a step takes 4.5 s instead of 1 s; checkpointing saves most, 256 GiB, and costs most, 3 s"
    )
    assert of_ladder(rows[:1]) == "Without techniques contexts up to 1M fit and a step takes 1 s"


def test_a_batch_is_balanced_by_planners_beside_the_layout_of_ones_own() -> None:
    def row(name: str, taken: float | None, error: str = "") -> dict[str, Any]:
        return {"planner": name, "attention_s": None, "slowest_s": taken, "skew": 1.2, "error": error}

    rows = [row("mine", 3.0), row("zigzag", 2.5), row("dcp", 2.0), row("wlb", None, "refused"), row("bound", 1.0)]
    assert of_balance(rows, "mine", "bound") == (
        "Dcp attends this batch fastest, in 2 s of kernels, 2 times the lower bound, its slowest rank 1.20 times the "
        "mean; mine takes 1.5 times as long"
    )
    assert of_balance(rows[3:], "mine", "bound") == "No planner takes this batch"


def diagnosis(verdict: Any, measured_s: float | None, *names: str, **more: Any) -> Diagnosis:
    causes = [Cause(name, "says", "check", 1.0, 1, None, 2.0 if name == "off" else 0.5, 1.0) for name in names]
    told = {"findings": [], "causes": causes, "untold": [], "skipped": [], "peak_hbm_bytes": 60 * GIB}
    told |= {"floor_by": "compute", "memory_within": (57.0 * GIB, 66.0 * GIB)}
    return Diagnosis(verdict, measured_s, 40.2, 35.0, 47.0, 15.2, 30.0, **(told | more))


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (
            diagnosis("impossible", 13.0, "off"),
            (
                "Impossible: 13 s a step is below 15.2 s, the floor by FLOPs at the peak; nothing that was simulated "
                "explains it"
            ),
        ),
        (
            diagnosis("impossible", 13.0, "cp-off", floor_by="nic"),
            "Impossible: 13 s a step is below 15.2 s, the floor by bytes over nic; cp-off would explain it",
        ),
        (
            diagnosis("too fast", 20.0, "window", "off"),
            (
                "Too fast: 20 s a step is 0.498 times the predicted 40.2 s (35 to 47 s), and less than its attention "
                "alone, 30 s; window would explain it"
            ),
        ),
        (
            diagnosis("too slow", 61.0, "a", "b", "c", "d", "e"),
            (
                "Too slow: 61 s a step is 1.52 times the predicted 40.2 s (35 to 47 s); a or b or c or 2 others would "
                "explain it"
            ),
        ),
        (
            diagnosis("healthy", 41.0, memory_bytes=61 * GIB),
            "Healthy: 41 s a step is as predicted, 40.2 s (35 to 47 s); so is the memory, 61 GiB of a GPU",
        ),
        (
            diagnosis("healthy", None, memory_bytes=61 * GIB),
            "Healthy: 61 GiB of a GPU are within the predicted 57 GiB to 66 GiB",
        ),
        (diagnosis("healthy", None), "Healthy: predicted are 40.2 s (35 to 47 s) a step"),
        (
            diagnosis("memory differs", 41.0, "a", memory_bytes=71 * GIB),
            "Memory differs: 71 GiB of a GPU, predicted are 57 GiB to 66 GiB; a would explain it",
        ),
        (
            diagnosis("ranks differ", None, "off"),
            (
                "Ranks differ: beside each other their kernels do not take what is predicted; nothing that was "
                "simulated explains it"
            ),
        ),
    ],
)
def test_the_doctor_says_the_figures_that_decide(found: Diagnosis, said: str) -> None:
    assert found.answer == said
    assert repr(found).startswith(said)


def test_winners_are_counted() -> None:
    all_of_it = [{"winner": "zigzag", "tied": True}, {"winner": "zigzag", "tied": None}]
    assert who_wins(all_of_it) == "Zigzag is fastest at all of 2 places; ties among these: 1"
    assert who_wins([{"winner": "", "tied": None}]) == "Of 1 places none is won; nothing fits at 1"


def test_notebooks_show_no_markup_of_names() -> None:
    table = Table([{"row": "<b>"}]).answering("<i> wins")
    assert table._repr_html_().startswith("<p><b>&lt;i&gt; wins</b></p><div ")
    assert "<td>&lt;b&gt;</td>" in table._repr_html_()
    assert str(table) == "<i> wins\nrow\n<b>"
    assert as_html("a", "", ["<u>"]) == "<p><b>a</b></p><p>&lt;u&gt;</p>"
